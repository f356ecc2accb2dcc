"""Metrics of graphs against the same figures of all batches together."""

import functools
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
    "true_positives": lambda y, p, w: np.sum(w * y * p),
    "false_positives": lambda y, p, w: np.sum(w * (1 - y) * p),
    "true_negatives": lambda y, p, w: np.sum(w * (1 - y) * (1 - p)),
    "false_negatives": lambda y, p, w: np.sum(w * y * (1 - p)),
    "accuracy": lambda y, p, w: np.average(y == p, weights=w),
    "mean_squared_error": lambda y, p, w: np.average((y - p) ** 2, weights=w),
    "root_mean_squared_error": lambda y, p, w: np.sqrt(np.average((y - p) ** 2, weights=w)),
    "mean_absolute_error": lambda y, p, w: np.average(abs(y - p), weights=w),
    "precision": lambda y, p, w: np.sum(w * y * p) / np.sum(w * p),
    "recall": lambda y, p, w: np.sum(w * y * p) / np.sum(w * y),
}


def in_batches(session, metric, labels, predictions, weighted, weights):
    """Return the value of a metric after three batches."""
    y, p, w = (
        g.placeholder(of.dtype, [None, *of.shape[1:]]) for of in (labels, predictions, weights)
    )
    value, update = metric(labels=y, predictions=p, weights=w if weighted else None)
    session.run(g.variables_initializer(g.local_variables()))
    assert np.all(session.run(value) == 0.0)
    for part in (slice(0, 7), slice(7, 8), slice(8, None)):
        feeds = {y: labels[part], p: predictions[part], w: weights[part]}
        last = session.run(update, feeds)
    np.testing.assert_array_equal(session.run(value), last)
    return last


SCORES = RNG.integers(0, 50, (20, 1)) / 50 + 0.003
SHARES = np.round(SCORES * 0.6 + LABELS * 0.3, 6)  # Better than chance, some alike.
THRESHOLDS = (0.1, 0.4, 0.7)


def rates(y, p, w):
    """Return the shares of true and of false labels above each of many thresholds."""
    above = p > np.linspace(0, 1, 200)[:, None, None]
    return [np.sum(above * kind * w, axis=(1, 2)) / np.sum(kind * w) for kind in (y, 1 - y)]


def ranked(y, p, w):
    """Return how probably a true label has the higher score; equal ones count by half."""
    pairs = (p[:, 0, None] > p[:, 0]) + 0.5 * (p[:, 0, None] == p[:, 0])
    of_pairs = (w * y)[:, 0, None] * (w * (1 - y))[:, 0]
    return np.sum(pairs * of_pairs) / np.sum(of_pairs)


def at(share):
    return lambda y, p, w: np.array([share(y, p > t, w) for t in THRESHOLDS])


AT = {"thresholds": THRESHOLDS}
CURVES: dict[str, tuple[dict[str, Any], Callable[[Any, Any, Any], Any]]] = {
    **{
        f"{name}_at_thresholds": (AT, at(EXPECTED[name]))
        for name in "true_positives false_positives true_negatives precision recall".split()
    },
    "false_negatives_at_thresholds": (AT, at(EXPECTED["false_negatives"])),
    "auc": ({}, ranked),
    "sensitivity_at_specificity": (
        {"specificity": 0.7},
        lambda y, p, w: (r := rates(y, p, w))[0][np.argmin(np.abs(1 - r[1] - 0.7))],
    ),
    "specificity_at_sensitivity": (
        {"sensitivity": 0.7},
        lambda y, p, w: 1 - (r := rates(y, p, w))[1][::-1][np.argmin(np.abs(r[0] - 0.7)[::-1])],
    ),
}


CLASSES, GUESSES = RNG.integers(0, 4, (2, 20))


def of_classes(y, p, w, share):
    table = np.array([[np.sum(w * (y == a) * (p == b)) for b in range(5)] for a in range(5)])
    right, true, guessed = np.diag(table), table.sum(1), table.sum(0)
    return share(right, true, guessed)


def iou(y, p, w):
    return of_classes(y, p, w, lambda r, t, g: np.mean((r / (t + g - r))[:4]))


def accuracy_of_classes(y, p, w):
    return of_classes(y, p, w, lambda r, t, g: np.sum((r / t)[:4]) / 5)


FIVE = {"num_classes": 5}
CASES: dict[str, tuple[dict[str, Any], Any, Any, Callable[[Any, Any, Any], Any]]] = {
    **{name: ({}, LABELS, PREDICTIONS, compute) for name, compute in EXPECTED.items()},
    **{name: (options, LABELS, SHARES, compute) for name, (options, compute) in CURVES.items()},
    "mean_iou": (FIVE, CLASSES, GUESSES, iou),
    "mean_per_class_accuracy": (FIVE, CLASSES, GUESSES, accuracy_of_classes),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value")  # The fifth class has no examples.
def test_a_metric_counts_all_examples_however_they_are_batched(session, name, weighted):
    options, labels, predictions, compute = CASES[name]
    metric = functools.partial(getattr(metrics, name), **options)
    weights = WEIGHTS.reshape(labels.shape)
    batched = in_batches(session, metric, labels, predictions, weighted, weights)
    expected = compute(labels, predictions, weights if weighted else np.ones_like(weights))
    rtol = 1e-6 if predictions is SHARES else 1e-12  # Thresholds are 32-bit numbers.
    np.testing.assert_allclose(batched, expected, rtol=rtol)


PAIR = np.array([2, 0, 1, 3]), np.array([1, 1, 2, 0])  # Numbers other than zero are true.
RIGHT, NINE = np.mean(LABELS == PREDICTIONS), np.arange(9.0).reshape(3, 3)
SCORED = [0, 0, 1, 1], np.array([0.1, 0.4, 0.35, 0.8])
PR = {"curve": "PR"}
SHAPES: dict[str, tuple[Callable[[], Any], Any]] = {
    "labels without an axis": (lambda: metrics.accuracy(LABELS.ravel(), PREDICTIONS), RIGHT),
    "precision of one weight": (lambda: metrics.precision(*PAIR, weights=0.5), 2 / 3),
    "recall of one weight": (lambda: metrics.recall(*PAIR, weights=0.5), 2 / 3),
    "weights of rows": (lambda: metrics.mean(NINE, np.array([1.0, 0.0, 0.0])), 1.0),
    "weights with one more axis": (
        lambda: metrics.accuracy(np.array([1, 0, 3]), np.array([1, 2, 3]), np.eye(3)[:, :1]),
        1.0,
    ),
    "whole numbers above thresholds": (
        lambda: metrics.precision_at_thresholds([0, 1, 1], np.array([0, 1, 0]), [0.5]),
        1.0,
    ),
    "elements": (
        lambda: metrics.mean_tensor(NINE, np.array([[1.0], [1.0], [0.0]])),
        NINE * [[1], [1], [0]],
    ),
    "area by trapezoids": (lambda: metrics.auc(*SCORED, **PR), 0.791667),
    "area of shares": (
        lambda: metrics.auc(*SCORED, summation_method="careful_interpolation"),
        0.75,
    ),
    "area that is interpolated": (
        lambda: metrics.auc(*SCORED, **PR, summation_method="careful_interpolation"),
        0.797267,
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_of_labels_and_weights_are_matched(session, case):
    make, expected = SHAPES[case]
    _, update = make()
    session.run(g.variables_initializer(g.local_variables()))
    np.testing.assert_allclose(session.run(update), expected, rtol=1e-5)


def test_a_metric_joins_the_collections_that_it_is_given(session):
    value, update = metrics.accuracy(
        *PAIR, name="hits", metrics_collections=["values"], updates_collections=["updates"]
    )
    graph = g.get_default_graph()
    assert graph.get_collection("values") == [value]
    assert graph.get_collection("updates") == [update]
    assert value.name == "hits/value:0"


def test_what_a_metric_cannot_compute_is_said():
    with pytest.raises(ValueError, match=r"'careful_interpolation'\], got 'ROC' and 'middle'"):
        metrics.auc([1], [0.5], summation_method="middle")
    with pytest.raises(ValueError, match="num_thresholds must be 2 or more, got 1"):
        metrics.auc([1], [0.5], num_thresholds=1)
    with pytest.raises(ValueError, match="mean_tensor needs a tensor of a known shape"):
        metrics.mean_tensor(g.placeholder(np.float64, [None]))
