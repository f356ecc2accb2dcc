"""Estimators in several processes: workers that reduce together, and all tasks of a cluster."""

import functools
import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.estimator import Estimator, RunConfig, early_stopping, model_to_estimator
from ndistribute.graph import latest_checkpoint
from ndistribute.graph.hooks import SessionRunHook
from tests.estimator import test_canned as canned
from tests.estimator import test_estimator as alone
from tests.processes import ROOT, Ranks, Tasks, wait_until


def train_together(rank: int, size: int, directory: str) -> tuple[dict[str, Any], Any, bool]:
    """Train and evaluate on batches that the workers share, where only the chief sees the disk."""

    def share(input_context: nd.InputContext, repeated: bool = False) -> nd.Dataset:
        assert input_context.num_replicas_in_sync == 2 * size
        data = nd.Dataset.from_tensor_slices(({"x": alone.X}, alone.Y)).batch(6)
        data = data.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return data.repeat() if repeated else data

    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        config = RunConfig(
            f"{directory}/{rank}", train_distribute=strategy, eval_distribute=strategy
        )
        model = Estimator(alone.linear, config=config, params={"rate": alone.RATE})
        model.train(share, steps=1)
        start = alone.weights(model) if rank == 0 else None
        model.train(lambda input_context: share(input_context, repeated=True), max_steps=8)
        found = model.evaluate(share)
        end = alone.weights(model) if rank == 0 else None
    return found, (start, end), model.latest_checkpoint() is not None


def stop_together(rank: int, size: int, directory: str) -> tuple[int, int]:
    """Train until the chief alone wants to stop; return how often it was asked, and the step."""
    asked: list[int] = []

    def enough() -> bool:
        asked.append(rank)
        return len(asked) == 3

    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        config = RunConfig(f"{directory}/stop-{rank}", train_distribute=strategy)
        model = Estimator(alone.linear, config=config, params={"rate": alone.RATE})
        hook = early_stopping.make_early_stopping_hook(model, enough, None, 1)
        asks_here = hook if rank == 0 else SessionRunHook()
        model.train(lambda: ({"x": alone.X}, alone.Y), hooks=[asks_here])
        return len(asked), model.evaluate(lambda: ({"x": alone.X}, alone.Y), 1)["global_step"]


def train_model_together(rank: int, size: int, directory: str) -> Any:
    """Train, evaluate and use an estimator of a model, where only the chief sees the disk."""
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        config = RunConfig(f"{directory}/model-{rank}", train_distribute=strategy)
        model = model_to_estimator(canned.compiled(), config=config)
        batches = canned.batches(canned.X, canned.Y)
        model.train(batches, steps=20)
        model.train(batches, max_steps=30)
        predicted = [one["predictions"].item() for one in model.predict(lambda: canned.X)]
        return model.evaluate(canned.once(canned.X, canned.Y)), predicted


def test_workers_train_as_one_process_and_agree_on_metrics(tmp_path: Path) -> None:
    # Under the name by which the ranks find it.
    module = importlib.import_module("tests.estimator.test_processes")
    with Ranks(2) as ranks:
        (found, (start, end), saved), other = ranks.results(module.train_together, str(tmp_path))
        models = ranks.results(module.train_model_together, str(tmp_path))
        stopped = ranks.results(module.stop_together, str(tmp_path))
    assert (saved, other[2]) == (True, False)
    assert found == other[0]
    # Worker k takes batches k, k + 2, ... and its replicas one each: two steps see all batches.
    for weights, expected in zip(end, trained(start, 7), strict=True):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)
    errors = np.square(alone.X @ end[0] + end[1] - alone.Y)
    assert found["mse"] == pytest.approx(errors.mean(), rel=1e-12)
    assert found["global_step"] == 8
    assert stopped == [(3, 3), (0, 3)]
    assert models[0] == models[1]
    assert models[0][0]["global_step"] == 30
    error = np.mean(np.abs(np.array(models[0][1]) - canned.Y[:, 0]))
    assert models[0][0]["mean_absolute_error"] == pytest.approx(error, rel=1e-5)


def trained(start: Any, steps: int) -> Any:
    return alone.trained(start, steps, 24)


def test_all_tasks_of_a_cluster_run_one_program(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        f"sys.argv = ['', '--model_dir', {str(tmp_path / 'model')!r}, '--max_steps', '300']\n"
        f"runpy.run_path({str(ROOT / 'examples' / 'estimator.py')!r}, run_name='__main__')\n"
    )
    with Tasks(workers=1, servers=1, TASK_SCRIPT=str(script)) as tasks:
        jobs, latest = ("chief", "evaluator", "worker", "ps"), []
        for _ in range(2):  # There is nothing left to do the second time.
            for job in reversed(jobs):
                tasks.start(job, 0)
            assert [tasks.code(job, 0) for job in jobs] == [0, 0, 0, 0]
            latest.append(latest_checkpoint(tmp_path / "model"))
        score, again = re.finditer(
            r"step (\d+), test accuracy ([0-9.]+)", tasks.said("evaluator:0")
        )
    # The first evaluator may end between the chief's save of step 300 and that at its end, which
    # has the worker's last step.
    assert latest[0] == latest[1]
    assert int(again[1]) >= int(score[1]) >= 300
    assert Path(str(latest[1])).name.partition(".0")[0] == f"model.ckpt-{again[1]}"
    for one in score, again:
        assert float(one[2]) > 0.94


TOGETHER = """
import numpy as np
from ndistribute import graph
from ndistribute.estimator import *

def model_fn(features, labels, mode, config):
    w = graph.Variable(np.zeros((3, 1)), name="w")
    loss = np.mean(np.square(features @ w - labels))
    count = config.num_worker_replicas
    optimizer = graph.SyncReplicasOptimizer(graph.GradientDescentOptimizer(0.1), count)
    step = optimizer.minimize(loss, graph.get_or_create_global_step())
    hook = optimizer.make_session_run_hook(config.is_chief)
    return EstimatorSpec(mode, loss=loss, train_op=step, training_hooks=[hook])

def input_fn(config):
    x = np.eye(4, 3)[:2] if config.is_chief else np.eye(4, 3)[2:]
    return x, x @ [[1.0], [2.0], [3.0]]

model = Estimator(model_fn, config=RunConfig({directory!r}))
train_and_evaluate(model, TrainSpec(input_fn, max_steps=30), EvalSpec(input_fn))
"""


def test_workers_of_servers_make_each_step_together(tmp_path: Path) -> None:
    script, directory = tmp_path / "program.py", str(tmp_path / "model")
    script.write_text(TOGETHER.format(directory=directory))
    with Tasks(workers=1, servers=1, TASK_SCRIPT=str(script)) as tasks:
        for job in ("ps", "worker", "chief"):
            tasks.start(job, 0)
        assert [tasks.code(job, 0) for job in ("chief", "worker", "ps")] == [0, 0, 0]
    w, x = np.zeros((3, 1)), np.eye(4, 3)
    for _ in range(30):
        w -= 0.1 * 2 * x.T @ (x @ w - x @ [[1.0], [2.0], [3.0]]) / 4
    found = Estimator(lambda features: features, directory).get_variable_value("w")
    np.testing.assert_allclose(found, w, rtol=0, atol=1e-12)


SLOW = """
import time
import numpy as np
import ndistribute as nd
from ndistribute.estimator import *

def slowly(x, y):
    time.sleep(0.02)
    return x, y

def input_fn():
    x = np.random.default_rng(0).standard_normal((48, 3))
    rows = nd.Dataset.from_tensor_slices(({{"x": x}}, x @ np.ones((3, 1))))
    return rows.batch(12).map(slowly).repeat()

config = RunConfig({directory!r}, save_checkpoints_steps=10)
model = LinearRegressor([feature_column.numeric_column("x", 3)], config=config)
train_and_evaluate(model, TrainSpec(input_fn, max_steps=100), EvalSpec(input_fn, steps=1))
"""


def test_training_goes_on_after_each_task_was_killed_and_started_again(tmp_path: Path) -> None:
    script, directory = tmp_path / "program.py", tmp_path / "model"
    script.write_text(SLOW.format(directory=str(directory)))

    def has_saved(step: int) -> bool:
        return any(saved_step(path) >= step for path in directory.glob("model.ckpt-*"))

    with Tasks(workers=1, servers=1, TASK_SCRIPT=str(script)) as tasks:
        for job in ("ps", "worker", "chief"):
            tasks.start(job, 0)
        for job, step in (("worker", 20), ("chief", 40), ("ps", 60)):
            wait_until(functools.partial(has_saved, step))
            tasks.kill(job, 0)
            tasks.start(job, 0)
        assert [tasks.code(job, 0) for job in ("chief", "worker", "ps")] == [0, 0, 0]
    last = max(saved_step(path) for path in directory.glob("model.ckpt-*"))
    # Workers that do not wait for each other may end steps that had begun.
    assert 100 <= last < 105


def saved_step(path: Path) -> int:
    return int(path.name.partition("-")[2].partition(".")[0])
