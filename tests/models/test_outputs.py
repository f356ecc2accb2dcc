"""Models of several outputs: losses, weights, metrics, labels and sample weights by output."""

from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import layers, losses, metrics
from tests.kinds import strategy

__all__ = ["strategy"]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6))
LABELS = RNG.integers(0, 3, 50)
VALUES = RNG.normal(size=(50, 2))
WEIGHTS = RNG.uniform(size=50)
NAMES = ["loss", "kind_loss", "value_loss", "kind_accuracy", "value_mae"]
CROSS = losses.SparseCategoricalCrossentropy(from_logits=True)


class Two(nd.Model):
    """A classifier and a regression with a common layer, whose outputs are a tuple or a dict."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name
        self.hidden = layers.Dense(5, "tanh", dtype="float64")
        self.kind, self.value = (layers.Dense(units, dtype="float64") for units in (3, 2))

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        outputs = {"kind": self.kind(hidden), "value": self.value(hidden)}
        return outputs if self.by_name else tuple(outputs.values())


def trained(by_name: bool, **compiled: Any) -> Any:
    """Return the model, and its history of three epochs with weights and a validation."""
    nd.set_seed(1)
    model = Two(by_name)
    if by_name:
        loss: Any = {"kind": CROSS, "value": "mse"}
        scales: Any = {"value": 0.3}
        of_outputs: Any = {"kind": ["accuracy"], "value": "mae"}
        y: Any = {"kind": LABELS, "value": VALUES}
    else:
        loss, scales, of_outputs = [CROSS, "mse"], [1.0, 0.3], [["accuracy"], ["mae"]]
        y = (LABELS, VALUES)
    options = {"loss": loss, "loss_weights": scales, "metrics": of_outputs, **compiled}
    model.compile(nd.optimizers.Adam(0.01), **options)
    weights = {"value": WEIGHTS} if by_name else (np.ones(50), WEIGHTS)
    return model, model.fit(X, y, 16, 3, 0, sample_weight=weights, validation_data=(X, y)).history


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by position"])
def test_two_outputs_give_the_result_of_one_replica(strategy, by_name):
    alone, expected = trained(by_name)
    with strategy.scope():
        model, history = trained(by_name)
    names = (
        NAMES
        if by_name
        else [name.replace("kind", "output_1").replace("value", "output_2") for name in NAMES]
    )
    assert list(history) == names + [f"val_{name}" for name in names]
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-12)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


def test_the_loss_is_the_weighted_sum_of_those_of_the_outputs():
    model, _ = trained(by_name=True)
    logs = model.evaluate(X, {"kind": LABELS, "value": VALUES}, verbose=0, return_dict=True)
    outputs = model(X)
    of_kind = float(CROSS(LABELS, outputs["kind"]))
    of_value = float(np.mean((VALUES - outputs["value"]) ** 2))
    expected = {"loss": of_kind + 0.3 * of_value, "kind_loss": of_kind, "value_loss": of_value}
    expected["kind_accuracy"] = np.mean(outputs["kind"].argmax(axis=-1) == LABELS)
    expected["value_mae"] = np.mean(np.abs(VALUES - outputs["value"]))
    assert logs == pytest.approx(expected, abs=1e-12)
    assert list(logs) == NAMES


def test_one_loss_and_one_list_of_metrics_are_for_all_outputs_and_none_for_no_output():
    y = (RNG.normal(size=(50, 3)), VALUES)
    model = Two(by_name=False)
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"])
    history = model.fit(X, y, verbose=0).history
    parts = ("loss", "mae", "mse")
    assert {*history} == {"loss", *(f"output_{k}_{part}" for part in parts for k in (1, 2))}
    model.compile("sgd", [None, "mse"])
    assert {*model.fit(X, {"output_2": VALUES}, verbose=0).history} == {"loss", "output_2_loss"}


@pytest.mark.parametrize(
    ("compiled", "y", "says"),
    [
        (
            {"loss": {"knd": "mse"}},
            VALUES,
            "loss: the model has 2 outputs, 'kind', 'value', but no output 'knd'",
        ),
        ({"metrics": {"kind": "nothing"}}, VALUES, "unknown metric 'nothing'"),
        ({"metrics": [metrics.MeanAbsoluteError()]}, VALUES, "would count several outputs"),
        ({"loss_weights": [1.0]}, VALUES, "loss_weights: a list of 1 for 2 outputs"),
        ({}, VALUES, "got labels: a ndarray for 2 outputs"),
        ({}, {"kind": LABELS}, "got no labels: pass y"),
        ({}, None, "got no labels: pass y"),
    ],
)
def test_mistakes_are_explained(compiled, y, says):
    model = Two(by_name=True)

    def fit() -> None:
        model.compile("sgd", **{"loss": {"kind": CROSS, "value": "mse"}} | compiled)
        model.fit(X, y, verbose=0)

    with pytest.raises(ValueError, match=says):
        fit()


@pytest.mark.parametrize(
    ("y", "predicted", "accuracy"),
    [
        (np.array([1, 0, 1]), np.array([[0.7], [0.2], [0.1]]), 2 / 3),
        (np.array([1, 0, 1]), np.array([0.7, 0.2, 0.1]), 2 / 3),
        (np.array([1, 0, 1]), np.array([[0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]), 2 / 3),
        (np.array([[1], [0], [1]]), np.array([[0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]), 2 / 3),
        (np.eye(2)[[1, 0, 1]], np.array([[0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]), 2 / 3),
    ],
    ids=["binary", "binary without an axis", "sparse", "sparse with an axis", "one-hot"],
)
def test_accuracy_and_crossentropy_follow_the_shapes(y, predicted, accuracy):
    metric, cross = metrics.get("accuracy", None), metrics.get("ce", None)
    metric.update_state(y, predicted)
    cross.update_state(y, predicted)
    assert metric.result() == pytest.approx(accuracy)
    of_label = predicted.reshape(3, -1)
    if of_label.shape[1] == 1:
        of_label = np.concatenate([1 - of_label, of_label], axis=1)
    expected = -np.mean(np.log(of_label[np.arange(3), [1, 0, 1]]))
    assert cross.result() == pytest.approx(expected, rel=1e-6)
