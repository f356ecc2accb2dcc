"""Backends of two levels: the members of a group meet inside it, and the groups meet outside.

Replicas of a process are such a group, whose members see one memory; the processes of a host are
another, and the outside of the one may be the whole of the other. One member speaks for its group,
so one message of each group travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ndistribute.collective.backend import Backend, Call, Update
from ndistribute.collective.buckets import blocks, owned_ranges
from ndistribute.collective.reduce_op import (
    ReduceOp,
    accumulation_dtype,
    finish,
    reduce_arrays,
    result_dtype,
)
from ndistribute.collective.threads import ThreadBackend
from ndistribute.collective.workers import ProcessBackend, Workers
from ndistribute.device import Array, copy_to, to_host
from ndistribute.stream import write_to
from ndistribute.timeline import span

__all__ = ["TwoLevelBackend", "host_groups", "join_replicas"]

T = TypeVar("T")

# As large as a core's second-level cache likes it; see the thread backend for why not smaller.
BLOCK_ELEMENTS = 64 * 1024

# Smaller ones are not worth the two meetings of a reduction in place.
SHARED_BYTES = 256 * 1024
MOST_KEPT = 4

_Key = tuple[tuple[np.dtype[Any], int], ...]


def join_replicas(local: Sequence[ThreadBackend], workers: Workers) -> list[Backend]:
    """Return backends between the replicas of this process and those of all others.

    Args:
        local: how the replicas of this process meet.
        workers: the processes.
    """
    if workers.single_cpus:  # All processes find the same, for they must make the same calls.
        return [_Single(local[0], workers.backend)]
    ends = np.cumsum(workers.replica_counts).tolist()
    groups = [
        range(end - count, end) for count, end in zip(workers.replica_counts, ends, strict=True)
    ]
    sums = _Sums(workers)
    return [
        TwoLevelBackend(threads, workers.backend, groups, groups[workers.rank][place], sums)
        for place, threads in enumerate(local)
    ]


def host_groups(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first ranks.

    >>> host_groups(["red", "blue", "red"])
    [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())


class _Single:
    """Let replicas meet as their processes do, where each process has one, on a CPU.

    The methods are those of the processes' backend, so a call has no way to go between.
    """

    def __init__(self, threads: ThreadBackend, processes: ProcessBackend) -> None:
        self.rank, self.size = processes.rank, processes.size
        self.device, self.owner, self.owners = threads.device, threads.owner, threads.owners
        self.all_reduce = processes.all_reduce
        self.reduce_update = processes.reduce_update
        self.all_gather = processes.all_gather
        self.broadcast = processes.broadcast
        self.merge = threads.merge
        self.abort = threads.abort
        self.gradient_memory = getattr(processes, "gradient_memory", None)


class _Sums:
    """Keep the arrays in which the members of a group add up, one for each array of a call.

    They are used again by the next call of the same sizes. Large ones that every step needs lie
    where the other processes of the host see them, where that is offered.

    Args:
        workers: whose memory it is; None for memory of this process alone.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self._allocate = None if workers is None else getattr(workers.backend, "allocate", None)
        self._made: dict[_Key, list[Array]] = {}
        if workers is not None:
            workers.at_close(self._made.clear)

    def of(self, inputs: Sequence[Array], op: ReduceOp) -> list[Array]:
        """Return host arrays of these sizes, in the dtype in which they are added up."""
        key = tuple((accumulation_dtype(op, array.dtype), array.size) for array in inputs)
        if key not in self._made:
            if len(self._made) == MOST_KEPT:  # Those of a step, not all that ever were.
                del self._made[next(iter(self._made))]
            arrays: list[Array | None] = [None]
            if self._allocate and sum(dtype.itemsize * size for dtype, size in key) >= SHARED_BYTES:
                arrays = [self._allocate(dtype, (size,)) for dtype, size in key]
            whole = [array for array in arrays if array is not None]
            if len(whole) < len(key):  # All or none: only then do processes reduce in place.
                whole = [np.empty(size, dtype) for dtype, size in key]
            self._made[key] = whole
        return self._made[key]


class TwoLevelBackend:
    """Move data between one member of a group and the members of all groups.

    Args:
        inside: how the members of this group meet.
        outside: how the groups meet; None on a process that does not speak for its group.
        groups: the ranks of each group's members.
        rank: which of them this is.
        sums: where members of one memory add up, shared by them; None where they are processes.
        owned: those of the two that are reset and closed with this backend.
    """

    def __init__(
        self,
        inside: Backend,
        outside: ProcessBackend | None,
        groups: Sequence[Sequence[int]],
        rank: int,
        sums: _Sums | None = None,
        owned: Sequence[ProcessBackend] = (),
    ) -> None:
        self.rank = rank
        self.size = sum(map(len, groups))
        self.device, self.owner, self.owners = inside.device, inside.owner, inside.owners
        self._inside = inside
        self._outside = outside
        self._members = next(list(group) for group in groups if rank in group)
        self._order = [member for group in groups for member in group]
        self._one_memory = sums is not None
        self._sums = sums or _Sums()
        self._owned = owned

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` once in each process; the processes do not meet."""
        return self._inside.merge(call, value, combine, timeout)

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce in each group, then over groups, and copy the total."""
        totals, _ = self._reduce(call, inputs, op, lambda: None, timeout)
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
        """Reduce in each group, then over groups, and update what this replica owns."""
        totals, prepared = self._reduce(call, inputs, op, prepare, timeout)
        sizes = tuple(total.size for total in totals)
        # Members with memories of their own read the same total, and each may change it.
        read_by_others = self._one_memory and self.owners < len(self._members)
        with span("update", call.title):
            for leaf, start, stop in owned_ranges(sizes, self.owners, self.owner):
                dtype = result_dtype(op, inputs[leaf].dtype)
                for first, last in blocks(start, stop, BLOCK_ELEMENTS):
                    total = totals[leaf][first:last].astype(dtype, copy=read_by_others)
                    update(prepared, leaf, first, last, total)
        self._inside.merge(call, None, lambda _: None, timeout)
        return prepared

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join the rows of each group, then those of all groups, in the order of ranks."""
        own = [to_host(rows) for rows in inputs]
        if not self._one_memory:
            return self._gather_apart(call, own, timeout)

        def join(everyone: Sequence[Sequence[Array]]) -> list[Array]:
            rows = [np.concatenate(parts) for parts in zip(*everyone, strict=True)]
            return rows if self._outside is None else self._outside.all_gather(call, rows, timeout)

        joined = self._inside.merge(call, own, join, timeout)
        alone = len(self._members) == 1
        return [copy_to(rows if alone else rows.copy(), self.device) for rows in joined]

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Add up the bytes of the root and zeros of all others, which also lets all meet."""
        own = [np.array(to_host(buffer)).view(np.uint8) for buffer in buffers]
        for flat in own if self.rank != root else ():
            flat[...] = 0
        totals, _ = self._reduce(call, own, ReduceOp.SUM, lambda: None, timeout)
        for buffer, total in zip(buffers, totals, strict=True):
            write_to(buffer, copy_to(total.view(buffer.dtype), self.device))

    def abort(self, cause: BaseException) -> None:
        """Release whoever waits inside the group."""
        self._inside.abort(cause)

    def reset(self) -> None:
        """Forget every call, after a failure."""
        for level in self._owned:
            level.reset()

    def close(self) -> None:
        """Give back what the levels hold."""
        for level in self._owned:
            level.close()

    def _reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        timeout: float,
    ) -> tuple[list[Array], Any]:
        """Return the totals over all groups, which stay until the next call, and `prepare`'s."""
        inner = ReduceOp.SUM if op is ReduceOp.MEAN else op
        own = [to_host(array) for array in inputs]

        def open_sums(everyone: Sequence[Any]) -> tuple[Sequence[Any], list[Array]]:
            return everyone, self._sums.of(own, op)

        everyone, sums = self._inside.merge(call, own, open_sums, timeout)
        if self._one_memory:
            self._add_slices(inner, everyone, sums)
        else:
            wide = [a.astype(into.dtype, copy=False) for a, into in zip(own, sums, strict=True)]
            self._inside.all_reduce(call, wide, sums, inner, timeout)

        def meet(_: Sequence[Any]) -> Any:
            if self._outside is not None:
                self._outside.all_reduce(call, sums, sums, inner, timeout)
                for total in sums:
                    finish(op, total, self.size)
            return prepare() if self._one_memory else None

        prepared = self._inside.merge(call, None, meet, timeout)
        if not self._one_memory:
            self._inside.broadcast(call, sums, 0, timeout)
            prepared = prepare()  # Now that all is there, so that a failure before changes nothing.
        return sums, prepared

    def _add_slices(self, op: ReduceOp, everyone: Sequence[Any], sums: Sequence[Array]) -> None:
        """Add up this member's slice of what all members of one memory contribute."""
        sizes = tuple(total.size for total in sums)
        place = self._members.index(self.rank)
        for leaf, start, stop in owned_ranges(sizes, len(self._members), place):
            for first, last in blocks(start, stop, BLOCK_ELEMENTS):
                into = sums[leaf][first:last]
                parts = [
                    arrays[leaf][first:last].astype(into.dtype, copy=False) for arrays in everyone
                ]
                reduce_arrays(op, parts, out=into)

    def _gather_apart(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join rows where only one process of a group gets those of the other groups."""
        counts = np.zeros((self.size, len(inputs)), np.int64)
        counts[self.rank] = [len(rows) for rows in inputs]
        flat = [counts.reshape(-1)]
        self.all_reduce(call, flat, flat, ReduceOp.SUM, timeout)
        joined = self._inside.all_gather(call, inputs, timeout)
        if self._outside is not None:
            joined = self._outside.all_gather(call, joined, timeout)
        else:
            lengths = counts.sum(axis=0).tolist()
            shapes = [(length, rows.shape[1]) for length, rows in zip(lengths, joined, strict=True)]
            joined = [
                np.empty(shape, rows.dtype) for shape, rows in zip(shapes, joined, strict=True)
            ]
        self._inside.broadcast(call, [rows.reshape(-1) for rows in joined], 0, timeout)
        if self._order == sorted(self._order):
            return joined
        results = []
        for rows, lengths in zip(joined, counts[self._order].T, strict=True):
            parts = dict(zip(self._order, np.split(rows, np.cumsum(lengths)[:-1]), strict=True))
            results.append(np.concatenate([parts[rank] for rank in range(self.size)]))
        return results
