"""The backend that joins the replicas of a process and the processes of a job.

Replicas meet in the memory of their process and add their parts there, each a slice; one of them
then meets the other processes, while the rest wait; and each takes what it needs of the total.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ndistribute.collective.backend import Call, Update
from ndistribute.collective.buckets import blocks, owned_ranges
from ndistribute.collective.reduce_op import (
    ReduceOp,
    accumulation_dtype,
    finish,
    reduce_arrays,
    result_dtype,
)
from ndistribute.collective.threads import ThreadBackend
from ndistribute.collective.workers import Workers
from ndistribute.device import Array, copy_to, to_host
from ndistribute.stream import write_to

__all__ = ["HierarchicalBackend", "make_hierarchical_backends"]

T = TypeVar("T")

# As large as a core's second-level cache likes it; see the thread backend for why not smaller.
BLOCK_ELEMENTS = 64 * 1024

# Smaller ones are not worth the two meetings of a reduction in place.
SHARED_BYTES = 256 * 1024

_Key = tuple[tuple[np.dtype[Any], int], ...]

_owned_ranges = functools.lru_cache(maxsize=256)(owned_ranges)


def make_hierarchical_backends(
    local: Sequence[ThreadBackend], workers: Workers
) -> list[HierarchicalBackend]:
    """Make the backends of this process's replicas.

    Args:
        local: how they meet in this process.
        workers: the processes.
    """
    buckets = _Buckets(workers)
    return [HierarchicalBackend(threads, workers, buckets) for threads in local]


class _Buckets:
    """Keep the arrays in which the replicas of a process add their parts, one for each leaf.

    They are shared by the replicas, and used again by the next call of the same shapes. Large ones
    lie where the other processes of the host see them, where that is offered.

    Args:
        workers: the processes; all of them make the same calls, and so the same choices.
    """

    def __init__(self, workers: Workers) -> None:
        self._allocate = getattr(workers.backend, "allocate", None)
        self._made: dict[_Key, list[Array]] = {}
        workers.at_close(self._made.clear)

    def of(self, inputs: Sequence[Array], op: ReduceOp) -> list[Array]:
        """Return host arrays of the sizes of these, in the dtype in which they are added up."""
        key = tuple((accumulation_dtype(op, array.dtype), array.size) for array in inputs)
        if key not in self._made:
            self._made.clear()  # One step's gradients after the other, not all that ever were.
            arrays: list[Array | None] = [None]
            if self._allocate and sum(dtype.itemsize * n for dtype, n in key) >= SHARED_BYTES:
                arrays = [self._allocate(dtype, (n,)) for dtype, n in key]
            if any(array is None for array in arrays):
                arrays = [np.empty(n, dtype) for dtype, n in key]
            self._made[key] = arrays
        return self._made[key]


class HierarchicalBackend:
    """Move data between one replica and all replicas of all processes.

    Args:
        threads: how the replicas of this process meet.
        workers: how the processes meet.
        buckets: shared by the replicas of this process.
    """

    def __init__(self, threads: ThreadBackend, workers: Workers, buckets: _Buckets) -> None:
        self._threads = threads
        self._outer = workers.backend
        self._counts = workers.replica_counts
        self._buckets = buckets
        self.gradient_memory = None
        if workers.single_cpus:
            # There is nothing to join. All processes find the same, for they must make the same
            # calls.
            self.gradient_memory = getattr(self._outer, "gradient_memory", None)
            self.all_reduce = self._outer.all_reduce  # type: ignore[method-assign]
            self.reduce_update = self._outer.reduce_update  # type: ignore[method-assign]
        self.rank = sum(self._counts[: workers.rank]) + threads.rank
        self.size = sum(self._counts)
        self.device = threads.device
        self.owner = threads.owner
        self.owners = threads.owners

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` once in each process; the processes do not meet."""
        return self._threads.merge(call, value, combine, timeout)

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce in the process, then over processes, and copy the total."""
        totals, _ = self._reduce(call, inputs, op, _nothing, timeout)
        for total, output in zip(totals, outputs, strict=True):
            narrow = total.astype(result_dtype(op, output.dtype), copy=False)
            write_to(output, copy_to(narrow, self.device))

    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce in the process, then over processes, and update what this replica owns."""
        totals, prepared = self._reduce(call, inputs, op, prepare, timeout)
        sizes = tuple(total.size for total in totals)
        for leaf, start, stop in _owned_ranges(sizes, self.owners, self.owner):
            dtype = result_dtype(op, inputs[leaf].dtype)
            for first, last in blocks(start, stop, BLOCK_ELEMENTS):
                # A copy of its own: the callee may change it, and others may read the total.
                update(prepared, leaf, first, last, totals[leaf][first:last].astype(dtype))
        self._threads.merge(call, None, _forget, timeout)
        return prepared

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join the rows of the process, then those of all processes."""
        own = [to_host(rows) for rows in inputs]

        def join(everyone: Sequence[Sequence[Array]]) -> list[Array]:
            local = [np.concatenate(rows) for rows in zip(*everyone, strict=True)]
            return self._outer.all_gather(call, local, timeout)

        joined = self._threads.merge(call, own, join, timeout)
        alone = self._threads.size == 1
        return [copy_to(rows if alone else rows.copy(), self.device) for rows in joined]

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Copy from one replica to those of its process and to the other processes."""
        process, replica = self._place_of(root)
        own = [np.array(to_host(buffer)) for buffer in buffers]

        def send(everyone: Sequence[Sequence[Array]]) -> Sequence[Array]:
            chosen = everyone[replica if process == self._outer.rank else 0]
            self._outer.broadcast(call, chosen, process, timeout)
            # Who sends hears nothing of who receives: none goes on before all made this call.
            token = [np.zeros(1)]
            self._outer.all_reduce(call, token, token, ReduceOp.SUM, timeout)
            return chosen

        received = self._threads.merge(call, own, send, timeout)
        for buffer, theirs in zip(buffers, received, strict=True):
            write_to(buffer, copy_to(theirs, self.device))

    def abort(self, cause: BaseException) -> None:
        """Release the replicas of this process."""
        self._threads.abort(cause)

    def _reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        timeout: float,
    ) -> tuple[list[Array], Any]:
        """Return the totals over all replicas, which stay until the next call, and `prepare`'s."""
        inner = ReduceOp.SUM if op is ReduceOp.MEAN else op
        own = [to_host(array) for array in inputs]

        def open_buckets(everyone: Sequence[Any]) -> tuple[Sequence[Any], list[Array]]:
            return everyone, self._buckets.of(own, op)

        everyone, buckets = self._threads.merge(call, own, open_buckets, timeout)
        sizes = tuple(array.size for array in own)
        for leaf, start, stop in _owned_ranges(sizes, self._threads.size, self._threads.rank):
            for first, last in blocks(start, stop, BLOCK_ELEMENTS):
                into = buckets[leaf][first:last]
                parts = [
                    arrays[leaf][first:last].astype(into.dtype, copy=False) for arrays in everyone
                ]
                reduce_arrays(inner, parts, out=into)

        def meet(_: Sequence[Any]) -> tuple[list[Array], Any]:
            self._outer.all_reduce(call, buckets, buckets, inner, timeout)
            for total in buckets:
                finish(op, total, self.size)
            return buckets, prepare()

        return self._threads.merge(call, None, meet, timeout)

    def _place_of(self, rank: int) -> tuple[int, int]:
        """Return which process a replica belongs to, and its number there."""
        for process, count in enumerate(self._counts):
            if rank < count:
                return process, rank
            rank -= count
        raise ValueError(f"there is no replica {rank + self.size}: there are {self.size}.")


def _nothing() -> None:
    return None


def _forget(_: Sequence[Any]) -> None:
    return None
