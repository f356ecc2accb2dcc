"""Rows are gathered or reduced as a whole table, whichever is less; the result does not tell."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute import CollectiveMismatchError, IndexedSlices
from ndistribute.collective.select import make_group
from ndistribute.collective.sparse import gathers_fewer_bytes, must_count, reduce_rows
from ndistribute.device import Device

DEADLINE_SECONDS = 20


def on_ranks(size, work):
    """Return what ``work(communicator)`` returned or raised on each rank."""
    group = make_group([Device(f"cpu:{rank}") for rank in range(size)])
    results = [None] * size

    def run(rank):
        try:
            results[rank] = work(group.communicators[rank])
        except Exception as error:
            results[rank] = error
        finally:
            group.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def rows(indices, shape, dtype="float64", seed=0):
    """Return rows of small integers, whose sums are exact in any order."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-4, 5, (len(indices), *shape[1:])).astype(dtype)
    return IndexedSlices(values, np.array(indices, np.int64), shape)


class Recording:
    """A communicator that remembers which calls were made."""

    def __init__(self, communicator):
        self._communicator, self.size, self.calls = communicator, communicator.size, []

    def all_reduce(self, op, value, options=None):
        self.calls.append("table" if isinstance(value, tuple) else "count")
        return self._communicator.all_reduce(op, value, options)

    def all_gather(self, value, axis, options=None):
        self.calls.append("rows")
        return self._communicator.all_gather(value, axis, options)


def reduced(op, given):
    """Return each rank's result and the calls that it made."""

    def work(communicator):
        recording = Recording(communicator)
        return reduce_rows(recording, op, given[communicator.rank]), recording.calls

    results = on_ranks(len(given), work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return zip(*results, strict=True)


# Small enough to be gathered unasked, and too large for that.
lengths = st.sampled_from([5, 700])


@settings(max_examples=40)
@given(
    st.data(), lengths, st.integers(1, 4), st.sampled_from(["sum", "mean"]), st.integers(0, 2**20)
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_the_rows_are_those_of_the_dense_sum(dtype, data, length, size, op, seed):
    counts = st.integers(0, 2 * length)
    rng = np.random.default_rng(seed)
    given = [
        rows(rng.integers(0, length, data.draw(counts)), (length, 9), dtype, seed + rank)
        for rank in range(size)
    ]
    totals, calls = reduced(op, given)
    dense = np.sum([each.to_dense() for each in given], axis=0)
    wanted = dense / size if op == "mean" else dense
    for total in totals:
        assert isinstance(total, IndexedSlices)
        assert total.indices.tolist() == sorted({int(i) for each in given for i in each.indices})
        assert np.allclose(total.to_dense(), wanted)
        assert total.dtype == (np.float64 if (op, dtype) == ("mean", "int32") else dtype)
        assert total.values.tobytes() == totals[0].values.tobytes()
    assert all(made == calls[0] for made in calls)


def table_rows(share, size, length=700):
    """Return rows for each rank: this share of a table, spread at random."""
    rng = np.random.default_rng(1)
    count = int(share * length)
    return [rows(rng.permutation(length)[:count], (length, 20), seed=r) for r in range(size)]


@pytest.mark.parametrize(
    ("size", "share", "calls"),
    [
        (1, 1.0, ["rows"]),
        (2, 1.0, ["rows"]),
        (3, 0.1, ["count", "rows"]),
        (3, 1.0, ["count", "table"]),
        (4, 0.3, ["count", "rows"]),
        (4, 0.7, ["count", "table"]),
    ],
)
def test_the_form_that_moves_fewer_bytes_is_taken(size, share, calls):
    _, made = reduced("sum", table_rows(share, size))
    assert list(made) == [calls] * size


def test_a_small_table_is_gathered_without_a_question():
    _, made = reduced("sum", [rows(range(30), (30, 4))] * 4)
    assert list(made) == [["rows"]] * 4


def test_ranks_of_one_memory_always_gather():
    def work(communicator):
        recording = Recording(communicator)
        reduce_rows(recording, "sum", given[communicator.rank], one_memory=True)
        return recording.calls

    given = table_rows(1.0, 3)
    assert on_ranks(3, work) == [["rows"]] * 3


def test_ranks_with_different_numbers_of_rows_choose_alike():
    given = [rows(range(700), (700, 20)), rows([], (700, 20)), rows([3], (700, 20))]
    totals, made = reduced("sum", given)
    assert list(made) == [["count", "rows"]] * 3
    assert all(len(total.indices) == 700 for total in totals)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_forms_have_the_same_bits(dtype, monkeypatch):
    """Sums of a rank first, then in the order of the ranks: as long as the wire keeps to it."""
    rng = np.random.default_rng(5)

    def make():
        indices = rng.integers(0, 200, 600)
        return IndexedSlices(rng.normal(size=(600, 30)).astype(dtype), indices, (200, 30))

    given = [make() for _ in range(3)]
    (whole, *_), (made, *_) = reduced("mean", given)
    assert made == ["count", "table"]
    monkeypatch.setattr("ndistribute.collective.sparse.gathers_fewer_bytes", lambda *_: True)
    (gathered, *_), (made, *_) = reduced("mean", given)
    assert made == ["count", "rows"]
    assert gathered.indices.tobytes() == whole.indices.tobytes()
    assert gathered.values.tobytes() == whole.values.tobytes()


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_half_precision_rows_are_summed_in_single(share):
    """1 beside 2048 is lost in float16, where neighbours are 2 apart."""
    count = int(700 * share)
    values = [np.full((count, 40), value, np.float16) for value in (2048, 1, 1)]
    given = [IndexedSlices(each, np.arange(count), (700, 40)) for each in values]
    totals, _ = reduced("sum", given)
    for total in totals:
        assert total.dtype == np.float16
        assert np.all(total.values == 2050)


@pytest.mark.parametrize("lengths", [(30, 31), (7000, 7001, 7000)])
def test_tables_of_different_length_are_a_mismatch(lengths):
    given = [rows([1], (length, 4)) for length in lengths]
    errors = on_ranks(len(given), lambda c: reduce_rows(c, "sum", given[c.rank]))
    assert all(isinstance(error, CollectiveMismatchError) for error in errors)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_other_reductions_of_rows_are_refused(op):
    (error,) = on_ranks(1, lambda c: reduce_rows(c, op, rows([1], (4, 2))))
    assert isinstance(error, ValueError)
    assert "SUM or MEAN" in str(error)


sizes = st.integers(2, 4096)
row_bytes = st.integers(1, 1 << 16)


@given(st.integers(0, 1 << 30), row_bytes, st.integers(1, 1 << 40), sizes)
def test_fewer_rows_are_never_a_reason_not_to_gather(total, row, dense, size):
    if gathers_fewer_bytes(total, row, 8, dense, size):
        assert gathers_fewer_bytes(total // 2, row, 8, dense, size)


@given(st.integers(1, 1 << 30), row_bytes, sizes)
def test_ranks_that_do_not_ask_lose_little(length, row, size):
    dense = length * row
    if not must_count(length, row, 8, dense, size):
        most = size * length * (row + 8)
        assert most <= max(1 << 16, 1.25 * 2 * dense)
