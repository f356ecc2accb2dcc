"""A SIGTERM on any worker: all save at the same step, exit with the code, and continue later."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import PreemptionCheckpointHandler, Sequential, layers
from ndistribute.models.checkpoint import Checkpoint
from ndistribute.models.checkpoint_manager import CheckpointManager
from tests.processes import Tasks, wait_until

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 3)), RNG.normal(size=(24, 1))
STEP = 5
CODE = 143


def build() -> Sequential:
    """Return a compiled model whose training does not depend on random numbers."""
    model = Sequential([layers.Dense(1, dtype="float64", kernel_initializer="ones")])
    model.compile(nd.optimizers.Adam(0.01), "mse")
    model(X[:1])
    return model


def wait_for_signal(handler: PreemptionCheckpointHandler) -> None:
    """Say on the second worker that the step is made, and wait for the signal."""
    if os.environ["WAITS"] == "1" and '"index": 1' in os.environ["TF_CONFIG"]:
        open(os.environ["READY"], "w").close()
        wait_until(lambda: handler._signalled)


def fit_task() -> None:
    """Be a worker that calls `fit`."""
    directory = os.environ["DIRECTORY"]
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        model = build()
        # Only the chief sees the disk.
        own = directory if strategy.is_chief else "/nowhere"
        handler = PreemptionCheckpointHandler(CheckpointManager(Checkpoint(net=model), own))
        wait = nd.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: (
                wait_for_signal(handler) if model.position.steps_made == STEP else None
            )
        )
        history = model.fit(X, Y, 8, 4, 0, shuffle=False, callbacks=[wait, handler]).history
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if strategy.is_chief:
            np.savez(os.environ["RESULT"], *model.get_weights(), loss=history["loss"])


def loop_task() -> None:
    """Be a worker with a loop of its own."""
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        total = nd.Variable(0.0, aggregation="mean")
        manager = CheckpointManager(Checkpoint(total=total), os.environ["DIRECTORY"])

        def step() -> None:
            strategy.run(lambda: total.assign_add(1.0))

        total_steps = []
        with PreemptionCheckpointHandler(manager) as handler:
            for number in range(handler.steps_made + 1, 13):
                if number == STEP:
                    step_and_wait = lambda: (step(), wait_for_signal(handler))  # noqa: E731
                    handler.run(step_and_wait)
                else:
                    handler.run(step)
                total_steps.append(number)
        if strategy.is_chief:
            np.savez(os.environ["RESULT"], total.numpy(), steps=total_steps)


def run_twice(tmp_path, task: str) -> dict[str, np.ndarray]:
    """Interrupt a task of two workers, start it again, and return its result."""
    script = tmp_path / "task.py"
    script.write_text(f"from tests.models.test_preemption import {task}\n{task}()\n")
    environ = {
        "TASK_SCRIPT": str(script),
        "DIRECTORY": str(tmp_path / "saved"),
        "READY": str(tmp_path / "ready"),
        "RESULT": str(tmp_path / "result.npz"),
    }
    with Tasks(2, 0, chief=False, **environ) as tasks:
        tasks.start_all("worker", WAITS="1")
        wait_until((tmp_path / "ready").exists)
        tasks.send("worker", 1, signal.SIGTERM)
        assert [tasks.code("worker", index) for index in (0, 1)] == [CODE, CODE], tasks.said()
    assert not (tmp_path / "result.npz").exists()
    with Tasks(2, 0, chief=False, **environ) as tasks:
        tasks.start_all("worker", WAITS="0")
        assert [tasks.code("worker", index) for index in (0, 1)] == [0, 0], tasks.said()
    with np.load(tmp_path / "result.npz") as found:
        return dict(found)


def test_a_fit_of_two_workers_exits_and_continues_at_the_step_of_the_signal(tmp_path):
    found = run_twice(tmp_path, "fit_task")
    model = build()
    loss = model.fit(X, Y, 8, 4, 0, shuffle=False).history["loss"]
    np.testing.assert_allclose(found["loss"], loss[1:], atol=1e-12)
    for number, weights in enumerate(model.get_weights()):
        np.testing.assert_allclose(found[f"arr_{number}"], weights, atol=1e-12)


def test_a_loop_of_two_workers_exits_and_continues_at_the_step_of_the_signal(tmp_path):
    found = run_twice(tmp_path, "loop_task")
    assert found["steps"].tolist() == list(range(STEP + 1, 13))


def handler_of(tmp_path) -> tuple[nd.Variable, PreemptionCheckpointHandler]:
    v = nd.Variable(0.0)
    return v, PreemptionCheckpointHandler(CheckpointManager(Checkpoint(v=v), tmp_path))


def test_the_earlier_handler_is_restored_and_gets_a_signal_that_no_step_served(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        earlier = signal.getsignal(signal.SIGTERM)
        _, handler = handler_of(tmp_path)
        with handler:
            signal.raise_signal(signal.SIGTERM)
            assert not seen
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is earlier
        with pytest.raises(SystemExit) as left, handler:
            handler.run(signal.raise_signal, signal.SIGTERM)
        assert left.value.code == CODE
        assert seen == [signal.SIGTERM]  # It is served.
        assert signal.getsignal(signal.SIGTERM) is earlier
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("when", ["on_epoch_end", "on_train_end"])
def test_a_signal_between_epochs_and_at_the_end_is_served(when, tmp_path):
    model = build()
    handler = PreemptionCheckpointHandler(CheckpointManager(Checkpoint(net=model), tmp_path))
    kill = nd.callbacks.LambdaCallback(**{when: lambda *_: signal.raise_signal(signal.SIGTERM)})
    with pytest.raises(SystemExit) as left:
        model.fit(X, Y, 8, 2, 0, shuffle=False, callbacks=[kill, handler])
    assert left.value.code == 143
    weights, again = model.get_weights(), build()
    handler = PreemptionCheckpointHandler(CheckpointManager(Checkpoint(net=again), tmp_path))
    epochs = again.fit(X, Y, 8, 2, 0, shuffle=False, callbacks=[handler]).epoch
    assert epochs == ([1] if when == "on_epoch_end" else [])
    if not epochs:
        assert all(map(np.array_equal, again.get_weights(), weights))


def test_mistakes_are_explained(tmp_path):
    _, handler = handler_of(tmp_path)
    with pytest.raises(RuntimeError, match="write `with handler:` around the loop"):
        handler.run(print)
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(handler.__enter__)
        with pytest.raises(RuntimeError, match="must be used in the main thread"):
            entered.result(10)


def test_a_configuration_tells_when_how_and_after_what_time_to_end(tmp_path):
    total, ended, asked = nd.Variable(0.0), [], []

    def must_end() -> bool:
        asked.append(len(asked))
        return len(asked) > 2

    config = nd.models.TerminationConfig(
        termination_watcher_fn=must_end,
        exit_fn=lambda: ended.append("exit"),
        save_fn=lambda: ended.append("save"),
    )
    manager = CheckpointManager(Checkpoint(total=total), tmp_path)
    with PreemptionCheckpointHandler(manager, termination_config=config) as handler:
        for _ in range(3):
            assert not ended
            handler.run(total.assign_add, 1.0)
    assert (ended, len(asked), manager.latest_checkpoint) == (["save", "exit"], 3, None)
    patient = nd.models.TerminationConfig(grace_period=3600)
    with PreemptionCheckpointHandler(manager, termination_config=patient) as handler:
        signal.raise_signal(signal.SIGTERM)
        handler.run(total.assign_add, 1.0)
        assert float(total) == 4  # The training goes on, and nothing is saved yet.
        handler._signalled = False  # So that leaving does not end this process.
    with pytest.raises(ValueError, match="grace_period must be 0 or more seconds, got -1"):
        nd.models.TerminationConfig(grace_period=-1)
