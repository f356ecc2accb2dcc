"""Gradients that are summed while others are computed: the same sums, bucket by bucket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.collective.buckets import LeafSpec
from ndistribute.collective.early import EarlyReduction
from ndistribute.errors import CollectiveTimeoutError, WorkerLostError

F8 = np.dtype(np.float64)


@pytest.fixture
def courier() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    bucket_bytes=st.sampled_from([0, 64, 128, 10_000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_leaf_is_reduced_once_whatever_order_they_come_in(
    sizes: list[int], bucket_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    leaves = [LeafSpec(F8, size) for size in sizes]
    with ThreadPoolExecutor(1) as pool:
        early = EarlyReduction(
            lambda flat: np.multiply(flat, 2, out=flat), pool, leaves, bucket_bytes, 5.0
        )
        for _ in range(2):
            early.begin()
            values = [rng.normal(size=size) for size in sizes]
            for leaf in rng.permutation(len(sizes)):
                early.add(int(leaf), values[leaf])
            for total, value in zip(early.finish(), values, strict=True):
                np.testing.assert_array_equal(total, 2 * value)


def test_buckets_leave_in_their_order_even_if_a_later_one_is_full_first(courier: Executor) -> None:
    sent: list[float] = []
    leaves = [LeafSpec(F8, 8)] * 3  # Each fills a bucket; the last leaf is in the first.
    early = EarlyReduction(lambda flat: sent.append(flat[0]), courier, leaves, 64, 5.0)
    early.begin()
    for leaf in (0, 1, 2):
        early.add(leaf, np.full(8, float(leaf)))
    early.finish()
    assert sent == [2.0, 1.0, 0.0]


def test_the_first_bucket_travels_before_the_last_gradient_is_there(courier: Executor) -> None:
    started = threading.Event()
    early = EarlyReduction(lambda flat: started.set(), courier, [LeafSpec(F8, 8)] * 2, 64, 5.0)
    early.begin()
    early.add(1, np.ones(8))
    assert started.wait(timeout=30.0)
    early.add(0, np.ones(8))
    early.finish()


def test_a_failure_on_the_way_is_raised_by_finish_and_the_next_step_works(
    courier: Executor,
) -> None:
    failing = [True]

    def reduce(flat: object) -> None:
        if failing[0]:
            raise WorkerLostError("worker 1 was lost", rank=1)

    early = EarlyReduction(reduce, courier, [LeafSpec(F8, 2)], 64, 5.0)
    early.begin()
    early.add(0, np.ones(2))
    with pytest.raises(WorkerLostError, match="worker 1 was lost"):
        early.finish()
    failing[0] = False
    early.begin()
    early.add(0, np.ones(2))
    assert early.finish()[0].tolist() == [1.0, 1.0]


def test_a_step_that_was_left_half_way_leaves_nothing_for_the_next(courier: Executor) -> None:
    early = EarlyReduction(lambda flat: None, courier, [LeafSpec(F8, 2)] * 2, 0, 5.0)
    early.begin()
    early.add(1, np.ones(2))
    early.begin()
    early.add(1, np.full(2, 3.0))
    early.add(0, np.full(2, 4.0))
    assert [total.tolist() for total in early.finish()] == [[4.0, 4.0], [3.0, 3.0]]


def test_a_reduction_that_does_not_end_is_not_waited_for_for_ever(courier: Executor) -> None:
    release = threading.Event()
    early = EarlyReduction(
        lambda flat: release.wait(timeout=30.0), courier, [LeafSpec(F8, 2)], 64, 0.05
    )
    early.begin()
    early.add(0, np.ones(2))
    with pytest.raises(CollectiveTimeoutError, match=r"within 0\.05 s"):
        early.finish()
    release.set()
