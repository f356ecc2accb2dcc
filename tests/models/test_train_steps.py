"""Steps that models define themselves are called, and give the results of one replica."""

from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import callbacks, layers, losses, metrics
from tests.kinds import strategy

__all__ = ["strategy"]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6))
Y = RNG.normal(size=(50, 1))


def dense(units: int, activation: Any = None, **options: Any) -> layers.Dense:
    return layers.Dense(units, activation, dtype="float64", **options)


class Regression(nd.Model):
    """A model of one output, which counts a penalty and a loss of its activations."""

    def __init__(self) -> None:
        super().__init__(dtype="float64")
        self.hidden = dense(4, "tanh", kernel_regularizer=nd.models.regularizers.L2(0.01))
        self.output = dense(1)

    def call(self, x: Any) -> Any:
        return self.output(self.hidden(x))


class ByComputeLoss(Regression):
    """The first step of Keras' guide."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with nd.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        trained = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}


class ByOwnMetrics(Regression):
    """The second one: a loss for each example, and metrics of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.error = metrics.Mean("loss"), metrics.MeanAbsoluteError("mae")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with nd.GradientTape() as tape:
            predicted = self(x, training=True)
            each = losses.mean_squared_error(y, predicted) / 16
        trained = self.trainable_variables
        gradients = tape.gradient(each, trained)
        self.optimizer.apply_gradients(zip(gradients, trained, strict=True))
        self.seen.update_state(each)
        self.error.update_state(y, predicted)
        return {"loss": self.seen.result(), "mae": self.error.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        predicted = self(x, training=False)
        self.seen.update_state(losses.MeanSquaredError()(y, predicted))
        self.error.update_state(y, predicted)
        return {"loss": self.seen.result(), "mae": self.error.result()}

    @property
    def metrics(self) -> Any:
        return [self.seen, self.error]


class ByTheBase(Regression):
    """A step that adds a number to what its base returns."""

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "steps": 1.0}

    def test_step(self, data: Any) -> Any:
        return super().test_step(data)


class OfKeras2(Regression):
    """A step with the compiled loss."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with nd.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compiled_loss(y, predicted, regularization_losses=self.losses)
        trained = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        return self.compute_metrics(x, y, predicted, None)


class WithComputeLoss(Regression):
    """A loss that adds to that of the base."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **_: Any):
        return super().compute_loss(x, y, y_pred, *args) + 0.1 * losses.Huber()(y, y_pred)


class WithAddedLoss(Regression):
    """A loss and a metric that `call` adds."""

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        self.add_loss(0.01 * np.sum(np.square(self.hidden.kernel)))
        self.add_metric(hidden, "activity")
        return self.output(hidden)


class Gan(nd.Model):
    """Two models and two optimizers, as in the tutorial of the DCGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nd.Sequential([dense(5, "tanh"), dense(6)])
        self.discriminator = nd.Sequential([dense(5, "tanh"), dense(1)])
        self.tracker = metrics.Mean("generator_loss")

    def compile(self, of_generator: Any, of_discriminator: Any) -> None:
        super().compile()
        self.optimizers = of_generator, of_discriminator
        self.cross_entropy = losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data: Any) -> Any:
        real, noise = data
        with nd.GradientTape() as tape, nd.GradientTape() as other:
            fake = self.generator(noise, training=True)
            logits = self.discriminator(real, training=True)
            fakes = self.discriminator(fake, training=True)
            deceived = self.cross_entropy(np.ones((len(noise), 1)), fakes)
            seen = self.cross_entropy(np.ones((len(real), 1)), logits)
            total = seen + self.cross_entropy(np.zeros((len(noise), 1)), fakes)
        pairs = (self.generator, tape, deceived), (self.discriminator, other, total)
        for optimizer, (part, recorded, loss) in zip(self.optimizers, pairs, strict=True):
            trained = part.trainable_variables
            optimizer.apply_gradients(zip(recorded.gradient(loss, trained), trained, strict=True))
        self.tracker.update_state(deceived)
        return {"d_loss": total, "g_loss": self.tracker.result()}


def trained(kind: Any, rows: int = 50, **options: Any) -> tuple[Any, Any]:
    """Return the history and the weights of a model of a kind."""
    nd.set_seed(1)
    model, x, y = kind(), X[:rows], Y[:rows]
    if kind is Gan:
        for part, features in ((model.generator, 4), (model.discriminator, 6)):
            part.build((None, features))
        model.compile(nd.optimizers.Adam(0.01), nd.optimizers.SGD(0.1))
        return model.fit(x, x[:, :4], 16, 3, 0).history, model.get_weights()
    model.compile(nd.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    history = model.fit(x, y, 16, 3, 0, validation_data=(x[: rows - 16], y[: rows - 16])).history
    return history, model.get_weights()


KINDS = [ByComputeLoss, ByOwnMetrics, ByTheBase, OfKeras2, WithComputeLoss, WithAddedLoss, Gan]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_model_gives_the_result_of_one_replica(strategy, kind):
    expected, weights = trained(kind)
    with strategy.scope():
        history, ours = trained(kind)
    assert_equal(history, expected, ours, weights)


def assert_equal(history: Any, expected: Any, ours: Any, weights: Any) -> None:
    """Compare two results of `trained`."""
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-12)
    for mine, theirs in zip(ours, weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


@pytest.mark.parametrize("kind", [ByComputeLoss, WithAddedLoss, Gan])
def test_a_step_of_a_model_is_compiled(kind):
    pytest.importorskip("jax")
    expected, weights = trained(kind, 48)
    with nd.TPUStrategy(["tpu:0", "tpu:1"]) as tpus, tpus.scope():
        history, ours = trained(kind, 48)
    assert_equal(history, expected, ours, weights)
    if kind is ByComputeLoss:
        history, ours = trained(kind, 48, jit_compile=True)
        assert_equal(history, expected, ours, weights)


@pytest.mark.parametrize("kind", [ByComputeLoss, ByTheBase, OfKeras2])
def test_a_step_of_a_model_does_what_that_of_fit_does(kind):
    expected, weights = trained(Regression)
    history, ours = trained(kind)
    weighs = kind is not ByComputeLoss  # Whose mean counts each batch alike.
    for name in expected if weighs else ("mae", "val_loss", "val_mae"):
        np.testing.assert_allclose(history[name], expected[name], atol=1e-12)
    for mine, theirs in zip(ours, weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


def test_callbacks_and_the_progress_see_what_a_step_returns(capsys):
    seen: list[Any] = []
    model = ByTheBase()
    model.compile("sgd", "mse")
    see = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    model.fit(X, Y, 25, verbose=2, callbacks=see)
    assert [logs.keys() for logs in seen] == [{"loss", "steps"}] * 2
    assert "steps: 1.0000" in capsys.readouterr().err


class WithLogs(Regression):
    """A model whose step returns what it was told."""

    def __init__(self, logs: Any) -> None:
        super().__init__()
        self.logs = logs

    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        return self.logs


class WithoutLoss(Regression):
    """A model whose loss is a function."""

    def call(self, x: Any) -> Any:
        self.add_loss(lambda: 0.0)
        return self.output(self.hidden(x))


def fit(model: nd.Model, loss: Any = "mse") -> None:
    model.compile("sgd", loss)
    model.fit(X, Y, verbose=0)


def jitted() -> None:
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        ByComputeLoss().compile("sgd", "mse", jit_compile=True)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fit(WithLogs([1.0])), "train_step of model .* returned .1.0.: return a dict"),
        (
            lambda: fit(WithLogs({"a": np.ones(2)})),
            "returned .'a': array.*: return a dict of numbers",
        ),
        (lambda: fit(WithoutLoss()), "add_loss of .* got a function: pass a number"),
        (lambda: fit(nd.Sequential([dense(1)]), None), "has no loss: call compile"),
        (lambda: Gan().fit(X, Y), r"call compile\(optimizer, loss\) first"),
        (jitted, "communicates with other replicas: leave out jit_compile, use TPUStrategy"),
        (lambda: Regression().add_metric(1.0, "a", "sum"), "aggregation must be 'mean'"),
    ],
)
def test_mistakes_are_explained(call, says):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=says):
        call()
