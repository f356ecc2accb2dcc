"""Models, losses, metrics and optimizers compute in compiled steps what they do in plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import layers, losses, metrics, optimizers
from tests.kinds import closing

pytest.importorskip("jax")

RNG = np.random.default_rng(5)
X = RNG.normal(size=(16, 6))
LABELS = RNG.integers(0, 3, size=16)
IMAGES = RNG.normal(size=(16, 8, 8, 2)) / 3
SERIES = RNG.normal(size=(16, 4, 3))
WORDS = RNG.integers(0, 10, size=(16, 5))


@pytest.fixture(params=[1, 2])
def compiled(request: pytest.FixtureRequest) -> Iterator[nd.TPUStrategy]:
    with closing(nd.TPUStrategy([f"tpu:{k}" for k in range(request.param)])) as strategy:
        yield strategy


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    layers.set_dtype_policy("float64")
    yield
    layers.set_dtype_policy("float32")


class Transformer(nd.Model):
    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(10, 8)
        self.attention = layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()
        self.inner = layers.Dense(8, activation="gelu")
        self.classes = layers.Dense(3)

    def call(self, x: Any) -> Any:
        h = self.words(x)
        h = self.norm(h + self.attention(h, h, use_causal_mask=True))
        return self.classes(np.mean(h + self.inner(h), axis=1))


def mlp() -> nd.Model:
    return nd.Sequential([layers.Dense(8, activation="relu"), layers.Dense(3)])


def cnn() -> nd.Model:
    return nd.Sequential(
        [
            layers.Conv2D(4, 3, activation="relu", padding="same", strides=2),
            layers.BatchNormalization(synchronized=True),
            layers.Conv2D(4, 2, groups=2, dilation_rate=2),
            layers.MaxPool2D(2, strides=1),
            layers.AveragePool2D(1),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def convolutions() -> nd.Model:
    return nd.Sequential(
        [
            layers.Conv2D(2, 3, groups=2, dilation_rate=2, padding="same", activation="tanh"),
            layers.Conv2D(512, 3),  # Its gradient is made in blocks of images.
            layers.MaxPool2D(2),
            layers.Conv2D(1, 1),
            layers.Conv2D(4, 2, strides=2, padding="same"),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def recurrent() -> nd.Model:
    return nd.Sequential(
        [
            layers.Embedding(10, 4, mask_zero=True),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.GRU(3),
            layers.Dense(3),
        ]
    )


def of_layer(layer: Callable[[], Any]) -> Callable[[], nd.Model]:
    return lambda: nd.Sequential([layer(), layers.Flatten(), layers.Dense(3)])


MODELS: dict[str, tuple[Callable[[], nd.Model], Any]] = {
    "mlp": (mlp, X),
    "cnn": (cnn, IMAGES),
    "convolutions": (convolutions, IMAGES),
    "transformer": (Transformer, WORDS),
}
LAYERS: dict[str, tuple[Callable[[], nd.Model], Any]] = {
    "batch normalization": (of_layer(layers.BatchNormalization), X),
    "columns": (of_layer(lambda: layers.ColumnParallelDense(4, activation="tanh")), X),
    "rows": (of_layer(lambda: layers.RowParallelDense(4)), X),
    "max pooling": (of_layer(lambda: layers.MaxPool2D(3, strides=2, padding="same")), IMAGES),
    "mean pooling": (of_layer(lambda: layers.AveragePool2D(3, 2, padding="same")), IMAGES),
    "transposed": (of_layer(lambda: layers.Conv2DTranspose(2, 3, strides=2)), IMAGES),
    "causal": (of_layer(lambda: layers.Conv1D(2, 2, padding="causal")), SERIES),
    "recurrent": (recurrent, WORDS),
    "gru": (of_layer(lambda: layers.GRU(3, return_sequences=True)), SERIES),
    "simple rnn": (of_layer(lambda: layers.SimpleRNN(3, activation="elu")), SERIES),
    "regularized": (of_layer(lambda: layers.Dense(4, kernel_regularizer="l2")), X),
    "dropout of nothing": (of_layer(lambda: layers.Dropout(0.0)), X),
}
OPTIMIZERS: dict[str, Callable[[], optimizers.Optimizer]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "nesterov": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adam": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "amsgrad": lambda: optimizers.Adam(0.1, amsgrad=True, weight_decay=0.1),
    "nadam": lambda: optimizers.Nadam(0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "averages": lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: optimizers.Adam(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "accumulation": lambda: optimizers.GradientAccumulation(optimizers.Adagrad(0.1), 3),
    "scale": lambda: optimizers.LossScale(optimizers.Adam(0.1), 2.0, growth_steps=2),
}


def made(strategy: Any, make: Callable[[], nd.Model], x: Any, **options: Any) -> nd.Model:
    """Return a compiled model with the same weights each time."""
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        model = make()
        model.compile(**{"optimizer": optimizers.Adam(0.01), "loss": loss} | options)
    model.build_for(x)
    rng = np.random.default_rng(1)
    model.set_weights([np.abs(rng.normal(size=w.shape)) / 3 for w in model.get_weights()])
    return model


def trained(strategy: Any, make: Callable[[], nd.Model], x: Any, **options: Any) -> list[Any]:
    """Return what a training and a prediction give."""
    model = made(strategy, make, x, metrics=["accuracy"], **options)
    history = model.fit(x, LABELS, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), *history.values(), model.predict(x, batch_size=8)]


def check_equal(ours: list[Any], plain: list[Any]) -> None:
    for array, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-12, atol=1e-12)


def on_cpus(strategy: Any) -> Any:
    return nd.MirroredStrategy([f"cpu:{k}" for k in range(strategy.num_replicas_in_sync)])


@pytest.mark.parametrize("kind", [*MODELS, *LAYERS])
def test_a_model_gives_what_plain_steps_give(compiled: nd.TPUStrategy, kind: str) -> None:
    make, x = (MODELS | LAYERS)[kind]
    with closing(on_cpus(compiled)) as plain:
        expected = trained(plain, make, x)
    check_equal(trained(compiled, make, x), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_updates_as_in_plain_steps(compiled: nd.TPUStrategy, kind: str) -> None:
    """Rows of a table, too."""

    def updated(strategy: Any) -> list[Any]:
        with strategy.scope():
            optimizer = OPTIMIZERS[kind]()
            table = nd.Variable(np.linspace(1, 2, 10).reshape(5, 2))
            weights = nd.Variable(np.linspace(-1, 1, 4).reshape(2, 2))

        def step(rows: Any, x: Any) -> None:
            with nd.GradientTape() as tape:
                loss = optimizer.scale_loss(np.sum((table[rows] @ weights - x) ** 2))
            pairs = zip(tape.gradient(loss, [table, weights]), [table, weights], strict=True)
            optimizer.apply_gradients(pairs)

        for k in range(7):
            strategy.run(step, args=(np.array([k % 5, 2, 2]), np.ones((3, 2)) * k))
        slots = [variable.numpy() for variable in optimizer.variables]
        return [table.numpy(), weights.numpy(), *slots]

    with closing(on_cpus(compiled)) as plain:
        expected = updated(plain)
    check_equal(updated(compiled), expected)


LOSSES: dict[str, tuple[Any, Any, Any]] = {
    "mse": ("mse", X[:, :3], ["mae", "root_mean_squared_error"]),
    "mae": ("mae", X[:, :3], ["mse"]),
    "huber": ("huber", X[:, :3], []),
    "binary": (
        losses.BinaryCrossentropy(from_logits=True),
        np.float64(X[:, :3] > 0),
        ["accuracy", "precision", "recall"],
    ),
    "categorical": (
        losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        np.eye(3)[LABELS],
        ["accuracy"],
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_and_metrics_count_as_in_plain_steps(compiled: nd.TPUStrategy, kind: str) -> None:
    loss, y, names = LOSSES[kind]

    def scores(strategy: Any) -> list[Any]:
        model = made(strategy, mlp, X, loss=loss, metrics=names)
        weight = np.linspace(0.5, 1, 16)
        logs = model.fit(X, y, batch_size=8, sample_weight=weight, shuffle=False, verbose=0).history
        return [*logs.values(), model.evaluate(X, y, verbose=0, return_dict=True)["loss"]]

    with closing(on_cpus(compiled)) as plain:
        expected = scores(plain)
    check_equal(scores(compiled), expected)


def test_one_of_several_probable_classes_counts(compiled: nd.TPUStrategy) -> None:
    with compiled.scope():
        metric = metrics.SparseTopKCategoricalAccuracy(2)
    compiled.run(metric.update_state, args=(np.array([0, 2]), np.array([[3.0, 2, 1], [3, 2, 1]])))
    assert metric.result() == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_losses_in_float32_stay_close_for_100_steps(kind: str) -> None:
    layers.set_dtype_policy("float32")
    make, x = MODELS[kind]

    def history(strategy: Any) -> Any:
        model = made(strategy, make, x, optimizer=optimizers.Adam(1e-3))
        return model.fit(x, LABELS, 8, epochs=50, shuffle=False, verbose=0).history["loss"]

    with closing(nd.TPUStrategy(["tpu:0"])) as strategy:
        np.testing.assert_allclose(history(strategy), history(nd.get_strategy()), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "mixed_float16", "mixed_bfloat16"])
def test_models_of_16_bits_train(compiled: nd.TPUStrategy, dtype: str) -> None:
    layers.set_dtype_policy(dtype)
    history = made(compiled, mlp, X).fit(X, LABELS, 8, epochs=8, shuffle=False, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


def test_a_step_that_overflows_changes_the_scale_alone(compiled: nd.TPUStrategy) -> None:
    with compiled.scope():
        weights = nd.Variable(np.ones(2, np.float32))
        optimizer = optimizers.LossScale(optimizers.Adam(0.5), 8.0, growth_steps=2)
    seen = []
    for gradient in (1.0, np.inf, 1.0, 1.0):
        pairs = [(np.full(2, gradient, np.float32), weights)]
        compiled.run(lambda grads: optimizer.apply_gradients([(grads, weights)]), (pairs[0][0],))
        seen.append((optimizer.scale, optimizer.iterations, float(weights[0])))
    assert [scale for scale, *_ in seen] == [8.0, 4.0, 4.0, 8.0]
    assert [steps for _, steps, _ in seen] == [1, 1, 2, 3]
    assert seen[0][2] == seen[1][2] > seen[2][2]
    assert len(compiled.compilations) == 1


def test_loss_scaling_makes_one_step_in_a_compiled_step(compiled: nd.TPUStrategy) -> None:
    with compiled.scope():
        weights, optimizer = nd.Variable(1.0), optimizers.LossScale(optimizers.SGD(0.5))

    def step() -> None:
        for _ in range(2):
            optimizer.apply_gradients([(np.ones(()), weights)])

    with pytest.raises(nd.errors.TracingError, match="second step in one compiled step"):
        compiled.run(step)


def test_labels_out_of_range_raise_what_plain_steps_raise(compiled: nd.TPUStrategy) -> None:
    model = made(compiled, mlp, X, metrics=["accuracy"])
    model.fit(X, LABELS, verbose=0)
    before = [*model.get_weights(), model.optimizer.iterations]
    wrong = r"'sparse_categorical_crossentropy' of labels .*must be in \[0, 3\), got 1 to 3\. The "
    with pytest.raises(ValueError, match=wrong):
        model.fit(X, np.arange(16) % 3 + 1, verbose=0)
    check_equal([*model.get_weights(), model.optimizer.iterations], before)


def test_words_out_of_range_raise_what_plain_steps_raise(compiled: nd.TPUStrategy) -> None:
    model = made(compiled, Transformer, WORDS)
    with pytest.raises(ValueError, match=r"embedding: indices must be in \[0, 10\), got 0 to 11\."):
        model.predict(np.arange(10).reshape(2, 5) + [[0], [2]])


def test_callbacks_set_rates_without_another_compilation(compiled: nd.TPUStrategy) -> None:
    model = made(compiled, mlp, X, optimizer=optimizers.SGD(0.1))
    model.fit(X, LABELS, 8, verbose=0)
    weights, count = model.get_weights(), len(compiled.compilations)
    stop = nd.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0)
    stopped = model.fit(X, LABELS, 8, epochs=2, shuffle=False, verbose=0, callbacks=[stop]).history
    check_equal(model.get_weights(), weights)
    assert stopped["loss"][0] == stopped["loss"][1]
    assert len(compiled.compilations) == count


def test_callbacks_save_and_validate(compiled: nd.TPUStrategy, tmp_path: Path) -> None:
    callbacks = [
        nd.callbacks.ModelCheckpoint(tmp_path / "weights"),
        nd.callbacks.BackupAndRestore(tmp_path / "backup"),
        nd.callbacks.EarlyStopping(patience=5),
        nd.callbacks.ReduceLROnPlateau(patience=1),
    ]
    model = made(compiled, mlp, X)
    fit: Any = {"batch_size": 8, "validation_split": 0.5, "verbose": 0, "callbacks": callbacks}
    history = model.fit(X, LABELS, epochs=3, **fit).history
    assert len(history["val_loss"]) == 3
    assert len([*tmp_path.glob("weights*")]) == 3


def test_checkpoints_go_to_other_strategies_and_back(
    compiled: nd.TPUStrategy, tmp_path: Path
) -> None:
    def saved(model: nd.Model, source: Any) -> Any:
        model.optimizer.build(model.trainable_variables)
        checkpoint = nd.Checkpoint(model=model, optimizer=model.optimizer)
        if source is not None:
            checkpoint.restore(source)
        model.fit(X, LABELS, 8, shuffle=False, verbose=0)
        return checkpoint.save(tmp_path / "state")

    with closing(on_cpus(compiled)) as plain:
        path, expected = None, None
        for strategy in (compiled, plain, compiled):
            path = saved(model := made(strategy, mlp, X), path)
            expected = saved(alone := made(plain, mlp, X), expected)
            check_equal(model.get_weights(), alone.get_weights())
    assert model.optimizer.iterations == 6


def test_dropout_draws_anew_in_each_step_and_replica() -> None:
    with closing(nd.TPUStrategy(["tpu:0", "tpu:1"])) as strategy:
        layer = layers.Dropout(0.5)
        masks = [
            mask.tobytes()
            for _ in range(2)
            for mask in strategy.run(lambda x: layer(x, training=True), (np.ones(64),)).values
        ]
    assert len(set(masks)) == 4


@pytest.mark.slow
def test_another_model_and_other_parts_have_steps_of_their_own(compiled: nd.TPUStrategy) -> None:
    model, other = made(compiled, mlp, X), made(compiled, mlp, X, optimizer=optimizers.SGD(0.0))
    model.fit(X, LABELS, verbose=0)
    other.fit(X, LABELS, verbose=0)
    check_equal(other.get_weights(), made(compiled, mlp, X).get_weights())
    model.layers[0].trainable = False
    kernel, last = model.get_weights()[0], model.get_weights()[2]
    model.fit(X, LABELS, verbose=0)
    check_equal([kernel], [model.get_weights()[0]])
    assert not np.array_equal(last, model.get_weights()[2])
    model.add(layers.Activation("softmax"))
    np.testing.assert_allclose(np.sum(model.predict(X), axis=-1), 1)


def test_batches_that_do_not_divide_say_what_to_do() -> None:
    with closing(nd.TPUStrategy(["tpu:0", "tpu:1"])) as strategy:
        model = made(strategy, mlp, X)
        model.fit(X[:12], LABELS[:12], batch_size=8, verbose=0)  # The last batch has equal parts.
        with pytest.raises(ValueError, match="drop_remainder"):
            model.fit(X[:13], LABELS[:13], batch_size=8, verbose=0)


@pytest.mark.parametrize(("kind", "replicas"), [("mlp", 1), ("transformer", 2)])
def test_jit_compile_computes_the_same(kind: str, replicas: int) -> None:
    make, x = MODELS[kind]
    with closing(nd.MirroredStrategy([f"cpu:{k}" for k in range(replicas)])) as strategy:
        check_equal(*(trained(strategy, make, x, jit_compile=jit) for jit in (True, False)))


def test_jit_compile_of_several_replicas_refuses_layers_with_collectives() -> None:
    with closing(nd.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy:
        model = made(strategy, cnn, IMAGES, jit_compile=True)
        with pytest.raises(TypeError, match="Compile code without collectives"):
            model.fit(IMAGES, LABELS, verbose=0)


def test_variables_on_servers_are_not_compiled() -> None:
    with nd.ParameterServerStrategy(devices=["cpu:0"]) as strategy:
        weights = nd.Variable(np.ones(2), name="w")
        with pytest.raises(nd.errors.TracingError, match="'w', which is on parameter servers, is"):
            nd.function(lambda x: x * weights)(np.ones(2))
        with strategy.scope():
            model = mlp()
        with pytest.raises(ValueError, match="jit_compile=True, but a compiled step cannot use"):
            model.compile("sgd", "mse", jit_compile=True)


@pytest.mark.parametrize(("rows", "batch_size"), [(1, 8), (11, 8)])
def test_evaluate_and_predict_take_any_number_of_rows(rows: int, batch_size: int) -> None:
    """The eight devices get a row each, or none, of the last batch."""
    x, labels, weights = X[:rows], LABELS[:rows], np.linspace(0.5, 2, rows)

    def results(strategy: Any) -> list[Any]:
        model = made(strategy, mlp, X, metrics=["accuracy"], weighted_metrics=["accuracy"])
        data = x, labels, batch_size, 0, weights
        return [model.predict(x, batch_size), *model.evaluate(*data)]

    with closing(nd.TPUStrategy([f"tpu:{k}" for k in range(8)])) as compiled:
        check_equal(results(compiled), results(nd.get_strategy()))


def test_an_uneven_evaluation_refuses_to_write_what_is_equal_on_all_replicas() -> None:
    class Counting(nd.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.calls = layers.Dense(3), nd.Variable(0.0, aggregation="sum")

        def call(self, x: Any, training: bool = False) -> Any:
            self.calls.assign_add(1.0)
            return self.dense(x)

    with closing(nd.TPUStrategy(["tpu:0", "tpu:1"])) as compiled:
        model = made(compiled, Counting, X)
        assert float(model.evaluate(X, LABELS, 8, verbose=0)) > 0
        with pytest.raises(nd.errors.TracingError, match="drop_remainder=True"):
            model.evaluate(X[:1], LABELS[:1], verbose=0)


class Logging(nd.Model):
    """A model with a test step of its own, whose logs are those of metrics, or numbers."""

    def __init__(self, numbers: bool) -> None:
        super().__init__()
        self.dense, self.numbers = layers.Dense(3), numbers

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(x)

    def test_step(self, data: Any) -> Any:
        logs = super().test_step(data)
        return {"loss": np.sum(data[0])} if self.numbers else logs


def test_an_uneven_evaluation_counts_in_steps_that_a_model_defines() -> None:
    def results(strategy: Any, numbers: bool = False) -> Any:
        model = made(strategy, lambda: Logging(numbers), X, metrics=["accuracy"])
        return model.evaluate(X[:3], LABELS[:3], verbose=0)

    with closing(nd.TPUStrategy(["tpu:0", "tpu:1"])) as compiled:
        check_equal(results(compiled), results(nd.get_strategy()))
        with pytest.raises(nd.errors.TracingError, match="its test_step returns numbers"):
            results(compiled, numbers=True)
