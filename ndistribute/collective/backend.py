"""The protocol of backends: six methods over flat contiguous buffers; and what backends share.

A backend gets arrays of one memory space and a `Call` that describes the operation. It knows no
nests and does not check shapes. It compares the calls of all replicas before it uses their data,
and every wait has a deadline. Processes compare calls by their headers: a header is sent with the
first message of a call, or lies beside the data in shared memory.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.devices import Array, Device
from ndistribute.errors import CollectiveMismatchError, DistributeError
from ndistribute.timeline import span

T = TypeVar("T")
E = TypeVar("E", bound=DistributeError)

# The total and the variable that it updates stay in a core's second-level cache.
_UPDATE_ELEMENTS = 64 * 1024
# Cuts between owners are at multiples of this: 16 float32 are a cache line.
OWNED_ALIGNMENT = 16

# Magic, generation, step, number within the step, number within the generation, a digest of the
# call, and its description. Two cache lines.
_HEADER = struct.Struct("<2sHIII8s104s")
_MAGIC = b"ND"
HEADER_BYTES = _HEADER.size

Signature = tuple[tuple[np.dtype[Any], tuple[int | str, ...]], ...]
LeafKey = tuple[np.dtype[Any], int]  # The dtype of a leaf and its number of elements.
Arrays = Sequence[Array]
Begin = Callable[[], Any]
Combine = Callable[[Sequence[Any]], T]

Update = Callable[[Any, int, int, int, Array], None]
"""Called as ``update(prepared, leaf, start, stop, total)`` with a reduced range of a leaf that this
replica owns; it may change `total`."""


class Call(NamedTuple):
    """A collective call of one replica; the calls of all replicas must be equal.

    Args:
        sequence: the call's number in this step, from 1.
        kind: the method's name.
        op: the reduction's name, another argument that must be equal, or None.
        signature: dtype and shape of each leaf.
        purpose: what the call is for, such as a write to a variable; empty for a user's own call.
    """

    sequence: int
    kind: str
    op: str | None = None
    signature: Signature = ()
    purpose: str = ""

    @property
    def title(self) -> str:
        """The kind and the number, for example ``all_reduce #12``."""
        return f"{self.kind} #{self.sequence}"

    def error(self, kind: type[E], text: str, rank: int | None = None) -> E:
        """Return an exception about this call."""
        return kind(f"{self.title}: {text}", rank=rank, op=self.kind, sequence=self.sequence)

    def __str__(self) -> str:
        shapes = [f"{dtype.name}[{','.join(map(str, shape))}]" for dtype, shape in self.signature]
        shown = shapes if len(shapes) <= 6 else [*shapes[:5], f"... {len(shapes)} leaves"]
        what = f"{self.kind}({', '.join(filter(None, [self.op, *shown]))})"
        return f"{what} for {self.purpose}" if self.purpose else what


class Backend(Protocol):
    """The collectives of one replica over flat buffers.

    The replica computes on `device`. It has index `owner` among the `owners` replicas that update
    the same memory.
    """

    rank: int
    size: int
    device: Device
    owner: int
    owners: int

    def merge(self, call: Call, value: Any, combine: Combine[T], timeout: float) -> T:
        """Run `combine` once on the values of this process's replicas, in replica order."""

    def all_reduce(
        self, call: Call, inputs: Arrays, outputs: Arrays, op: ReduceOp, timeout: float
    ) -> None:
        """Reduce each input over all replicas into the output of the same index, on all of them."""

    def reduce_update(
        self, call: Call, inputs: Arrays, op: ReduceOp, begin: Begin, update: Update, timeout: float
    ) -> Any:
        """Reduce, and call `update` on each replica with the ranges of the result that it owns.

        `begin` runs once in each process, when all of its replicas are in this call. Its result
        is passed to every `update` and returned. No replica of a process returns before all updates
        of that process are done.
        """

    def all_gather(self, call: Call, inputs: Arrays, timeout: float) -> list[Array]:
        """Concatenate matrices of equal width in replica order; numbers of rows may differ."""

    def broadcast(self, call: Call, buffers: Arrays, root: int, timeout: float) -> None:
        """Copy the buffers of replica `root` into those of all others."""

    def abort(self, cause: BaseException) -> None:
        """Make all waits of all replicas raise because of `cause`, now and later."""


def check_calls(calls: Sequence[Call]) -> None:
    """Check that the calls of all replicas are equal.

    Raises:
        CollectiveMismatchError: two of the calls differ.

    >>> check_calls([Call(1, "all_reduce", "SUM"), Call(1, "all_reduce", "MAX")])
    Traceback (most recent call last):
    ndistribute.errors.CollectiveMismatchError: all_reduce #1: replica 1 called all_reduce(MAX), ...
    """
    first = calls[0]
    for rank, call in enumerate(calls):
        if call != first:
            number = "" if call.sequence == first.sequence else f" as its call {call.sequence}"
            what = f"replica {rank} called {call}{number}, replica 0 called {first}."
            alike = call._replace(signature=first.signature) == first
            raise _mismatch(first, rank, what, alike=alike)


def _mismatch(call: Call, rank: int, what: str, *, alike: bool) -> CollectiveMismatchError:
    """Return the error for calls that differ; `alike`: only in shapes and dtypes."""
    advice = "make the same calls in the same order."
    if alike:
        hint = "; pad the batch, or use all_gather" if call.kind == "all_reduce" else ""
        advice = f"pass the same shapes and dtypes{hint}."
    return call.error(CollectiveMismatchError, f"{what} Every replica must {advice}", rank)


def update_in_blocks(
    call: Call, inputs: Arrays, totals: Arrays, begin: Begin, update: Update
) -> Any:
    """Call `update` with complete totals, in the inputs' dtypes; return the result of `begin`."""
    with span("update", call.title):
        prepared = begin()
        for leaf, (array, total) in enumerate(zip(inputs, totals, strict=True)):
            for start, stop in blocks(0, total.size, _UPDATE_ELEMENTS):
                part = total[start:stop].astype(array.dtype, copy=False)
                update(prepared, leaf, start, stop, part)
    return prepared


def encode_header(call: Call, count: int, step: int = 0, generation: int = 0) -> bytes:
    """Return the header of a call, which is the call number `count` on its wire.

    With the number of the step, a call that is skipped in one step cannot match one of the next;
    with the generation, messages of failed calls cannot match.
    """
    place = step & 0xFFFFFFFF, call.sequence, count & 0xFFFFFFFF
    said = _said(call.kind, call.op, call.signature, call.purpose)
    return _HEADER.pack(_MAGIC, generation & 0xFFFF, *place, *said)


def compare_headers(mine: bytes, theirs: bytes, my_rank: int, their_rank: int) -> None:
    """Check that two processes make the same call.

    Raises:
        CollectiveMismatchError: the calls differ; the message describes both.

    >>> two, three = (Call(1, "broadcast", f"root={root}") for root in (2, 3))
    >>> one, other = encode_header(two, 1), encode_header(three, 1)
    >>> compare_headers(one, one, 0, 1)
    >>> compare_headers(one, other, 0, 1)
    Traceback (most recent call last):
    ndistribute.errors.CollectiveMismatchError: broadcast #1: worker 1 called broadcast(root=3), \
worker 0 called broadcast(root=2). Every replica must make the same calls in the same order.
    """
    if mine == theirs:
        return
    *_, step, sequence, number, _, words = _HEADER.unpack(mine)
    *_, their_step, their_sequence, their_number, _, their_words = _HEADER.unpack(theirs)
    own, other = (text.rstrip(b"\0").decode("ascii", "replace") for text in (words, their_words))
    call = Call(sequence, own.partition("(")[0])
    if theirs[:4] != mine[:4]:  # Other data, or the message of a failed call.
        text = (
            f"worker {their_rank} sent no collective's header to worker {my_rank}, which called "
            f"{own}. Do both run the same version of ndistribute?"
        )
        raise call.error(CollectiveMismatchError, text, their_rank)
    in_place = (step, sequence, number) == (their_step, their_sequence, their_number)
    difference = ""
    if in_place and own == other:
        difference = " with other shapes, or for something else"
    elif step != their_step:
        difference = f" in its step {(their_step + 1) // 2}, expected step {(step + 1) // 2}"
    elif not in_place:
        difference = (
            f" as its call {their_sequence} ({their_number} since the start, expected {number})"
        )
    what = f"worker {their_rank} called {other}{difference}, worker {my_rank} called {own}."
    # The part before the first comma is kind and op.
    alike = in_place and own.partition(",")[0] == other.partition(",")[0]
    raise _mismatch(call, their_rank, what, alike=alike)


@functools.lru_cache(maxsize=1024)
def _said(kind: str, op: str | None, signature: Signature, purpose: str) -> tuple[bytes, bytes]:
    """Return a digest of a call for comparison, and a description for error messages."""
    shapes = [(dtype.str, repr(dtype), shape) for dtype, shape in signature]
    digest = hashlib.blake2b(repr((kind, op, shapes, purpose)).encode(), digest_size=8).digest()
    parts = [op] if op else []
    if signature:
        names = {dtype.name for dtype, _ in signature}
        dtype = names.pop() if len(names) == 1 else "mixed"
        elements = sum(math.prod(n for n in shape if isinstance(n, int)) for _, shape in signature)
        parts.append(f"{elements} element(s) of {dtype} in {len(signature)} array(s)")
    about = f" for {purpose}" if purpose else ""
    return digest, f"{kind}({', '.join(parts)}){about}".encode()


@functools.lru_cache(maxsize=256)
def owned_ranges(sizes: tuple[int, ...], owners: int, owner: int) -> list[tuple[int, int, int]]:
    """Cut concatenated flat leaves into balanced parts, and return the part of one owner.

    A cut is between two leaves, or at a multiple of `OWNED_ALIGNMENT` inside one, so two owners
    never write to one cache line. For that, it moves by at most half of the alignment.

    The result is non-empty ranges ``(leaf, start, stop)`` in ascending order, which the caller must
    not change. The ranges of all owners together contain every element exactly once.

    >>> owned_ranges((40, 8, 60), owners=2, owner=0)
    [(0, 0, 40), (1, 0, 8)]
    >>> owned_ranges((100,), owners=3, owner=1)
    [(0, 32, 64)]
    """
    starts = list(itertools.accumulate(sizes, initial=0))
    begin, end = _owned_start(starts, owners, owner), _owned_start(starts, owners, owner + 1)
    ranges = []
    for leaf, (first, last) in enumerate(itertools.pairwise(starts)):
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            ranges.append((leaf, start - first, stop - first))
    return ranges


def _owned_start(starts: list[int], owners: int, owner: int) -> int:
    """Return the start of a part: the allowed place that is nearest to the even cut.

    The rounding is monotone in the even cut, so parts cannot overlap.
    """
    even = starts[-1] * owner // owners
    leaf = bisect.bisect_right(starts, even) - 1
    if leaf == len(starts) - 1:
        return even
    below = even - (even - starts[leaf]) % OWNED_ALIGNMENT
    above = min(below + OWNED_ALIGNMENT, starts[leaf + 1])
    return below if even - below <= above - even else above


def blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    """Return adjacent pieces ``(start, stop)`` of a range, each of at most `block` elements.

    >>> list(blocks(3, 10, 4))
    [(3, 7), (7, 10)]
    """
    return ((first, min(first + block, stop)) for first in range(start, stop, block))
