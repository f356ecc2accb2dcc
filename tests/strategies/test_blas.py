"""BLAS threads are shared out between replicas while they run, and given back afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import threadpoolctl

from ndistribute.strategies.blas import cores
from tests.kinds import in_thread, mirrored, raised_in


def threads() -> list[int]:
    """Return how many threads each BLAS library of the process may use."""
    libraries = threadpoolctl.threadpool_info()
    return [library["num_threads"] for library in libraries if library["user_api"] == "blas"]


@pytest.fixture(autouse=True)
def _has_blas():
    np.ones((2, 2)) @ np.ones((2, 2))
    if not threads():
        pytest.skip("threadpoolctl knows no BLAS library of this NumPy")


def test_replicas_share_the_cores(several):
    before = threads()
    share = max(1, cores() // len(several.devices))
    inside = several.run(lambda: max(threads())).values
    assert all(count <= share for count in inside)
    assert threads() == before


def test_one_replica_keeps_them_all():
    with mirrored(1) as strategy:
        assert strategy.run(lambda: max(threads())).values[0] == max(threads())


def test_a_failed_step_gives_them_back(several):
    before = threads()
    with raised_in(several, None, ZeroDivisionError):
        several.run(lambda: 1 / 0)
    assert threads() == before


def test_the_last_of_two_strategies_gives_them_back():
    before = threads()
    with mirrored(2) as two, mirrored(3) as three:
        with in_thread(lambda: [two.run(threads) for _ in range(20)]):
            for _ in range(20):
                three.run(threads)
        assert threads() == before
