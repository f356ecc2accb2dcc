"""Collective algorithms as plans: who sends which range to whom, and what becomes of what arrives.

A plan is a pure function of how many ranks there are (`size`), whose plan it is (`rank`) and how
many elements the buffer has (`length`), so it is tested without a thread or a socket; `run_plan`
executes it over whatever can send and receive. Any size and length will do: what would be a
message without elements is left out at both ends. A rank that can not be is a `ValueError`.

=============================  ==================  ===========================================
plan                           steps of a rank     elements that a rank sends
=============================  ==================  ===========================================
ring_reduce_scatter            n - 1               all but its own chunk: (n-1)/n * length
ring_all_gather                n - 1               all but the next rank's chunk
ring_all_reduce                2(n - 1)            2(n-1)/n * length: the least possible
recursive_doubling_all_reduce  floor(log2 n) (+2)  length in each step that sends
tree_reduce, tree_broadcast    <= ceil(log2 n)     length to its parent; to each child
=============================  ==================  ===========================================
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ndistribute.collective.buckets import blocks
from ndistribute.device import Array, array_namespace

__all__ = [
    "Action",
    "Message",
    "Step",
    "Transport",
    "chunk_cuts",
    "recursive_doubling_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "run_plan",
    "segmented",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_reduce",
]


class Action(enum.Enum):
    """Say what becomes of received elements. The side is fixed, because rounding depends on it."""

    COPY = "mine = received"
    REDUCE_LEFT = "mine = received + mine"
    REDUCE_RIGHT = "mine = mine + received"


@dataclass(frozen=True, slots=True)
class Message:
    """Name the elements ``[start, stop)`` of the buffer that go to, or come from, a peer."""

    peer: int
    start: int
    stop: int

    def of(self, buffer: Array) -> Array:
        """Return the view of a buffer that this message carries."""
        return buffer[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Step:
    """Send and receive at the same time; the next step begins when both are done.

    The two ranges are disjoint, or equal and then reduced: nothing overwrites what is being sent.
    """

    send: Message | None = None
    receive: Message | None = None
    action: Action = Action.COPY


class Transport(Protocol):
    """Move flat arrays between ranks; messages from one rank to another keep their order."""

    def isend(self, peer: int, array: Array) -> Any:
        """Begin to send an array, which stays unchanged until the handle is waited for."""

    def irecv(self, peer: int, array: Array) -> Any:
        """Begin to receive into an array, and return a handle."""

    def wait(self, handles: Sequence[Any], deadline: float) -> None:
        """Wait until all are done; raise once `time.monotonic` has passed the deadline."""


def run_plan(
    steps: Sequence[Step],
    buffer: Array,
    transport: Transport,
    combine: Callable[[Array, Array, Array], Any],
    deadline: float,
) -> None:
    """Execute one rank's plan, in place.

    Args:
        steps: the plan.
        buffer: flat and contiguous, of the length that the plan was made for.
        transport: how to reach the other ranks; what it raises passes through.
        combine: called as ``combine(left, right, out)``, as NumPy's binary ufuncs are.
        deadline: when to give up, on the clock of `time.monotonic`.
    """
    reduced = [s.receive.of(buffer).size for s in steps if s.receive and s.action != Action.COPY]
    scratch = array_namespace(buffer).empty(max(reduced, default=0), buffer.dtype)
    for step in steps:
        handles = []
        if step.receive is not None:
            mine = step.receive.of(buffer)
            received = mine if step.action is Action.COPY else scratch[: mine.size]
            handles.append(transport.irecv(step.receive.peer, received))
        if step.send is not None:
            handles.append(transport.isend(step.send.peer, step.send.of(buffer)))
        transport.wait(handles, deadline)
        if step.action is Action.REDUCE_LEFT:
            combine(received, mine, mine)
        elif step.action is Action.REDUCE_RIGHT:
            combine(mine, received, mine)


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


def ring_reduce_scatter(
    size: int, rank: int, length: int, cuts: Sequence[int] | None = None
) -> list[Step]:
    """Plan a reduction after which rank r holds the total of chunk r; other chunks are spoilt.

    The order is fixed, but begins at another rank in each chunk: the total of chunk c is
    ``(((x[c+1] + x[c+2]) + ... + x[n-1]) + x[0]) + ... + x[c]``. `cuts` say where chunks begin
    and the last one ends: ``size + 1`` numbers that rise from 0 to `length`, else `ValueError`;
    None stands for `chunk_cuts`. Source: see `ring_all_reduce`.

    >>> ring_reduce_scatter(size=2, rank=1, length=6)[0].send
    Message(peer=0, start=0, stop=3)
    """
    return _ring(rank, _checked_cuts(size, rank, length, cuts), rank - 1, Action.REDUCE_LEFT)


def ring_all_gather(
    size: int, rank: int, length: int, cuts: Sequence[int] | None = None
) -> list[Step]:
    """Plan how every rank gets all chunks, where rank r has chunk r in its place in the buffer.

    `cuts` are as in `ring_reduce_scatter`; uneven ones make a ragged all-gather.

    >>> [step.receive for step in ring_all_gather(size=3, rank=0, length=9, cuts=(0, 2, 2, 9))]
    [Message(peer=2, start=2, stop=9), None]
    """
    return _ring(rank, _checked_cuts(size, rank, length, cuts), rank, Action.COPY)


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


def tree_reduce(size: int, rank: int, length: int, root: int = 0) -> list[Step]:
    """Plan a reduction to the root, up a binomial tree; the other buffers are spoilt.

    The tree is that of Thakur, Rabenseifner and Gropp (see `recursive_doubling_all_reduce`). A rank
    totals those that follow it, so operands stand in rank order from the root on, cyclically.

    >>> [step.receive.peer for step in tree_reduce(size=6, rank=0, length=1)]
    [1, 2, 4]
    """
    _check(size, rank, length, root)
    place = (rank - root) % size
    steps: list[Step] = []
    reach = 1
    while length and reach < size:
        if place & reach:
            return [*steps, Step(send=Message((rank - reach) % size, 0, length))]
        if place + reach < size:
            child = Message((rank + reach) % size, 0, length)
            steps.append(Step(receive=child, action=Action.REDUCE_RIGHT))
        reach *= 2
    return steps


def tree_broadcast(size: int, rank: int, length: int, root: int = 0) -> list[Step]:
    """Plan a copy from the root to all ranks: `tree_reduce` run backwards.

    >>> [step.send.peer for step in tree_broadcast(size=6, rank=0, length=1)]
    [4, 2, 1]
    """
    upward = reversed(tree_reduce(size, rank, length, root))
    return [Step(send=step.receive, receive=step.send) for step in upward]


def tree_all_reduce(size: int, rank: int, length: int) -> list[Step]:
    """Plan a `tree_reduce` to rank 0 and a `tree_broadcast` of its total, in rank order."""
    return tree_reduce(size, rank, length) + tree_broadcast(size, rank, length)


def chunk_cuts(length: int, chunks: int) -> tuple[int, ...]:
    """Return where balanced chunks begin and the last one ends; the first may be longer by one.

    >>> chunk_cuts(length=8, chunks=3)
    (0, 3, 6, 8)
    """
    each, more = divmod(length, chunks)
    return tuple(each * index + min(index, more) for index in range(chunks + 1))


def _ring(rank: int, cuts: Sequence[int], first: int, action: Action) -> list[Step]:
    """Pass chunks on to the next rank: `first` in the first step, then always what came last."""
    size = len(cuts) - 1
    steps = []
    for turn in range(size - 1):
        send = _message((rank + 1) % size, cuts, (first - turn) % size)
        receive = _message((rank - 1) % size, cuts, (first - turn - 1) % size)
        if send or receive:
            steps.append(Step(send, receive, action if receive else Action.COPY))
    return steps


def _message(peer: int, cuts: Sequence[int], chunk: int) -> Message | None:
    message = Message(peer, cuts[chunk], cuts[chunk + 1])
    return message if message.start < message.stop else None


def _split(message: Message | None, block: int) -> Iterator[Message]:
    if message is not None:
        for start, stop in blocks(message.start, message.stop, block):
            yield Message(message.peer, start, stop)


def _check(size: int, rank: int, length: int, root: int = 0) -> None:
    if not (0 <= rank < size and 0 <= root < size):
        raise ValueError(f"rank {rank} and root {root} must be in [0, size), and size is {size}.")
    if length < 0:
        raise ValueError(f"length must be 0 or more, got {length}.")


def _checked_cuts(size: int, rank: int, length: int, cuts: Sequence[int] | None) -> Sequence[int]:
    _check(size, rank, length)
    if cuts is None:
        return chunk_cuts(length, size)
    if len(cuts) != size + 1 or list(cuts) != sorted(cuts) or (cuts[0], cuts[-1]) != (0, length):
        raise ValueError(f"cuts must be {size + 1} numbers that rise from 0 to {length}: {cuts}.")
    return cuts
