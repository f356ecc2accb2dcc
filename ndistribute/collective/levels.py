"""Backends of two levels: first the members of each group reduce, then the groups reduce.

A group is the replicas of a process, which share its memory, or the processes of a host. Levels can
be nested. One member communicates for its group, so each group sends its data once.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.collective.backend import Arrays, Backend, Begin, Call, Combine, LeafKey, T, Update
from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish, result_dtype
from ndistribute.collective.threads import ThreadBackend, owned_blocks
from ndistribute.devices import Array, copy_to, to_host
from ndistribute.stream import write_to
from ndistribute.timeline import span

Sums = Callable[[tuple[LeafKey, ...]], list[Array]]
Reduced = tuple[list[Array], Any]  # The totals, and what `begin` returned.

# A sum and the variable that it updates fit into a core's second-level cache.
BLOCK_BYTES = 256 * 1024
# For smaller sums, the two meetings of a reduction in place cost more than copying.
SHARED_BYTES = 256 * 1024
MOST_KEPT = 4


class SingleReplicaBackend:
    """The backend of a process's only replica, on a CPU: it calls other backends directly."""

    def __init__(self, threads: Backend, processes: Backend) -> None:
        self.rank, self.size = processes.rank, processes.size
        self.device, self.owner, self.owners = threads.device, threads.owner, threads.owners
        self.is_traced = False
        self.all_reduce = processes.all_reduce
        self.reduce_update = processes.reduce_update
        self.all_gather = processes.all_gather
        self.broadcast = processes.broadcast
        self.merge, self.abort = threads.merge, threads.abort
        self.allocate, self.gradient_memory = processes.allocate, processes.gradient_memory
        self.reset, self.close = processes.reset, processes.close


class _TwoLevelBackend(Backend):
    """The backend of one member of a group, over the members of all groups.

    `inside` is the backend among the members of this group; `outside` the one among the groups, or
    None on a process that does not communicate for its group.
    """

    def __init__(
        self, inside: Backend, outside: Backend | None, groups: Sequence[Sequence[int]], rank: int
    ) -> None:
        self.rank = rank
        self.size = sum(map(len, groups))
        self.device, self.owner, self.owners = inside.device, inside.owner, inside.owners
        self._inside, self._outside = inside, outside
        self._readers = 1  # The number of replicas that read the same totals.

    def merge(self, call: Call, value: Any, combine: Combine[T]) -> T:
        return self._inside.merge(call, value, combine)

    def all_reduce(self, call: Call, inputs: Arrays, outputs: Arrays, op: ReduceOp) -> None:
        """Reduce in each group, then over the groups, and copy the result."""
        totals, _ = self._reduce(call, inputs, op, lambda: None)
        for total, output in zip(totals, outputs, strict=True):
            narrow = total.astype(result_dtype(op, output.dtype), copy=False)
            write_to(output, copy_to(narrow, self.device))

    def reduce_update(self, call: Call, inputs: Arrays, op: ReduceOp, update: Update) -> Any:
        """Reduce in each group, then over the groups, and update the part of this replica."""
        try:
            totals, prepared = self._reduce(call, inputs, op, update.begin)
            # Owners in several memories read the same total, but the update may change the total.
            read_by_others = self.owners < self._readers
            with span("update", call.title):
                for leaf, part in owned_blocks(totals, self.owners, self.owner, BLOCK_BYTES):
                    dtype = result_dtype(op, inputs[leaf].dtype)
                    total = totals[leaf][part].astype(dtype, copy=read_by_others)
                    update.apply(prepared, leaf, part.start, part.stop, total)
            self._inside.merge(call, None, lambda _: None)
            return prepared
        except BaseException as error:
            # The other processes may already be updating.
            (self._inside if self._outside is None else self._outside).abort(error)
            raise

    def broadcast(self, call: Call, buffers: Arrays, root: int) -> None:
        """Broadcast by adding the root's bytes and zeros of all other members."""
        flats = [np.array(to_host(buffer)).view(np.uint8) for buffer in buffers]
        for flat in flats if self.rank != root else ():
            flat[...] = 0
        totals, _ = self._reduce(call, flats, ReduceOp.SUM, lambda: None)
        for buffer, total in zip(buffers, totals, strict=True):
            write_to(buffer, copy_to(total.view(buffer.dtype), self.device))

    def abort(self, cause: BaseException) -> None:
        self._inside.abort(cause)  # This involves no other group.

    @abstractmethod
    def _reduce(self, call: Call, inputs: Arrays, op: ReduceOp, begin: Begin) -> Reduced:
        """Return the totals, which are valid until the next call, and the result of `begin`."""

    def _reduce_outside(self, call: Call, sums: list[Array], op: ReduceOp) -> None:
        """Reduce this group's sums over all groups, if this member communicates for its group."""
        if self._outside is not None:
            self._outside.all_reduce(call, sums, sums, _summed(op))
            for total in sums:
                finish(op, total, self.size)


class ReplicaLevelBackend(_TwoLevelBackend):
    """The backend of a replica: a group is the replicas of a process.

    `sums` returns arrays for sums; all replicas of a process get the same arrays.
    """

    def __init__(
        self,
        threads: ThreadBackend,
        processes: Backend,
        groups: Sequence[Sequence[int]],
        rank: int,
        sums: Sums,
    ) -> None:
        super().__init__(threads, processes, groups, rank)
        self._readers = threads.size
        self._reduce_parts, self._gather = threads.reduce_parts, processes.all_gather
        self._sums = sums

    def all_gather(self, call: Call, inputs: Arrays) -> list[Array]:
        """Concatenate the rows of each process, then those of all processes, in rank order."""

        def join(everyone: Sequence[Sequence[Array]]) -> list[Array]:
            rows = [np.concatenate(parts) for parts in zip(*everyone, strict=True)]
            return self._gather(call, rows)

        joined = self.merge(call, [to_host(rows) for rows in inputs], join)
        alone = self._readers == 1
        return [copy_to(rows if alone else rows.copy(), self.device) for rows in joined]

    def _reduce(self, call: Call, inputs: Arrays, op: ReduceOp, begin: Begin) -> Reduced:
        arrays = [to_host(array) for array in inputs]
        leaves = _leaves(op, arrays)

        def open_sums(everyone: Sequence[Any]) -> Sequence[Any]:
            sums = self._sums(leaves)
            return [(arrays, sums) for arrays in everyone]

        everyone = self.merge(call, arrays, open_sums)
        sums: list[Array] = everyone[0][1]
        self._reduce_parts(_summed(op), everyone)

        def meet(_: Sequence[Any]) -> Any:
            self._reduce_outside(call, sums, op)
            return begin()

        return sums, self.merge(call, None, meet)


class HostLevelBackend(_TwoLevelBackend):
    """The backend of a process: a group is the processes of a host."""

    def __init__(
        self, inside: Backend, outside: Backend | None, groups: Sequence[Sequence[int]], rank: int
    ) -> None:
        super().__init__(inside, outside, groups, rank)
        self._order = [member for group in groups for member in group]
        self._levels = [inside] if outside is None else [inside, outside]
        self._sums = reused_sums(self.allocate)

    def all_gather(self, call: Call, inputs: Arrays) -> list[Array]:
        """Gather the rows of each host; one process of each host then gathers those of all."""
        lengths = np.array([[len(rows) for rows in inputs]], np.int64)
        joined = self._inside.all_gather(call, [*inputs, lengths])
        if self._outside is not None:
            joined = self._outside.all_gather(call, joined)
        else:  # The communicating process has all rows.
            joined = [rows[:0] for rows in joined]
        *joined, lengths = self._inside.all_gather(call, joined)
        if self._order == sorted(self._order):
            return joined
        results = []
        for rows, counts in zip(joined, lengths.T, strict=True):
            parts = np.split(rows, counts.cumsum()[:-1])
            results.append(np.concatenate([parts[place] for place in np.argsort(self._order)]))
        return results

    def reset(self) -> None:
        for level in self._levels:
            level.reset()

    def close(self) -> None:
        for level in self._levels:
            level.close()

    def _reduce(self, call: Call, inputs: Arrays, op: ReduceOp, begin: Begin) -> Reduced:
        sums = self._sums(_leaves(op, inputs))
        wide = [a.astype(into.dtype, copy=False) for a, into in zip(inputs, sums, strict=True)]
        self._inside.all_reduce(call, wide, sums, _summed(op))
        self._reduce_outside(call, sums, op)
        self._inside.broadcast(call, sums, 0)
        return sums, begin()  # Done last, so that an earlier failure changes nothing.


def reused_sums(allocate: Callable[..., Array | None]) -> Any:
    """Return a function that makes arrays for sums; large ones with `allocate` if it has room."""

    @functools.lru_cache(maxsize=MOST_KEPT)  # The sums of a step.
    def sums(leaves: tuple[LeafKey, ...]) -> list[Array]:
        large = sum(dtype.itemsize * size for dtype, size in leaves) >= SHARED_BYTES
        made = []
        for dtype, size in leaves:
            shared = allocate(dtype, (size,)) if large else None
            made.append(np.empty(size, dtype) if shared is None else shared)
        return made

    return sums


def _summed(op: ReduceOp) -> ReduceOp:
    """Return the reduction of a level: MEAN divides at the end."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _leaves(op: ReduceOp, arrays: Arrays) -> tuple[LeafKey, ...]:
    return tuple([(accumulation_dtype(op, array.dtype), array.size) for array in arrays])
