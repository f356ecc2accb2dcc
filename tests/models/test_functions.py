"""Losses and metrics against their formulas, written out for one number or example at a time."""

import math

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import losses, metrics

RNG = np.random.default_rng(4)
P, T, Z = (*RNG.uniform(0.1, 0.9, size=(2, 5, 3)), RNG.normal(size=(5, 3)))
BITS = (T > 0.5).astype(float)
HOT = np.eye(3)[RNG.integers(0, 3, 5)]


def each(formula):
    return lambda y, p: np.mean([formula(a, b) for a, b in zip(y, p, strict=True)])


def length(row):
    return math.sqrt(sum(x * x for x in row))


FORMULAS = {
    "mape": (T, Z, each(lambda y, p: 100 * abs(y - p) / abs(y))),
    "msle": (T, P, each(lambda y, p: (math.log(1 + y) - math.log(1 + p)) ** 2)),
    "log_cosh": (T, Z, each(lambda y, p: math.log(math.cosh(p - y)))),
    "poisson": (T, P, each(lambda y, p: p - y * math.log(p))),
    "kld": (T, P, lambda y, p: sum(a * math.log(a / b) for a, b in zip(y, p, strict=True))),
    "cosine_similarity": (T, Z, lambda y, p: -(y @ p) / length(y) / length(p)),
    "hinge": (BITS, Z, each(lambda y, p: max(0, 1 - (2 * y - 1) * p))),
    "squared_hinge": (2 * BITS - 1, Z, each(lambda y, p: max(0, 1 - y * p) ** 2)),
    "categorical_hinge": (HOT, Z, lambda y, p: max(0, 1 + max(0, *p[y == 0]) - p[y > 0][0])),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_and_the_metric_of_its_name_are_the_mean_of_its_formula(name):
    y, p, formula = FORMULAS[name]
    expected = np.mean([formula(*rows) for rows in zip(y, p, strict=True)])
    assert float(losses.get(name)(y, p)) == pytest.approx(expected, rel=1e-5)
    metric = metrics.get(name, losses.get("mse"))
    for part in (slice(0, 2), slice(2, 5)):
        metric.update_state(y[part], p[part])
    sign = -1 if name == "cosine_similarity" else 1  # As in Keras.
    assert metric.result() == pytest.approx(sign * expected, rel=1e-5)


def test_smoothed_labels_are_those_between_both_classes():
    plain = losses.BinaryCrossentropy(from_logits=True)
    smooth = losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.2)
    assert float(smooth(BITS, Z)) == pytest.approx(float(plain(BITS * 0.8 + 0.1, Z)))


def pairs_in_order(labels, scores):
    """Return the share of pairs of a positive and another example whose scores are in order."""
    positive, others = scores[labels > 0], scores[labels == 0]
    return np.mean(positive[:, None] > others[None])


def test_the_area_under_a_curve_is_that_of_all_examples_on_all_replicas():
    labels = RNG.integers(0, 2, 60).astype(float)
    scores = np.round(labels * 0.3 + RNG.uniform(size=60) * 0.7, 6)
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        metric, precision = metrics.AUC(20001), metrics.Precision([0.2, 0.6])

        def update(y, p):
            metric.update_state(y, p)
            precision.update_state(y, p)

        halves = [nd.PerReplica((array[:17], array[17:])) for array in (labels, scores)]
        strategy.run(update, args=tuple(halves))
        assert metric.result() == pytest.approx(pairs_in_order(labels, scores), abs=1e-3)
        expected = [labels[scores > bound].mean() for bound in (0.2, 0.6)]
        np.testing.assert_allclose(precision.result(), expected)


def test_the_area_of_precision_over_recall_is_interpolated():
    """Right and wrong positives grow in a line between thresholds."""
    metric = metrics.AUC(3, curve="PR")
    metric.update_state(np.array([1, 0, 1, 1]), np.array([0.9, 0.8, 0.7, 0.2]))
    # 0, 2 of 3, and 3 of 4 examples are positive above the thresholds.
    steps = np.linspace(0, 1, 100001)[1:]
    between = [(2 * steps / (3 * steps), 2 / 3), ((2 + steps) / (3 + steps), 1 / 3)]
    expected = sum(precision.mean() * width for precision, width in between)
    assert metric.result() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("metric", "labels", "predicted", "expected"),
    [
        (metrics.Accuracy(), [1, 2, 3, 4], [1, 2, 0, 4], 0.75),
        (metrics.TopKCategoricalAccuracy(2), HOT, HOT + [0.5, 1.5, 0.25], 1.0),
        (metrics.BinaryCrossentropy(from_logits=True), BITS, Z * 0, math.log(2)),
        (metrics.CategoricalCrossentropy(from_logits=True), HOT, Z * 0, math.log(3)),
        (metrics.SparseCategoricalCrossentropy(from_logits=True), [0] * 5, Z * 0, math.log(3)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_metric_is_the_mean_of_its_examples(metric, labels, predicted, expected):
    metric.update_state(np.array(labels), np.array(predicted))
    assert metric.result() == pytest.approx(expected)


def test_decisions_that_are_no_fractions_are_counted():
    truth, decision = np.array([1, 0, 1, 0, 1]), np.array([True, True, False, False, True])
    kinds = "Precision TruePositives FalsePositives FalseNegatives TrueNegatives".split()
    counted = [getattr(metrics, kind)() for kind in kinds]
    for metric in counted:
        metric.update_state(truth, decision)
        metric.update_state(truth, decision.astype(int))
    assert [metric.result() for metric in counted] == pytest.approx([2 / 3, 4, 2, 2, 2])
