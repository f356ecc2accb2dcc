"""The backend for processes on several hosts: memory inside a host, a wire between hosts.

The processes of a host add up in memory that they share; the first of each host, its leader, meets
the other leaders; and the total comes back the same way. Only one message of each host travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ndistribute.collective.backend import Call, Update
from ndistribute.collective.hand_over import update_in_blocks
from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish
from ndistribute.collective.workers import ProcessBackend
from ndistribute.device import Array, Device

__all__ = ["HostsBackend", "host_groups"]

T = TypeVar("T")


def host_groups(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first ranks.

    >>> host_groups(["red", "blue", "red"])
    [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())


class HostsBackend:
    """Move data between one process and those of all hosts.

    Args:
        rank: which process this is.
        groups: the ranks of each host, as `host_groups` returns them.
        inside: how the processes of this host meet; the leader is number 0 of it.
        leaders: how the leaders meet; None on a process that is none.
    """

    def __init__(
        self,
        rank: int,
        groups: Sequence[Sequence[int]],
        inside: ProcessBackend,
        leaders: ProcessBackend | None,
    ) -> None:
        self.rank = rank
        self.size = sum(map(len, groups))
        self.device = Device("cpu:0")
        self.owner, self.owners = 0, 1  # A process has its variables to itself.
        self._groups = [list(group) for group in groups]
        self._host = next(i for i, group in enumerate(groups) if rank in group)
        self._inside = inside
        self._leaders = leaders
        self._totals: dict[Any, list[Array]] = {}

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` here; nothing is sent."""
        return combine([value])

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce on each host, then over hosts, and tell the total to all."""
        for total, output in zip(self._reduce(call, inputs, op, timeout), outputs, strict=True):
            output[...] = total.astype(output.dtype, copy=False)

    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce everything, then update block by block."""
        totals = self._reduce(call, inputs, op, timeout)
        return update_in_blocks(call, inputs, totals, prepare, update)

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join the rows of each host, then those of all hosts, in the order of ranks."""
        counts = self._gather_inside_out(
            call, [np.array([[len(rows) for rows in inputs]], np.int64)], timeout, [self.size]
        )[0]
        order = [rank for group in self._groups for rank in group]
        joined = self._gather_inside_out(call, inputs, timeout, counts.sum(axis=0).tolist())
        if order == sorted(order):
            return joined
        return [
            _in_rank_order(rows, order, counts[:, leaf].tolist())
            for leaf, rows in enumerate(joined)
        ]

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Copy to the root's leader, to the other leaders, and on all hosts."""
        home = next(i for i, group in enumerate(self._groups) if root in group)
        place = self._groups[home].index(root)
        if self._host == home and place:
            self._inside.broadcast(call, buffers, place, timeout)
        if self._leaders is not None:
            self._leaders.broadcast(call, buffers, home, timeout)
        # On the root's host too: who leaves the call may believe that all made the same one.
        self._inside.broadcast(call, buffers, 0, timeout)

    def abort(self, cause: BaseException) -> None:
        """Release whoever waits on this host or between hosts."""
        self._inside.abort(cause)
        if self._leaders is not None:
            self._leaders.abort(cause)

    def reset(self) -> None:
        """Forget every call; run when no process is inside one."""
        self._inside.reset()
        if self._leaders is not None:
            self._leaders.reset()

    def close(self) -> None:
        """Give back what the levels hold."""
        self._inside.close()
        if self._leaders is not None:
            self._leaders.close()

    def _reduce(
        self, call: Call, inputs: Sequence[Array], op: ReduceOp, timeout: float
    ) -> list[Array]:
        """Return the totals, which the next call of the same shapes overwrites."""
        inner = ReduceOp.SUM if op is ReduceOp.MEAN else op
        wide = [array.astype(accumulation_dtype(op, array.dtype), copy=False) for array in inputs]
        key = tuple((array.size, array.dtype) for array in wide)
        if key not in self._totals:
            self._totals.clear()
            self._totals[key] = [np.empty(size, dtype) for size, dtype in key]
        totals = self._totals[key]
        self._inside.all_reduce(call, wide, totals, inner, timeout)
        if self._leaders is not None:
            self._leaders.all_reduce(call, totals, totals, inner, timeout)
        self._inside.broadcast(call, totals, 0, timeout)
        for total in totals:
            finish(op, total, self.size)
        return totals

    def _gather_inside_out(
        self, call: Call, inputs: Sequence[Array], timeout: float, lengths: Sequence[int]
    ) -> list[Array]:
        """Join rows host after host; `lengths` says how many there are of each in all."""
        joined = self._inside.all_gather(call, inputs, timeout)
        if self._leaders is not None:
            whole = self._leaders.all_gather(call, joined, timeout)
        else:
            whole = [
                np.empty((length, rows.shape[1]), rows.dtype)
                for rows, length in zip(joined, lengths, strict=True)
            ]
        flat = [np.ascontiguousarray(rows).reshape(-1) for rows in whole]
        self._inside.broadcast(call, flat, 0, timeout)
        return [rows.reshape(like.shape) for rows, like in zip(flat, whole, strict=True)]


def _in_rank_order(rows: Array, order: Sequence[int], counts: Sequence[int]) -> Array:
    """Put rows that stand host after host in the order of ranks."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    parts = {rank: rows[starts[place] : starts[place + 1]] for place, rank in enumerate(order)}
    return np.concatenate([parts[rank] for rank in sorted(order)])
