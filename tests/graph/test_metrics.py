"""Metrics of graphs against the same figures of all batches together."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ndistribute import graph as g
from ndistribute.graph import streaming_metrics as metrics

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
def test_a_metric_counts_all_examples_however_they_are_batched(session, name, weighted):
    y, p, w = (g.placeholder(np.float64, [None, 1]) for _ in range(3))
    value, update = getattr(metrics, name)(y, p, w if weighted else None)
    session.run(g.variables_initializer(g.local_variables()))
    assert session.run(value) == 0.0
    for part in (slice(0, 7), slice(7, 8), slice(8, None)):
        feeds = {y: LABELS[part], p: PREDICTIONS[part], w: WEIGHTS[part]}
        last = session.run(update, feeds)
    weights = WEIGHTS if weighted else np.ones_like(WEIGHTS)
    expected = EXPECTED[name](LABELS, PREDICTIONS, weights)
    assert session.run(value) == last == pytest.approx(expected, rel=1e-12)


PAIR = np.array([2, 0, 1, 3]), np.array([1, 1, 2, 0])  # Numbers other than zero are true.
RIGHT, NINE = np.mean(LABELS == PREDICTIONS), np.arange(9.0).reshape(3, 3)
SHAPES: dict[str, tuple[Callable[[], Any], float]] = {
    "labels without an axis": (lambda: metrics.accuracy(LABELS.ravel(), PREDICTIONS), RIGHT),
    "precision of one weight": (lambda: metrics.precision(*PAIR, weights=0.5), 2 / 3),
    "recall of one weight": (lambda: metrics.recall(*PAIR, weights=0.5), 2 / 3),
    "weights of rows": (lambda: metrics.mean(NINE, np.array([1.0, 0.0, 0.0])), 1.0),
    "weights with one more axis": (
        lambda: metrics.accuracy(np.array([1, 0, 3]), np.array([1, 2, 3]), np.eye(3)[:, :1]),
        1.0,
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_of_labels_and_weights_are_matched(session, case):
    make, expected = SHAPES[case]
    _, update = make()
    session.run(g.variables_initializer(g.local_variables()))
    assert session.run(update) == pytest.approx(expected)
