"""What carries bytes between replicas: six methods over flat contiguous buffers.

A backend sees one-dimensional arrays of one memory space and a `Call` that says what the replicas
believe they are doing. It neither knows nests nor validates shapes; it does compare the calls of
all replicas before it moves anything, and it never waits without a deadline.
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
"""Called as ``update(prepared, leaf, start, stop, total)`` for a reduced range of a leaf that this
replica owns; `total` may be changed by the callee."""


class Call(NamedTuple):
    """Describe a collective call as one replica made it; those of all replicas must be equal.

    Args:
        sequence: the call's number in this step, from 1.
        kind: the method's name.
        op: the reduction's name, or None.
        signature: dtype and shape of each leaf.
        purpose: what it is made for, such as a write to a variable; empty for a call by itself.
    """

    sequence: int
    kind: str
    op: str | None = None
    signature: Signature = ()
    purpose: str = ""

    @property
    def title(self) -> str:
        """Return kind and number, for example ``all_reduce #12``."""
        return f"{self.kind} #{self.sequence}"

    def __str__(self) -> str:
        shapes = [f"{dtype.name}[{','.join(map(str, shape))}]" for dtype, shape in self.signature]
        shown = shapes if len(shapes) <= 6 else [*shapes[:5], f"... {len(shapes)} leaves"]
        what = f"{self.kind}({', '.join(filter(None, [self.op, *shown]))})"
        return f"{what} for {self.purpose}" if self.purpose else what


class Backend(Protocol):
    """Move bytes between the replicas of a group; one object for each replica.

    The replica computes on `device`. Of the `owners` replicas that update the same memory, this
    one is number `owner`.
    """

    rank: int
    size: int
    device: Device
    owner: int
    owners: int

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` once over the values of this process's replicas, in replica order."""

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce each input over all replicas into the output beside it, on every replica."""

    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce, and hand each replica the ranges it owns instead of the whole result.

        `prepare` runs once in a process, when all its replicas are there and none reads; what it
        returns goes to every `update` and to the caller. No replica returns before all updates are
        done.
        """

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join matrices of equal width, the rows of replica 0 first; row counts may differ."""

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Copy the buffers of one replica into those of all others."""

    def abort(self, cause: BaseException) -> None:
        """Release every replica that waits, now or later, with the reason."""


def check_calls(calls: Sequence[Call]) -> None:
    """Compare what the replicas believe they are doing.

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
        kind: of the call as it was expected.
        sequence: its number.
        rank: who made another one.
        what: which calls were made, as a sentence.
        alike: whether they differ in shapes and dtypes alone.
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
    """Update with totals that are all there, so that a failure before changes nothing.

    `update` gets them in the dtypes of the inputs, and may change them.
    """
    with span("update", call.title):
        prepared = prepare()
        for leaf, (array, total) in enumerate(zip(inputs, totals, strict=True)):
            for start, stop in blocks(0, total.size, _UPDATE_ELEMENTS):
                part = total[start:stop].astype(array.dtype, copy=False)
                update(prepared, leaf, start, stop, part)
    return prepared
