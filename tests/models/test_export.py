"""A model that is exported is loaded with its architecture and weights, and without its code."""

import json
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Model, Sequential, initializers, layers, load, losses, metrics
from tests.kinds import strategy

__all__ = ["strategy"]

X = np.random.default_rng(0).normal(size=(5, 4))


class Twice(Model):
    """A model that applies a shared layer twice, and then a head."""

    def __init__(self, shared: layers.Layer, units: int) -> None:
        super().__init__(dtype="float64")
        self.shared = shared
        self.blocks = {"head": [layers.Dense(units, dtype="float64")]}

    def call(self, x: Any) -> Any:
        """Return the output."""
        return self.blocks["head"][0](self.shared(self.shared(x)))


def squared(x: Any) -> Any:
    """Return the square."""
    return x * x


def dense(units: int, **options: Any) -> layers.Dense:
    """Return a dense layer in float64."""
    return layers.Dense(units, dtype="float64", **options)


MODELS = {
    "sequential": lambda: Sequential([dense(3, activation="relu"), layers.Reshape((3, 1))]),
    "nested": lambda: Sequential([Sequential([dense(3)]), dense(2, use_bias=False)]),
    "initializer": lambda: Sequential(
        [dense(3, kernel_initializer=initializers.RandomNormal(stddev=2.0, seed=1))]
    ),
    "regularizer": lambda: Sequential([dense(2, kernel_regularizer="l2")]),
    "frozen": lambda: Sequential([dense(3, trainable=False), dense(2)]),
    "shared": lambda: Twice(dense(4), 2),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_loaded_model_computes_the_same(kind, strategy, tmp_path):
    with strategy.scope():
        model = MODELS[kind]()
        expected = model(X)
        path = model.export(tmp_path / "model")
        loaded = load(path)
    assert np.array_equal(loaded(X), expected)
    assert list(map(float, loaded.losses)) == list(map(float, model.losses))
    assert kind != "regularizer" or float(loaded.losses[0]) > 0
    assert loaded.named_variables().keys() == model.named_variables().keys()
    assert [layer.trainable for layer in loaded.walk()] == [one.trainable for one in model.walk()]
    assert len(loaded.trainable_variables) == len(model.trainable_variables)
    assert len(list(loaded.walk())) == len(list(model.walk()))
    other = load(path)  # Without a strategy.
    assert np.array_equal(other(X), expected)


OPTIMIZERS: dict[str, Any] = {
    "name": lambda: "adam",
    "schedule": lambda: nd.optimizers.SGD(nd.optimizers.schedules.CosineDecay(0.1, 50), 0.9),
    "accumulation": lambda: nd.optimizers.GradientAccumulation(nd.optimizers.Adam(clipnorm=1.0), 2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(kind, strategy, tmp_path):
    labels, path = np.arange(5) % 2, tmp_path / "best.keras"
    with strategy.scope():
        model = Sequential([dense(3, activation="relu"), dense(2)])
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        wanted = ["accuracy", metrics.SparseTopKCategoricalAccuracy(2)]
        model.compile(OPTIMIZERS[kind](), loss, metrics=wanted)
        model.fit(X, labels, 2, 2, 0, shuffle=False)
        if kind == "name":
            model.optimizer.learning_rate = 0.25
        for _ in range(2):
            model.save(path)
        assert not strategy.is_chief or list(tmp_path.iterdir()) == [path]
        loaded = load(path)
    for each in (model, loaded):
        each.fit(X, labels, 2, 2, 0, shuffle=False)
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert loaded.evaluate(X, labels, verbose=0) == model.evaluate(X, labels, verbose=0)
    assert loaded.optimizer.iterations == model.optimizer.iterations


def test_functions_and_unknown_classes_are_asked_for(tmp_path):
    model = Sequential([dense(3, activation=squared)])
    expected = model(X)
    path = model.export(tmp_path / "model")
    with pytest.raises(ValueError, match="needs 'squared', which this program does not define"):
        load(path)
    assert np.array_equal(load(path, {"squared": squared})(X), expected)


def test_a_file_runs_no_code(tmp_path):
    model = MODELS["sequential"]()
    model(X)
    path = model.export(tmp_path / "model")
    data = json.loads((path / "data.json").read_text())["data"]
    assert data["architecture"]["model"]["layer"] == "Sequential"
    assert not list(path.glob("*.pkl"))


def test_earlier_exports_are_kept_and_the_last_is_loaded(tmp_path):
    model = MODELS["sequential"]()
    outputs = []
    for factor in range(4):
        model(X)
        model.set_weights([np.full(one.shape, float(factor)) for one in model.get_weights()])
        outputs.append((model.export(tmp_path / "model"), model(X)))
    for path, expected in outputs:
        assert np.array_equal(load(path)(X), expected)
    assert np.array_equal(load(tmp_path / "model")(X), outputs[-1][1])
    kept = [model.export(tmp_path / "model", max_to_keep=2) for _ in range(2)]
    assert sorted(tmp_path.iterdir()) == kept


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda path: Sequential([dense(2)]).export(path / "m"), "not built yet"),
        (lambda path: load(path / "m"), "there is no checkpoint"),
        (
            lambda path: load(nd.Checkpoint(v=nd.Variable(1.0)).save(path / "c")),
            "not an exported mod",
        ),
    ],
)
def test_mistakes_are_explained(call, says, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        call(tmp_path)


def test_an_argument_that_cannot_be_written_is_named(tmp_path):
    model = Sequential([dense(2, activation=lambda x: x)])
    model(X)
    with pytest.raises(ValueError, match=r"the argument sequential.*\.activation is <function"):
        model.export(tmp_path / "model")
