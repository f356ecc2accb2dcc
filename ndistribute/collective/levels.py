"""Backends of two levels: first the members of each group reduce, then the groups.

The replicas of a process are such a group, in one memory; the processes of a host are another.
Levels can be nested. One member communicates for its group, so each group sends its data once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.collective.backend import Arrays, Backend, Begin, Call, LeafKey, Update
from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish, result_dtype
from ndistribute.collective.threads import ThreadBackend, owned_blocks
from ndistribute.collective.workers import ProcessBackend, Workers
from ndistribute.devices import Array, copy_to, to_host
from ndistribute.stream import write_to
from ndistribute.timeline import span

_Sums = Callable[[tuple[LeafKey, ...]], list[Array]]

# A sum and the variable that it updates fit into a core's second-level cache.
BLOCK_BYTES = 256 * 1024
# For smaller sums, the two meetings of a reduction in place cost more than copying.
SHARED_BYTES = 256 * 1024
MOST_KEPT = 4


def join_replicas(local: Sequence[ThreadBackend], workers: Workers) -> list[Backend]:
    """Return the backends of this process's replicas in the group of all processes' replicas."""
    if workers.single_cpus:  # The same in all processes, because they must make the same calls.
        return [_Single(local[0], workers.backend)]
    ends = np.cumsum(workers.replica_counts).tolist()
    groups = [
        range(end - count, end) for count, end in zip(workers.replica_counts, ends, strict=True)
    ]
    sums = _sums(getattr(workers.backend, "allocate", None))
    workers.at_close(sums.cache_clear)
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
    """The backend if each process has one CPU replica: the bound methods of other backends."""

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


def _sums(allocate: Callable[..., Array | None] | None = None) -> Any:
    """Return a function that returns arrays for sums; large ones by `allocate` if it has room."""

    @functools.lru_cache(maxsize=MOST_KEPT)  # Those of a step.
    def sums(leaves: tuple[LeafKey, ...]) -> list[Array]:
        large = sum(dtype.itemsize * size for dtype, size in leaves) >= SHARED_BYTES
        made = []
        for dtype, size in leaves:
            shared = allocate(dtype, (size,)) if allocate and large else None
            made.append(np.empty(size, dtype) if shared is None else shared)
        return made

    return sums


class TwoLevelBackend:
    """The backend of one member of a group, over the members of all groups.

    `inside` is the backend among the members of this group, threads or processes; `outside` the one
    among the groups, or None on a process that does not communicate for its group. `sums` returns
    arrays for sums, the same ones to all threads.
    """

    def __init__(
        self,
        inside: Backend,
        outside: ProcessBackend | None,
        groups: Sequence[Sequence[int]],
        rank: int,
        sums: _Sums | None = None,
    ) -> None:
        self.rank = rank
        self.size = sum(map(len, groups))
        self.device, self.owner, self.owners = inside.device, inside.owner, inside.owners
        self.merge, self.abort = inside.merge, inside.abort  # These involve no other process.
        self._inside = inside
        self._outside = outside
        self._order = [member for group in groups for member in group]
        self._one_memory = isinstance(inside, ThreadBackend)
        self._sums = sums or _sums()
        # Reset and closed if the members are processes.
        self._levels: list[Any] = [level for level in (inside, outside) if level is not None]

    def all_reduce(
        self, call: Call, inputs: Arrays, outputs: Arrays, op: ReduceOp, timeout: float
    ) -> None:
        """Reduce in each group, then over the groups, and copy the result."""
        totals, _ = self._reduce(call, inputs, op, lambda: None, timeout)
        for total, output in zip(totals, outputs, strict=True):
            narrow = total.astype(result_dtype(op, output.dtype), copy=False)
            write_to(output, copy_to(narrow, self.device))

    def reduce_update(
        self, call: Call, inputs: Arrays, op: ReduceOp, begin: Begin, update: Update, timeout: float
    ) -> Any:
        """Reduce in each group, then over the groups, and update the part of this replica."""
        try:
            totals, prepared = self._reduce(call, inputs, op, begin, timeout)
            # Owners in several memories read the same total, and `update` may change it.
            read_by_others = self._one_memory and self.owners < self._inside.size
            with span("update", call.title):
                for leaf, part in owned_blocks(totals, self.owners, self.owner, BLOCK_BYTES):
                    dtype = result_dtype(op, inputs[leaf].dtype)
                    total = totals[leaf][part].astype(dtype, copy=read_by_others)
                    update(prepared, leaf, part.start, part.stop, total)
            self._inside.merge(call, None, lambda _: None, timeout)
            return prepared
        except BaseException as error:
            if self._outside is not None:  # The other processes may already update.
                self._outside.abort(error)
            raise

    def all_gather(self, call: Call, inputs: Arrays, timeout: float) -> list[Array]:
        """Concatenate the rows of each group, then those of all groups, in rank order."""
        own = [to_host(rows) for rows in inputs]
        if not self._one_memory:
            return self._gather_apart(call, own, timeout)

        def join(everyone: Sequence[Sequence[Array]]) -> list[Array]:
            rows = [np.concatenate(parts) for parts in zip(*everyone, strict=True)]
            return rows if self._outside is None else self._outside.all_gather(call, rows, timeout)

        joined = self._inside.merge(call, own, join, timeout)
        alone = self._inside.size == 1
        return [copy_to(rows if alone else rows.copy(), self.device) for rows in joined]

    def broadcast(self, call: Call, buffers: Arrays, root: int, timeout: float) -> None:
        """Broadcast as a sum of the root's bytes and zeros, in which all members take part."""
        own = [np.array(to_host(buffer)).view(np.uint8) for buffer in buffers]
        for flat in own if self.rank != root else ():
            flat[...] = 0
        totals, _ = self._reduce(call, own, ReduceOp.SUM, lambda: None, timeout)
        for buffer, total in zip(buffers, totals, strict=True):
            write_to(buffer, copy_to(total.view(buffer.dtype), self.device))

    def reset(self) -> None:
        for level in self._levels:
            level.reset()

    def close(self) -> None:
        for level in self._levels:
            level.close()

    def _reduce(
        self, call: Call, inputs: Arrays, op: ReduceOp, begin: Begin, timeout: float
    ) -> tuple[list[Array], Any]:
        """Return the totals, valid until the next call, and the result of `begin`."""
        inner = ReduceOp.SUM if op is ReduceOp.MEAN else op
        own = [to_host(array) for array in inputs]
        leaves = tuple([(accumulation_dtype(op, array.dtype), array.size) for array in own])

        def open_sums(everyone: Sequence[Any]) -> Sequence[Any]:
            sums = self._sums(leaves)
            return [(arrays, sums) for arrays in everyone]

        everyone = self._inside.merge(call, own, open_sums, timeout)
        sums = everyone[0][1]
        if isinstance(self._inside, ThreadBackend):
            self._inside.reduce_parts(inner, everyone)
        else:
            wide = [a.astype(into.dtype, copy=False) for a, into in zip(own, sums, strict=True)]
            self._inside.all_reduce(call, wide, sums, inner, timeout)

        def meet(_: Sequence[Any]) -> Any:
            if self._outside is not None:
                self._outside.all_reduce(call, sums, sums, inner, timeout)
                for total in sums:
                    finish(op, total, self.size)
            return begin() if self._one_memory else None

        prepared = self._inside.merge(call, None, meet, timeout)
        if not self._one_memory:
            self._inside.broadcast(call, sums, 0, timeout)
            prepared = begin()  # Last, so that an earlier failure changes nothing.
        return sums, prepared

    def _gather_apart(self, call: Call, inputs: Arrays, timeout: float) -> list[Array]:
        """Gather rows if only one process of each group communicates with other groups."""
        lengths = np.array([[len(rows) for rows in inputs]], np.int64)
        joined = self._inside.all_gather(call, [*inputs, lengths], timeout)
        if self._outside is not None:
            joined = self._outside.all_gather(call, joined, timeout)
        else:  # The communicating process has all rows.
            joined = [rows[:0] for rows in joined]
        *joined, lengths = self._inside.all_gather(call, joined, timeout)
        if self._order == sorted(self._order):
            return joined
        results = []
        for rows, counts in zip(joined, lengths.T, strict=True):
            parts = np.split(rows, counts.cumsum()[:-1])
            results.append(np.concatenate([parts[place] for place in np.argsort(self._order)]))
        return results
