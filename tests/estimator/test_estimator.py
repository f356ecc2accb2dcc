"""Estimators: training, evaluation and prediction through checkpoints, under any strategy."""

import dataclasses
import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import estimator as est
from ndistribute import graph as g
from ndistribute.estimator import tasks
from ndistribute.graph import streaming_metrics as metrics

RNG = np.random.default_rng(0)
X = RNG.standard_normal((48, 3))
Y = X @ np.array([[1.0], [-2.0], [3.0]]) + 0.5
RATE = 0.1

STRATEGIES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "mirrored": lambda: nd.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored-3": lambda: nd.MirroredStrategy([f"cpu:{k}" for k in range(3)]),
    "central": lambda: nd.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "workers": lambda: nd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]),
    "servers": lambda: nd.ParameterServerStrategy(devices=["cpu:0", "cpu:1"]),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = STRATEGIES[request.param]()
    yield made
    if made is not None:
        made.close()


def linear(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> est.EstimatorSpec:
    """Return a linear model, which starts at random."""
    w = g.Variable(g.random_normal((3, 1), dtype=np.float64), name="w")
    b = g.Variable(np.zeros(1), name="b")
    predicted = features["x"] @ w + b
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, {"y": predicted})
    loss = np.mean(np.square(predicted - labels))
    step = g.get_or_create_global_step()
    train_op = g.GradientDescentOptimizer(params["rate"]).minimize(loss, global_step=step)
    measured = {
        "mse": metrics.mean_squared_error(labels, predicted),
        "area": metrics.auc(labels > 0, 1 / (1 + np.exp(-predicted)), num_thresholds=5000),
        "classes": metrics.mean_per_class_accuracy(labels > 0, predicted > 0, 2),
    }
    return est.EstimatorSpec(mode, None, loss, train_op, measured)


def estimator(directory: Path, **config: Any) -> est.Estimator:
    return est.Estimator(linear, directory, est.RunConfig(**config), {"rate": RATE})


def inputs(size: int, repeated: bool = False) -> Callable[[], nd.Dataset]:
    def input_fn() -> nd.Dataset:
        data = nd.Dataset.from_tensor_slices(({"x": X}, Y)).batch(size)
        return data.repeat() if repeated else data

    return input_fn


def trained(start: tuple[Any, Any], steps: int, size: int) -> tuple[Any, Any]:
    """Return the weights after steps of gradient descent, computed directly."""
    w, b = start
    for k in range(steps):
        rows = np.arange(k * size, (k + 1) * size) % len(X)
        error = 2 * (X[rows] @ w + b - Y[rows]) / size
        w, b = w - RATE * X[rows].T @ error, b - RATE * error.sum(axis=0)
    return w, b


def weights(model: est.Estimator) -> tuple[Any, Any]:
    return model.get_variable_value("w"), model.get_variable_value("b")


@pytest.mark.parametrize(
    "kind", [lambda data: data, lambda data: g.DatasetIterator(data).get_next()]
)
def test_steps_on_replicas_are_those_of_one_on_all_their_batches(tmp_path, strategy, kind):
    model = estimator(tmp_path, train_distribute=strategy)
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    batches = inputs(24 // replicas, repeated=True)
    model.train(lambda: kind(batches()), steps=1)
    start = weights(model)
    model.train(lambda: kind(batches()), steps=7)
    assert model.get_variable_value("global_step") == 8
    for found, expected in zip(weights(model), trained(start, 7, 24), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    model.train(inputs(10))  # Five batches: a step needs one for each replica.
    assert model.get_variable_value("global_step") == 8 + 5 // replicas


def test_metrics_are_those_of_all_examples_on_any_number_of_replicas(tmp_path, strategy):
    model = estimator(tmp_path, eval_distribute=strategy)
    model.train(inputs(10), steps=3)
    w, b = weights(model)
    errors = np.square(X @ w + b - Y)
    found = model.evaluate(inputs(10))
    assert found["mse"] == pytest.approx(errors.mean(), rel=1e-12)
    parts = [errors[k : k + 10].mean() for k in range(0, len(X), 10)]
    assert found["loss"] == pytest.approx(np.mean(parts), rel=1e-12)
    assert found["global_step"] == 3
    right = [np.mean((X @ w + b > 0)[kind]) for kind in (Y > 0, Y <= 0)]
    assert found["classes"] == pytest.approx((right[0] + 1 - right[1]) / 2, rel=1e-12)
    ranks = (X @ w + b)[Y > 0][:, None] > (X @ w + b)[Y <= 0]
    assert found["area"] == pytest.approx(np.mean(ranks), abs=0.002)


def test_a_model_is_trained_evaluated_used_and_trained_on(tmp_path):
    model = estimator(tmp_path)
    first = model.evaluate(inputs(16))  # Without a checkpoint: the initial values.
    assert (first["global_step"], model.latest_checkpoint()) == (0, None)
    model.train(inputs(16, repeated=True), max_steps=150)
    assert model.evaluate(inputs(16))["mse"] < 1e-3 < first["mse"]
    predicted = [one["y"] for one in model.predict(inputs(16))]
    np.testing.assert_allclose(predicted, Y, atol=0.1)
    again = estimator(tmp_path)
    again.train(inputs(16, repeated=True), max_steps=150)
    assert again.get_variable_value("global_step") == 150
    again.train(inputs(16, repeated=True), max_steps=200)
    assert again.evaluate(inputs(16))["global_step"] == 200
    assert again.get_variable_names() == ["b", "global_step", "w"]


@pytest.mark.parametrize("kind", [np.asarray, lambda x: g.as_tensor(x) * 1.0])
def test_arrays_and_constants_are_one_batch_for_each_step(tmp_path, kind):
    model = estimator(tmp_path)
    model.train(lambda: ({"x": kind(X)}, kind(Y)), steps=2)
    assert model.get_variable_value("global_step") == 2
    assert model.evaluate(lambda: ({"x": X}, Y))["mse"] > 0
    assert len(list(model.predict(lambda: {"x": X[:5]}))) == 5


def test_input_functions_and_model_functions_get_what_they_ask_for(tmp_path):
    seen: dict[str, Any] = {}

    def input_fn(mode: str, params: Any, config: est.RunConfig, input_context: Any) -> Any:
        seen["input"] = mode, params, config.model_dir, input_context.num_replicas_in_sync
        return inputs(8)()

    def model_fn(features: Any, labels: Any, mode: str, config: est.RunConfig) -> est.EstimatorSpec:
        seen["shapes"] = features["x"].shape, features["x"].dtype, labels.shape
        seen["directory"] = config.model_dir
        return linear(features, labels, mode, {"rate": RATE})

    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        est.Estimator(model_fn, tmp_path, est.RunConfig(train_distribute=strategy)).train(
            input_fn, steps=1
        )
    assert seen["input"] == (est.ModeKeys.TRAIN, {}, str(tmp_path), 2)
    assert seen["shapes"] == ((None, 3), np.float64, (None, 1))
    assert seen["directory"] == str(tmp_path)


def test_predictions_are_chosen_by_name_and_batch(tmp_path):
    def model_fn(features: Any) -> est.EstimatorSpec:
        found = {"twice": 2 * features, "rows": np.sum(features, axis=1)}
        return est.EstimatorSpec(est.ModeKeys.PREDICT, found)

    model = est.Estimator(model_fn, tmp_path)
    data = np.arange(6.0).reshape(3, 2)
    assert [one["rows"] for one in model.predict(lambda: data, "rows")] == [1, 5, 9]
    (batch,) = model.predict(lambda: data, yield_single_examples=False)
    np.testing.assert_array_equal(batch["twice"], 2 * data)
    with pytest.raises(ValueError, match=r"no keys \['other'\]: they have \['twice'"):
        next(model.predict(lambda: data, ["other"]))


def test_checkpoints_are_kept_by_number_and_scored_as_they_are_written(tmp_path):
    model = estimator(tmp_path, save_checkpoints_steps=10, keep_checkpoint_max=2)
    batches = inputs(16, repeated=True)
    spec = est.TrainSpec(batches, max_steps=35, hooks=None, saving_listeners=None)
    found, _ = est.train_and_evaluate(model, spec, est.EvalSpec(inputs(16), throttle_secs=0))
    assert found["global_step"] == 35
    assert len(list(tmp_path.glob("model.ckpt-*"))) == 2
    assert list(Path(model.eval_dir()).iterdir())
    evaluated = model.evaluate(inputs(16), checkpoint_path=model.latest_checkpoint())
    assert evaluated["mse"] == found["mse"]


class Saved(g.CheckpointSaverListener):
    """Keeps the steps of checkpoints."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_save(self, session: Any, global_step_value: int) -> None:
        self.steps.append(global_step_value)


def test_hooks_watch_the_first_replica_and_can_stop_all(tmp_path, strategy):
    model, hook, saved = estimator(tmp_path, train_distribute=strategy), Stopping(3), Saved()
    model.train(inputs(8, repeated=True), hooks=[hook], saving_listeners=[saved])
    assert (hook.seen, saved.steps) == (3, [0, model.get_variable_value("global_step")])


def test_a_loss_that_is_no_number_ends_the_training(tmp_path, strategy):
    model = estimator(tmp_path, train_distribute=strategy)
    with pytest.raises(g.NanLossDuringTrainingError, match="learning rate"):
        model.train(lambda: ({"x": X * np.nan}, Y), steps=5)


def test_the_same_seed_gives_the_same_weights(tmp_path):
    made = [estimator(tmp_path / name, tf_random_seed=3) for name in "ab"]
    for model in made:
        model.train(inputs(8), steps=2)
    for one, other in zip(*map(weights, made), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_task_and_the_cluster_come_from_tf_config(monkeypatch):
    cluster = '{"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}'
    task = '{"type": "worker", "index": 1}'
    monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {cluster}, "task": {task}}}')
    config = est.RunConfig()
    assert (config.task_type, config.task_id, config.master) == ("worker", 1, "c:1")
    assert (config.num_ps_replicas, config.num_worker_replicas) == (1, 3)
    assert not config.is_chief


class Stopping(g.SessionRunHook):
    """Ask to stop after so many runs; none: before the first one."""

    def __init__(self, runs: int) -> None:
        self.left, self.seen = runs, 0

    def after_create_session(self, session: Any, coord: Any) -> None:
        if not self.left:
            coord.request_stop()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.seen, self.left = self.seen + 1, self.left - 1
        if self.left <= 0:
            run_context.request_stop()


def test_a_hook_stops_training_evaluation_and_prediction(tmp_path):
    model = estimator(tmp_path)
    model.train(inputs(12, repeated=True), hooks=[Stopping(2)])
    assert model.get_variable_value("global_step") == 2
    model.train(inputs(12, repeated=True), hooks=[Stopping(0)])
    assert model.get_variable_value("global_step") == 2
    for work in (model.evaluate, lambda *args, **more: list(model.predict(*args, **more))):
        stopping = Stopping(2)
        work(inputs(12), hooks=[stopping])
        assert stopping.seen == 2


def test_functions_may_be_partial_and_change_their_params(tmp_path):
    def model_fn(
        features: Any, labels: Any, mode: str, params: Any, unit: float
    ) -> est.EstimatorSpec:
        return linear(features, labels, mode, {"rate": params.pop("rate") * unit})

    def input_fn(params: Any) -> Any:
        return inputs(params["size"])()

    bound = functools.partial(model_fn, unit=1.0)
    model = est.Estimator(bound, tmp_path, params={"rate": RATE})
    model.train(functools.partial(input_fn, params={"size": 12}), steps=1)
    assert model.evaluate(inputs(12))["global_step"] == 1
    assert model.params == {"rate": RATE}


def test_a_training_with_variables_of_hooks_goes_on_and_keeps_its_checkpoints(tmp_path):
    class Counting(g.SessionRunHook):
        def begin(self) -> None:
            g.Variable(0.0, trainable=False, name="of_hook")

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> est.EstimatorSpec:
        spec = linear(features, labels, mode, params)
        scaffold = g.Scaffold(init_fn=lambda scaffold, session: None)
        return dataclasses.replace(spec, scaffold=scaffold)

    config = est.RunConfig(save_checkpoints_steps=1, keep_checkpoint_max=2)
    model = est.Estimator(model_fn, tmp_path, config, {"rate": RATE})
    for _ in range(2):
        model.train(inputs(12, repeated=True), steps=4, hooks=[Counting()])
    assert model.get_variable_value("global_step") == 8
    assert len(list(tmp_path.glob("model.ckpt-*"))) == 2
    model = estimator(tmp_path / "all", save_checkpoints_steps=1, keep_checkpoint_max=0)
    model.train(inputs(12, repeated=True), steps=7)
    assert len(list((tmp_path / "all").glob("model.ckpt-*"))) == 8


def test_an_evaluator_goes_on_when_its_checkpoint_is_deleted(tmp_path):
    model, calls = estimator(tmp_path), itertools.count()
    model.train(inputs(12), max_steps=2)

    def input_fn() -> Any:
        if not next(calls):
            for folder in tmp_path.glob("model.ckpt-2.*"):
                shutil.rmtree(folder)
            model.train(inputs(12), max_steps=4)
        return inputs(12)()

    spec = est.EvalSpec(input_fn, steps=1, start_delay_secs=0, throttle_secs=0)
    found = tasks.Evaluations(model, spec).follow(4)
    assert found["global_step"] == 4
    assert next(calls) == 2
