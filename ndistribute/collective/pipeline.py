"""Runs programs of moves over a wire, with several messages on their way at once.

While one block is combined, the next ones travel. What a rank contributes may lie elsewhere than
the total: a large array is then neither copied into a buffer nor out of one. Nothing here knows
what carries the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute import timeline
from ndistribute.collective.compression import Codec
from ndistribute.collective.reduce_op import ReduceOp, finish
from ndistribute.collective.schedule import Action, Message, Move
from ndistribute.collective.wire import Handle, Wire
from ndistribute.device import Array

__all__ = ["WINDOW", "Bucket", "Pipeline"]

# How many messages each way may be begun and not finished: one that is combined, one that arrives,
# and two that keep the wire busy meanwhile.
WINDOW = 4


@dataclass(slots=True)
class Bucket:
    """Be one buffer of a call.

    Args:
        source: what this rank contributes, flat; not changed unless it is also the target.
        target: where the total goes, of the same length and dtype.
        codec: how elements are compressed on the wire, or None.
        fill: run before the source is first read.
        drain: run when the target is complete.
    """

    source: Array
    target: Array
    codec: Codec | None = None
    fill: Callable[[], None] | None = None
    drain: Callable[[], None] | None = None

    def copy_alone(self) -> None:
        """Do what is left to do where there is no other rank."""
        if self.fill is not None:
            self.fill()
        if self.target is not self.source:
            self.target[...] = self.source
        if self.drain is not None:
            self.drain()


class Pipeline:
    """Run programs over a wire, and keep the space that messages are received into.

    Args:
        wire: what carries the messages.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._space: dict[tuple[str, np.dtype[Any], int], Array] = {}

    def run(
        self,
        moves: Sequence[Move],
        buckets: Sequence[Bucket],
        ranks: Sequence[int],
        title: str,
        op: ReduceOp | None = None,
    ) -> None:
        """Carry a program out.

        Args:
            moves: this rank's program.
            buckets: the buffers that the moves number.
            ranks: which process each rank of the program is.
            title: what the timeline shows.
            op: how received elements are combined with those that are there.
        """
        run = _Run(self._wire, self._slot, moves, buckets, ranks, title, op)
        if len(moves) == 1 and moves[0].receive is not None:
            run.run_one(moves[0], moves[0].receive)
        else:
            run.run()

    def _slot(self, use: str, dtype: np.dtype[Any], index: int, length: int) -> Array:
        """Return space for a message; what move `index` got is used again `WINDOW` moves later."""
        key = use, dtype, index % WINDOW
        space = self._space.get(key)
        if space is None or space.size < length:
            space = self._space[key] = np.empty(length, dtype)
        return space[:length]


class _Run:
    """One program that is being carried out."""

    def __init__(
        self,
        wire: Wire,
        slot: Callable[[str, np.dtype[Any], int, int], Array],
        moves: Sequence[Move],
        buckets: Sequence[Bucket],
        ranks: Sequence[int],
        title: str,
        op: ReduceOp | None,
    ) -> None:
        self._wire = wire
        self._slot = slot
        self._moves = moves
        self._buckets = buckets
        self._ranks = ranks
        self._title = title
        self._op = op
        self._combine = getattr(np, op.ufunc) if op is not None else None
        self._sends: list[Handle | None] = [None] * len(moves)
        self._receives: list[tuple[Handle, Array] | None] = [None] * len(moves)
        self._encoded: list[Handle | None] = [None] * WINDOW
        self._filled = 0

    def run(self) -> None:
        """Go through the moves in order, always some ahead with what may begin."""
        moves = self._moves
        sent = asked = 0
        for index, move in enumerate(moves):
            horizon = min(index + WINDOW, len(moves))
            while asked < horizon and self._ask(asked, index):
                asked += 1
            while sent < horizon and self._send(sent, index):
                sent += 1
            if move.receive is not None:
                self._take(index, move, move.receive)
            if index + 1 == len(moves) or moves[index + 1].bucket != move.bucket:
                self._drain(move.bucket)

    def run_one(self, move: Move, receive: Message) -> None:
        """Do what `run` does for one move, which is what most small calls of two ranks are."""
        self._ask(0, 0)
        self._send(0, 0)
        with timeline.span("wait", self._title):
            self._wire.end()
        self._take(0, move, receive)
        self._drain(move.bucket)

    def _ask(self, index: int, now: int) -> bool:
        """Begin the receive of a move, if its place is free."""
        move = self._moves[index]
        receive = move.receive
        if receive is None:
            return True
        bucket = self._fill(move.bucket)
        length = receive.stop - receive.start
        if bucket.codec is not None:
            room = self._slot("receive", bucket.codec.dtype, index, length)
        elif move.action is not Action.COPY:
            room = self._slot("receive", bucket.target.dtype, index, length)
        else:
            if not self._is_free(move, wait=index == now):
                return False
            room = receive.of(bucket.target)
        handle = self._wire.irecv(self._ranks[receive.peer], room)
        self._receives[index] = handle, room
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
            earlier = self._encoded[index % WINDOW]
            if earlier is not None:
                self._await(earlier)
            room = self._slot("send", bucket.codec.dtype, index, values.size)
            bucket.codec.encode(values, room)
            values = room
        handle = self._wire.isend(self._ranks[send.peer], values)
        self._sends[index] = handle
        if bucket.codec is not None:
            self._encoded[index % WINDOW] = handle
        return True

    def _take(self, index: int, move: Move, message: Message) -> None:
        """Wait for what a move receives, and make of it what the plan says."""
        receive = self._receives[index]
        if receive is None:
            raise RuntimeError(f"move {index} of {self._title} was never begun.")
        handle, received = receive
        self._receives[index] = None
        self._await(handle)
        bucket = self._buckets[move.bucket]
        target = message.of(bucket.target)
        if move.action is Action.COPY:
            if bucket.codec is not None:
                bucket.codec.decode(received, target)
            return
        if bucket.codec is None:
            self._is_free(move, wait=True)
        else:
            decoded = self._slot("decode", bucket.target.dtype, 0, received.size)
            bucket.codec.decode(received, decoded)
            received = decoded
        mine = message.of(bucket.source if move.adds_own else bucket.target)
        with timeline.span("reduce", self._title):
            self._reduce(bucket, move, received, mine, target)

    def _reduce(
        self, bucket: Bucket, move: Move, received: Array, mine: Array, target: Array
    ) -> None:
        if self._combine is None or self._op is None:
            raise RuntimeError(f"{self._title} has no reduction, but its plan has.")
        if move.action is Action.REDUCE_LEFT:
            self._combine(received, mine, out=target)
        else:
            self._combine(mine, received, out=target)
        if move.total:
            finish(self._op, target, len(self._ranks))
            if bucket.codec is not None:
                # All ranks get the total through the code; its owner must hold the same bits.
                room = self._slot("total", bucket.codec.dtype, 0, target.size)
                bucket.codec.encode(target, room)
                bucket.codec.decode(room, target)

    def _is_free(self, move: Move, *, wait: bool) -> bool:
        """Say whether nothing that is still being sent lies where a message goes."""
        if move.blocked_by < 0:
            return True
        handle = self._sends[move.blocked_by]
        if handle is None:
            return wait
        if not handle.done and wait:
            self._await(handle)
        return handle.done

    def _await(self, handle: Handle) -> None:
        if not handle.done:
            with timeline.span("wait", self._title):
                self._wire.wait(handle)

    def _fill(self, index: int) -> Bucket:
        """Return a bucket, its source ready to be read."""
        while self._filled <= index:
            bucket = self._buckets[self._filled]
            self._filled += 1
            if bucket.fill is not None:
                with timeline.span("pack", self._title):
                    bucket.fill()
        return self._buckets[index]

    def _drain(self, index: int) -> None:
        """Copy totals out of a bucket that is complete."""
        drain = self._buckets[index].drain
        if drain is not None:
            with timeline.span("pack", self._title):
                drain()
