"""Programs of moves: both ends agree, and no move waits for one that comes after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ndistribute.collective.schedule import Action, Move, plan_gather, plan_reduce

sizes = st.integers(2, 9)
lengths = st.lists(st.integers(0, 200), min_size=1, max_size=4)
small_bytes = st.integers(0, 400)
block_bytes = st.integers(4, 200)


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


@given(sizes, lengths, small_bytes, block_bytes, st.booleans())
def test_a_reduction_reaches_every_element_of_every_rank(
    size: int, lengths: list[int], small: int, block: int, ring: bool
) -> None:
    buckets = [(length, 4, ring) for length in lengths]
    programs = [plan_reduce(size, rank, buckets, small, block) for rank in range(size)]
    check_programs(programs)
    for moves in programs:
        reached = {
            (move.bucket, element)
            for move in moves
            if move.receive and (move.total or move.action is Action.COPY)
            for element in range(move.receive.start, move.receive.stop)
        }
        assert reached == {(b, i) for b, length in enumerate(lengths) for i in range(length)}


@given(st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3), max_size=4), block_bytes)
def test_a_gather_reaches_what_a_rank_does_not_have(lengths: list[list[int]], block: int) -> None:
    check_gather(3, lengths, block)


@given(sizes, st.integers(0, 200), block_bytes, st.data())
def test_a_gather_of_what_one_rank_has_is_a_broadcast(
    size: int, length: int, block: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, size - 1))
    check_gather(size, [[length if rank == root else 0 for rank in range(size)]], block)


def check_gather(size: int, lengths: list[list[int]], block: int) -> None:
    chunks = [(each, 4) for each in lengths]
    programs = [plan_gather(rank, chunks, block) for rank in range(size)]
    check_programs(programs)
    for rank, moves in enumerate(programs):
        came = sum(m.receive.stop - m.receive.start for m in moves if m.receive)
        assert came == sum(sum(each) - each[rank] for each in lengths)
