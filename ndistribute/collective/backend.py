"""The protocol of backends: six methods over flat contiguous buffers.

A backend gets arrays of one memory space and a `Call` that describes the operation. It knows no
nests and does not check shapes. It compares the calls of all replicas before it uses their data,
and every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ndistribute.collective.buckets import blocks
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.device import Array, Device
from ndistribute.errors import CollectiveMismatchError
from ndistribute.timeline import span

T = TypeVar("T")

# The total and the variable that it updates stay in a core's second-level cache.
_UPDATE_ELEMENTS = 64 * 1024

Signature = tuple[tuple[np.dtype[Any], tuple[int | str, ...]], ...]

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

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` once on the values of this process's replicas, in replica order."""

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce each input over all replicas into the output of the same index, on all of them."""

    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce, and call `update` on each replica with the ranges of the result that it owns.

        `prepare` runs once in each process, when all of its replicas are in this call. Its result
        is passed to every `update` and returned. No replica of a process returns before all updates
        of that process are done.
        """

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Concatenate matrices of equal width in replica order; numbers of rows may differ."""

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
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
            raise mismatch(first.kind, first.sequence, rank, what, alike=alike)


def mismatch(
    kind: str, sequence: int, rank: int, what: str, *, alike: bool
) -> CollectiveMismatchError:
    """Return the error for calls that differ.

    Args:
        kind: the kind of the expected call.
        sequence: the number of the expected call.
        rank: the replica or worker that made another call.
        what: a sentence that names both calls.
        alike: whether the calls differ only in shapes and dtypes.
    """
    advice = "make the same calls in the same order."
    if alike:
        hint = "; pad the batch, or use all_gather" if kind == "all_reduce" else ""
        advice = f"pass the same shapes and dtypes{hint}."
    return CollectiveMismatchError(
        f"{kind} #{sequence}: {what} Every replica must {advice}",
        rank=rank,
        op=kind,
        sequence=sequence,
    )


def update_in_blocks(
    call: Call,
    inputs: Sequence[Array],
    totals: Sequence[Array],
    prepare: Callable[[], Any],
    update: Update,
) -> Any:
    """Call `update` with complete totals, block by block; an earlier failure changes no variable.

    The totals are converted to the dtypes of the inputs. Returns the result of `prepare`.
    """
    with span("update", call.title):
        prepared = prepare()
        for leaf, (array, total) in enumerate(zip(inputs, totals, strict=True)):
            for start, stop in blocks(0, total.size, _UPDATE_ELEMENTS):
                part = total[start:stop].astype(array.dtype, copy=False)
                update(prepared, leaf, start, stop, part)
    return prepared
