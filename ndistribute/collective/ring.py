"""The backend for processes that share no memory: plans, carried out over a transport.

Small arrays are packed into buckets, large ones travel from where they are. What is large goes
round a ring, which moves the fewest bytes; what is small goes in the fewest steps. While one block
is combined, the next ones travel. The calls of all ranks are compared on the way, for a header goes
in front of the first message to each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ndistribute.collective.backend import Call, Update, update_in_blocks
from ndistribute.collective.buckets import LeafKey, pack
from ndistribute.collective.compression import compress, compressed_dtype, decompress
from ndistribute.collective.control import ControlPlane, WaitMonitor
from ndistribute.collective.header import HEADER_BYTES, compare, encode
from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish
from ndistribute.collective.schedule import Action, Message, Move, plan_gather, plan_reduce
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
_Space = dict[tuple[np.dtype[Any], int], Array]  # What messages are received into.


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
        ranks: which of the processes take part, in order, this one among them; None means all.
        bytes_per_pack: the most bytes of a bucket and of a message; 0 leaves it to the transport.
        wire_dtype: ``"float16"`` or ``"bfloat16"`` halves what float32 sums cost on the wire, at
            the price of rounding each partial sum; None sends what is added.
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
        self.rank = self._ranks.index(peers.rank)
        self.size = len(self._ranks)
        self.device = Device("cpu:0")
        self.owner, self.owners = 0, 1
        self._peers = peers
        self._connect = connect
        self._bucket_bytes = bytes_per_pack or BUCKET_BYTES
        self._wire_dtype = wire_dtype
        self._start()
        self._block_bytes = self._transport.block_bytes
        if bytes_per_pack:
            self._block_bytes = min(self._block_bytes, max(bytes_per_pack, LEAST_BYTES))
        small = SMALL_BYTES_OF_TWO if self.size == 2 else SMALL_BYTES
        self._small_bytes = min(small, self._block_bytes)

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
        with self._begin(call, timeout) as runner:
            self._reduce(runner, inputs, outputs, op)

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
        with self._begin(call, timeout) as runner:
            layout, buckets = self._reduce(runner, inputs, [None] * len(inputs), op)
            totals = list(inputs)  # In no bucket are those without elements.
            for packed, bucket in zip(layout, buckets, strict=True):
                for leaf, place in packed.places.items():
                    totals[leaf] = bucket.target[place]
            return update_in_blocks(call, inputs, totals, prepare, update)

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Tell each other how many rows there are, then pass them round the ring."""
        with self._begin(call, timeout) as runner:
            counts = np.zeros((self.size, len(inputs)), np.int64)
            counts[self.rank] = [len(array) for array in inputs]
            flat = counts.reshape(-1)
            self._reduce(runner, [flat], [flat], ReduceOp.SUM)
            joined, lengths = [], []
            for array, rows in zip(inputs, counts.T.tolist(), strict=True):
                whole = np.empty((sum(rows), array.shape[1]), array.dtype)
                before = sum(rows[: self.rank])
                whole[before : before + len(array)] = array
                joined.append(whole)
                lengths.append([count * array.shape[1] for count in rows])
            self._gather(runner, [whole.reshape(-1) for whole in joined], lengths)
        return joined

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Pass the root's bytes round the ring; small ones are added to the zeros of all others."""
        with self._begin(call, timeout) as runner:
            flats = [array.view(np.uint8) for array in buffers]
            small = [flat for flat in flats if flat.size <= self._small_bytes]
            large = [flat for flat in flats if flat.size > self._small_bytes]
            for flat in small if self.rank != root else ():
                flat[...] = 0
            self._reduce(runner, small, small, ReduceOp.SUM)
            if large:
                of_root = [rank == root for rank in range(self.size)]
                self._gather(runner, large, [[flat.size * n for n in of_root] for flat in large])

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
        peers = self._peers
        peers.check()
        self.count += 1
        self._transport.begin(peers.patience(call, timeout))
        header = encode(call, self.count, peers.where.position, peers.generation)
        return Runner(peers, self._transport, self._space, self._ranks, header, call.title)

    def _reduce(
        self,
        runner: Runner,
        inputs: Sequence[Array],
        outputs: Sequence[Array | None],
        op: ReduceOp,
    ) -> tuple[list[Packed], list[Bucket]]:
        """Reduce inputs into outputs; where there is None, the total is left in its bucket."""
        layout, moves = self._packing(tuple([(array.dtype, array.size) for array in inputs]))
        buckets = []
        for places, alone, codec, make_buffer in layout:
            target = None if alone is None else outputs[alone]
            if target is None:
                target = make_buffer()
            if alone is None:
                parts = [(place, inputs[leaf], outputs[leaf]) for leaf, place in places.items()]
                buckets.append(Bucket(target, target, codec, parts))
            else:
                buckets.append(Bucket(inputs[alone], target, codec))
        runner.run(moves, buckets, op)
        return layout, buckets

    def _make_packing(self, leaves: tuple[LeafKey, ...]) -> tuple[list[Packed], list[Move]]:
        """Return which arrays share a bucket, and this rank's program."""
        # Sums decide: a mean of integers has become one of floats above.
        wide = [(accumulation_dtype(ReduceOp.SUM, dtype), size) for dtype, size in leaves]
        layout, lengths = [], []
        for dtype, places in pack(wide, self._bucket_bytes):
            leaf, last = next(reversed(places.items()))
            alone = leaf if len(places) == 1 and leaves[leaf][0] == dtype else None
            codec = compressed_dtype(self._wire_dtype, dtype)
            # Zeros, for what lies between arrays is reduced.
            make_buffer = functools.cache(functools.partial(np.zeros, last.stop, dtype))
            layout.append(Packed(places, alone, codec, make_buffer))
            itemsize = dtype.itemsize if codec is None else codec.itemsize
            lengths.append((last.stop, itemsize, codec is not None))
        sizes = self._small_bytes, self._block_bytes
        return layout, plan_reduce(self.size, self.rank, lengths, *sizes)

    def _gather(self, runner: Runner, flats: list[Array], lengths: list[list[int]]) -> None:
        """Pass what each rank has of each array, so many elements, round the ring."""
        chunks = [(each, flat.itemsize) for each, flat in zip(lengths, flats, strict=True)]
        moves = plan_gather(self.rank, chunks, self._block_bytes)
        runner.run(moves, [Bucket(flat, flat) for flat in flats])


class Packed(NamedTuple):
    """Say which arrays share a bucket; kept, so that a training step allocates nothing."""

    places: dict[int, slice]
    alone: int | None  # The array that travels from where it is, for there is no other.
    codec: np.dtype[Any] | None
    make_buffer: Callable[[], Array]  # Returns the same one each time.


class Bucket(NamedTuple):
    """Be one buffer of a call."""

    source: Array  # What this rank contributes, flat; not changed unless it is also the target.
    target: Array  # Where the total goes, of the same length and dtype.
    codec: np.dtype[Any] | None = None  # What elements are compressed to on the wire.
    # Which arrays come from and go to which place of it, unless they are source and target.
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


class Runner:
    """Carry out the moves of one call, with several messages on their way at once.

    What a rank contributes may lie elsewhere than the total: a large array is then neither copied
    into a buffer nor out of one. Of whatever ends a call in its ``with`` block all others hear.
    """

    def __init__(
        self,
        peers: ControlPlane,
        transport: Transport,
        space: _Space,
        ranks: Sequence[int],
        header: bytes,
        title: str,
    ) -> None:
        self._peers, self._transport, self._space = peers, transport, space
        self._ranks, self._rank = ranks, ranks.index(peers.rank)
        self._header, self._title = header, title
        self._greeted: set[int] = set()
        self._expected: dict[int, Handle] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._peers.abort(error)

    def run(
        self, moves: Sequence[Move], buckets: Sequence[Bucket], op: ReduceOp = ReduceOp.SUM
    ) -> None:
        """Go through moves in order, always some ahead with what may begin.

        Without moves, this rank meets the others all the same.
        """
        self._moves, self._buckets, self._op = moves, buckets, op
        self._combine = getattr(np, op.ufunc)
        self._sends: dict[int, Handle] = {}
        self._receives: dict[int, tuple[Handle, Array]] = {}
        asked = sent = filled = 0
        for index, move in enumerate(moves):
            horizon = min(index + WINDOW, len(moves))
            while filled <= moves[horizon - 1].bucket:
                if buckets[filled].parts:
                    with span("pack", self._title):
                        buckets[filled].fill()
                filled += 1
            while asked < horizon and self._ask(asked, index):
                asked += 1
            while sent < horizon and self._send(sent, index):
                sent += 1
            if index == 0:
                self._meet_at(1)
            if index + 1 == len(moves):
                self._end()
            if move.receive is not None:
                self._take(index, move, move.receive)
            bucket = buckets[move.bucket]
            if bucket.parts and (index + 1 == len(moves) or moves[index + 1].bucket != move.bucket):
                with span("pack", self._title):
                    bucket.drain()
        if not moves:
            self._meet()
            for bucket in buckets:  # Of one rank alone.
                bucket.fill()
                bucket.target[...] = bucket.source
                bucket.drain()

    def _meet(self) -> None:
        """Return when all ranks are known to make this call, where no data would tell.

        In round k a rank hears from the one 2**k before it, which had heard from the 2**k ranks
        before itself: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
        International Journal of Parallel Programming 17(1), 1988.
        """
        reach = 1
        while reach < len(self._ranks):
            self._await(self._meet_at(reach))
            reach *= 2
        self._end()

    def _meet_at(self, reach: int) -> Handle:
        """Tell the rank that comes so far after this one of the call, and hear of that before.

        If all do so for the next one, also where they exchange no data, all ranks are compared with
        each other, whatever plan each of them follows.
        """
        size = len(self._ranks)
        after = (self._rank + reach) % size
        if after not in self._greeted:
            self._post(after)
        return self._expect((self._rank - reach) % size)

    def _post(self, peer: int, *arrays: Array) -> Handle:
        """Begin to send to a peer, the header of the call in front of the first message."""
        if peer not in self._greeted:
            self._greeted.add(peer)
            arrays = np.frombuffer(self._header, np.uint8), *arrays
        return self._transport.isend(self._ranks[peer], *arrays)

    def _expect(self, peer: int) -> Handle:
        """Receive a peer's header of the call, once, and compare it."""
        handle = self._expected.get(peer)
        if handle is None:
            mine, theirs = self._header, np.empty(HEADER_BYTES, np.uint8)
            here, there = self._ranks[self._rank], self._ranks[peer]
            # It does not know `self`, or in a circle the arrays of a call would outlive it.
            handle = self._expected[peer] = self._transport.irecv(
                there, theirs, lambda: compare(mine, theirs.tobytes(), here, there)
            )
        return handle

    def _ask(self, index: int, now: int) -> bool:
        """Begin the receive of a move, if its place is free."""
        move = self._moves[index]
        receive = move.receive
        if receive is None:
            return True
        bucket = self._buckets[move.bucket]
        if bucket.codec is not None or move.action is not Action.COPY:
            dtype = bucket.target.dtype if bucket.codec is None else bucket.codec
            room = self._slot(dtype, index % WINDOW, receive.stop - receive.start)
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
        bucket = self._buckets[move.bucket]
        values = send.of(bucket.target if move.after else bucket.source)
        if bucket.codec is not None:
            values = compress(values, np.empty(values.size, bucket.codec))
        handle = self._post(send.peer, values)
        if bucket.codec is None:  # Else nobody asks for it, and it would hold its block.
            self._sends[index] = handle
        return True

    def _take(self, index: int, move: Move, message: Message) -> None:
        """Wait for what a move receives, and make of it what the plan says."""
        handle, received = self._receives.pop(index)
        # Of another call's message nothing is made.
        self._await(handle, self._expected[message.peer])
        bucket = self._buckets[move.bucket]
        target = message.of(bucket.target)
        if move.action is Action.COPY:
            if bucket.codec is not None:
                decompress(received, target)
            return
        if bucket.codec is None:
            self._is_free(move, wait=True)
        else:
            received = decompress(received, self._slot(target.dtype, 0, target.size))
        mine = message.of(bucket.source) if move.adds_own else target
        left, right = (received, mine) if move.action is Action.REDUCE_LEFT else (mine, received)
        with span("reduce", self._title):
            self._combine(left, right, out=target)
            if move.total:
                finish(self._op, target, len(self._ranks))
        if move.total and bucket.codec is not None:
            # All others get the total compressed; its owner must hold the same bits.
            decompress(compress(target, np.empty(target.size, bucket.codec)), target)

    def _is_free(self, move: Move, *, wait: bool) -> bool:
        """Return True if nothing that is still being sent lies where a message goes."""
        if move.blocked_by < 0:
            return True
        bucket = self._buckets[move.bucket]
        from_source = not self._moves[move.blocked_by].after
        if from_source and not np.may_share_memory(bucket.source, bucket.target):
            return True
        handle = self._sends.get(move.blocked_by)
        if handle is not None and wait:
            self._await(handle)
        return handle is not None and handle.done

    def _await(self, *handles: Handle) -> None:
        for handle in handles:
            if not handle.done:
                with span("wait", self._title):
                    self._transport.wait(handle)

    def _end(self) -> None:
        """Wait until everything that was begun has left and come."""
        with span("wait", self._title):
            self._transport.end()

    def _slot(self, dtype: np.dtype[Any], number: int, length: int) -> Array:
        """Return space for a message, until the next one of that dtype and number."""
        space = self._space.get((dtype, number))
        if space is None or space.size < length:
            space = self._space[dtype, number] = np.empty(length, dtype)
        return space[:length]
