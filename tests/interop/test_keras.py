"""Models of Keras 3 train under every strategy to what Keras makes of them, by JAX and PyTorch.

All of this runs with the backend that KERAS_BACKEND names, JAX by default; one test starts the
others again with PyTorch.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import ALL_MEMORIES, COMPILED_2, fixture_over
from tests.models import test_elastic_fit
from tests.models.test_elastic_fit import Job, assert_same
from tests.processes import ROOT, Ranks, environment

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

from ndistribute.interop.keras import distribute  # noqa: E402 - What comes before is for Keras.

BACKEND = keras.backend.backend()
layers, ops = keras.layers, keras.ops
RNG = np.random.default_rng(7)
X = RNG.random((48, 8, 8, 1)).astype(np.float32)
Y = RNG.integers(0, 5, 48)
ONE_HOT = np.eye(5, dtype=np.float32)[Y]

on_jax = pytest.mark.skipif(BACKEND != "jax", reason="compiled steps need JAX")
strategy = fixture_over({**ALL_MEMORIES, **(COMPILED_2 if BACKEND == "jax" else {})}, "mirrored-2")


def mlp() -> Any:
    keras.utils.set_random_seed(3)
    dense = layers.Dense(6, activation="relu", kernel_regularizer="l2", activity_regularizer="l2")
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), dense, layers.Dense(5)])


def cnn(rate: float = 0.0) -> Any:
    """Return a network with the layers that write to variables."""
    keras.utils.set_random_seed(3)
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(image)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.8)(x))
    x = layers.Dropout(rate)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, layers.Dense(5)(x))


def loss_of_keras() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def trained(network: Any, strategy: Any, x: Any = X, y: Any = Y, **more: Any) -> Any:
    """Train a model of Keras by `fit`; return the history, the weights and the model."""
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
    with strategy.scope():
        model = distribute(network)
        kinds = {
            "optimizer": nd.optimizers.SGD(0.2),
            "loss": loss_of_keras(),
            "metrics": ["accuracy"],
        }
        model.compile(
            **kinds | {name: more.pop(name) for name in {*more} & {*kinds, "loss_weights"}}
        )
    history = model.fit(x, y, **options | more).history
    return history, network.get_weights(), model


def by_keras(network: Any, x: Any = X, y: Any = Y, loss: Any = None, **more: Any) -> Any:
    """Train a model by Keras alone; return the history and the weights."""
    network.compile(keras.optimizers.SGD(0.2), loss or loss_of_keras(), metrics=["accuracy"])
    history = network.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, **more).history
    return history, network.get_weights()


def assert_near(result: Any, expected: Any, names: Any = ("loss", "accuracy")) -> None:
    """Compare histories and weights."""
    for name in names:
        np.testing.assert_allclose(result[0][name], expected[0][name], atol=2e-6, rtol=2e-6)
    for mine, theirs in zip(result[1], expected[1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def mirrored(count: int) -> Any:
    return nd.MirroredStrategy([f"cpu:{k}" for k in range(count)])


def test_a_model_trains_under_every_strategy_to_what_keras_makes_of_it(strategy, tmp_path):
    network = mlp()
    result = trained(network, strategy)
    assert_near(result, by_keras(mlp()))
    outputs = result[2].predict(X, 20)
    np.testing.assert_allclose(outputs, network.predict(X, verbose=0), atol=1e-6)
    network.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for mine, theirs in zip(loaded.get_weights(), network.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_weights_of_examples_and_short_batches_count_as_in_keras():
    data = X[:18], Y[:18]  # One of three replicas has no examples of the last batch.
    weights = np.linspace(0, 2, 18)
    expected = by_keras(mlp(), *data, sample_weight=weights)
    more = {"sample_weight": weights, "class_weight": {1: 2.0, 3: 0.5}}
    with mirrored(3) as strategy:
        assert_near(trained(mlp(), strategy, *data, sample_weight=weights), expected)
        several = trained(mlp(), strategy, *data, **more)
    assert_near(several, trained(mlp(), nd.get_strategy(), *data, **more))


def test_statistics_of_batches_agree_and_are_those_of_keras_for_equal_parts():
    rows = np.arange(24).reshape(3, 1, 8).repeat(2, axis=1).ravel()
    data = X[rows], Y[rows]
    expected = by_keras(cnn(), *data)
    with mirrored(2) as strategy:
        result = trained(cnn(), strategy, *data)
        assert_near(result, expected)
        *_, model = trained(cnn(), strategy, X[:17], Y[:17])  # The last batch has one example.
        for variable in model.state:
            first, second = strategy.local_results(variable)
            np.testing.assert_array_equal(first, second)
        theirs = model.keras_model.predict(X, verbose=0)
        np.testing.assert_allclose(model.predict(X), theirs, atol=1e-6)
        assert np.isfinite(model.predict(X)).all()


def test_masks_differ_by_replica_and_by_step_and_generators_agree():
    with mirrored(2) as strategy, strategy.scope():
        model = distribute(keras.Sequential([keras.Input((64,)), layers.Dropout(0.5)]))
        step = lambda x: model(x, training=True)  # noqa: E731
        ones = np.ones((1, 64), np.float32)
        drawn = [strategy.run(step, args=(ones,)).values for _ in range(2)]
        masks = {np.asarray(mask).tobytes() for masks in drawn for mask in masks}
        assert len(masks) == 4
        for variable in model.state:
            first, second = strategy.local_results(variable)
            np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(model.predict(ones), ones)


def on_workers(rank, size):
    """Train a network on all workers; return the weights, after the first's have been saved."""
    options = nd.CommunicationOptions(timeout_seconds=40.0)
    with nd.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
        keras.utils.set_random_seed(rank)  # The other worker starts from the weights of the first.
        network = mlp() if rank == 0 else keras.models.clone_model(mlp())
        history, weights, _ = trained(
            network, strategy, callbacks=[nd.callbacks.EarlyStopping("loss", patience=3)]
        )
        return {"loss": history["loss"], "accuracy": history["accuracy"]}, weights


@pytest.mark.slow
def test_workers_train_as_keras_does_alone():
    with Ranks(2, "python", {"KERAS_BACKEND": BACKEND}) as workers:
        for result in workers.results(on_workers):
            assert_near(result, by_keras(mlp()))


@pytest.mark.slow
@on_jax
def test_elastic_workers_go_on_when_one_is_lost_and_another_one_joins(tmp_path, monkeypatch):
    from tests.jobs import elastic_keras

    monkeypatch.setattr(test_elastic_fit, "SCRIPT", elastic_keras.__file__)
    begun = Job(tmp_path, kind="fit", waits=[f"{tmp_path}/waits", ["train", 14]])
    with begun.tasks:
        for index in range(3):
            begun.start(index, ends=["train", 8] if index == 1 else None)
        begun.start_again(1, tmp_path / "waits")
        expected = elastic_keras.run(kind="fit")
        for result in map(begun.result, range(3)):
            assert_same(result, expected)


class Branches(keras.Model):
    """A subclass with several outputs, which adds a loss."""

    def __init__(self, frozen: bool = False) -> None:
        keras.utils.set_random_seed(3)
        super().__init__()
        self.hidden, self.drop = layers.Dense(4, activation="tanh"), layers.Dropout(0.0)
        self.outs = [layers.Dense(5), layers.Dense(1)]
        self(X[:1])
        self.hidden.trainable = not frozen

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.drop(self.hidden(ops.reshape(x, (-1, 64))), training=training)
        self.add_loss(0.1 * ops.mean(x**2))
        return {"label": self.outs[0](x), "mean": self.outs[1](x)}


@pytest.mark.parametrize("frozen", [False, True])
def test_a_subclass_with_outputs_and_added_losses_trains_as_in_keras(frozen):
    labels = {"label": Y, "mean": X.mean(axis=(1, 2))}
    losses = {"label": loss_of_keras(), "mean": keras.losses.Huber()}
    theirs = Branches(frozen)
    theirs.compile(keras.optimizers.SGD(0.2), losses, loss_weights={"label": 1.0, "mean": 0.5})
    expected = theirs.fit(X, labels, batch_size=16, epochs=2, verbose=0, shuffle=False).history
    mine = Branches(frozen)
    start = mine.hidden.get_weights()
    with mirrored(2) as strategy:
        result = trained(
            mine,
            strategy,
            X,
            labels,
            loss=losses,
            loss_weights={"label": 1.0, "mean": 0.5},
            metrics=None,
        )
        assert len(result[2].trainable_variables) == (4 if frozen else 6)
    assert_near(result, (expected, theirs.get_weights()), ["loss"])
    assert np.array_equal(start[0], mine.hidden.get_weights()[0]) == frozen


def test_a_functional_model_has_several_inputs_and_outputs_by_name_or_place():
    def network() -> Any:
        keras.utils.set_random_seed(3)
        a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
        joined = layers.Concatenate()([a, b])
        return keras.Model([a, b], [layers.Dense(1, name=name)(joined) for name in "pq"])

    x, y = {"a": X[:, 0, :4, 0], "b": X[:, 1, :3, 0]}, {"p": X[:, 2, :1, 0], "q": X[:, 3, :1, 0]}
    with mirrored(2) as strategy:
        named = trained(network(), strategy, x, y, loss={"p": "mse", "q": "mae"}, metrics=None)
        placed = trained(
            network(), strategy, [*x.values()], [*y.values()], loss=["mse", "mae"], metrics=None
        )
    assert_near(named, placed, ["loss", "p_loss", "q_loss"])
    theirs = network()
    theirs.compile(keras.optimizers.SGD(0.2), ["mse", "mae"])
    theirs.fit([*x.values()], [*y.values()], batch_size=16, epochs=2, verbose=0, shuffle=False)
    assert_near(named, ({}, theirs.get_weights()), [])


def test_sequences_of_words_keep_their_masks():
    def network() -> Any:
        keras.utils.set_random_seed(3)
        words = layers.Embedding(9, 4, mask_zero=True)
        parts = [keras.Input((6,), dtype="int32"), words, layers.GRU(3, return_sequences=True)]
        return keras.Sequential([*parts, layers.Dense(5)])

    words, labels = RNG.integers(0, 9, (48, 6)), RNG.integers(0, 5, (48, 6))
    with mirrored(2) as strategy:
        result = trained(network(), strategy, words, labels)
    assert_near(result, by_keras(network(), words, labels), ["loss"])


@pytest.mark.parametrize("pooled", [False, True])
def test_replicas_without_words_add_nothing_to_a_step(pooled):
    def network() -> Any:
        keras.utils.set_random_seed(3)
        words = layers.Embedding(9, 4, mask_zero=True, embeddings_regularizer="l2")
        # The mean of words that are all masked is no number.
        pool = layers.GlobalAveragePooling1D() if pooled else layers.GRU(3, return_sequences=True)
        last = layers.Dense(5, activity_regularizer="l2")
        return keras.Sequential([keras.Input((6,), dtype="int32"), words, pool, last])

    words = RNG.integers(0, 9, (18, 6))
    labels = RNG.integers(0, 5, 18 if pooled else (18, 6))
    with mirrored(3) as strategy:  # Two examples are left for the last batch.
        result = trained(network(), strategy, words, labels)
    assert_near(result, by_keras(network(), words, labels), ["loss"])


class Largest(keras.metrics.Metric):
    """A metric that does not add to its variable."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(predicted))))

    def result(self) -> Any:
        return self.largest + 0


def absolute(y: Any, predicted: Any) -> Any:
    return ops.mean(ops.abs(y - predicted), axis=-1)


def test_losses_metrics_and_optimizers_of_keras_do_here_what_they_do_there():
    def parts() -> dict[str, Any]:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
        kinds = [keras.metrics.AUC(name="area"), absolute, "mae"]
        softened = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
        optimizer = keras.optimizers.Adam(schedule, clipnorm=1.0)
        return {"optimizer": optimizer, "loss": softened, "metrics": kinds}

    theirs = mlp()
    theirs.compile(**parts())
    run = theirs.fit(X, ONE_HOT, batch_size=16, epochs=2, verbose=0, shuffle=False)
    with mirrored(2) as strategy:
        *result, model = trained(mlp(), strategy, y=ONE_HOT, **parts())
        assert_near(result, (run.history, theirs.get_weights()), ["loss", "area", "absolute"])
        assert model.metrics_names == ["loss", "area", "absolute", "mae"]
        for loss in (absolute, "dice", keras.losses.Dice()):
            model.compile("sgd", loss)
            assert np.isfinite(model.evaluate(X, ONE_HOT, verbose=0))
        excluding = keras.optimizers.AdamW()
        excluding.exclude_from_weight_decay(var_names=["bias"])
        for optimizer, problem in {
            keras.optimizers.Lion(): "no Lion with",
            keras.optimizers.SGD(gradient_accumulation_steps=2): "'gradient_accumulation_steps': 2",
            theirs.optimizer: "Adam has made 6 steps",
            excluding: "AdamW.exclude_from_weight_decay would have no effect",
        }.items():
            with pytest.raises(ValueError, match=problem):
                model.compile(optimizer, "mse")
        with pytest.raises(ValueError, match="reduction must be one of"):
            model.compile("sgd", keras.losses.MeanSquaredError("mean_with_sample_weight"))
        with pytest.raises(ValueError, match="add up the variables of a metric"):
            model.compile("sgd", "mse", metrics=[keras.metrics.F1Score()])
        model.compile("sgd", "mse", metrics=[Largest()])
        with pytest.raises(ValueError, match="its update_state must add to its variables"):
            model.evaluate(X, ONE_HOT, verbose=0)
        with pytest.raises(TypeError, match="EarlyStopping"):
            model.fit(X, ONE_HOT, callbacks=[keras.callbacks.EarlyStopping()])


def test_training_goes_on_after_keras_and_from_checkpoints(tmp_path):
    network = mlp()
    by_keras(network)
    before = network.get_weights()
    with mirrored(2) as strategy:
        stopping = nd.callbacks.EarlyStopping("val_loss", patience=0, min_delta=100.0)
        more = {"callbacks": [stopping], "validation_data": (X, Y), "epochs": 9}
        history, weights, model = trained(network, strategy, **more)
        assert len(history["val_loss"]) == 2
        with strategy.scope():
            saved = nd.Checkpoint(model=model).save(tmp_path / "checkpoint")
            model.fit(X, Y, verbose=0)
            model.load_weights(saved)
            model.write_back()
        for mine, theirs in zip(network.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        network.set_weights(before)
        for use in (model.fit, model.evaluate):
            with pytest.raises(ValueError, match="the weights of Keras's model were changed"):
                use(X, Y, verbose=0)
        with pytest.raises(NotImplementedError, match=r"keras_model.save\(path\) on the chief"):
            model.save(tmp_path / "model")
    assert not np.array_equal(before[0], weights[0])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_layers_compute_in_halves_and_keep_floats(policy):
    keras.config.set_dtype_policy(policy)
    try:
        network = cnn()
    finally:
        keras.config.set_dtype_policy("float32")
    with mirrored(2) as strategy:
        scale = nd.optimizers.LossScale(nd.optimizers.SGD(0.2), initial_scale=64.0)
        history, _, model = trained(network, strategy, epochs=6, optimizer=scale)
        assert history["loss"][-1] < history["loss"][0]
        assert {variable.dtype for variable in model.trainable_variables} == {np.dtype("f4")}
        model.compile("sgd", loss_of_keras())
        assert isinstance(model.optimizer, nd.optimizers.LossScale) == (policy == "mixed_float16")


@on_jax
def test_steps_can_be_compiled_whole():
    with nd.OneDeviceStrategy("cpu:0") as strategy, strategy.scope():
        network = cnn()
        model = distribute(network)
        model.compile(nd.optimizers.SGD(0.2), loss_of_keras(), ["accuracy"], jit_compile=True)
        history = model.fit(X, Y, 16, 2, 0, shuffle=False).history
    assert_near((history, network.get_weights()), by_keras(cnn()))


class Stepping(keras.Model):
    def train_step(self, *args: Any) -> Any:
        return {}


class Counting(keras.Model):
    """A model with a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Sum()
        self(X[:1])

    def call(self, x: Any) -> Any:
        self.seen.update_state(x)
        return x


def test_what_a_model_cannot_do_here_is_refused():
    image = keras.Input((8, 8, 1))
    bounded = layers.Dense(2, kernel_constraint="non_neg")(layers.Flatten()(image))
    cases: dict[str, Callable[[], Any]] = {
        "nothing would call its train_step": lambda: Stepping(image, layers.Flatten()(image)),
        "do not apply the constraint": lambda: keras.Model(image, bounded),
        "it has no variables yet": lambda: keras.Sequential([layers.Dense(2)]),
    }
    for problem, make in cases.items():
        with pytest.raises(ValueError, match=problem):
            distribute(make())
    with pytest.raises(TypeError, match="needs a model of Keras 3, got a Dense"):
        distribute(layers.Dense(2))
    with pytest.raises(ValueError, match="its call writes to a metric"):
        distribute(Counting())(X)
    dense = layers.SpectralNormalization(layers.Dense(2))
    scaled = keras.Sequential([image, layers.Flatten(), dense])
    with pytest.raises(ValueError, match=r"its call writes to .*kernel, on which"):
        distribute(scaled)(X, training=True)


def test_other_backends_are_refused():
    program = "import keras, ndistribute.interop.keras as k; k.distribute(keras.Sequential())"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=environment({"KERAS_BACKEND": "numpy"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "backend is numpy: set KERAS_BACKEND=jax or torch before" in ran.stderr


@pytest.mark.slow
@on_jax
def test_all_of_this_holds_with_pytorch():
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environ = environment({"KERAS_BACKEND": "torch"})
    ran = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stdout[-8000:]
