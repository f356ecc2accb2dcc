"""The protocol of backends: six methods over flat contiguous buffers, and the `Call` they get.

A backend gets arrays in one memory space and a `Call` that describes the operation. It does not
handle nests or check shapes. It compares the calls of all replicas before it uses their data, and
every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.devices import Array, Device
from ndistribute.errors import DistributeError

T = TypeVar("T")
E = TypeVar("E", bound=DistributeError)

Signature = tuple[tuple[np.dtype[Any], tuple[int | str, ...]], ...]
LeafKey = tuple[np.dtype[Any], int]  # The dtype of a leaf and its number of elements.
Arrays = Sequence[Array]
Begin = Callable[[], Any]
Combine = Callable[[Sequence[Any]], T]


class Call(NamedTuple):
    """A collective call of one replica; the calls of all replicas must agree.

    Args:
        sequence: the call's number in this step, from 1.
        kind: the method's name.
        op: the reduction's name, another argument that must be equal, or None.
        signature: the dtype and the shape of each leaf.
        purpose: what the call is for, such as a write to a variable; empty for a user's own call.
        timeout: how many seconds each wait of this replica may take; replicas may pass different
            values.
    """

    sequence: int
    kind: str
    op: str | None = None
    signature: Signature = ()
    purpose: str = ""
    timeout: float = 600.0

    @property
    def agreed(self) -> tuple[Any, ...]:
        """The parts of the call that must be equal on all replicas."""
        return self[:-1]

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


class Update(NamedTuple):
    """The functions that process reduced arrays.

    Args:
        begin: called once in each process, when all its replicas are in the call.
        apply: called as ``apply(prepared, leaf, start, stop, total)`` with the result of `begin`
            and a reduced range of a leaf that this replica owns; it may change `total`.
    """

    begin: Begin
    apply: Callable[[Any, int, int, int, Array], None]


class Backend(Protocol):
    """The collectives of one replica over flat buffers.

    The replica computes on `device`. It has index `owner` among the `owners` replicas that update
    the same memory. A class that derives from this one must define the methods up to `abort`, and
    `merge` if a process has several replicas.
    """

    rank: int
    size: int
    device: Device = Device("cpu:0")
    owner: int = 0
    owners: int = 1
    is_traced: bool = False  # Whether the calls of this backend are parts of a compiled step.

    def merge(self, call: Call, value: Any, combine: Combine[T]) -> T:
        """Run `combine` once on the values of this process's replicas, in replica order."""
        return combine([value])

    def all_reduce(self, call: Call, inputs: Arrays, outputs: Arrays, op: ReduceOp) -> None:
        """Reduce each input over all replicas into the output of the same index, on all of them."""

    def reduce_update(self, call: Call, inputs: Arrays, op: ReduceOp, update: Update) -> Any:
        """Reduce; on each replica, apply the update to the ranges of the result that it owns.

        Return the result of the update's `begin`. No replica of a process returns before all
        updates of that process are done.
        """

    def all_gather(self, call: Call, inputs: Arrays) -> list[Array]:
        """Concatenate matrices of equal width in replica order; the numbers of rows may differ."""

    def broadcast(self, call: Call, buffers: Arrays, root: int) -> None:
        """Copy the buffers of replica `root` into those of all others."""

    def abort(self, cause: BaseException) -> None:
        """Make all waits of all replicas raise because of `cause`, now and later."""

    def allocate(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """Return an array that `all_reduce` reduces in place if all replicas pass such arrays.

        None means that the backend has no such memory, or that it is used up.
        """
        return None

    def gradient_memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """Return an array that `reduce_update` reads without a copy, or None."""
        return None

    def reset(self) -> None:
        """Drop the state of all calls; no process may be in a call."""
        return

    def close(self) -> None:
        """Free the resources of the backend, which cannot be used afterwards."""
        return
