"""Claims about the plans, checked by playing all ranks at once, without a network.

`play` is a deterministic machine in which a send ends only when its receive takes it: a plan that
needs a buffering network to get on stops it.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.collective.schedule import (
    Action,
    Message,
    Step,
    chunk_cuts,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    segmented,
)

Array = np.ndarray[Any, Any]
Plans = list[list[Step]]

ALL_REDUCES = [ring_all_reduce, recursive_doubling_all_reduce]
SIZES = st.integers(1, 17)
LENGTHS = st.integers(0, 50)


def balanced_all_gather(size: int, rank: int, length: int) -> list[Step]:
    return ring_all_gather(rank, chunk_cuts(length, size))


every_plan = pytest.mark.parametrize("plan", [*ALL_REDUCES, balanced_all_gather])


def plans_of(plan: Callable[..., list[Step]], size: int, *args: Any) -> Plans:
    return [plan(size, rank, *args) for rank in range(size)]


class Player:
    """One rank of the machine: where it stands, and which halves of its step are still open."""

    def __init__(self, steps: list[Step], buffer: Array) -> None:
        self.steps = collections.deque(steps)
        self.buffer = buffer
        self.received: Any = None
        self.begin()

    def begin(self) -> None:
        self.sending = self.steps[0].send if self.steps else None
        self.receiving = self.steps[0].receive if self.steps else None

    def finish_step(self) -> bool:
        """Go on to the next step if this one is over."""
        if not self.steps or self.sending or self.receiving:
            return False
        step = self.steps.popleft()
        if step.receive:
            mine = step.receive.of(self.buffer)
            if step.action is Action.COPY:
                mine[...] = self.received
            else:
                left = step.action is Action.REDUCE_LEFT
                mine[...] = self.received + mine if left else mine + self.received
        self.begin()
        return True


def play(plans: Plans, buffers: Sequence[Array]) -> None:
    """Run all plans in lockstep on the buffers; fail on a deadlock or an unmatched message."""
    players = [Player(steps, buffer) for steps, buffer in zip(plans, buffers, strict=True)]
    while any(player.steps for player in players):
        moved = False
        for rank, player in enumerate(players):
            message = player.sending
            if message and (wanted := players[message.peer].receiving) and wanted.peer == rank:
                assert (wanted.start, wanted.stop) == (message.start, message.stop)
                players[message.peer].received = message.of(player.buffer).copy()
                player.sending = players[message.peer].receiving = None
                moved = True
        finished = [player.finish_step() for player in players]
        moved = any(finished) or moved
        assert moved, f"deadlock: {[player.steps[0] for player in players if player.steps]}"


def letters(size: int, length: int) -> list[Array]:
    """Return per rank its own letter in every element, so that `+` spells the order."""
    return [np.full(length, chr(ord("a") + rank), dtype=object) for rank in range(size)]


def spelled(size: int, first: int = 0) -> str:
    return "".join(chr(ord("a") + (first + i) % size) for i in range(size))


@given(SIZES)
def test_recursive_doubling_adds_all_in_rank_order_everywhere(size: int) -> None:
    buffers = letters(size, 2)
    play(plans_of(recursive_doubling_all_reduce, size, 2), buffers)
    assert all(text == spelled(size) for buffer in buffers for text in buffer)


@given(SIZES, LENGTHS)
def test_ring_adds_chunk_c_in_rank_order_from_c_plus_1_everywhere(size: int, length: int) -> None:
    buffers = letters(size, length)
    play(plans_of(ring_all_reduce, size, length), buffers)
    cuts = chunk_cuts(length, size)
    for buffer, chunk in itertools.product(buffers, range(size)):
        assert all(
            text == spelled(size, chunk + 1) for text in buffer[cuts[chunk] : cuts[chunk + 1]]
        )


@given(SIZES, LENGTHS, st.data())
def test_all_gather_copies_ragged_chunks(size: int, length: int, data: st.DataObject) -> None:
    cuts = data.draw(cut_lists(size, length))
    expected = np.arange(length)
    buffers = [np.full(length, -1) for _ in range(size)]
    for buffer, (start, stop) in zip(buffers, itertools.pairwise(cuts), strict=True):
        buffer[start:stop] = expected[start:stop]
    play([ring_all_gather(rank, cuts) for rank in range(size)], buffers)
    assert all((buffer == expected).all() for buffer in buffers)


def cut_lists(size: int, length: int) -> st.SearchStrategy[list[int]]:
    inner = st.lists(st.integers(0, length), min_size=size - 1, max_size=size - 1)
    return inner.map(lambda cuts: [0, *sorted(cuts), length])


@every_plan
@given(SIZES, LENGTHS)
def test_a_step_never_overwrites_what_it_sends(
    plan: Callable[..., list[Step]], size: int, length: int
) -> None:
    for step in itertools.chain(*plans_of(plan, size, length)):
        if step.send and step.receive:
            sent = (step.send.start, step.send.stop)
            got = (step.receive.start, step.receive.stop)
            disjoint = sent[1] <= got[0] or got[1] <= sent[0]
            assert disjoint or (sent == got and step.action is not Action.COPY)
        assert step.receive or step.action is Action.COPY


@every_plan
@given(SIZES, LENGTHS, st.integers(1, 9))
def test_segments_change_no_order(
    plan: Callable[..., list[Step]], size: int, length: int, block: int
) -> None:
    whole, cut = letters(size, length), letters(size, length)
    plans = plans_of(plan, size, length)
    play(plans, whole)
    pieces = [segmented(steps, block) for steps in plans]
    play(pieces, cut)
    assert [list(buffer) for buffer in whole] == [list(buffer) for buffer in cut]
    sizes = [m.stop - m.start for s in itertools.chain(*pieces) for m in (s.send, s.receive) if m]
    assert max(sizes, default=0) <= block


def test_the_machine_sees_a_deadlock() -> None:
    send_first = [Step(send=Message(1, 0, 1)), Step(receive=Message(1, 0, 1))]
    too = [Step(send=Message(0, 0, 1)), Step(receive=Message(0, 0, 1))]
    with pytest.raises(AssertionError, match="deadlock"):
        play([send_first, too], letters(2, 1))


@given(SIZES, st.integers(17, 50), st.data())
def test_ring_counts(size: int, length: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    steps = ring_all_reduce(size, rank, length)
    assert len(steps) == 2 * (size - 1)
    own, following = np.diff(chunk_cuts(length, size))[[rank, (rank + 1) % size]]
    assert volume(steps) == (0 if size == 1 else 2 * length - own - following)
    assert abs(volume(steps) - 2 * (size - 1) / size * length) < 2


@given(SIZES, st.data())
def test_recursive_doubling_counts(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    steps = recursive_doubling_all_reduce(size, rank, 10)
    exchanges, pairs = int(math.log2(size)), size - 2 ** int(math.log2(size))
    if rank >= 2 * pairs:
        assert len(steps) == exchanges
    else:
        assert len(steps) == (exchanges + 2 if rank % 2 else 2)
    assert volume(steps) == 10 * sum(step.send is not None for step in steps)


def volume(steps: Sequence[Step]) -> int:
    return sum(step.send.stop - step.send.start for step in steps if step.send)


@given(st.integers(0, 10**9), st.integers(1, 99))
def test_chunks_are_balanced(length: int, chunks: int) -> None:
    cuts = chunk_cuts(length, chunks)
    sizes = {b - a for a, b in itertools.pairwise(cuts)}
    assert len(cuts) == chunks + 1
    assert (cuts[0], cuts[-1]) == (0, length)
    assert max(sizes) - min(sizes) <= 1
