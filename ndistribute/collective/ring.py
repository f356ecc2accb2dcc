"""The backend for processes that share no memory: plans, carried out over a transport.

Small arrays are packed into buckets, large ones travel from where they are. What is large goes
round a ring, which moves the fewest bytes; what is small goes in the fewest steps. While one block
is combined, the next ones travel. The calls of all ranks are compared on the way, for a header goes
in front of the first message to each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from ndistribute.collective.backend import Call, Update
from ndistribute.collective.buckets import LeafSpec, pack
from ndistribute.collective.compression import compress, compressed_dtype, decompress
from ndistribute.collective.control import ControlPlane, WaitMonitor
from ndistribute.collective.hand_over import update_in_blocks
from ndistribute.collective.header import HEADER_BYTES, compare, encode
from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish
from ndistribute.collective.schedule import (
    Action,
    Message,
    Move,
    Tuning,
    plan_broadcast,
    plan_gather,
    plan_reduce,
)
from ndistribute.device import Array, Device
from ndistribute.timeline import span

__all__ = ["Handle", "RingBackend", "Transport"]

T = TypeVar("T")

# How many messages each way may be begun and not finished: one that is combined, one that arrives,
# and two that keep the transport busy meanwhile.
WINDOW = 4
# An array that is larger than a pack goes in several messages, but none is cut below this: each
# costs 20 us, in which as many bytes would have gone twenty times.
LEAST_BYTES = 4 * 1024
# Arrays of up to this size share a bucket: copying costs about 0.1 ms a MiB, a message 20 us.
BUCKET_BYTES = 4 * 1024 * 1024
# Up to here a buffer goes whole. Between two ranks that costs no more bytes than a ring and saves a
# step: 63 us against 96 us for 256 KiB. Among more it costs more bytes with each step.
SMALL_BYTES_OF_TWO = 256 * 1024
SMALL_BYTES = 64 * 1024

_PACKINGS = 16  # of the arrays of the last calls
_Leaves = tuple[tuple[np.dtype[Any], int], ...]
_Space = dict[tuple[str, np.dtype[Any], int], Array]  # for messages, by use, dtype and number


class Handle(Protocol):
    """Stand for a message on its way."""

    @property
    def done(self) -> bool:
        """Return whether it has arrived, or has left."""


class Transport(Protocol):
    """Move flat arrays between processes; messages from one to another keep their order."""

    block_bytes: int
    """How large messages should be: cut smaller, they cost more; larger, they leave the cache."""

    def begin(self, patience: WaitMonitor) -> None:
        """Start a call, with what ends waits that take too long."""

    def isend(self, peer: int, *arrays: Array) -> Handle:
        """Begin to send arrays, which stay unchanged until the handle, that of the last, is done.

        Each is a message of its own.
        """

    def irecv(self, peer: int, array: Array, then: Callable[[], None] | None = None) -> Handle:
        """Begin to receive into an array; `then` is called once the message has come."""

    def wait(self, handle: Handle) -> None:
        """Wait until a message is done, and push all others on meanwhile."""

    def end(self) -> None:
        """Wait until all messages of the call are done."""

    def close(self) -> None:
        """Forget every message, and give back what the transport holds."""


class RingBackend:
    """Move data between one process and the others of a group.

    Args:
        peers: the processes.
        connect: returns what carries the messages; called again after a failure, when that of
            before is closed.
        ranks: which of the processes take part, in order; all of them if None.
        bytes_per_pack: the most bytes of a bucket and of a message; 0 leaves it to the transport.
        wire_dtype: ``"float16"`` or ``"bfloat16"`` halves what float32 sums cost on the wire, at
            the price of rounding each partial sum; None sends what is added.

    Raises:
        ValueError: this process is not one of `ranks`, or `wire_dtype` is unknown.
    """

    def __init__(
        self,
        peers: ControlPlane,
        connect: Callable[[], Transport],
        *,
        ranks: Sequence[int] | None = None,
        bytes_per_pack: int = 0,
        wire_dtype: str | None = None,
    ) -> None:
        self._ranks = tuple(range(peers.size) if ranks is None else ranks)
        if peers.rank not in self._ranks:
            raise ValueError(f"worker {peers.rank} is not one of the ranks {self._ranks}.")
        compressed_dtype(wire_dtype, np.dtype(np.float32))
        self.rank = self._ranks.index(peers.rank)
        self.size = len(self._ranks)
        self.device = Device("cpu:0")
        self.owner, self.owners = 0, 1
        self._peers = peers
        self._guard = _Guard(peers)
        self._connect = connect
        self._pack_bytes = bytes_per_pack
        self._wire_dtype = wire_dtype
        self._start()
        most = self._transport.block_bytes
        if bytes_per_pack:
            most = min(most, max(bytes_per_pack, LEAST_BYTES))
        small = SMALL_BYTES_OF_TWO if self.size == 2 else SMALL_BYTES
        self._tuning = Tuning(min(small, most), most)

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
            packing = self._packing(tuple([(array.dtype, array.size) for array in inputs]))
            self._reduce(call, packing, packing.buckets(inputs, outputs), op, timeout)

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
            packing = self._packing(tuple([(array.dtype, array.size) for array in inputs]))
            buckets = packing.buckets(inputs, None)
            self._reduce(call, packing, buckets, op, timeout)
            totals = [packing.total(leaf, buckets) for leaf in range(len(inputs))]
            return update_in_blocks(call, inputs, totals, prepare, update)

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Tell each other how many rows there are, then pass them round the ring."""
        with self._guard:
            runner = self._begin(call, timeout)
            counts = np.zeros((self.size, len(inputs)), np.int64)
            counts[self.rank] = [len(array) for array in inputs]
            flat = counts.reshape(-1)
            if not inputs:
                runner.meet()
            moves = _count_moves(self.size, self.rank, len(inputs), self._tuning)
            runner.run(moves, [Bucket(flat, flat)])
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
            runner.run(plan_gather(self.size, self.rank, cuts, self._tuning), buckets)
            runner.end()
        return joined

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Pass the root's bytes down a tree."""
        with self._guard:
            runner = self._begin(call, timeout)
            runner.meet()
            flats = [array.view(np.uint8) for array in buffers]
            lengths = [flat.size for flat in flats]
            moves = plan_broadcast(self.size, self.rank, root, lengths, self._tuning)
            runner.run(moves, [Bucket(flat, flat) for flat in flats])
            runner.end()

    def abort(self, cause: BaseException) -> None:
        """Release every process that waits, now or later, with the reason."""
        self._peers.abort(cause)

    def reset(self) -> None:
        """Start over after a failure; every process does it before the next call."""
        self._transport.close()
        self._start()

    def close(self) -> None:
        """Give the buffers and the transport back."""
        self._packing.cache_clear()
        self._transport.close()

    def _start(self) -> None:
        """Make what no failure may be left in."""
        self.count = 0
        self._transport = self._connect()
        self._space: _Space = {}
        self._packing = functools.lru_cache(_PACKINGS)(self._make_packing)

    def _begin(self, call: Call, timeout: float) -> Runner:
        self.count += 1
        self._transport.begin(self._peers.patience(call, timeout))
        peers = self._peers
        header = encode(call, self.count, peers.where.position, peers.generation)
        return Runner(self._transport, self._space, self._ranks, self.rank, header, call.title)

    def _reduce(
        self, call: Call, packing: Packing, buckets: Sequence[Bucket], op: ReduceOp, timeout: float
    ) -> None:
        runner = self._begin(call, timeout)
        if packing.moves:
            runner.run(packing.moves, buckets, op)
        else:  # One rank alone, or arrays without elements.
            runner.meet()
            for bucket in buckets:
                bucket.fill()
                bucket.target[...] = bucket.source
                bucket.drain()
        runner.end()

    def _make_packing(self, leaves: _Leaves) -> Packing:
        packing = Packing(leaves, self._pack_bytes or BUCKET_BYTES, self._wire_dtype)
        if self.size > 1:
            packing.moves = plan_reduce(self.size, self.rank, packing.lengths, self._tuning)
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
def _count_moves(size: int, rank: int, arrays: int, tuning: Tuning) -> list[Move]:
    cuts = [arrays * index for index in range(size + 1)]
    return plan_gather(size, rank, [(cuts, np.dtype(np.int64).itemsize)], tuning)


@dataclass(slots=True)
class Bucket:
    """Be one buffer of a call.

    Args:
        source: what this rank contributes, flat; not changed unless it is also the target.
        target: where the total goes, of the same length and dtype.
        codec: the dtype that elements have on the wire where they are compressed, or None.
        parts: which arrays come from and go to which place of it; none where source and target
            are such arrays themselves. An output of None is left where it is.
    """

    source: Array
    target: Array
    codec: np.dtype[Any] | None = None
    parts: Sequence[tuple[slice, Array, Array | None]] = ()

    def fill(self) -> None:
        """Copy what is reduced into the source."""
        for place, array, _ in self.parts:
            self.source[place] = array

    def drain(self) -> None:
        """Copy the totals out of the target."""
        for place, _, output in self.parts:
            if output is not None:
                output[...] = self.target[place]


class Packing:
    """Say which arrays share a bucket, and which travel from where they are.

    Made once for arrays of given dtypes and sizes, with the buffers that they are packed into, so
    that a training step allocates nothing.

    Args:
        leaves: dtype and number of elements of each array.
        bucket_bytes: the most bytes of a bucket with several arrays.
        wire_dtype: how float32 is compressed, or None.
    """

    def __init__(self, leaves: _Leaves, bucket_bytes: int, wire_dtype: str | None) -> None:
        # Sums decide: a mean of integers has become one of floats above.
        specs = [LeafSpec(accumulation_dtype(ReduceOp.SUM, d), size) for d, size in leaves]
        layout = pack(specs, bucket_bytes)
        self.lengths: list[tuple[int, int, bool]] = []  # What `plan_reduce` has to know.
        self.moves: list[Move] = []  # This rank's program.
        self._slots = [slice(slot.start, slot.stop) for slot in layout.slots]
        self._bucket_of = [slot.bucket for slot in layout.slots]
        self._buckets: list[tuple[np.dtype[Any], np.dtype[Any] | None, bool, list[int]]] = []
        self._buffers: dict[int, Array] = {}
        for index, spec in enumerate(layout.buckets):
            members = [
                leaf
                for leaf, slot in enumerate(layout.slots)
                if slot.bucket == index and slot.start < slot.stop
            ]
            # An array that is alone in its bucket goes as it is, without padding for empty ones.
            alone = len(members) == 1 and leaves[members[0]][0] == spec.dtype
            length = leaves[members[0]][1] if alone else spec.size
            codec = compressed_dtype(wire_dtype, spec.dtype)
            itemsize = spec.dtype.itemsize if codec is None else codec.itemsize
            self.lengths.append((length, itemsize, codec is not None))
            self._buckets.append((spec.dtype, codec, alone, members))

    def buckets(self, inputs: Sequence[Array], outputs: Sequence[Array] | None) -> list[Bucket]:
        """Return the buffers of a call.

        Args:
            inputs: what this rank contributes.
            outputs: where the totals go; None leaves them in the buckets, see `total`.
        """
        made = []
        for index, (dtype, codec, alone, members) in enumerate(self._buckets):
            if alone and outputs is not None:
                made.append(Bucket(inputs[members[0]], outputs[members[0]], codec))
                continue
            if index not in self._buffers:
                # Zeros, for what lies between slots is reduced.
                self._buffers[index] = np.zeros(self.lengths[index][0], dtype)
            buffer = self._buffers[index]
            if alone:
                made.append(Bucket(inputs[members[0]], buffer, codec))
                continue
            to = [None] * len(inputs) if outputs is None else outputs
            parts = [(self._slots[leaf], inputs[leaf], to[leaf]) for leaf in members]
            made.append(Bucket(buffer, buffer, codec, parts))
        return made

    def total(self, leaf: int, buckets: Sequence[Bucket]) -> Array:
        """Return the reduced elements of an array, in the dtype in which they were added."""
        return buckets[self._bucket_of[leaf]].target[self._slots[leaf]]


class Runner:
    """Carry out the moves of one call, with several messages on their way at once.

    What a rank contributes may lie elsewhere than the total: a large array is then neither copied
    into a buffer nor out of one.

    Args:
        transport: what carries the messages.
        space: kept from call to call.
        ranks: which process each rank is.
        rank: which of them this is.
        header: what this rank says about the call.
        title: what the timeline shows.
    """

    def __init__(
        self,
        transport: Transport,
        space: _Space,
        ranks: Sequence[int],
        rank: int,
        header: bytes,
        title: str,
    ) -> None:
        self._transport, self._space = transport, space
        self._ranks, self._rank = ranks, rank
        self._header, self._title = header, title
        self._greeted: set[int] = set()
        self._expected: dict[int, Handle] = {}

    def meet(self) -> None:
        """Return when all ranks are known to make this call, where no data would tell.

        In round k a rank hears from the one 2**k before it, which had heard from the 2**k ranks
        before itself: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
        International Journal of Parallel Programming 17(1), 1988.
        """
        size, reach = len(self._ranks), 1
        while reach < size:
            self._greet((self._rank + reach) % size)
            self._await(self._expect((self._rank - reach) % size))
            reach *= 2

    def run(
        self, moves: Sequence[Move], buckets: Sequence[Bucket], op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Go through moves in order, always some ahead with what may begin.

        Args:
            moves: this rank's program.
            buckets: the buffers that the moves number.
            op: how received elements are combined with those that are there.
        """
        self._moves, self._buckets, self._op = moves, buckets, op
        self._combine = getattr(np, op.ufunc)
        self._sends: dict[int, Handle] = {}
        self._receives: dict[int, tuple[Handle, Array]] = {}
        self._encoded: dict[int, Handle] = {}
        self._filled = 0
        self._meet_neighbours()
        sent = asked = 0
        for index, move in enumerate(moves):
            horizon = min(index + WINDOW, len(moves))
            while asked < horizon and self._ask(asked, index):
                asked += 1
            while sent < horizon and self._send(sent, index):
                sent += 1
            if move.receive is not None:
                self._take(index, move, move.receive)
            bucket = buckets[move.bucket]
            if bucket.parts and (index + 1 == len(moves) or moves[index + 1].bucket != move.bucket):
                with span("pack", self._title):
                    bucket.drain()

    def end(self) -> None:
        """Wait until everything has left and come."""
        with span("wait", self._title):
            self._transport.end()

    def _meet_neighbours(self) -> None:
        """Hear from the rank before, and tell the one after, also where they exchange no data.

        So all ranks are compared with each other, whatever plan each of them follows.
        """
        size = len(self._ranks)
        if size == 1:
            return
        self._expect((self._rank - 1) % size)
        after = (self._rank + 1) % size
        if next((move.send.peer for move in self._moves if move.send), None) != after:
            self._greet(after)

    def _greet(self, peer: int) -> None:
        """Send the header of the call, once."""
        for header in self._header_to(peer):
            self._transport.isend(self._ranks[peer], header)

    def _header_to(self, peer: int) -> tuple[Array, ...]:
        """Return what goes in front of the next message to a peer."""
        if peer in self._greeted:
            return ()
        self._greeted.add(peer)
        return (np.frombuffer(self._header, np.uint8),)

    def _expect(self, peer: int) -> Handle:
        """Receive a peer's header of the call, once, and compare it."""
        handle = self._expected.get(peer)
        if handle is None:
            theirs = np.empty(HEADER_BYTES, np.uint8)
            here, there = self._ranks[self._rank], self._ranks[peer]
            handle = self._expected[peer] = self._transport.irecv(
                there, theirs, lambda: compare(self._header, theirs.tobytes(), here, there)
            )
        return handle

    def _ask(self, index: int, now: int) -> bool:
        """Begin the receive of a move, if its place is free."""
        move = self._moves[index]
        receive = move.receive
        if receive is None:
            return True
        bucket = self._fill(move.bucket)
        if bucket.codec is not None or move.action is not Action.COPY:
            dtype = bucket.target.dtype if bucket.codec is None else bucket.codec
            room = self._slot("receive", dtype, index, receive.stop - receive.start)
        elif self._is_free(move, wait=index == now):
            room = receive.of(bucket.target)
        else:
            return False
        self._expect(receive.peer)
        self._receives[index] = self._transport.irecv(self._ranks[receive.peer], room), room
        return True

    def _send(self, index: int, now: int) -> bool:
        """Begin the send of a move, if what it passes on has come."""
        move = self._moves[index]
        send = move.send
        if send is None:
            return True
        if move.after > now:
            return False
        bucket = self._fill(move.bucket)
        values = send.of(bucket.source if move.sends_own else bucket.target)
        if bucket.codec is not None:
            if (earlier := self._encoded.get(index % WINDOW)) is not None:
                self._await(earlier)
            room = self._slot("send", bucket.codec, index, values.size)
            compress(values, room)
            values = room
        process, header = self._ranks[send.peer], self._header_to(send.peer)
        handle = self._sends[index] = self._transport.isend(process, *header, values)
        if bucket.codec is not None:
            self._encoded[index % WINDOW] = handle
        return True

    def _take(self, index: int, move: Move, message: Message) -> None:
        """Wait for what a move receives, and make of it what the plan says."""
        handle, received = self._receives.pop(index)
        self._await(handle)
        self._await(self._expected[message.peer])  # Of another call's message nothing is made.
        bucket = self._buckets[move.bucket]
        target = message.of(bucket.target)
        if move.action is Action.COPY:
            if bucket.codec is not None:
                decompress(received, target)
            return
        if bucket.codec is None:
            self._is_free(move, wait=True)
        else:
            whole = self._slot("whole", target.dtype, 0, target.size)
            decompress(received, whole)
            received = whole
        mine = message.of(bucket.source if move.adds_own else bucket.target)
        left, right = (received, mine) if move.action is Action.REDUCE_LEFT else (mine, received)
        with span("reduce", self._title):
            self._combine(left, right, out=target)
            if move.total:
                finish(self._op, target, len(self._ranks))
        if move.total and bucket.codec is not None:
            # All others get the total compressed; its owner must hold the same bits.
            room = self._slot("total", bucket.codec, 0, target.size)
            compress(target, room)
            decompress(room, target)

    def _is_free(self, move: Move, *, wait: bool) -> bool:
        """Return True if nothing that is still being sent lies where a message goes."""
        if move.blocked_by < 0:
            return True
        bucket = self._buckets[move.bucket]
        sends_source = self._moves[move.blocked_by].sends_own
        if sends_source and not np.may_share_memory(bucket.source, bucket.target):
            return True
        handle = self._sends.get(move.blocked_by)
        if handle is None:
            return wait
        if wait:
            self._await(handle)
        return handle.done

    def _await(self, handle: Handle) -> None:
        if not handle.done:
            with span("wait", self._title):
                self._transport.wait(handle)

    def _fill(self, index: int) -> Bucket:
        """Return a bucket, its source ready to be read."""
        while self._filled <= index:
            bucket = self._buckets[self._filled]
            self._filled += 1
            if bucket.parts:
                with span("pack", self._title):
                    bucket.fill()
        return self._buckets[index]

    def _slot(self, use: str, dtype: np.dtype[Any], index: int, length: int) -> Array:
        """Return space for a message; what move `index` got is used again `WINDOW` moves later."""
        key = use, dtype, index % WINDOW
        space = self._space.get(key)
        if space is None or space.size < length:
            space = self._space[key] = np.empty(length, dtype)
        return space[:length]
