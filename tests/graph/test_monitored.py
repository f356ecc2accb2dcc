"""Supervised training: sessions that initialise, restore, call hooks, save, and recover."""

import contextlib
import logging
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import errors, event_files
from ndistribute import graph as g
from ndistribute.compat.graph_supervisor import Supervisor
from ndistribute.graph import hooks, monitored, summary
from tests.graph.conftest import PS
from tests.processes import HANG_SECONDS, wait_until


def model() -> tuple[Any, g.Tensor]:
    """Return the training step and the loss of a model with one weight."""
    w = g.Variable(np.float64(1.0), name="w")
    loss = w * w
    summary.scalar("loss", loss)
    step = g.GradientDescentOptimizer(0.25).minimize(loss, g.get_or_create_global_step())
    return step, loss


@contextlib.contextmanager
def training(
    *watching: Any, target: str = "", **options: Any
) -> Iterator[tuple[Any, Any, g.Tensor]]:
    """Yield a session of the model with hooks, the training step and the loss."""
    with g.Graph().as_default():
        step, loss = model()
        with g.MonitoredTrainingSession(target, hooks=watching, **options) as session:
            yield session, step, loss


def train(last: int, folder: Path | None = None, *more: Any, **options: Any) -> float:
    """Train up to a global step; return the last loss."""
    stop = hooks.StopAtStepHook(last_step=last)
    options |= {"checkpoint_dir": folder, "save_checkpoint_steps": 2}
    with training(stop, *more, **options) as (session, step, loss):
        while not session.should_stop():
            value = session.run([step, loss])[1]
    return float(value)


class Writer:
    """Keeps what is written and its steps, and -1 for each time that it is told to write now."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[bytes] = []

    def add_summary(self, value: Any, step: int) -> None:
        self.steps.append(step)
        self.values.append(value)

    def flush(self) -> None:
        self.steps.append(-1)

    def close(self) -> None: ...


class Failing(hooks.SessionRunHook):
    """Raises an error in a method."""

    def __init__(self, method: str, error: Exception) -> None:
        def fail(*args: Any) -> None:
            raise error

        setattr(self, method, fail)


def test_a_training_goes_on_where_an_earlier_one_ended(tmp_path):
    assert train(4, tmp_path) == 0.25**3
    assert str(g.latest_checkpoint(tmp_path)).endswith("model.ckpt-4")
    assert train(6, tmp_path) == 0.25**5
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_summaries_are_written_every_so_many_steps():
    writer: Any = Writer()
    with g.Graph().as_default():
        step, _ = model()
        hook = hooks.SummarySaverHook(3, summary_writer=writer, summary_op=summary.merge_all())
        stop = hooks.StopAtStepHook(last_step=8)
        with g.MonitoredTrainingSession(hooks=[hook, stop]) as session:
            session.run(g.get_or_create_global_step())  # This makes no step.
            while not session.should_stop():
                session.run(step)
    assert writer.steps == [0, 3, 6, -1]  # Who passed the writer closes it.


def test_a_hook_saves_by_the_saver_of_the_graph_and_can_be_used_again(tmp_path):
    for steps in (1, 2):
        with g.Graph().as_default():
            step, _ = model()
            saving = hooks.CheckpointSaverHook(tmp_path / str(steps), save_steps=1)
            counting = hooks.StepCounterHook(1, output_dir=tmp_path / str(steps))
            for _ in range(steps):
                with g.MonitoredTrainingSession(hooks=[saving, counting]) as session:
                    session.run(step)
            assert str(g.latest_checkpoint(tmp_path / str(steps))).endswith("model.ckpt-1")


def test_files_are_closed_when_a_hook_fails_at_the_end(tmp_path):
    counting = hooks.StepCounterHook(1, output_dir=tmp_path)
    failing = Failing("end", ValueError("at the end"))
    with pytest.raises(ValueError, match="at the end"), training(failing, counting) as (s, step, _):
        s.run(step)
    assert counting._writer is not None
    with pytest.raises(ValueError, match="closed"):
        counting._writer.add_summary(event_files.scalar("late", 1.0), 1)


def test_none_for_both_of_two_intervals_writes_nothing(tmp_path):
    options: Any = dict.fromkeys(
        f"save_{what}" for what in "summaries_steps summaries_secs checkpoint_secs".split()
    )
    options |= {"checkpoint_dir": tmp_path, "log_step_count_steps": None}
    with training(**options) as (session, step, _):
        session.run(step)
    assert not list(tmp_path.iterdir())


def test_a_program_that_fails_like_a_lost_task_is_not_begun_again():
    failing = Failing("after_run", errors.UnavailableError("of the program"))
    with training(failing) as (session, step, _):
        with pytest.raises(errors.UnavailableError, match="of the program"):
            session.run(step)
        assert session.run_step_fn(lambda c: c.session.run(g.get_or_create_global_step())) == 1
    with (
        nd.Server.create_local_server() as server,
        training(failing, target=server.target, max_wait_secs=0.1) as (session, step, _),
        pytest.raises(errors.UnavailableError, match="of the program"),
    ):
        session.run(step)


class Feeding(hooks.SessionRunHook):
    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def before_run(self, run_context: Any) -> Any:
        return hooks.SessionRunArgs(None, {self._tensor: 2.0})


def test_mistakes_in_hooks_are_errors(tmp_path):
    with pytest.raises(ValueError, match="either scaffold or summary_op"):
        hooks.SummarySaverHook(1, output_dir=tmp_path)
    with g.Graph().as_default():
        x = g.placeholder(np.float64, [])
        with g.MonitoredTrainingSession(hooks=[Feeding(x)]) as session:
            assert session.run(x) == 2.0
            with pytest.raises(
                RuntimeError, match=r"Feeding feeds .*placeholder.* another hook feeds it too"
            ):
                session.run(x, {x: 1.0})


def test_a_finished_graph_can_be_trained_again(tmp_path):
    with g.Graph().as_default():
        step, loss = model()
        for expected in (1.0, 0.25):
            with g.MonitoredTrainingSession(checkpoint_dir=tmp_path) as session:
                assert session.run([loss, step])[0] == expected
            with pytest.raises(RuntimeError, match="was closed"):
                session.run(loss)
        late = hooks.StopAtStepHook(last_step=2)
        with g.MonitoredTrainingSession(checkpoint_dir=tmp_path, hooks=[late]) as session:
            assert session.should_stop()


def test_hooks_log_count_and_end(caplog, tmp_path):
    with caplog.at_level(logging.INFO, "ndistribute"), g.Graph().as_default():
        step, loss = model()
        ops = hooks.FinalOpsHook(loss)
        watching = [
            hooks.LoggingTensorHook({"loss": loss.op.name}, every_n_iter=2),
            hooks.StepCounterHook(every_n_steps=2),
            hooks.StopAtStepHook(num_steps=3),
            hooks.SummarySaverHook(
                save_steps=1, output_dir=tmp_path, summary_op=summary.merge_all()
            ),
            ops,
        ]
        with g.MonitoredTrainingSession(hooks=watching) as session:
            while not session.should_stop():
                session.run(step)
    assert ops.final_ops_values == 0.25**3
    for text in ("loss = 1.0", "loss = 0.0625", "global_step/sec"):
        assert text in caplog.text


def test_a_loss_that_is_no_number_ends_the_training():
    with g.Graph().as_default():
        x = g.placeholder(np.float64)
        with g.MonitoredTrainingSession(hooks=[hooks.NanTensorHook(x)]) as session:
            session.run(x, {x: [np.inf, -np.inf]})
            with pytest.raises(hooks.NanLossDuringTrainingError, match="lower the learning rate"):
                session.run(x, {x: np.nan})


@pytest.mark.parametrize("how", ["run", "function"])
def test_a_training_recovers_from_a_restarted_server(cluster, tmp_path, how):
    with g.get_default_graph().device(PS):
        step, loss = model()
        fetches = [loss, step, g.get_or_create_global_step()]
    sessions, losses = [], []

    def step_fn(context: Any) -> Any:
        sessions.append(context.session)
        return context.run_with_hooks(fetches)

    with g.MonitoredTrainingSession(
        cluster["worker"].target,
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=2,
        hooks=[hooks.StopAtStepHook(last_step=6)],
        max_wait_secs=30,
    ) as session:
        while not session.should_stop():
            if len(losses) == 5:
                cluster["ps"].stop()
                cluster["ps"] = nd.Server(cluster["ps"].cluster_spec, "ps", 0)
            results = session.run(fetches) if how == "run" else session.run_step_fn(step_fn)
            losses.append(results[0])
    # The checkpoint of step 4 was restored, so one step was made twice.
    assert losses == [0.25**k for k in (0, 1, 2, 3, 4, 4, 5)]
    if how == "function":  # It was called again, with another session.
        assert len(sessions) == 8
        assert sessions[5] is not sessions[6]


@pytest.mark.parametrize(("saves", "then"), [(2, [3, 4, 5]), (None, [4, 5, 6])])
def test_a_recovered_session_restores_the_checkpoint_or_keeps_all_values(
    cluster, tmp_path, saves, then
):
    with g.get_default_graph().device(PS):
        step, _ = model()
        count = g.get_or_create_global_step()
    failed = []

    def step_fn(context: Any) -> Any:
        if int(context.session.run(count)) == 3 and not failed:
            failed.append(context.session)
            raise errors.UnavailableError("the connection broke.")
        context.run_with_hooks(step)
        return int(context.session.run(count))

    options = {"checkpoint_dir": tmp_path, "save_checkpoint_steps": saves} if saves else {}
    with g.MonitoredTrainingSession(cluster["worker"].target, **options) as session:
        made = [session.run_step_fn(step_fn) for _ in range(6)]
    assert made == [1, 2, 3, *then]  # The server is still there, with the values of step 3.


def test_a_supervisor_saves_at_the_end_and_stops_its_threads(tmp_path):
    for expected in (1.0, 0.25):
        with g.Graph().as_default():
            step, loss = model()
            supervisor = Supervisor(logdir=tmp_path, save_model_secs=1000)
            with supervisor.managed_session() as session:
                assert session.run(loss) == expected
                session.run(step)
                assert not supervisor.should_stop()
            assert supervisor.should_stop()
            with supervisor.managed_session() as session:  # A second loop goes on.
                assert not supervisor.should_stop()
                assert supervisor.summary_writer is not None
                assert session.run(loss) == expected / 4
    with g.Graph().as_default():
        bad = g.constant([1.0, 2.0]) + g.constant([1.0, 2.0, 3.0])
        failing = pytest.raises(errors.InvalidArgumentError, match=r"numpy\.add")
        with failing, Supervisor().managed_session() as session:
            session.run(bad)


def test_a_supervisor_calls_functions_until_it_stops():
    called: queue.Queue[Any] = queue.Queue()
    with g.Graph().as_default():
        g.Variable(0.0)
        supervisor = Supervisor()
        with supervisor.managed_session():
            thread = supervisor.loop(None, lambda *a, **k: called.put((a, k)), (1,), {"b": 2})
            assert [called.get(timeout=HANG_SECONDS) for _ in range(3)] == 3 * [((1,), {"b": 2})]
            supervisor.loop(0.001, lambda: called.put("no arguments"))
            while called.get(timeout=HANG_SECONDS) != "no arguments":
                pass
        assert not thread.is_alive()


def test_a_supervisor_counts_steps_and_saves_at_the_end_of_the_input(tmp_path):
    writer: Any = Writer()
    with g.Graph().as_default():
        step, _ = model()
        options: Any = {"summary_op": None, "summary_writer": writer}
        supervisor = Supervisor(logdir=tmp_path, save_summaries_secs=0.01, **options)
        with supervisor.managed_session() as session:
            session.run(step)
            wait_until(lambda: any(step > 0 for step in writer.steps))
            raise StopIteration  # As next(batches) does.
    assert all(b"global_step/sec" in value for value in writer.values)
    assert str(g.latest_checkpoint(tmp_path)).endswith("model.ckpt-1")


def test_a_supervisor_that_cannot_begin_closes_its_file(tmp_path):
    with g.Graph().as_default():
        model()
        bad = g.constant([1.0, 2.0]) + [1.0, 2.0, 3.0]
        supervisor = Supervisor(logdir=tmp_path, init_op=bad)
        with pytest.raises(errors.InvalidArgumentError), supervisor.managed_session():
            pass
    assert supervisor.summary_writer is None


def test_who_waits_for_the_chief_says_so_at_the_deadline(caplog, monkeypatch):
    monkeypatch.setattr(monitored, "_SILENT_SECONDS", 0.0)
    with nd.Server.create_local_server() as server, g.Graph().as_default():
        model()
        with pytest.raises(errors.DeadlineExceededError, match="Is the chief running"):
            g.MonitoredTrainingSession(server.target, is_chief=False, max_wait_secs=0.1)
        said = "still waiting, for 0.1 s at most: the chief has not initialised the variables."
        assert caplog.messages == [said]
        with g.Session(server.target, g.Graph()) as other:
            assert other.graph is not None


def test_a_hook_may_only_feed_and_the_step_is_found_by_its_name():
    with g.Graph().as_default():
        x = g.placeholder(np.float64, ())
        step = g.Variable(np.int64(0), trainable=False, name="global_step")
        assert g.get_or_create_global_step() is step
        doubled, add = 2 * x, step.assign_add(1)
        stop = hooks.StopAtStepHook(last_step=1)
        with g.MonitoredTrainingSession(hooks=[Feeding(x), stop]) as session:
            assert session.run([doubled, add]) == [4.0, 1]
            assert session.should_stop()


def test_a_listener_ends_the_training(tmp_path):
    class Listener(hooks.CheckpointSaverListener):
        def after_save(self, session: Any, global_step_value: int) -> bool:
            return global_step_value >= 4

    saving = hooks.CheckpointSaverHook(tmp_path, save_steps=2, listeners=[Listener()])
    with training(saving) as (session, step, _):
        while not session.should_stop():
            last = session.run([step, g.get_or_create_global_step()])[1]
    assert last in (3, 4)


def test_hooks_take_lists_of_summaries_and_may_be_used_again(caplog):
    writer: Any = Writer()
    caplog.set_level(logging.INFO, "ndistribute")
    shown = hooks.LoggingTensorHook(["global_step"], every_n_iter=100)
    for _ in range(3):
        with g.Graph().as_default():
            step, loss = model()
            several = [summary.scalar("a", loss), summary.scalar("b", loss)]
            saving = hooks.SummarySaverHook(10, summary_writer=writer, summary_op=several)
            with g.MonitoredTrainingSession(hooks=[shown, saving]) as session:
                session.run(step)
    assert writer.steps == [1, 1, -1] * 3
    assert sum("global_step = " in record.getMessage() for record in caplog.records) == 3


def test_the_last_step_is_saved_while_a_lost_task_can_still_come_back(tmp_path):
    seen: list[str | None] = []

    class Late(hooks.SessionRunHook):
        def end(self, session: Any) -> None:
            seen.append(g.latest_checkpoint(tmp_path))

    train(5, tmp_path, Late())  # Which ends before the hook that saves.
    assert str(seen[0]).endswith("model.ckpt-5")
