"""Pure functions of collectives: packing, cuts, schedules, headers, and 16-bit codes.

`play` runs the schedules of all ranks without a network, in a machine where a send ends only when
its receive takes it: a schedule that needs a buffering network stops it.
"""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.collective.backend import Call
from ndistribute.collective.cuts import OWNED_ALIGNMENT, owned_ranges
from ndistribute.collective.headers import compare_headers, encode_header
from ndistribute.collective.ring import compress, compressed_dtype, decompress
from ndistribute.collective.schedule import (
    Action,
    Message,
    ScheduleStep,
    chunk_cuts,
    pack,
    plan_gather,
    plan_reduce,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    segmented,
)
from ndistribute.collective.shared_memory import cut
from ndistribute.errors import CollectiveMismatchError

ALIGNMENT = 64
DTYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float64, np.int64, np.complex128, bool)]
LEAVES = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 500)), max_size=30)
SIZES, LENGTHS = st.integers(1, 17), st.integers(0, 50)


@given(LEAVES, st.sampled_from([0, 1, 64, 256, 1000, 4096, 10**9]))
def test_every_leaf_has_one_aligned_place_in_a_bucket_of_its_dtype(leaves, budget):
    buckets = pack(leaves, budget)
    found = [(leaf, dtype, s.stop - s.start) for dtype, p in buckets for leaf, s in p.items()]
    assert sorted((leaf, size) for leaf, _, size in found) == [
        (leaf, size) for leaf, (_, size) in enumerate(leaves) if size
    ]
    assert all(leaves[leaf][0] == dtype for leaf, dtype, _ in found)
    for dtype, places in buckets:
        slots = list(places.values())
        assert all(first.stop <= second.start for first, second in itertools.pairwise(slots))
        assert all(slot.start * dtype.itemsize % ALIGNMENT == 0 for slot in slots)
        assert slots[-1].stop * dtype.itemsize <= budget or len(places) == 1
    for dtype in DTYPES:  # They fill from the last leaf to the first.
        order = [leaf for leaf, kind, _ in found if kind == dtype]
        assert order == sorted(order, reverse=True)
    assert len(pack(leaves, 10**12)) == len({dtype for dtype, size in leaves if size})


@given(LEAVES.map(tuple), st.sampled_from([128, 256, 4096]))
def test_chunks_cover_every_element_once_at_places_of_their_own(leaves, limit):
    chunks = cut(leaves, limit)
    found = [(leaf, i) for chunk in chunks for leaf, a, b, _ in chunk for i in range(a, b)]
    assert found == [(leaf, i) for leaf, (_, size) in enumerate(leaves) for i in range(size)]
    for chunk in chunks:
        free = 0
        for leaf, start, stop, offset in chunk:
            assert offset >= free
            assert offset % ALIGNMENT == 0
            free = offset + (stop - start) * leaves[leaf][0].itemsize
        assert free <= limit


@given(st.lists(st.integers(0, 200), max_size=12).map(tuple), st.integers(1, 9))
def test_owners_cover_every_element_once_evenly_and_cut_at_aligned_places(sizes, owners):
    parts = [owned_ranges(sizes, owners, owner) for owner in range(owners)]
    seen = [(leaf, i) for part in parts for leaf, a, b in part for i in range(a, b)]
    assert seen == [(leaf, i) for leaf, size in enumerate(sizes) for i in range(size)]
    for part in parts:
        for leaf, start, stop in part:
            assert start < stop
            assert start % OWNED_ALIGNMENT == 0
            assert stop % OWNED_ALIGNMENT == 0 or stop == sizes[leaf]
        own = sum(stop - start for _, start, stop in part)
        assert abs(own - sum(sizes) / owners) <= OWNED_ALIGNMENT + 1


class Player:
    """One rank of the machine: its remaining steps, and the open halves of the current one."""

    def __init__(self, steps, buffer):
        self.steps, self.buffer, self.received = list(steps), buffer, None
        self.begin()

    def begin(self):
        self.sending, self.receiving, _ = self.steps[0] if self.steps else ScheduleStep()

    def finish_step(self):
        if not self.steps or self.sending or self.receiving:
            return False
        step = self.steps.pop(0)
        if step.receive:
            mine = step.receive.of(self.buffer)
            results = {
                Action.COPY: lambda: self.received,
                Action.REDUCE_LEFT: lambda: self.received + mine,
                Action.REDUCE_RIGHT: lambda: mine + self.received,
            }
            mine[...] = results[step.action]()
        self.begin()
        return True


def play(plans, buffers):
    """Run all plans in lockstep on the buffers; fail on a deadlock or an unmatched message."""
    players = [Player(steps, buffer) for steps, buffer in zip(plans, buffers, strict=True)]
    while any(player.steps for player in players):
        moved = False
        for rank, player in enumerate(players):
            message = player.sending
            if message and (wanted := players[message.peer].receiving) and wanted.peer == rank:
                assert wanted[1:] == message[1:]
                players[message.peer].received = message.of(player.buffer).copy()
                player.sending = players[message.peer].receiving = None
                moved = True
        finished = [player.finish_step() for player in players]
        assert any(finished) or moved, f"deadlock: {[p.steps[0] for p in players if p.steps]}"


def letters(size, length):
    """Return per rank its own letter in every element, so that `+` spells the order."""
    return [np.full(length, chr(ord("a") + rank), dtype=object) for rank in range(size)]


def spelled(size, first=0):
    return "".join(chr(ord("a") + (first + i) % size) for i in range(size))


def balanced_all_gather(size, rank, length):
    return ring_all_gather(rank, chunk_cuts(length, size))


def plans_of(plan, size, length):
    return [plan(size, rank, length) for rank in range(size)]


def volume(steps):
    return sum(step.send.stop - step.send.start for step in steps if step.send)


def test_the_machine_sees_a_deadlock():
    plans = [
        [ScheduleStep(send=Message(1 - r, 0, 1)), ScheduleStep(receive=Message(1 - r, 0, 1))]
        for r in (0, 1)
    ]
    with pytest.raises(AssertionError, match="deadlock"):
        play(plans, letters(2, 1))


@given(SIZES)
def test_recursive_doubling_adds_all_in_rank_order_in_the_fewest_steps(size):
    plans, buffers = plans_of(recursive_doubling_all_reduce, size, 2), letters(size, 2)
    play(plans, buffers)
    assert all(text == spelled(size) for buffer in buffers for text in buffer)
    exchanges, pairs = int(math.log2(size)), size - 2 ** int(math.log2(size))
    for rank, steps in enumerate(plans):
        paired = exchanges + 2 if rank % 2 else 2
        assert len(steps) == (paired if rank < 2 * pairs else exchanges)


@given(SIZES, LENGTHS)
def test_a_ring_adds_chunk_c_from_rank_c_plus_1_on_and_sends_the_fewest_bytes(size, length):
    plans, buffers = plans_of(ring_all_reduce, size, length), letters(size, length)
    play(plans, buffers)
    cuts = chunk_cuts(length, size)
    for buffer, chunk in itertools.product(buffers, range(size)):
        own = buffer[cuts[chunk] : cuts[chunk + 1]]
        assert all(text == spelled(size, chunk + 1) for text in own)
    assert all(abs(volume(s) - 2 * (size - 1) / size * length) < 2 for s in plans)
    lengths = {stop - start for start, stop in itertools.pairwise(cuts)}
    assert (cuts[0], cuts[-1], len(cuts)) == (0, length, size + 1)
    assert max(lengths) - min(lengths) <= 1


@given(SIZES, LENGTHS, st.data())
def test_an_all_gather_copies_ragged_chunks(size, length, data):
    inner = data.draw(st.lists(st.integers(0, length), min_size=size - 1, max_size=size - 1))
    cuts, expected = [0, *sorted(inner), length], np.arange(length)
    buffers = [np.full(length, -1) for _ in range(size)]
    for buffer, (start, stop) in zip(buffers, itertools.pairwise(cuts), strict=True):
        buffer[start:stop] = expected[start:stop]
    play([ring_all_gather(rank, cuts) for rank in range(size)], buffers)
    assert all((buffer == expected).all() for buffer in buffers)


@pytest.mark.parametrize(
    "plan", [ring_all_reduce, recursive_doubling_all_reduce, balanced_all_gather]
)
@given(size=SIZES, length=LENGTHS, block=st.integers(1, 9))
def test_steps_overwrite_nothing_that_they_send_and_segments_change_no_order(
    plan, size, length, block
):
    plans = plans_of(plan, size, length)
    pieces = [segmented(steps, block) for steps in plans]
    whole, parts = letters(size, length), letters(size, length)
    play(plans, whole)
    play(pieces, parts)
    assert [list(buffer) for buffer in whole] == [list(buffer) for buffer in parts]
    messages = [m for s in itertools.chain(*pieces) for m in (s.send, s.receive) if m]
    assert all(message.stop - message.start <= block for message in messages)
    for send, receive, action in itertools.chain(*plans):
        if send and receive:
            disjoint = send.stop <= receive.start or receive.stop <= send.start
            assert disjoint or (send[1:] == receive[1:] and action is not Action.COPY)


def check_programs(programs):
    """Check that each rank receives what the others send to it, in that order."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, moves in enumerate(programs):
        for index, move in enumerate(moves):
            if move.send is not None:
                assert move.after <= index
                sent[rank, move.send.peer].append((move.bucket, *move.send[1:]))
            if move.receive is not None:
                assert move.blocked_by <= index
                assert move.action is not Action.COPY or move.blocked_by < index
                received[move.receive.peer, rank].append((move.bucket, *move.receive[1:]))
    assert sent == received


@given(
    st.integers(2, 9),
    st.lists(st.integers(0, 200), min_size=1, max_size=4),
    st.integers(0, 400),
    st.integers(4, 200),
    st.booleans(),
)
def test_the_moves_of_a_reduction_reach_every_element_of_every_rank(
    size, lengths, small, block, ring
):
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


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3), max_size=4), st.integers(4, 99)
)
def test_the_moves_of_a_gather_reach_what_a_rank_does_not_have(lengths, block):
    lengths = [*lengths, [0, 77, 0]]  # A broadcast.
    programs = [plan_gather(rank, [(each, 4) for each in lengths], block) for rank in range(3)]
    check_programs(programs)
    for rank, moves in enumerate(programs):
        came = sum(m.receive.stop - m.receive.start for m in moves if m.receive)
        assert came == sum(sum(each) - each[rank] for each in lengths)


FIELDS = np.dtype([("x", np.float32), ("y", np.float32)])


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (FIELDS, [("x", np.float32), ("y", np.int32)]),
        (FIELDS, [("y", np.float32), ("x", np.float32)]),
        (">f4", "<f4"),
        (np.float32, np.int32),
    ],
)
def test_headers_tell_dtypes_of_one_size_apart(mine, theirs):
    own, other = (
        encode_header(Call(1, "all_gather", "axis=0", ((np.dtype(dtype), (2,)),)), 1)
        for dtype in (mine, theirs)
    )
    compare_headers(own, own, 0, 1)
    with pytest.raises(CollectiveMismatchError, match="worker 1 called all_gather"):
        compare_headers(own, other, 0, 1)


def through(name, values):
    wire = np.empty(values.size, compressed_dtype(name, values.dtype))
    assert wire.itemsize == 2
    return decompress(compress(values, wire), np.empty(values.size, np.float32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bfloat16_rounds_as_ml_dtypes_does(bits):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(through("bfloat16", values), expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_a_second_pass_through_16_bits_changes_nothing(name, values):
    once = through(name, np.array(values, np.float32))
    np.testing.assert_array_equal(through(name, once), once)
    special = np.array([0.0, -0.0, np.inf, -np.inf], np.float32)
    assert through(name, special).tobytes() == special.tobytes()
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    assert np.isnan(through(name, bits.view(np.float32))).all()


def test_float16_ends_at_infinity_without_a_warning_and_other_dtypes_stay():
    assert through("float16", np.array([1e6], np.float32)).tolist() == [np.inf]
    for dtype in ("float64", "int32", "complex64"):
        assert compressed_dtype("float16", np.dtype(dtype)) is None
