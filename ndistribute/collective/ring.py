"""The backend for processes that share no memory: plans over a wire that sends and receives.

Small arrays are packed into buckets, large ones travel from where they are. What is large goes
round a ring, which moves the fewest bytes; what is small goes in the fewest steps. The calls of all
ranks are compared on the way: see `Wire`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ndistribute import timeline
from ndistribute.collective.backend import Call, Update
from ndistribute.collective.control import ControlPlane
from ndistribute.collective.hand_over import update_in_blocks
from ndistribute.collective.header import encode
from ndistribute.collective.packing import Packing, Settings
from ndistribute.collective.pipeline import Bucket, Pipeline
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.schedule import Move, Tuning, plan_broadcast, plan_gather
from ndistribute.collective.wire import Wire
from ndistribute.device import Array, Device

__all__ = ["RingBackend"]

T = TypeVar("T")


_PACKINGS = 16
_NOTHING = np.empty(0, np.uint8)


class RingBackend:
    """Move data between one process and the others of a group.

    Args:
        peers: the processes.
        transport: what carries the messages.
        ranks: which of the processes take part, in order; all of them if None.
        bytes_per_pack: the most bytes of a bucket and of a message; 0 leaves it to the wire.
        wire_dtype: ``"float16"`` or ``"bfloat16"`` halves what float32 sums cost on the wire, at
            the price of rounding each partial sum; None sends what is added.

    Raises:
        ValueError: this process is not one of `ranks`, or `wire_dtype` is unknown.
    """

    def __init__(
        self,
        peers: ControlPlane,
        transport: Wire,
        *,
        ranks: Sequence[int] | None = None,
        bytes_per_pack: int = 0,
        wire_dtype: str | None = None,
    ) -> None:
        self._ranks = tuple(range(peers.size) if ranks is None else ranks)
        if peers.rank not in self._ranks:
            raise ValueError(f"worker {peers.rank} is not one of the ranks {self._ranks}.")
        self.rank = self._ranks.index(peers.rank)
        self.size = len(self._ranks)
        self.device = Device("cpu:0")
        self.owner, self.owners = 0, 1
        self.count = 0
        self._peers = peers
        self._wire = transport
        self._guard = _Guard(peers)
        self._pipeline = Pipeline(transport)
        self._settings = Settings(
            self.size, self.rank, transport.block_bytes, bytes_per_pack, wire_dtype
        )
        self._packings: OrderedDict[Any, Packing] = OrderedDict()

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` over the one value of this process; nothing is sent."""
        return combine([value])

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce bucket by bucket; one is packed while the one before travels."""
        with self._guard:
            packing = self._packing(op, inputs)
            buckets = packing.buckets(inputs, outputs)
            self._communicate(call, packing.moves, buckets, op, timeout)

    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce everything, then update all of it: this process owns its copies alone."""
        with self._guard:
            packing = self._packing(op, inputs)
            buckets = packing.buckets(inputs, None)
            self._communicate(call, packing.moves, buckets, op, timeout)
            totals = [packing.total(leaf, buckets) for leaf in range(len(inputs))]
            return update_in_blocks(call, inputs, totals, prepare, update)

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Tell each other how many rows there are, then pass them round the ring."""
        with self._guard:
            self._begin(call, timeout)
            counts = self._gather_counts(call, [len(array) for array in inputs])
            joined, buckets, cuts = [], [], []
            for array, rows in zip(inputs, counts.T, strict=True):
                width = array.shape[1]
                places = [0, *np.cumsum(rows * width).tolist()]
                whole = np.empty((int(rows.sum()), width), array.dtype)
                flat = whole.reshape(-1)
                flat[places[self.rank] : places[self.rank + 1]] = array.reshape(-1)
                joined.append(whole)
                buckets.append(Bucket(flat, flat))
                cuts.append((places, array.dtype.itemsize))
            self._run(call, plan_gather(self.size, self.rank, cuts, self._tuning), buckets)
            self._end(call)
        return joined

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Pass the root's bytes down a tree."""
        with self._guard:
            self._begin(call, timeout)
            self._meet()
            flats = [array.view(np.uint8) for array in buffers]
            moves = plan_broadcast(
                self.size, self.rank, root, [flat.size for flat in flats], self._tuning
            )
            self._run(call, moves, [Bucket(flat, flat) for flat in flats])
            self._end(call)

    def abort(self, cause: BaseException) -> None:
        """Release every process that waits, now or later, with the reason."""
        self._peers.abort(cause)

    def reset(self) -> None:
        """Forget all calls, after a failure; every process does it before the next call."""
        self.count = 0
        self._wire.reset()
        self._packings.clear()
        self._pipeline = Pipeline(self._wire)

    def close(self) -> None:
        """Give the buffers and the wire back."""
        self._packings.clear()
        self._wire.close()

    @property
    def _tuning(self) -> Tuning:
        return self._settings.tuning

    def _communicate(
        self,
        call: Call,
        moves: Sequence[Move],
        buckets: Sequence[Bucket],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        if self.size == 1:
            for bucket in buckets:
                bucket.copy_alone()
            return
        first = next((move.send.peer for move in moves if move.send), None)
        self._begin(call, timeout, None if first is None else self._ranks[first])
        if not any(bucket.target.size for bucket in buckets):
            self._meet()
        self._run(call, moves, buckets, op)
        self._end(call)

    def _begin(self, call: Call, timeout: float, sends_to: int | None = None) -> None:
        self.count += 1
        ring = self._neighbour(-1), self._neighbour(1)
        patience = self._peers.patience(call, timeout)
        first = ring[1] if sends_to is None else sends_to
        header = encode(call, self.count, self._peers.where.position)
        self._wire.begin(header, patience, first, ring)

    def _run(
        self,
        call: Call,
        moves: Sequence[Move],
        buckets: Sequence[Bucket],
        op: ReduceOp | None = None,
    ) -> None:
        self._pipeline.run(moves, buckets, self._ranks, call.title, op)

    def _end(self, call: Call) -> None:
        with timeline.span("wait", call.title):
            self._wire.end()

    def _meet(self) -> None:
        """Return when all ranks are known to make this call, where no data would tell.

        In round k a rank hears from the one 2**k before it, which had heard from the 2**k ranks
        before itself: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
        International Journal of Parallel Programming 17(1), 1988.
        """
        reach = 1
        while reach < self.size:
            self._wire.isend(self._neighbour(reach), _NOTHING)
            self._wire.wait(self._wire.irecv(self._neighbour(-reach), _NOTHING))
            reach *= 2

    def _neighbour(self, distance: int) -> int:
        return self._ranks[(self.rank + distance) % self.size]

    def _gather_counts(self, call: Call, own: Sequence[int]) -> Any:
        """Return how many rows each rank has of each array, one line for each rank."""
        counts = np.zeros((self.size, len(own)), np.int64)
        counts[self.rank] = own
        if not own:
            self._meet()
        cuts = [len(own) * rank for rank in range(self.size + 1)]
        flat = counts.reshape(-1)
        moves = _count_moves(self.size, self.rank, tuple(cuts), self._tuning)
        self._run(call, moves, [Bucket(flat, flat)])
        return counts

    def _packing(self, op: ReduceOp, inputs: Sequence[Array]) -> Packing:
        """Return where arrays of these dtypes and sizes go; the last few are kept."""
        key = tuple((array.dtype, array.size) for array in inputs)
        packing = self._packings.get(key)
        if packing is None:
            packing = self._packings[key] = Packing(self._settings, op, key)
            if len(self._packings) > _PACKINGS:
                self._packings.popitem(last=False)
        self._packings.move_to_end(key)
        return packing


class _Guard:
    """Let the others know of whatever ends a call."""

    def __init__(self, peers: ControlPlane) -> None:
        self._peers = peers

    def __enter__(self) -> None:
        self._peers.check()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._peers.abort(error)


@functools.lru_cache(maxsize=64)
def _count_moves(size: int, rank: int, cuts: tuple[int, ...], tuning: Tuning) -> list[Move]:
    return plan_gather(size, rank, [(cuts, np.dtype(np.int64).itemsize)], tuning)
