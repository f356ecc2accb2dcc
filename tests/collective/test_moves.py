"""Programs of moves: both ends agree, and no move waits for one that comes after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ndistribute.collective.schedule import (
    Action,
    Move,
    Tuning,
    chunk_cuts,
    plan_broadcast,
    plan_gather,
    plan_reduce,
)

sizes = st.integers(2, 9)
lengths = st.lists(st.integers(0, 200), min_size=1, max_size=4)
tunings = st.builds(Tuning, st.integers(0, 400), st.integers(4, 200))


def check_programs(programs: Sequence[Sequence[Move]]) -> None:
    """Check that what each rank sends to another is what that one receives, in this order."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, moves in enumerate(programs):
        for index, move in enumerate(moves):
            out, into = move.send, move.receive
            if out is not None:
                assert move.after <= index
                sent[rank, out.peer].append((move.bucket, out.start, out.stop))
            if into is not None:
                assert move.blocked_by <= index
                assert move.action is not Action.COPY or move.blocked_by < index
                received[into.peer, rank].append((move.bucket, into.start, into.stop))
    assert sent == received


@given(sizes, lengths, tunings, st.booleans())
def test_a_reduction_reaches_every_element_of_every_rank(
    size: int, lengths: list[int], tuning: Tuning, ring: bool
) -> None:
    buckets = [(length, 4, ring) for length in lengths]
    programs = [plan_reduce(size, rank, buckets, tuning) for rank in range(size)]
    check_programs(programs)
    for moves in programs:
        reached = {
            (move.bucket, element)
            for move in moves
            if move.receive and (move.total or move.action is Action.COPY)
            for element in range(move.receive.start, move.receive.stop)
        }
        assert reached == {(b, i) for b, length in enumerate(lengths) for i in range(length)}


@given(sizes, lengths, tunings)
def test_a_gather_reaches_what_a_rank_does_not_have(
    size: int, lengths: list[int], tuning: Tuning
) -> None:
    cuts = [(chunk_cuts(length, size), 4) for length in lengths]
    programs = [plan_gather(size, rank, cuts, tuning) for rank in range(size)]
    check_programs(programs)
    for rank, moves in enumerate(programs):
        came = sum(m.receive.stop - m.receive.start for m in moves if m.receive)
        assert came == sum(c[-1] - (c[rank + 1] - c[rank]) for c, _ in cuts)


@given(sizes, lengths, tunings, st.data())
def test_a_broadcast_reaches_all_but_the_root(
    size: int, lengths: list[int], tuning: Tuning, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, size - 1))
    programs = [plan_broadcast(size, rank, root, lengths, tuning) for rank in range(size)]
    check_programs(programs)
    for rank, moves in enumerate(programs):
        came = sum(m.receive.stop - m.receive.start for m in moves if m.receive)
        assert came == (0 if rank == root else sum(lengths))
