"""The six methods of a backend over NCCL, whoever else takes part in the group.

A replica stages its arrays and meets the other replicas of its process on the host. The last to
arrive has their group launch for all of them; what that takes, the group knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ndistribute.collective.backend import Call, Update
from ndistribute.collective.nccl_plan import Launch, Leaf, broadcast_launches, stage
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.device import Array, array_namespace
from ndistribute.stream import settle
from ndistribute.timeline import span

if TYPE_CHECKING:
    from ndistribute.collective.nccl import NcclGroup

__all__ = ["NcclBackend"]

T = TypeVar("T")


class NcclBackend:
    """Move data between one replica's GPU and those of the others.

    The order in which floats are summed is NCCL's: all replicas hold the same bits, but not those
    that summing in replica order would give.

    Args:
        group: what the replicas of this process share.
        index: which of these replicas this one is.
    """

    def __init__(self, group: NcclGroup, index: int) -> None:
        self.rank = group.first + index
        self.size = group.size
        self.owner, self.owners = 0, 1  # Each GPU has a memory of its own.
        self.device = group.streams[index].device
        self._group = group
        self._index = index
        self._stream = group.streams[index]
        self._exchange = functools.partial(group.rendezvous.exchange, index)

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` once, when the GPUs have finished what the replicas had enqueued."""

        def settled(values: Sequence[Any]) -> T:
            combined = combine(values)
            settle(self._group.streams)  # The others may use it at once, on their own streams.
            return combined

        self._group.drain(self._index, call, timeout)
        return self._exchange(call, value, settled, timeout)

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce all leaves in one launch."""

        def combine(everyone: Sequence[Sequence[Launch]]) -> None:
            self._group.launch(call, everyone, timeout)

        with self._stream.use():
            with span("pack", call.title):
                leaves = stage(op, inputs, outputs, self.size)
            self._exchange(call, _launches(leaves), combine, timeout)
            for leaf in leaves:
                leaf.complete(self.size)

    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce, and let each replica update all of the copy that its GPU holds."""

        def combine(everyone: Sequence[Sequence[Launch]]) -> Any:
            return self._group.launch_update(call, everyone, prepare, timeout)

        with self._stream.use():
            with span("pack", call.title):
                totals = [array_namespace(source).empty_like(source) for source in inputs]
                leaves = stage(op, inputs, totals, self.size)
            prepared = self._exchange(call, _launches(leaves), combine, timeout)
            with span("update", call.title):
                for index, leaf in enumerate(leaves):
                    leaf.complete(self.size)
                    update(prepared, index, 0, leaf.output.size, leaf.output)
        self.merge(call, None, _nothing, timeout)
        return prepared

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join everyone's rows; the last to arrive knows how many, and allocates for all."""

        def combine(everyone: Sequence[Sequence[Array]]) -> list[list[Array]]:
            return self._group.gather(call, everyone, timeout)

        return self._exchange(call, inputs, combine, timeout)[self._index]

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Copy from the root's GPU."""

        def combine(everyone: Sequence[Sequence[Launch]]) -> None:
            self._group.launch(call, everyone, timeout)

        self._exchange(call, broadcast_launches(buffers, root), combine, timeout)

    def abort(self, cause: BaseException) -> None:
        """Release every replica that waits on the host, and what can not end on the GPUs."""
        self._group.abort(cause)


def _launches(leaves: Sequence[Leaf]) -> list[Launch]:
    return [launch for leaf in leaves for launch in leaf.launches]


def _nothing(_: Sequence[Any]) -> None:
    return None
