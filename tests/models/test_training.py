"""`fit`, `evaluate` and `predict` give the results of one replica under every strategy."""

from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Model, Sequential, callbacks, layers, losses
from tests.kinds import strategy
from tests.processes import Ranks

__all__ = ["strategy"]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6))
Y = RNG.integers(0, 3, 50)


def classifier(optimizer: Any = None, **options: Any) -> Sequential:
    """Return a compiled model in float64."""
    nd.set_seed(1)
    model = Sequential(
        [layers.Dense(8, activation="tanh", dtype="float64"), layers.Dense(3, dtype="float64")]
    )
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or nd.optimizers.Adam(0.01), loss, **options)
    model(X[:1])
    return model


def one_replica(**options: Any) -> tuple[Any, Any]:
    """Return the history and the weights of the same training without a strategy."""
    model = classifier(metrics=["accuracy"])
    history = model.fit(X, Y, batch_size=16, epochs=3, verbose=0, **options).history
    return history, model.get_weights()


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "sample weights": {"sample_weight": np.arange(50.0)},
    "class weights": {"class_weight": {0: 2.0, 2: 0.5}},
    "initial epoch": {"initial_epoch": 1},
    "validation steps": {"validation_steps": 2, "validation_batch_size": 3, "validation_freq": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fit_gives_the_result_of_one_replica(strategy, options):
    expected, weights = one_replica(validation_data=(X[:7], Y[:7]), **options)
    with strategy.scope():
        model = classifier(metrics=["accuracy"])
    history = model.fit(
        X, Y, batch_size=16, epochs=3, verbose=0, validation_data=(X[:7], Y[:7]), **options
    ).history
    assert history.keys() == expected.keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-12)
    for ours, theirs in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def with_steps(model: Sequential) -> list[Any]:
    """Return the losses and weights after epochs that begin in the middle of a dataset."""
    dataset = nd.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=1).repeat().batch(16)
    history = model.fit(dataset, steps_per_epoch=3, epochs=3, verbose=0).history
    return [history["loss"], *model.get_weights()]


def that_stop(model: Sequential) -> list[Any]:
    """Return the losses and weights of a training that grows worse, and is stopped."""
    rates = callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch < 2 else 5.0)
    stop = callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    history = model.fit(X, Y, 16, 9, 0, [rates, stop], validation_data=(X, Y)).history
    assert stop.stopped_epoch == len(history["loss"]) - 1 < 8
    return [history["val_loss"], *model.get_weights()]


@pytest.mark.parametrize("train", [with_steps, that_stop])
def test_what_depends_on_the_epochs_gives_the_result_of_one_replica(strategy, train):
    expected = train(classifier())
    with strategy.scope():
        model = classifier()
    for ours, theirs in zip(train(model), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)


def test_all_workers_end_when_one_replica_meets_a_loss_that_is_no_number(strategy):
    size = strategy.num_replicas_in_sync
    labels = np.zeros((5 * size, 1))
    labels[3 * size - 1] = np.nan  # In the third batch, of the last replica alone.
    with strategy.scope():
        model = Sequential([layers.Dense(1, dtype="float64")])
        model.compile("sgd", "mse")
    used = [callbacks.TerminateOnNaN()]
    x = np.ones((5 * size, 2))
    history = model.fit(x, labels, size, 3, 0, used, shuffle=False)
    assert history.epoch == [0]
    assert model.optimizer.iterations == model.position.steps_made == 3


def test_predict_keeps_the_order_and_evaluate_counts_a_short_last_batch(strategy):
    expected = classifier(metrics=["accuracy"])
    with strategy.scope():
        model = classifier(metrics=["accuracy"])
    np.testing.assert_allclose(model.predict(X, batch_size=7), expected(X), atol=1e-12)
    loss, accuracy = model.evaluate(X, Y, batch_size=7, verbose=0)
    predicted = expected(X)
    assert accuracy == np.mean(predicted.argmax(axis=-1) == Y)
    assert loss == pytest.approx(float(expected.loss(Y, predicted)), abs=1e-12)


def test_a_penalty_counts_once_whatever_the_replicas(strategy):
    def penalized() -> Sequential:
        nd.set_seed(1)
        model = Sequential(
            [layers.Dense(3, kernel_regularizer=lambda w: 0.1 * np.sum(w * w), dtype="float64")]
        )
        model.compile(nd.optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(True))
        model(X[:1])
        return model

    alone = penalized()
    expected = alone.fit(X, Y, epochs=2, verbose=0).history["loss"]
    with strategy.scope():
        model = penalized()
    np.testing.assert_allclose(model.fit(X, Y, epochs=2, verbose=0).history["loss"], expected)
    assert [*model.named_variables()] == ["layers/0/kernel", "layers/0/bias"]
    for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_steps_beyond_the_data_warn_and_the_next_epoch_begins_anew(strategy):
    with strategy.scope():
        model = classifier(nd.optimizers.SGD(0.0))
    with pytest.warns(UserWarning, match="epoch 2 stops: the dataset ended after 2 of"):
        history = model.fit(X, Y, 10, epochs=3, steps_per_epoch=3, shuffle=False, verbose=0)
    losses = history.history["loss"]
    assert model.position.steps_made == 8
    assert losses[0] == pytest.approx(losses[2], abs=1e-12) != losses[1]
    evenly = model.fit(X, Y, 10, epochs=3, steps_per_epoch=5, verbose=0)
    assert len(evenly.epoch) == 3  # Without a warning, which would be an error.


def test_a_generator_that_has_ended_ends_the_training():
    model = classifier()
    batches = ((X[start : start + 10], Y[start : start + 10]) for start in range(0, 50, 10))
    with pytest.warns(UserWarning, match="dataset ended after . of steps_per_epoch=3"):
        history = model.fit(batches, epochs=4, steps_per_epoch=3, verbose=0)
    assert history.epoch == [0, 1]
    assert model.position.steps_made == 5
    with pytest.warns(UserWarning, match="evaluate stops: .* after 5 of steps=9"):
        model.evaluate(X, Y, 10, 0, steps=9)


class Frame:
    """What a data frame has to have."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape = array, array.shape

    def to_numpy(self) -> Any:
        return self.array


class Batches:
    """What a `Sequence` of Keras has to have."""

    epochs = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Any:
        rows = slice(10 * number, 10 * (number + 1))
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.epochs += 1


def test_frames_lists_sequences_and_generators_are_the_same_data(strategy):
    def fitted(x: Any, y: Any = None, **options: Any) -> Any:
        with strategy.scope():
            model = classifier()
        options |= {"batch_size": 10} if y is not None else {}
        return model.fit(x, y, epochs=2, shuffle=False, verbose=0, **options).history["loss"]

    expected = fitted(X, Y)
    sequence, whole = Batches(), Batches()
    generator = (whole[k % 5] for k in range(10))
    assert fitted(Frame(X), Frame(Y)) == expected
    assert fitted(X.tolist(), Y.tolist()) == expected
    assert fitted(sequence) == expected
    assert sequence.epochs == 2
    assert fitted(generator, steps_per_epoch=5) == expected
    divided = strategy.distribute_dataset(nd.Dataset.from_tensor_slices((X, Y)).batch(10))
    assert fitted(divided) == expected


def test_one_batch_is_trained_tested_and_predicted_as_by_fit(strategy):
    expected = classifier(metrics=["accuracy"])
    history = expected.fit(X, Y, 50, 2, 0, class_weight={1: 2.0}).history
    with strategy.scope():
        model = classifier(metrics=["accuracy"])
    losses_of = [model.train_on_batch(X, Y, class_weight={1: 2.0})[0] for _ in range(2)]
    np.testing.assert_allclose(losses_of, history["loss"], atol=1e-12)
    tested = model.test_on_batch(X, Y, return_dict=True)
    assert tested == pytest.approx(expected.evaluate(X, Y, verbose=0, return_dict=True), abs=1e-12)
    np.testing.assert_allclose(model.predict_on_batch(X), expected.predict(X), atol=1e-12)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("classes", [{0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0}], ids=["all", "one"])
def test_class_weights_are_weights_of_examples_and_1_where_there_is_none(classes, one_hot):
    model, other = classifier(), classifier()
    if one_hot:
        model.compile(model.optimizer, losses.CategoricalCrossentropy(from_logits=True))
    y = np.eye(3)[Y] if one_hot else Y
    model.fit(X, y, class_weight=classes, shuffle=False, verbose=0)
    weights = np.array([classes.get(label, 1.0) for label in Y])
    other.fit(X, Y, sample_weight=weights, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_steps_per_epoch_go_on_in_the_dataset():
    seen = []
    model = classifier(nd.optimizers.SGD(0.0))
    dataset = nd.Dataset.from_tensor_slices((X, Y)).repeat().batch(10)
    record = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    history = model.fit(dataset, steps_per_epoch=2, epochs=3, callbacks=[record], verbose=0)
    assert seen == [0, 1] * 3
    first = losses.sparse_categorical_crossentropy(Y[:20], model(X[:20]), from_logits=True)
    assert history.history["loss"][0] == pytest.approx(first.mean(), abs=1e-12)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"validation_split": 0.2}, slice(40, None)),
        ({"validation_data": nd.Dataset.from_tensor_slices((X, Y)).batch(7)}, slice(None)),
    ],
    ids=["the last examples", "a dataset with batches of its own"],
)
def test_validation_data_is_a_split_or_a_dataset(options, rows):
    model, history = classifier(nd.optimizers.SGD(0.0)), callbacks.History()
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=history, **options)
    expected = model.evaluate(X[rows], Y[rows], verbose=0)
    assert history.history["val_loss"] == [pytest.approx(expected)]


def frozen(model: Sequential) -> Sequential:
    """Return a model without variables to train."""
    model.trainable = False
    for layer in model.layers:
        layer.trainable = False
    return model


def refit(model: Sequential, loss: Any) -> None:
    """Fit a model with another loss."""
    model.compile("sgd", loss)
    model.fit(X, Y, verbose=0)


def fit_unbatched() -> None:
    """Fit a model that has no variables yet to a dataset without batches."""
    model = Sequential([layers.Dense(3)])
    model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(nd.Dataset.from_tensor_slices((X, Y)), verbose=0)


class TwoOutputs(Model):
    """A model of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(3)
        self.compile("sgd", "mse")

    def call(self, x: Any) -> Any:
        """Return the outputs."""
        return self.inner(x), self.inner(x)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: frozen(m).fit(X, Y, verbose=0), "has no variables to train"),
        (lambda m: Sequential([layers.Dense(2)]).fit(X, Y), r"call compile\(optimizer, loss\)"),
        (lambda m: m.fit(nd.Dataset.range(3), Y), "x is a dataset"),
        (lambda m: m.fit(X, Y, validation_split=1.5), "validation_split must be between"),
        (lambda m: m.fit(X, Y + 3, verbose=0), r"labels must be in \[0, 3\), got 3 to 5"),
        (lambda m: m.fit(X[:0], Y[:0], verbose=0), "fit got no batches"),
        (lambda m: m.evaluate(X[:0], Y[:0], verbose=0), "evaluate got no batches"),
        (lambda m: m.fit(iter([(X, Y)]), epochs=2, verbose=0), "for another epoch: a generator"),
        (lambda m: fit_unbatched(), "got an unbatched dataset"),
        (lambda m: Sequential([layers.Dense(1)]).predict(X[:0]), "got no batches"),
        (lambda m: m.fit(X, verbose=0), "got no labels: pass y"),
        (lambda m: m.fit(X, (Y, Y), verbose=0), "got labels: a tuple of 2 for one output"),
        (lambda m: m.fit(X, Y, batch_size=0), "batch_size must be an integer, 1 or more, got 0"),
        (lambda m: m.fit(X, Y, epochs=-1), "epochs must be an integer, 0 or more"),
        (lambda m: m.fit(X, Y, steps_per_epoch=0), "steps_per_epoch must be an integer, 1 or"),
        (lambda m: m.fit(X, Y, validation_freq=0), "validation_freq must be an integer, 1 or"),
        (lambda m: m.fit(X, Y, validation_data=X), "must be .x, y., .* got a ndarray"),
        (lambda m: m.fit(X, Y, validation_data=[X, Y]), "validation_data must be .* list of 2"),
        (lambda m: m.fit(X, Y, validation_data=(X,)), "validation_data must be .* tuple of 1"),
        (lambda m: m.fit(X, Y, validation_data=(X, Y), validation_split=0.1), "not both"),
        (lambda m: m.fit(nd.Dataset.range(3), validation_split=0.1), "needs arrays, got x as a D"),
        (lambda m: m.fit(X, Y, class_weight=[1, 2]), "class_weight must be a dict of weights"),
        (lambda m: m.fit(X, Y, verbose="loud"), "verbose must be 'auto', 0, 1 or 2"),
        (
            lambda m: TwoOutputs().fit(X, Y, verbose=0),
            "got labels: a ndarray for 2 outputs, 'output_1'",
        ),
        (lambda m: refit(m, ["mse", "mse"]), "loss: a list of 2 for one output"),
        (
            lambda m: refit(m, {"a": "mse", "b": None}),
            "loss: the model has one output, but no output 'a'",
        ),
        (
            lambda m: m.compile("sgd", "mse", "mae"),
            "metrics must be a list or a dict by output, got",
        ),
        (lambda m: m.compile(nd.optimizers.SGD), r"the class SGD: pass an object of it, SGD\("),
        (lambda m: m.compile("sgd", "nothing"), "unknown loss 'nothing': use one of"),
        (lambda m: m.compile("nothing"), "unknown optimizer 'nothing': use one of"),
        (lambda m: m.compile("sgd", "mse", ["nothing"]), "unknown metric 'nothing': use one of"),
        (lambda m: m.fit(X, Y, callbacks=[3], verbose=0), "must be a list of Callback objects"),
        (lambda m: layers.Dense(0), "units must be an integer, 1 or more, got 0"),
        (lambda m: layers.Dense("relu"), "Dense: units must be an integer, 1 or more, got 'relu'"),
        (lambda m: layers.Dense(None), "Dense: units must be an integer, 1 or more, got None"),
        (lambda m: layers.Conv1D(4, ["x"]), "Conv1D: kernel_size must be an integer, 1 or more"),
        (lambda m: layers.Dense(2, "nothing"), "unknown activation 'nothing'"),
        (lambda m: m(np.zeros((1, 5))), "built for 6 features"),
        (lambda m: m.set_weights([1.0]), "Nothing has changed"),
        (lambda m: Sequential([3]), "needs Layer objects"),
        (lambda m: losses.MeanSquaredError("x"), "reduction must be one of"),
    ],
)
def test_mistakes_are_explained(call, says):
    model = classifier()
    with pytest.raises((ValueError, TypeError, RuntimeError), match=says):
        call(model)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_layers_compute_in_the_dtype_of_the_policy_and_train(policy):
    layers.set_dtype_policy(policy)
    try:
        nd.set_seed(1)
        with nd.MirroredStrategy(["cpu:0", "cpu:1"]):
            model = Sequential([layers.Dense(8, activation="relu"), layers.Dense(3)])
            model.compile(nd.optimizers.SGD(0.5), losses.SparseCategoricalCrossentropy(True))
            history = model.fit(X, Y, batch_size=25, epochs=20, verbose=0).history
            assert model(X).dtype.name == policy.removeprefix("mixed_")
    finally:
        layers.set_dtype_policy("float32")
    assert {v.dtype for v in model.variables} == {np.dtype("float32")}
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert isinstance(model.optimizer, nd.optimizers.LossScale) == (policy == "mixed_float16")


def refusals(rank: int, size: int) -> list[str]:
    """Return how each use of arrays is refused that this worker has in an order of its own."""
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y, weight = x.sum(1), np.ones(40, np.float32)
    own = np.random.default_rng(rank).permutation(40)
    refused = []
    with nd.MultiWorkerMirroredStrategy():
        model = Sequential([layers.Dense(1)])
        model.compile("sgd", "mse")
        for use in (
            lambda: model.fit(x[own], y[own], 8, verbose=0),
            lambda: model.fit(x, y, 8, verbose=0, sample_weight=weight + rank),
            lambda: model.fit(x, y, 8, verbose=0, validation_data=(x, y[own])),
            lambda: model.evaluate(x, y[own], 8, verbose=0),
            lambda: model.predict(x[own], 8),
        ):
            try:
                use()
            except ValueError as error:
                refused.append(str(error))
        model.fit(x, y, 8, epochs=2, verbose=0, validation_data=(x, y))
    return refused


def test_workers_refuse_arrays_that_each_has_shuffled_in_its_own_way() -> None:
    wrong = ("array 0", "array 2", "array 1", "array 1", "array 0")
    with Ranks(2) as ranks:
        for refused in ranks.results(refusals):
            assert len(refused) == len(wrong)
            for message, array in zip(refused, wrong, strict=True):
                assert f"the {array} is " in message
                assert "on worker 1" in message
                assert "AutoShardPolicy.OFF" in message


def test_a_dataset_without_end_needs_a_number_of_steps():
    model = nd.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    data = nd.Dataset.from_tensor_slices((np.ones((4, 2)), np.ones((4, 1)))).repeat().batch(2)
    model.fit(data, steps_per_epoch=2, verbose=0)
    for method, name in ((model.fit, "steps_per_epoch"), (model.evaluate, "steps")):
        with pytest.raises(ValueError, match=f"forever: pass {name}"):
            method(data, verbose=0)
    with pytest.raises(ValueError, match="forever: pass steps"):
        model.predict(data)
