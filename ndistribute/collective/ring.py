"""The backend for processes without shared memory: executes schedules over a transport.

Small arrays are packed into buckets; large arrays are sent without a copy. Large buffers use a
ring, which sends the fewest bytes; small buffers use the algorithm with the fewest steps. While a
block is combined, the next blocks are in flight. A header precedes the first message to each rank,
so ranks compare their calls. Float32 may be sent in 16 bits; it is still added in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute.collective.backend import Arrays, Backend, Call, LeafKey, Update
from ndistribute.collective.communicator import CommunicationOptions
from ndistribute.collective.control_plane import ControlPlane, WaitMonitor
from ndistribute.collective.cuts import update_in_blocks
from ndistribute.collective.headers import HEADER_BYTES, compare_headers, encode_header
from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish
from ndistribute.collective.schedule import Action, Message, Move, pack, plan_gather, plan_reduce
from ndistribute.collective.tcp import Handle, Transport
from ndistribute.devices import Array
from ndistribute.timeline import span

# The most unfinished messages in each direction: one that is combined, one that arrives, and two
# that keep the transport busy.
WINDOW = 4
# Arrays larger than a pack are split into messages of at least this size. A message costs 20 us, in
# which twenty times as many bytes could be sent.
LEAST_BYTES = 4 * 1024
# Smaller arrays share a bucket: copying costs about 0.1 ms per MiB, a message 20 us.
BUCKET_BYTES = 4 * 1024 * 1024
# Smaller buffers are sent whole. Between two ranks that sends as many bytes as a ring in one step
# less: 63 instead of 96 us for 256 KiB. Between more ranks, each step sends more bytes.
SMALL_BYTES_OF_TWO = 256 * 1024
SMALL_BYTES = 64 * 1024

_PACKINGS = 16  # The most cached packings.
# NumPy has no bfloat16, so its bits are sent as integers.
_ON_THE_WIRE = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}
_Space = dict[tuple[np.dtype[Any], int], Array]  # Receive buffers.


class RingBackend(Backend):
    """The backend of one process in a group of processes.

    `connect` returns a transport; it is called again after a failure, when the old transport is
    closed. `ranks` are the participating ranks in order, including this one; None means all ranks.
    """

    def __init__(
        self,
        peers: ControlPlane,
        connect: Callable[[], Transport],
        ranks: Sequence[int] | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        most = 0 if options is None else options.bytes_per_pack
        self.ranks = tuple(range(peers.size) if ranks is None else ranks)
        self.rank = self.ranks.index(peers.rank)
        self.size = len(self.ranks)
        self.peers = peers
        self._connect = connect
        self._bucket_bytes = most or BUCKET_BYTES
        self._wire_dtype = None if options is None else options.wire_dtype
        self._start()
        self._block_bytes = self.transport.block_bytes
        if most:
            self._block_bytes = min(self._block_bytes, max(most, LEAST_BYTES))
        small = SMALL_BYTES_OF_TWO if self.size == 2 else SMALL_BYTES
        self._small_bytes = min(small, self._block_bytes)

    def all_reduce(self, call: Call, inputs: Arrays, outputs: Arrays, op: ReduceOp) -> None:
        """Reduce bucket by bucket; pack a bucket while the previous bucket is in flight."""
        with self._begin(call) as runner:
            self._reduce(runner, inputs, outputs, op)

    def reduce_update(self, call: Call, inputs: Arrays, op: ReduceOp, update: Update) -> Any:
        """Reduce all arrays, then update all elements, because this process owns all its copies."""
        with self._begin(call) as runner:
            layout, buckets = self._reduce(runner, inputs, [None] * len(inputs), op)
            totals = list(inputs)  # Arrays without elements are in no bucket.
            for packed, bucket in zip(layout, buckets, strict=True):
                for leaf, place in packed.places.items():
                    totals[leaf] = bucket.target[place]
            return update_in_blocks(call, inputs, totals, update)

    def all_gather(self, call: Call, inputs: Arrays) -> list[Array]:
        """Exchange the numbers of rows, then send the rows around the ring."""
        with self._begin(call) as runner:
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

    def broadcast(self, call: Call, buffers: Arrays, root: int) -> None:
        """Send the root's bytes around the ring; add zeros of the other ranks to small buffers."""
        with self._begin(call) as runner:
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
        self.peers.abort(cause)

    def reset(self) -> None:
        """Start over after a failure; all processes call this before the next call."""
        self.transport.close()
        self._start()

    def close(self) -> None:
        self._packing.cache_clear()
        self.transport.close()

    def _start(self) -> None:
        self.count = 0
        self.transport = self._connect()
        self.space: _Space = {}
        self._packing = functools.lru_cache(_PACKINGS)(self._make_packing)

    def _begin(self, call: Call) -> Runner:
        peers = self.peers
        peers.check()
        self.count += 1
        self.transport.begin(WaitMonitor(peers, call))
        header = encode_header(call, self.count, peers.where.position, peers.generation)
        return Runner(self, header, call.title)

    def _reduce(
        self, runner: Runner, inputs: Arrays, outputs: Sequence[Array | None], op: ReduceOp
    ) -> tuple[list[Packed], list[Bucket]]:
        """Reduce inputs into outputs; if an output is None, leave the total in its bucket."""
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
        """Return which arrays share a bucket, and the moves of this rank."""
        # Means are reduced like sums: means of integers have become means of floats above.
        wide = [(accumulation_dtype(ReduceOp.SUM, dtype), size) for dtype, size in leaves]
        layout, lengths = [], []
        for dtype, places in pack(wide, self._bucket_bytes):
            leaf, last = next(reversed(places.items()))
            alone = leaf if len(places) == 1 and leaves[leaf][0] == dtype else None
            codec = compressed_dtype(self._wire_dtype, dtype)
            # The buffer starts as zeros, because the gaps between arrays are reduced as well.
            make_buffer = functools.cache(functools.partial(np.zeros, last.stop, dtype))
            layout.append(Packed(places, alone, codec, make_buffer))
            itemsize = dtype.itemsize if codec is None else codec.itemsize
            lengths.append((last.stop, itemsize, codec is not None))
        sizes = self._small_bytes, self._block_bytes
        return layout, plan_reduce(self.size, self.rank, lengths, *sizes)

    def _gather(self, runner: Runner, flats: list[Array], lengths: list[list[int]]) -> None:
        """Send all ranks' chunks around the ring; `lengths` has their lengths for each array."""
        chunks = [(each, flat.itemsize) for each, flat in zip(lengths, flats, strict=True)]
        moves = plan_gather(self.rank, chunks, self._block_bytes)
        runner.run(moves, [Bucket(flat, flat) for flat in flats], ReduceOp.SUM)


class Packed(NamedTuple):
    """The arrays that share a bucket; they are cached, so a training step allocates nothing."""

    places: dict[int, slice]
    alone: int | None  # The only array, which is sent without a copy.
    codec: np.dtype[Any] | None
    make_buffer: Callable[[], Array]  # A function that returns the same buffer each time.


class Bucket(NamedTuple):
    """One buffer of a call."""

    source: Array  # This rank's contribution, flat.
    target: Array  # The total, of the same length and dtype.
    codec: np.dtype[Any] | None = None  # The dtype on the wire, if compressed.
    # Arrays to copy into the source and out of the target, with their places.
    parts: Sequence[tuple[slice, Array, Array | None]] = ()

    def fill(self) -> None:
        for place, array, _ in self.parts:
            self.source[place] = array

    def drain(self) -> None:
        for place, _, output in self.parts:
            if output is not None:
                output[...] = self.target[place]


class Runner:
    """Executes the moves of one call, with several messages in flight.

    The contribution and the total of a large array may be in different arrays, so no data is copied
    into or out of a buffer. An exception in the ``with`` block aborts the call on all ranks.
    """

    def __init__(self, ring: RingBackend, header: bytes, title: str) -> None:
        self._peers, self._transport, self._space = ring.peers, ring.transport, ring.space
        self._ranks, self._rank = ring.ranks, ring.rank
        self._header, self._title = header, title
        self._greeted: set[int] = set()
        self._expected: dict[int, Handle] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._peers.abort(error)

    def run(self, moves: Sequence[Move], buckets: Sequence[Bucket], op: ReduceOp) -> None:
        """Execute the moves in order, and start the messages of later moves early.

        If there are no moves, the ranks still compare their calls.
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
            for bucket in buckets:  # There is only one rank.
                bucket.fill()
                bucket.target[...] = bucket.source
                bucket.drain()

    def _meet(self) -> None:
        """Wait until all ranks have made this call, if no data is exchanged.

        In round k, a rank receives from the rank 2**k before it, which had received from the 2**k
        ranks before itself: Hensgen, Finkel and Manber, "Two algorithms for barrier
        synchronization", International Journal of Parallel Programming 17(1), 1988.
        """
        reach = 1
        while reach < len(self._ranks):
            self._await(self._meet_at(reach))
            reach *= 2
        self._end()

    def _meet_at(self, reach: int) -> Handle:
        """Send the header to the rank `reach` ahead, and expect one from the rank `reach` behind.

        If all ranks do so with distance 1, all calls are compared, whatever each rank's schedule.
        """
        size = len(self._ranks)
        after = (self._rank + reach) % size
        if after not in self._greeted:
            self._post(after)
        return self._expect((self._rank - reach) % size)

    def _post(self, peer: int, *arrays: Array) -> Handle:
        """Start to send to a peer; before the first message, send the header of the call."""
        if peer not in self._greeted:
            self._greeted.add(peer)
            arrays = np.frombuffer(self._header, np.uint8), *arrays
        return self._transport.isend(self._ranks[peer], *arrays)

    def _expect(self, peer: int) -> Handle:
        """Start to receive and compare a peer's header, once per call."""
        handle = self._expected.get(peer)
        if handle is None:
            mine, theirs = self._header, np.empty(HEADER_BYTES, np.uint8)
            here, there = self._ranks[self._rank], self._ranks[peer]
            # The function does not refer to `self`: a reference cycle would keep the arrays of the
            # call.
            handle = self._expected[peer] = self._transport.irecv(
                there, theirs, lambda: compare_headers(mine, theirs.tobytes(), here, there)
            )
        return handle

    def _ask(self, index: int, now: int) -> bool:
        """Start to receive the message of a move, if the message's place is free."""
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
        """Start to send the message of a move, if the data that it forwards has arrived."""
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
        # Otherwise the handle is not needed, and would keep its block in memory.
        if bucket.codec is None:
            self._sends[index] = handle
        return True

    def _take(self, index: int, move: Move, message: Message) -> None:
        """Wait for the message of a move, and combine or copy it."""
        handle, received = self._receives.pop(index)
        # The header comes first: data of another call is never used.
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
            # The other ranks get the compressed total; the owner must hold the same bits.
            decompress(compress(target, np.empty(target.size, bucket.codec)), target)

    def _is_free(self, move: Move, *, wait: bool) -> bool:
        """Return True if no unfinished send reads the place of a received message."""
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
        with span("wait", self._title):
            self._transport.end()

    def _slot(self, dtype: np.dtype[Any], number: int, length: int) -> Array:
        """Return a receive buffer; the next call with that dtype and number reuses it."""
        space = self._space.get((dtype, number))
        if space is None or space.size < length:
            space = self._space[dtype, number] = np.empty(length, dtype)
        return space[:length]


def compressed_dtype(wire_dtype: str | None, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype in which arrays of `dtype` are sent, or None if they are sent unchanged.

    Only float32 is compressed.

    >>> wire = np.empty(3, compressed_dtype("bfloat16", np.dtype("f4")))
    >>> decompress(compress(np.float32([1.0, 1.01, np.inf]), wire), np.empty(3, "f4")).tolist()
    [1.0, 1.0078125, inf]
    """
    return _ON_THE_WIRE[wire_dtype] if wire_dtype and dtype == np.float32 else None


def compress(values: Array, out: Array) -> Array:
    """Round float32 values into `out`, an array of a `compressed_dtype`, and return it."""
    if out.dtype == np.float16:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out[...] = values
        return out
    bits = values.view(np.uint32)
    # Add just under half a unit of the last kept bit, plus that bit: the sum carries into the upper
    # half exactly if rounding to nearest, ties to even, rounds up.
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    out[...] = rounded
    unordered = np.isnan(values)
    if unordered.any():
        out[unordered] = 0x7FC0  # The carry may have turned a NaN into an infinity.
    return out


def decompress(wire: Array, out: Array) -> Array:
    """Convert a compressed array to float32 in `out`, and return it."""
    if wire.dtype == np.float16:
        out[...] = wire
        return out
    bits = out.view(np.uint32)
    bits[...] = wire
    bits <<= 16
    return out
