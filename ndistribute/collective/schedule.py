"""Collective algorithms as programs: who sends which range to whom, when, and what comes of it.

A plan is a pure function of how many ranks there are (`size`), whose plan it is (`rank`) and how
many elements the buffer has (`length`), so it is tested without a thread or a socket. Any size and
length will do: what would be a message without elements is left out at both ends. A rank that can
not be is a `ValueError`.

=============================  ==================  ===========================================
plan                           steps of a rank     elements that a rank sends
=============================  ==================  ===========================================
ring_reduce_scatter            n - 1               all but its own chunk: (n-1)/n * length
ring_all_gather                n - 1               all but the next rank's chunk
ring_all_reduce                2(n - 1)            2(n-1)/n * length: the least possible
recursive_doubling_all_reduce  floor(log2 n) (+2)  length in each step that sends
tree_broadcast                 <= ceil(log2 n)     length to each child
=============================  ==================  ===========================================

The steps of one or more buffers become moves, which know what they wait for, so that several
messages are on their way at once: a send waits for what it passes on, a receive for the send that
still reads its place. Plans name a range more than once only as the same range, whole: they reduce
and pass on the blocks in which they received.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ndistribute.collective.buckets import blocks
from ndistribute.device import Array

__all__ = [
    "Action",
    "Message",
    "Move",
    "Step",
    "Tuning",
    "chunk_cuts",
    "plan_broadcast",
    "plan_gather",
    "plan_reduce",
    "recursive_doubling_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "segmented",
    "tree_broadcast",
]


class Action(enum.Enum):
    """Say what becomes of received elements. The side is fixed, because rounding depends on it."""

    COPY = "mine = received"
    REDUCE_LEFT = "mine = received + mine"
    REDUCE_RIGHT = "mine = mine + received"


class Message(NamedTuple):
    """Name the elements ``[start, stop)`` of the buffer that go to, or come from, a peer."""

    peer: int
    start: int
    stop: int

    def of(self, buffer: Array) -> Array:
        """Return the view of a buffer that this message carries."""
        return buffer[self.start : self.stop]


class Step(NamedTuple):
    """Send and receive at the same time; the next step begins when both are done.

    The two ranges are disjoint, or equal and then reduced: nothing overwrites what is being sent.
    """

    send: Message | None = None
    receive: Message | None = None
    action: Action = Action.COPY


class Move(NamedTuple):
    """Be one step of a program, for buffer number `bucket`, with what its messages wait for."""

    bucket: int
    send: Message | None
    receive: Message | None
    action: Action
    after: int  # So many moves must have received before this one sends.
    sends_own: bool  # Whether that is still what this rank contributes.
    blocked_by: int  # The move whose send reads the received range last, or -1.
    adds_own: bool  # Whether what arrives is combined with what this rank contributes.
    total: bool  # Whether that makes the total of all ranks.


class Tuning(NamedTuple):
    """Say how messages are cut."""

    small_bytes: int  # Up to here a buffer goes whole, in the fewest steps; above, round the ring.
    block_bytes: int  # The most bytes of one message.


def plan_reduce(
    size: int, rank: int, buckets: Sequence[tuple[int, int, bool]], tuning: Tuning
) -> list[Move]:
    """Plan the all-reduce of several buffers.

    Of each it is given the length, the bytes of an element, and whether only a ring will do: where
    what one rank sends is not what it adds itself, two that exchange would get different totals.

    >>> tuning = Tuning(small_bytes=0, block_bytes=8)
    >>> [move.after for move in plan_reduce(2, 0, [(6, 4, False)], tuning)]
    [0, 0, 1, 2]
    """
    programs = []
    for length, itemsize, ring in buckets:
        if not ring and length * itemsize <= tuning.small_bytes:
            programs.append(recursive_doubling_all_reduce(size, rank, length))
        else:
            block = max(1, tuning.block_bytes // itemsize)
            programs.append(segmented(ring_all_reduce(size, rank, length), block))
    return _moves(programs)


def plan_gather(
    size: int, rank: int, cuts: Sequence[tuple[Sequence[int], int]], tuning: Tuning
) -> list[Move]:
    """Plan how every rank gets every chunk of several buffers.

    Of each it is given where the chunks begin and the last one ends, and the bytes of an element.
    """
    return _moves(
        segmented(
            ring_all_gather(size, rank, places[-1], places),
            max(1, tuning.block_bytes // itemsize),
        )
        for places, itemsize in cuts
    )


def plan_broadcast(
    size: int, rank: int, root: int, lengths: Sequence[int], tuning: Tuning
) -> list[Move]:
    """Plan how every rank gets the bytes of several buffers of the root."""
    return _moves(
        segmented(tree_broadcast(size, rank, length, root), tuning.block_bytes)
        for length in lengths
    )


def segmented(steps: Sequence[Step], block: int) -> list[Step]:
    """Cut every message of a plan into blocks, with the same result, bit for bit.

    What arrives is then combined while it is in the cache, and the runner's scratch space is one
    block instead of a chunk. `block` counts elements and must be the same on all ranks.

    >>> [step.send for step in segmented([Step(send=Message(1, 0, 5))], block=3)]
    [Message(peer=1, start=0, stop=3), Message(peer=1, start=3, stop=5)]
    """
    cut = []
    for step in steps:
        pairs = itertools.zip_longest(_split(step.send, block), _split(step.receive, block))
        cut += [Step(out, into, step.action if into else Action.COPY) for out, into in pairs]
    return cut


def ring_all_reduce(size: int, rank: int, length: int) -> list[Step]:
    """Plan the all-reduce that moves the fewest bytes: a reduce-scatter, then an all-gather.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69(2), 2009. Each element is totalled once and
    then copied, so all ranks hold the same bits; see `ring_reduce_scatter` for the order.

    >>> [(step.receive, step.action.name) for step in ring_all_reduce(2, 0, length=5)]
    [(Message(peer=1, start=0, stop=3), 'REDUCE_LEFT'), (Message(peer=1, start=3, stop=5), 'COPY')]
    """
    return ring_reduce_scatter(size, rank, length) + ring_all_gather(size, rank, length)


def ring_reduce_scatter(size: int, rank: int, length: int) -> list[Step]:
    """Plan a reduction after which rank r holds the total of chunk r; other chunks are spoilt.

    The order is fixed, but begins at another rank in each chunk: the total of chunk c is
    ``(((x[c+1] + x[c+2]) + ... + x[n-1]) + x[0]) + ... + x[c]``. Source: see `ring_all_reduce`.

    >>> ring_reduce_scatter(size=2, rank=1, length=6)[0].send
    Message(peer=0, start=0, stop=3)
    """
    _check(size, rank, length)
    return _ring(rank, chunk_cuts(length, size), rank - 1, Action.REDUCE_LEFT)


def ring_all_gather(
    size: int, rank: int, length: int, cuts: Sequence[int] | None = None
) -> list[Step]:
    """Plan how every rank gets all chunks, where rank r has chunk r in its place in the buffer.

    `cuts` say where chunks begin and the last one ends; uneven ones make a ragged all-gather, None
    stands for `chunk_cuts`.

    >>> [step.receive for step in ring_all_gather(size=3, rank=0, length=9, cuts=(0, 2, 2, 9))]
    [Message(peer=2, start=2, stop=9), None]
    """
    _check(size, rank, length)
    cuts = chunk_cuts(length, size) if cuts is None else cuts
    if len(cuts) != size + 1 or list(cuts) != sorted(cuts) or (cuts[0], cuts[-1]) != (0, length):
        raise ValueError(f"cuts must be {size + 1} numbers that rise from 0 to {length}: {cuts}.")
    return _ring(rank, cuts, rank, Action.COPY)


def recursive_doubling_all_reduce(size: int, rank: int, length: int) -> list[Step]:
    """Plan the all-reduce with the fewest steps, for buffers so small that latency rules.

    Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
    International Journal of High Performance Computing Applications 19(1), 2005, section 4.
    Where n is no power of two, the first ranks fold in pairs: the odd one stands for both, in 2
    more steps, and the even one has only those 2. Both partners of an exchange put the lower ranks'
    total on the left: operands stand in rank order, and all ranks compute the same bits.

    >>> [step.send.peer for step in recursive_doubling_all_reduce(size=8, rank=5, length=4)]
    [4, 7, 1]
    """
    _check(size, rank, length)
    if length == 0:
        return []
    levels = size.bit_length() - 1
    pairs = size - 2**levels
    paired = rank < 2 * pairs
    partner = Message(rank ^ 1, 0, length)
    if paired and rank % 2 == 0:
        return [Step(send=partner), Step(receive=partner)]
    steps = [Step(receive=partner, action=Action.REDUCE_LEFT)] if paired else []
    place = rank // 2 if paired else rank - pairs
    for bit in range(levels):
        other = place ^ (1 << bit)
        whole = Message(2 * other + 1 if other < pairs else other + pairs, 0, length)
        side = Action.REDUCE_LEFT if whole.peer < rank else Action.REDUCE_RIGHT
        steps.append(Step(whole, whole, side))
    return [*steps, Step(send=partner)] if paired else steps


def tree_broadcast(size: int, rank: int, length: int, root: int = 0) -> list[Step]:
    """Plan a copy from the root to all ranks, down a binomial tree.

    The tree is that of Thakur, Rabenseifner and Gropp (see `recursive_doubling_all_reduce`).

    >>> [step.send.peer for step in tree_broadcast(size=6, rank=0, length=1)]
    [4, 2, 1]
    """
    _check(size, rank, length, root)
    place = (rank - root) % size
    # A rank feeds those that follow it, up to the next one that its own parent feeds.
    span = place & -place or 1 << (size - 1).bit_length()
    steps = [Step(receive=Message((rank - span) % size, 0, length))] if place else []
    while length and (span := span // 2):
        if place + span < size:
            steps.append(Step(send=Message((rank + span) % size, 0, length)))
    return steps if length else []


def chunk_cuts(length: int, chunks: int) -> tuple[int, ...]:
    """Return where balanced chunks begin and the last one ends; the first may be longer by one.

    >>> chunk_cuts(length=8, chunks=3)
    (0, 3, 6, 8)
    """
    each, more = divmod(length, chunks)
    return tuple(each * index + min(index, more) for index in range(chunks + 1))


def _moves(programs: Iterable[Sequence[Step]]) -> list[Move]:
    """Add to the steps of each buffer what they wait for, and join them to one program."""
    moves: list[Move] = []
    for bucket, steps in enumerate(programs):
        offset = len(moves)
        last = {step.receive[1:]: index for index, step in enumerate(steps) if step.receive}
        received: dict[tuple[int, ...], int] = {}
        sent: dict[tuple[int, ...], int] = {}
        for index, (send, receive, action) in enumerate(steps):
            after, blocked_by, sends_own, adds_own, total = 0, -1, True, True, False
            if send is not None:
                sends_own = send[1:] not in received
                after = 0 if sends_own else offset + received[send[1:]] + 1
                sent[send[1:]] = index
            if receive is not None:
                place = receive[1:]
                blocked_by = offset + sent[place] if place in sent else -1
                adds_own = place not in received
                # What was reduced here and does not come once more is the total.
                total = action is not Action.COPY and last[place] == index
                received[place] = index
            moves.append(
                Move(bucket, send, receive, action, after, sends_own, blocked_by, adds_own, total)
            )
    return moves


def _ring(rank: int, cuts: Sequence[int], first: int, action: Action) -> list[Step]:
    """Pass chunks on to the next rank: `first` in the first step, then always what came last."""
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
            steps.append(Step(send, receive, action if receive else Action.COPY))
    return steps


def _split(message: Message | None, block: int) -> Iterator[Message]:
    if message is not None:
        for start, stop in blocks(message.start, message.stop, block):
            yield Message(message.peer, start, stop)


def _check(size: int, rank: int, length: int, root: int = 0) -> None:
    if not (0 <= rank < size and 0 <= root < size):
        raise ValueError(f"rank {rank} and root {root} must be in [0, size), and size is {size}.")
    if length < 0:
        raise ValueError(f"length must be 0 or more, got {length}.")
