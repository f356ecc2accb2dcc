"""Metrics of graphs against the same figures of all batches together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ndistribute.graph import metrics
from ndistribute.graph.graph import Graph
from ndistribute.graph.operations import placeholder
from ndistribute.graph.session import Session
from ndistribute.graph.variables import local_variables, variables_initializer

RNG = np.random.default_rng(0)
LABELS, PREDICTIONS = RNG.integers(0, 2, (2, 20, 1)).astype(float)
WEIGHTS = RNG.uniform(size=(20, 1))

EXPECTED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "accuracy": lambda y, p, w: np.average(y == p, weights=w),
    "mean_squared_error": lambda y, p, w: np.average((y - p) ** 2, weights=w),
    "root_mean_squared_error": lambda y, p, w: np.sqrt(np.average((y - p) ** 2, weights=w)),
    "mean_absolute_error": lambda y, p, w: np.average(abs(y - p), weights=w),
    "precision": lambda y, p, w: np.sum(w * y * p) / np.sum(w * p),
    "recall": lambda y, p, w: np.sum(w * y * p) / np.sum(w * y),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_metric_counts_all_examples_however_they_are_batched(name: str, weighted: bool) -> None:
    with Graph().as_default(), Session() as session:
        y, p, w = (placeholder(np.float64, [None, 1]) for _ in range(3))
        value, update = getattr(metrics, name)(y, p, w if weighted else None)
        session.run(variables_initializer(local_variables()))
        assert session.run(value) == 0.0
        for part in (slice(0, 7), slice(7, 8), slice(8, None)):
            feeds = {y: LABELS[part], p: PREDICTIONS[part], w: WEIGHTS[part]}
            last = session.run(update, feeds)
        weights = WEIGHTS if weighted else np.ones_like(WEIGHTS)
        expected = EXPECTED[name](LABELS, PREDICTIONS, weights)
        assert session.run(value) == last == pytest.approx(expected, rel=1e-12)


def test_labels_may_lack_an_axis_of_length_one() -> None:
    with Graph().as_default(), Session() as session:
        _, update = metrics.accuracy(LABELS.ravel(), PREDICTIONS)
        session.run(variables_initializer(local_variables()))
        assert session.run(update) == pytest.approx(np.mean(LABELS == PREDICTIONS))


@pytest.mark.parametrize("name", ["precision", "recall"])
def test_numbers_other_than_zero_are_true_and_weights_are_spread(name: str) -> None:
    with Graph().as_default(), Session() as session:
        metric = getattr(metrics, name)
        pair = np.array([2, 0, 1, 3]), np.array([1, 1, 2, 0])
        _, update = metric(*pair, weights=0.5)
        session.run(variables_initializer(local_variables()))
        assert session.run(update) == pytest.approx(2 / 3)


def test_weights_may_lack_the_last_axis_or_have_one_more() -> None:
    with Graph().as_default(), Session() as session:
        rows = np.arange(9.0).reshape(3, 3)
        _, update = metrics.mean(rows, np.array([1.0, 0.0, 0.0]))
        _, share = metrics.accuracy(np.array([1, 0, 3]), np.array([1, 2, 3]), np.eye(3)[:, :1])
        session.run(variables_initializer(local_variables()))
        assert session.run([update, share]) == [1.0, 1.0]
