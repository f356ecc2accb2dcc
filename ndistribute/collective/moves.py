"""When each message of a plan may start, so that several can be on their way at once.

`schedule.run_plan` ends a step before it begins the next. Here the steps of one or more buffers
become moves that know what they wait for: a send for what it passes on, a receive for the send
that still reads its place. All of it is arithmetic; nothing is sent, and equal arguments give
equal programs, which a caller keeps.

The plans name a range more than once only as the same range, whole: they reduce and pass on the
blocks in which they received. That is what "the same range" means below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ndistribute.collective.schedule import (
    Action,
    Message,
    Step,
    chunk_cuts,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    segmented,
    tree_broadcast,
)

__all__ = ["Incoming", "Move", "Outgoing", "Tuning", "plan_broadcast", "plan_gather", "plan_reduce"]


class Tuning(NamedTuple):
    """Say how messages are cut.

    Args:
        small_bytes: up to here a buffer goes whole, in the fewest steps; above, round the ring.
        block_bytes: the most bytes of one message.
    """

    small_bytes: int
    block_bytes: int


class Outgoing(NamedTuple):
    """Send the elements ``[start, stop)`` of a buffer.

    Args:
        peer: where to.
        start: the first element.
        stop: the end, exclusive.
        own: whether these are still the values that this rank contributes.
        after: how many moves must have received before; 0 where nothing is passed on.
    """

    peer: int
    start: int
    stop: int
    own: bool
    after: int


class Incoming(NamedTuple):
    """Receive the elements ``[start, stop)`` of a buffer.

    Args:
        peer: where from.
        start: the first element.
        stop: the end, exclusive.
        action: what becomes of them.
        own: whether this rank's contribution is still to be read where they are combined with it.
        blocked_by: the move whose send reads this range last, or -1.
        total: whether combining makes the total of all ranks.
    """

    peer: int
    start: int
    stop: int
    action: Action
    own: bool
    blocked_by: int
    total: bool


class Move(NamedTuple):
    """Be one step of a program: what leaves and what comes for buffer number `bucket`."""

    bucket: int
    outgoing: Outgoing | None
    incoming: Incoming | None


def plan_reduce(
    size: int, rank: int, buckets: Sequence[tuple[int, int, bool]], tuning: Tuning
) -> list[Move]:
    """Plan the all-reduce of several buffers.

    Args:
        size: how many ranks there are.
        rank: whose program it is.
        buckets: length, bytes of an element, and whether only a ring will do (where what one rank
            sends is not what it adds itself, two that exchange would get different totals).
        tuning: how messages are cut.

    >>> tuning = Tuning(small_bytes=0, block_bytes=8)
    >>> [move.outgoing.after for move in plan_reduce(2, 0, [(6, 4, False)], tuning)]
    [0, 0, 1, 2]
    """
    moves: list[Move] = []
    for bucket, (length, itemsize, ring) in enumerate(buckets):
        if not ring and length * itemsize <= tuning.small_bytes:
            steps = recursive_doubling_all_reduce(size, rank, length)
            reductions = [i for i, step in enumerate(steps) if _reduces(step)]
            totals = set(reductions[-1:])
        else:
            whole = ring_all_reduce(size, rank, length)
            steps = segmented(whole, max(1, tuning.block_bytes // itemsize))
            first, last = chunk_cuts(length, size)[rank : rank + 2]
            totals = {i for i, step in enumerate(steps) if _reduces(step, first, last)}
        moves += _moves(bucket, steps, totals, len(moves))
    return moves


def plan_gather(
    size: int, rank: int, cuts: Sequence[tuple[Sequence[int], int]], tuning: Tuning
) -> list[Move]:
    """Plan how every rank gets every chunk of several buffers.

    Args:
        size: how many ranks there are.
        rank: whose program it is.
        cuts: where the chunks of each buffer begin and the last one ends; bytes of an element.
        tuning: how messages are cut.
    """
    moves: list[Move] = []
    for bucket, (places, itemsize) in enumerate(cuts):
        whole = ring_all_gather(size, rank, places[-1], places)
        steps = segmented(whole, max(1, tuning.block_bytes // itemsize))
        moves += _moves(bucket, steps, (), len(moves))
    return moves


def plan_broadcast(
    size: int, rank: int, root: int, lengths: Sequence[int], tuning: Tuning
) -> list[Move]:
    """Plan how every rank gets the bytes of several buffers of the root."""
    moves: list[Move] = []
    for bucket, length in enumerate(lengths):
        steps = segmented(tree_broadcast(size, rank, length, root), tuning.block_bytes)
        moves += _moves(bucket, steps, (), len(moves))
    return moves


def _reduces(step: Step, first: int = 0, last: int | None = None) -> bool:
    """Say whether a step reduces elements that lie in a range."""
    into = step.receive
    if into is None or step.action is Action.COPY:
        return False
    return first <= into.start and (last is None or into.stop <= last)


def _moves(bucket: int, steps: Sequence[Step], totals: Iterable[int], offset: int) -> list[Move]:
    """Add to the steps of one buffer what each of them waits for; moves count from `offset`."""
    complete = set(totals)
    received: dict[tuple[int, int], int] = {}
    sent: dict[tuple[int, int], int] = {}
    moves = []
    for index, step in enumerate(steps):
        outgoing = incoming = None
        if step.send is not None:
            peer, *place = _place(step.send)
            before = received.get((place[0], place[1]), -1)
            after = 0 if before < 0 else offset + before + 1
            outgoing = Outgoing(peer, place[0], place[1], before < 0, after)
            sent[place[0], place[1]] = index
        if step.receive is not None:
            peer, start, stop = _place(step.receive)
            last = sent.get((start, stop), -1)
            blocked_by = -1 if last < 0 else offset + last
            own = (start, stop) not in received
            total = index in complete
            incoming = Incoming(peer, start, stop, step.action, own, blocked_by, total)
            received[start, stop] = index
        moves.append(Move(bucket, outgoing, incoming))
    return moves


def _place(message: Message) -> tuple[int, int, int]:
    return message.peer, message.start, message.stop
