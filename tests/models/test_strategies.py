"""Every strategy trains a model on digits as one process does, by `fit` and by a loop of one's own.

Where the steps do not wait for each other, what is compared is the accuracy.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from tests.jobs.digits import WAYS, network, on_own_loop, on_worker, serve, weights
from tests.kinds import ALL, fixture_over, inside_worker
from tests.processes import Ranks

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is missing")

ONE = {} if inside_worker() else {"one-device": lambda: nd.OneDeviceStrategy("cpu:0")}
strategy = fixture_over({**ALL, **ONE})


@functools.cache
def expected() -> list[Any]:
    return weights(nd.get_strategy(), "fit")


def check(found: list[Any]) -> None:
    for ours, alone in zip(found, expected(), strict=True):
        np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_every_strategy_gives_the_weights_of_one_process(strategy: nd.Strategy, way: str) -> None:
    check(weights(strategy, way))


def test_the_training_that_is_compared_moves_every_weight() -> None:
    for trained, initial in zip(expected(), network().get_weights(), strict=True):
        assert np.max(np.abs(trained - initial)) > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_workers_in_processes_give_the_weights_of_one_process(way: str) -> None:
    with Ranks(2) as ranks:
        for found in ranks.results(on_worker, way):
            check(found)


@pytest.mark.parametrize("way", WAYS)
def test_workers_of_servers_that_do_not_wait_reach_the_accuracy(way: str) -> None:
    with Ranks(3, jobs=["ps", "worker", "worker"]) as ranks:
        ranks.run(serve, ranks=[0])[0].result()
        found = [outcome.result() for outcome in ranks.run(on_own_loop, way, ranks=[1, 2])]
    assert max(found) > 0.9  # The other one may have ended before.
