"""Ready-made estimators, and estimators of models: each learns as a direct computation does."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import estimator as est
from ndistribute.estimator import feature_column as fc
from ndistribute.graph import metrics
from ndistribute.graph.hooks import CheckpointSaverListener, SessionRunHook
from ndistribute.graph.optimizers import AdagradOptimizer, AdamOptimizer, GradientDescentOptimizer
from tests.contract_rows import TPUS
from tests.estimator.test_estimator import STRATEGIES

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 3))
Y = X @ np.array([[1.0], [-2.0], [3.0]]) + 0.5
COLUMN = fc.numeric_column("x", 3, np.float64)
SEEDED = est.RunConfig(tf_random_seed=1)


def batches(x: Any, y: Any, size: int = 32) -> Callable[[], nd.Dataset]:
    """Return an input function that never ends."""
    return lambda: (
        nd.Dataset.from_tensor_slices((x, y)).shuffle(len(y), seed=0).batch(size).repeat()
    )


def once(x: Any, y: Any) -> Callable[[], nd.Dataset]:
    return lambda: nd.Dataset.from_tensor_slices((x, y)).batch(100)


def digits() -> tuple[Any, Any, Any, Any]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x, y = found.data[order] / 16, found.target[order]
    return x[:1500], y[:1500], x[1500:], y[1500:]


@pytest.mark.parametrize(
    ("kind", "weight_column"),
    [(GradientDescentOptimizer, None), (nd.optimizers.SGD, None), (GradientDescentOptimizer, "w")],
)
def test_linear_regression_finds_the_least_squares_solution(kind, weight_column):
    weights = RNG.uniform(size=64) if weight_column else np.ones(64)
    noisy = Y + RNG.standard_normal(Y.shape)
    options = {"weight_column": weight_column, "optimizer": lambda: kind(0.2)}
    model = est.LinearRegressor([COLUMN], **options)
    model.train(lambda: ({"x": X, "w": weights}, noisy), steps=600)
    roots, rows = np.sqrt(weights)[:, None], np.c_[X, np.ones(64)]
    solution, *_ = np.linalg.lstsq(rows * roots, noisy * roots, rcond=None)
    kernel = model.get_variable_value("linear/linear_model/x/weights")
    np.testing.assert_allclose(kernel, solution[:3], atol=1e-6)
    found = model.evaluate(once({"x": X, "w": weights}, noisy))
    errors = np.square(rows @ solution - noisy)[:, 0]
    assert found["average_loss"] == pytest.approx(np.average(errors, weights=weights), rel=1e-6)
    assert found["label/mean"] == pytest.approx(np.average(noisy[:, 0], weights=weights))


def test_linear_classification_of_digits_is_as_good_as_a_softmax_regression():
    x, y, new_x, new_y = digits()
    column = fc.numeric_column("pixels", 64)
    model = est.LinearClassifier([column], n_classes=10, optimizer=AdagradOptimizer(0.2))
    model.train(batches({"pixels": x}, y, 100), steps=150)
    found = model.evaluate(once({"pixels": new_x}, new_y))
    assert found["accuracy"] > softmax_regression(x, y, new_x, new_y) - 0.02
    predicted = [one["class_ids"][0] for one in model.predict(once({"pixels": new_x}, new_y))]
    assert np.mean(predicted == new_y) == pytest.approx(found["accuracy"])
    shares = [each["probabilities"] for each in model.predict(once({"pixels": new_x}, new_y))]
    np.testing.assert_allclose(np.sum(shares, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(np.argmax(shares, axis=1), predicted)


def softmax_regression(x: Any, y: Any, new_x: Any, new_y: Any) -> float:
    """Return the accuracy after full steps of gradient descent in plain NumPy."""
    rows, new_rows = np.c_[x, np.ones(len(x))], np.c_[new_x, np.ones(len(new_x))]
    weights = np.zeros((65, 10))
    for _ in range(100):
        shares = np.exp(rows @ weights)
        shares /= shares.sum(axis=1, keepdims=True)
        weights -= 2 * rows.T @ (shares - np.eye(10)[y]) / len(x)
    return float(np.mean((new_rows @ weights).argmax(axis=1) == new_y))


def test_a_network_classifies_digits_better_than_a_linear_model():
    x, y, new_x, new_y = digits()
    column = fc.numeric_column("pixels", 64)
    model = est.DNNClassifier(
        [64], [column], n_classes=10, optimizer=AdamOptimizer(0.003), dropout=0.1, config=SEEDED
    )
    model.train(batches({"pixels": x}, y, 100), steps=250)
    assert model.evaluate(once({"pixels": new_x}, new_y))["accuracy"] > 0.95


def test_a_network_fits_what_no_linear_model_can():
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    column = fc.numeric_column("x")
    model = est.DNNRegressor([32], [column], optimizer=AdamOptimizer(0.02), config=SEEDED)
    model.train(batches({"x": x}, x * x), steps=300)
    found = model.evaluate(once({"x": x}, x * x))
    assert found["average_loss"] < 0.05 * np.var(x * x)


def test_words_are_classified_by_embeddings_and_by_weights():
    words = np.array([["good", "film"], ["bad", "film"], ["fine", ""], ["bad", "awful"]] * 4)
    labels, answers = np.array(["yes", "no", "yes", "no"] * 4), ["no", "yes"]
    vocabulary = ["good", "bad", "fine", "awful", "film"]
    column = fc.categorical_column_with_vocabulary_list("words", vocabulary)
    columns = [fc.embedding_column(column, 4)]
    options = {"optimizer": AdamOptimizer(0.05), "config": SEEDED}
    models = [
        est.LinearClassifier([column], label_vocabulary=answers),
        est.DNNClassifier([8], columns, label_vocabulary=answers, **options),
    ]
    asked = {"words": np.array([["good", ""], ["awful", "film"]])}
    for model in models:
        model.train(lambda: ({"words": words}, labels), steps=100)
        found = model.evaluate(once({"words": words}, labels))
        assert (found["accuracy"], found["precision"], found["recall"]) == (1, 1, 1)
        predicted = [one["classes"][0] for one in model.predict(lambda: asked)]
        assert predicted == ["yes", "no"]


WORDS = fc.categorical_column_with_hash_bucket("word", 10)
DEEP = [COLUMN, fc.embedding_column(WORDS, 2, dtype=np.float64)]
FEATURES = {"x": X, "word": np.array([f"word {k % 7}" for k in range(64)])}
PARTS = {"linear_feature_columns": [COLUMN, WORDS], "dnn_feature_columns": DEEP}
SEVERAL = {**PARTS, "dnn_hidden_units": [8], "linear_optimizer": "Ftrl", "dnn_optimizer": "Adam"}
CLIPPING = {**SEVERAL, "dnn_optimizer": nd.optimizers.SGD(0.1, clipnorm=1.0)}
KINDS: dict[str, Callable[..., Any]] = {
    "dense": lambda **options: est.DNNRegressor([8], DEEP, **options),
    "linear": lambda **options: est.LinearEstimator(est.regression_head(), [COLUMN], **options),
    "combined": lambda **options: est.DNNLinearCombinedRegressor(**SEVERAL, **options),
    "classes": lambda **options: est.DNNLinearCombinedClassifier(
        n_classes=3, **{**SEVERAL, "dnn_optimizer": nd.optimizers.SGD(lambda step: 0.1)}, **options
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mirrored", "workers"])
def test_replicas_train_ready_made_estimators_as_one_process_does(tmp_path, kind, name):
    losses, labels = [], np.arange(64) % 3 if kind == "classes" else Y
    with closing(STRATEGIES[name]()) as strategy:
        for used, size in ((None, 32), (strategy, 16)):
            config = est.RunConfig(tf_random_seed=1, train_distribute=used, eval_distribute=used)
            model = KINDS[kind](model_dir=str(tmp_path / str(size)), config=config)
            start = model.evaluate(once(FEATURES, labels))["loss"]
            data = nd.Dataset.from_tensor_slices((FEATURES, labels)).batch(size).repeat()
            model.train(lambda data=data: data, steps=10)
            losses.append(model.evaluate(once(FEATURES, labels))["loss"])
            assert losses[-1] < start
    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if kind == "classes" else 1e-12)


def test_a_warm_start_takes_the_values_of_another_training(tmp_path):
    data = batches(FEATURES, Y)
    first = KINDS["combined"](model_dir=str(tmp_path / "first")).train(data, steps=5)
    name = "linear/linear_model/x/weights"
    taken = first.get_variable_value(name)
    chosen = est.WarmStartSettings(first.model_dir, "linear/", None, {name: name})
    still = {key: nd.optimizers.SGD(0.0) for key in ("linear_optimizer", "dnn_optimizer")}
    for start, kept in ((first.model_dir, True), (chosen, False)):
        model = est.DNNLinearCombinedRegressor(warm_start_from=start, **{**SEVERAL, **still})
        model.train(data, steps=1)
        np.testing.assert_array_equal(model.get_variable_value(name), taken)
        deep = [key for key in first.get_variable_names() if key.endswith("hiddenlayer_0/kernel")]
        same = first.get_variable_value(deep[0]) == model.get_variable_value(deep[0])
        assert same.all() == kept


def test_metrics_are_added_and_a_training_ends_when_the_loss_falls_no_more(tmp_path):
    def largest(labels: Any, predictions: Any) -> dict[str, Any]:
        return {"mean_error": metrics.mean(labels - predictions["predictions"])}

    config = est.RunConfig(str(tmp_path), save_checkpoints_steps=5)
    model = est.LinearRegressor([COLUMN], optimizer=GradientDescentOptimizer(0.0), config=config)
    more = est.add_metrics(model, largest)
    hook = est.early_stopping.stop_if_no_decrease_hook(
        model, "loss", 10, run_every_secs=None, run_every_steps=1
    )
    spec = est.TrainSpec(batches({"x": X}, Y), hooks=[hook])
    every = est.EvalSpec(once({"x": X}, Y), throttle_secs=0)
    values, _ = est.train_and_evaluate(more, spec, every)
    assert values["mean_error"] == pytest.approx(Y.mean())
    assert 10 < values["global_step"] < 30


@pytest.mark.parametrize("name", ["stop_if_lower_hook", "stop_if_higher_hook"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_training_ends_when_a_metric_passes_a_threshold(tmp_path, name, factor):
    config = est.RunConfig(str(tmp_path), save_checkpoints_steps=5)
    model = est.LinearRegressor([COLUMN], optimizer=GradientDescentOptimizer(0.0), config=config)
    loss = np.mean(np.square(Y))
    hook = getattr(est.early_stopping, name)(
        model, "average_loss", factor * loss, run_every_secs=None, run_every_steps=1
    )
    spec = est.TrainSpec(batches({"x": X}, Y), max_steps=20, hooks=[hook])
    every = est.EvalSpec(once({"x": X}, Y), throttle_secs=0)
    values, _ = est.train_and_evaluate(model, spec, every)
    ends = (name == "stop_if_lower_hook") == (factor == 2.0)
    assert (values["global_step"] < 20) == ends


def compiled(learning_rate: float = 0.1) -> Any:
    model = nd.Sequential([nd.layers.Dense(1, dtype="float64")])
    model.compile(
        nd.optimizers.SGD(learning_rate), "mean_squared_error", metrics=["mean_absolute_error"]
    )
    return model


def test_a_graph_is_not_compiled_and_what_is_said_so():
    pytest.importorskip("jax")
    with nd.TPUStrategy(["tpu:0"]) as strategy:
        estimator = est.LinearRegressor(
            [COLUMN], config=est.RunConfig(train_distribute=strategy, eval_distribute=strategy)
        )
        for use in (estimator.train, estimator.evaluate):
            with pytest.raises(ValueError, match=r"TPUStrategy.*model_to_estimator"):
                use(batches(X, Y), steps=1)


@pytest.mark.parametrize("name", ["mirrored", "workers", "servers", "tpu-2"])
def test_a_model_becomes_an_estimator_under_its_strategy(tmp_path, name):
    if name in TPUS:
        pytest.importorskip("jax")
    with {**STRATEGIES, **TPUS}[name]() as strategy:
        config = est.RunConfig(train_distribute=strategy, save_checkpoints_steps=20)
        estimator = est.model_to_estimator(compiled(), tmp_path, config)
        spec = est.TrainSpec(batches(X, Y), max_steps=50)
        metrics, _ = est.train_and_evaluate(
            estimator, spec, est.EvalSpec(once(X, Y), steps=None, throttle_secs=0)
        )
        assert metrics["global_step"] == 50
        weights = estimator.get_variable_value("model/layers/0/kernel")
        bias = estimator.get_variable_value("model/layers/0/bias")
        errors = np.abs(X @ weights + bias - Y)
        found = metrics["mean_absolute_error"]
        assert found == pytest.approx(errors.mean(), rel=1e-5, abs=1e-6)  # Of float32.
        again = est.model_to_estimator(compiled(), tmp_path)
        again.train(batches(X, Y), max_steps=60)
        assert again.evaluate(once(X, Y))["global_step"] == 60
        predicted = [one["predictions"] for one in again.predict(lambda: X[:6])]
        np.testing.assert_allclose(predicted, Y[:6], atol=0.1)
        named = again.evaluate(lambda: ({"dense_input": X}, Y))
        assert named == pytest.approx(again.evaluate(once(X, Y)), rel=1e-5)


def test_an_estimator_of_a_model_keeps_all_checkpoints_and_ends_for_a_listener(tmp_path):
    class Listener(CheckpointSaverListener):
        def after_save(self, session: Any, global_step_value: int) -> bool:
            return global_step_value == 7

    config = est.RunConfig(save_checkpoints_steps=1, keep_checkpoint_max=0)
    estimator = est.model_to_estimator(compiled(), tmp_path, config)
    estimator.train(batches(X, Y), max_steps=20, saving_listeners=[Listener()])
    assert estimator.get_variable_value("model/optimizer/iterations") == 7
    assert len(list(tmp_path.glob("checkpoint.*"))) == 7
    with pytest.raises(ValueError, match="only in train"):
        estimator.evaluate(once(X, Y), hooks=[SessionRunHook()])
