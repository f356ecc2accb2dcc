"""Every strategy trains a model on digits as one process does, by `fit` and by a loop."""

import functools
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from tests.jobs.digits import WAYS, network, on_worker, weights
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
