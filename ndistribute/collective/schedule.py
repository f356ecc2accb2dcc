"""Schedules of collective algorithms: which rank sends which range to which rank, and when.

A schedule is a pure function of the number of ranks (`size`), the rank, and the number of elements
(`length`), so tests need no threads or sockets. Any size and length is allowed; messages without
elements are left out at both ends.

=============================  ==================  ===========================================
schedule                       steps of a rank     elements that a rank sends
=============================  ==================  ===========================================
ring_all_reduce                2(n - 1)            2(n-1)/n * length: the least possible
ring_all_gather                n - 1               all but the next rank's chunk
recursive_doubling_all_reduce  floor(log2 n) (+2)  length in each step that sends
=============================  ==================  ===========================================

The steps of all buffers become moves. Moves record their dependencies, so that several messages can
be in flight: a send waits for the data that it forwards, and a receive waits for the send that
still reads its place. Ranges in a schedule are equal or disjoint, so blocks are reduced and
forwarded as they were received. Each message costs a latency, so small leaves (arrays) of the same
dtype share a buffer.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute.collective.backend import LeafKey
from ndistribute.collective.cuts import blocks
from ndistribute.devices import Array
from ndistribute.transport.buffers import ALIGNMENT


class Action(enum.Enum):
    """How received elements are combined; their side is fixed, because rounding depends on it."""

    COPY = "mine = received"
    REDUCE_LEFT = "mine = received + mine"
    REDUCE_RIGHT = "mine = mine + received"


class Message(NamedTuple):
    """The elements ``[start, stop)`` of a buffer that are sent to, or received from, a peer."""

    peer: int
    start: int
    stop: int

    def of(self, buffer: Array) -> Array:
        """Return the view of the buffer that this message transfers."""
        return buffer[self.start : self.stop]


class ScheduleStep(NamedTuple):
    """A send and a receive at the same time; the next step starts when both are done.

    The two ranges are disjoint, or they are equal and the received data is reduced, so no receive
    overwrites data that is being sent.
    """

    send: Message | None = None
    receive: Message | None = None
    action: Action = Action.COPY


class Move(NamedTuple):
    """One step of a schedule for buffer number `bucket`, with its dependencies."""

    bucket: int
    send: Message | None
    receive: Message | None
    action: Action
    after: int  # The number of moves that must have received data before this move sends.
    blocked_by: int  # The last move whose send reads the received range, or -1.
    adds_own: bool  # Whether received data is combined with this rank's contribution.
    total: bool  # Whether the result is the total of all ranks.


def pack(
    leaves: Sequence[LeafKey], bucket_bytes: int
) -> list[tuple[np.dtype[Any], dict[int, slice]]]:
    """Return the place of every non-empty leaf in a bucket of its dtype.

    The last leaf comes first, in the order of a backward pass: Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", 2020, section 3.2.3. A leaf is never split;
    a leaf larger than `bucket_bytes` gets a separate bucket.

    For each bucket, in the order in which the buckets fill, the result has the bucket's dtype and
    the places of its leaves by their indices, in ascending order. Places start at multiples of 64
    bytes. Reductions also process the gaps between them, so a buffer must start as zeros to avoid
    floating-point warnings.

    >>> f4 = np.dtype(np.float32)
    >>> for _, places in pack([(f4, 100), (f4, 20), (f4, 0), (f4, 3)], bucket_bytes=256):
    ...     print(places)
    {3: slice(0, 3, None), 1: slice(16, 36, None)}
    {0: slice(0, 100, None)}
    """
    buckets: list[tuple[np.dtype[Any], dict[int, slice]]] = []
    filling: dict[np.dtype[Any], tuple[dict[int, slice], int]] = {}  # With the length so far.
    for leaf in reversed(range(len(leaves))):
        dtype, size = leaves[leaf]
        if size == 0:
            continue
        places, end = filling.get(dtype, ({}, 0))
        step = ALIGNMENT // math.gcd(ALIGNMENT, dtype.itemsize)
        start = -(-end // step) * step
        if not end or (start + size) * dtype.itemsize > bucket_bytes:
            places, start = {}, 0
            buckets.append((dtype, places))
        places[leaf] = slice(start, start + size)
        filling[dtype] = places, start + size
    return buckets


def plan_reduce(
    size: int,
    rank: int,
    buckets: Iterable[tuple[int, int, bool]],
    small_bytes: int,
    block_bytes: int,
) -> list[Move]:
    """Return the moves of a rank in an all-reduce of several buffers.

    Args:
        size: the number of ranks.
        rank: the rank whose moves these are.
        buckets: for each buffer its length, the bytes of an element, and whether it must use the
            ring. It must use the ring if values are compressed: two ranks that exchange compressed
            values would get different totals.
        small_bytes: buffers up to this size use the algorithm with the fewest steps; larger buffers
            use the ring.
        block_bytes: the maximum number of bytes of a message.

    >>> [move.after for move in plan_reduce(2, 0, [(6, 4, False)], small_bytes=0, block_bytes=8)]
    [0, 0, 1, 2]
    """
    programs = []
    for length, itemsize, ring in buckets:
        if not ring and length * itemsize <= small_bytes:
            programs.append(recursive_doubling_all_reduce(size, rank, length))
        else:
            steps = ring_all_reduce(size, rank, length)
            programs.append(segmented(steps, max(1, block_bytes // itemsize)))
    return _moves(programs)


def plan_gather(
    rank: int, buckets: Iterable[tuple[Iterable[int], int]], block_bytes: int
) -> list[Move]:
    """Return the moves of an all-gather of several buffers.

    `buckets` has for each buffer the lengths of all ranks' chunks, and the bytes of an element. If
    only one rank has elements, the all-gather is a broadcast.
    """
    programs = []
    for lengths, itemsize in buckets:
        steps = ring_all_gather(rank, tuple(itertools.accumulate(lengths, initial=0)))
        programs.append(segmented(steps, max(1, block_bytes // itemsize)))
    return _moves(programs)


def segmented(steps: Sequence[ScheduleStep], block: int) -> list[ScheduleStep]:
    """Split all messages of a schedule into blocks, with bit-identical results.

    With blocks, received data is combined while it is in the cache, and the runner needs scratch
    memory for a block instead of a chunk. `block` is a number of elements, the same on all ranks.

    >>> [step.send for step in segmented([ScheduleStep(send=Message(1, 0, 5))], block=3)]
    [Message(peer=1, start=0, stop=3), Message(peer=1, start=3, stop=5)]
    """

    def split(message: Message | None) -> list[Message]:
        peer, start, stop = message or (0, 0, 0)
        return [Message(peer, *part) for part in blocks(start, stop, block)]

    return [
        ScheduleStep(send, receive, action if receive else Action.COPY)
        for whole_send, whole_receive, action in steps
        for send, receive in itertools.zip_longest(split(whole_send), split(whole_receive))
    ]


def ring_all_reduce(size: int, rank: int, length: int) -> list[ScheduleStep]:
    """Return the all-reduce that sends the fewest bytes: a reduce-scatter, then an all-gather.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69(2), 2009. Each element is summed once and
    then copied, so all ranks hold the same bits. The order is fixed, but each chunk starts at
    another rank: the sum of chunk c is ``(((x[c+1] + x[c+2]) + ... + x[n-1]) + x[0]) + ... +
    x[c]``.

    >>> [(step.receive, step.action.name) for step in ring_all_reduce(2, 0, length=5)]
    [(Message(peer=1, start=0, stop=3), 'REDUCE_LEFT'), (Message(peer=1, start=3, stop=5), 'COPY')]
    """
    cuts = chunk_cuts(length, size)
    return _ring(rank, cuts, rank - 1, Action.REDUCE_LEFT) + ring_all_gather(rank, cuts)


def ring_all_gather(rank: int, cuts: Sequence[int]) -> list[ScheduleStep]:
    """Return the all-gather in which rank r contributes chunk r, in its place in the buffer.

    `cuts` has the starts of the chunks, which may have different lengths, and the end of the last
    chunk.
    """
    return _ring(rank, cuts, rank, Action.COPY)


def recursive_doubling_all_reduce(size: int, rank: int, length: int) -> list[ScheduleStep]:
    """Return the all-reduce with the fewest steps, for small buffers, where latency dominates.

    Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
    International Journal of High Performance Computing Applications 19(1), 2005, section 4.
    If n is not a power of two, the first ranks form pairs: the odd rank acts for both, with 2 more
    steps, and the even rank has only these 2. Both partners of an exchange put the sum of the lower
    ranks on the left, so operands are in rank order, and all ranks compute the same bits.

    >>> [step.send.peer for step in recursive_doubling_all_reduce(size=8, rank=5, length=4)]
    [4, 7, 1]
    """
    if length == 0:
        return []
    levels = size.bit_length() - 1
    pairs = size - 2**levels
    paired = rank < 2 * pairs
    partner = Message(rank ^ 1, 0, length)
    if paired and rank % 2 == 0:
        return [ScheduleStep(send=partner), ScheduleStep(receive=partner)]
    steps = [ScheduleStep(receive=partner, action=Action.REDUCE_LEFT)] if paired else []
    place = rank // 2 if paired else rank - pairs
    for bit in range(levels):
        other = place ^ (1 << bit)
        whole = Message(2 * other + 1 if other < pairs else other + pairs, 0, length)
        side = Action.REDUCE_LEFT if whole.peer < rank else Action.REDUCE_RIGHT
        steps.append(ScheduleStep(whole, whole, side))
    return [*steps, ScheduleStep(send=partner)] if paired else steps


def chunk_cuts(length: int, chunks: int) -> tuple[int, ...]:
    """Return the starts of balanced chunks and the last end; the first have one element more.

    >>> chunk_cuts(length=8, chunks=3)
    (0, 3, 6, 8)
    """
    each, more = divmod(length, chunks)
    return tuple(each * index + min(index, more) for index in range(chunks + 1))


def _ring(rank: int, cuts: Sequence[int], first: int, action: Action) -> list[ScheduleStep]:
    """Send chunk `first` to the next rank, and then in each step the chunk that was received."""
    size = len(cuts) - 1
    steps = []
    for turn in range(size - 1):
        out, into = (first - turn) % size, (first - turn - 1) % size
        send = receive = None
        if cuts[out] < cuts[out + 1]:
            send = Message((rank + 1) % size, cuts[out], cuts[out + 1])
        if cuts[into] < cuts[into + 1]:
            receive = Message((rank - 1) % size, cuts[into], cuts[into + 1])
        if send or receive:
            steps.append(ScheduleStep(send, receive, action if receive else Action.COPY))
    return steps


def _moves(programs: Iterable[Sequence[ScheduleStep]]) -> list[Move]:
    """Return the steps of all buffers as one sequence of moves with dependencies."""
    moves: list[Move] = []
    for bucket, steps in enumerate(programs):
        numbered = list(enumerate(steps, start=len(moves)))
        last = {step.receive[1:]: index for index, step in numbered if step.receive}
        received: dict[tuple[int, ...], int] = {}
        sent: dict[tuple[int, ...], int] = {}
        for index, (send, receive, action) in numbered:
            after, blocked_by, adds_own, total = 0, -1, True, False
            if send is not None:
                after = received.get(send[1:], -1) + 1
                sent[send[1:]] = index
            if receive is not None:
                place = receive[1:]
                blocked_by = sent.get(place, -1)
                adds_own = place not in received
                # A reduced range that is not received again is the total.
                total = action is not Action.COPY and last[place] == index
                received[place] = index
            moves.append(Move(bucket, send, receive, action, after, blocked_by, adds_own, total))
    return moves
