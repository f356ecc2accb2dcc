"""Hooks of `MonitoredTrainingSession`, which it calls before and after each run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ndistribute.event_files import scalar
from ndistribute.exports import export as _export
from ndistribute.graph.graph import get_default_graph
from ndistribute.graph.saver import Saver
from ndistribute.graph.summary import FileWriter
from ndistribute.graph.variables import find_global_step
from ndistribute.timers import Timer

SCAFFOLD = "scaffold"
"""The collection with the scaffold of a finalized graph."""
_POLL_SECONDS = 0.5
_log = logging.getLogger("ndistribute")


class SessionRunArgs(NamedTuple):
    """The fetches and feeds that a hook adds to a run."""

    fetches: Any
    feed_dict: Mapping[Any, Any] | None = None
    options: Any = None


class SessionRunValues(NamedTuple):
    """The values of a hook's fetches in a run, and the options of the run."""

    results: Any
    options: Any = None
    run_metadata: Any = None


class SessionRunContext:
    """The facts of a run for a hook, and `request_stop`, with which a hook stops training.

    Attributes:
        original_args: the `SessionRunArgs` of the program.
        session: the session.
        stop_requested: whether a hook has called `request_stop`.
    """

    def __init__(self, original_args: SessionRunArgs, session: Any) -> None:
        self.original_args, self.session = original_args, session
        self.stop_requested = False

    def request_stop(self) -> None:
        """Make `should_stop` of the session return True."""
        self.stop_requested = True


class SessionRunHook:
    """The base class of hooks, whose methods do nothing."""

    def begin(self) -> None:
        """Called once before the session exists; operations can still be added to the graph."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Called with each new session, also after a recovery."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each run; returns additional fetches and feeds, or None."""
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each run with the values that `before_run` asked for."""

    def end(self, session: Any) -> None:
        """Called once at the end, unless training failed."""


def write_speed(timer: Timer, step: int, writer: FileWriter | None) -> None:
    """Log and write the steps per second since the timer's last time, if there is one."""
    speed = timer.mark(step)
    if speed is None:
        return
    _log.info("global_step/sec: %g", speed)
    if writer is not None:
        writer.add_summary(scalar("global_step/sec", speed), step)


class _StepHook(SessionRunHook):
    """The base class of hooks that read the global step after each run."""

    _timer: Timer

    def begin(self) -> None:
        step = find_global_step()
        if step is None:
            why = "call get_or_create_global_step() and pass it to minimize(..., global_step)."
            raise RuntimeError(f"the graph has no global step: {why}")
        self._step = step

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return SessionRunArgs(self._step)

    def _step_if_due(self, context: SessionRunContext, values: SessionRunValues) -> int | None:
        """Return the global step after a run if the hook is due, otherwise None."""
        # The run read the step before or while it was incremented; other workers may increment it,
        # too.
        if not self._timer.is_due(int(values.results) + 1):
            return None
        step = int(context.session.run(self._step))
        return step if self._timer.is_due(step) else None


class StopAtStepHook(_StepHook):
    """A hook that stops at a global step, or after a number of steps.

    Args:
        num_steps: the number of steps from the start of this session.
        last_step: the global step at which to stop; pass only one of the two.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError("StopAtStepHook needs either num_steps or last_step.")
        self._more, self._last = num_steps, last_step

    def begin(self) -> None:
        super().begin()
        # A worker must not begin a step that needs workers which have stopped already.
        operations = get_default_graph().get_operations()
        self._local_steps = [op for op in operations if op.type == "local_step"]

    def after_create_session(self, session: Any, coord: Any) -> None:
        step = int(session.run(self._step))
        if self._last is None:
            self._last = step + (self._more or 0)
        if step >= self._last:  # Others have made the last step.
            coord.request_stop()
        for op in self._local_steps:  # Late gradients are dropped.
            session.run(op.outputs, {op.inputs[0]: np.int64(min(step, self._last - 1))})

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        last = self._last or 0
        # The step was read before, or while, it was incremented.
        is_near = self._local_steps or run_values.results + 1 >= last
        if is_near and run_context.session.run(self._step) >= last:
            run_context.request_stop()


class EarlyStoppingHook(_StepHook):
    """A hook that stops when a function returns True.

    Args:
        should_stop_fn: called without arguments.
        run_every_secs: the seconds between its calls.
        run_every_steps: the steps between its calls; pass only one of the two.
    """

    def __init__(
        self,
        should_stop_fn: Callable[[], bool],
        run_every_secs: float | None = 60,
        run_every_steps: int | None = None,
    ) -> None:
        self._should_stop = should_stop_fn
        self._timer = Timer(run_every_steps, run_every_secs)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = self._step_if_due(run_context, run_values)
        if step is not None:
            self._timer.mark(step)
            if self._should_stop():
                _log.info("training stops early, after step %d", step)
                run_context.request_stop()


class CheckpointSaverListener:
    """The base class of listeners to checkpoints, whose methods do nothing."""

    def begin(self) -> None:
        """Called once before the session exists; operations can still be added to the graph."""

    def before_save(self, session: Any, global_step_value: int) -> None:
        """Called before each checkpoint is written."""

    def after_save(self, session: Any, global_step_value: int) -> Any:
        """Called after each checkpoint is written; a true result stops training."""

    def end(self, session: Any, global_step_value: int) -> None:
        """Called once at the end, unless training failed."""


class CheckpointSaverHook(_StepHook):
    """A hook that saves checkpoints at the start, at intervals, and at the end.

    Args:
        checkpoint_dir: the folder.
        save_secs: the seconds between checkpoints.
        save_steps: the steps between checkpoints; pass only one of the two.
        saver: the `Saver`; None: the scaffold's saver.
        checkpoint_basename: the beginning of the checkpoints' names.
        scaffold: the scaffold whose saver to use; None: the saver of the graph.
        listeners: the `CheckpointSaverListener` objects to call.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Saver | None = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Any = None,
        listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> None:
        if saver is not None and scaffold is not None:
            raise ValueError("CheckpointSaverHook got both saver and scaffold: pass one of them.")
        self._timer = Timer(save_steps, save_secs)
        self._saver, self._scaffold = saver, scaffold
        self._listeners = list(listeners or ())
        self._path = Path(checkpoint_dir) / checkpoint_basename

    def begin(self) -> None:
        super().begin()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._save(session, int(session.run(self._step)))

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = self._step_if_due(run_context, run_values)
        if step is None and run_context.stop_requested:  # A lost task can still come back.
            last = int(run_context.session.run(self._step))
            step = None if last == self._timer.last_step else last
        if step is not None and self._save(run_context.session, step):
            run_context.request_stop()

    def end(self, session: Any) -> None:
        step = int(session.run(self._step))
        if step != self._timer.last_step:
            self._save(session, step)
        for listener in self._listeners:
            listener.end(session, step)

    def _save(self, session: Any, step: int) -> bool:
        """Save, and return whether a listener asks to stop."""
        self._timer.mark(step)
        for listener in self._listeners:
            listener.before_save(session, step)
        scaffold = self._scaffold or session.graph.get_collection(SCAFFOLD)[0]
        (self._saver or scaffold.saver).save(session, self._path, step)
        stops = [listener.after_save(session, step) for listener in self._listeners]
        return any(stops)


class WritingHook(_StepHook):
    """The base class of hooks that write to an event file: their own, or that of a writer."""

    def __init__(self, folder: str | os.PathLike[str] | None, writer: FileWriter | None) -> None:
        self._folder, self._writer = (folder if writer is None else None), writer

    def begin(self) -> None:
        super().begin()
        if self._folder is not None:
            self._writer = FileWriter(self._folder)

    def end(self, session: Any) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file if it is the hook's own; called even if training failed."""
        if self._folder is not None and self._writer is not None:
            self._writer.close()


class SummarySaverHook(WritingHook):
    """A hook that writes summaries at intervals of steps or seconds.

    Args:
        save_steps: the steps between summaries.
        save_secs: the seconds between summaries; pass only one of the two.
        output_dir: the folder of the event file.
        summary_writer: what writes, in place of a new writer for `output_dir`.
        scaffold: the scaffold whose summary operation to use.
        summary_op: the summary operation; pass only one of the two.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: FileWriter | None = None,
        scaffold: Any = None,
        summary_op: Any = None,
    ) -> None:
        if (scaffold is None) == (summary_op is None):
            raise ValueError("SummarySaverHook needs either scaffold or summary_op.")
        self._timer = Timer(save_steps, save_secs)
        super().__init__(output_dir, summary_writer)
        self._scaffold, self._op = scaffold, summary_op
        self._next = 0  # The number that the next step probably has.

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        op = self._op if self._op is not None else self._scaffold.summary_op
        self._asked = op is not None and self._timer.is_due(self._next)
        return SessionRunArgs({"step": self._step, **({"summary": op} if self._asked else {})})

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = int(run_values.results["step"]) + 1  # The step was read before it was incremented.
        if self._asked:
            step = int(run_context.session.run(self._step))
            self._timer.mark(step)
            if self._writer is not None:
                summaries = run_values.results["summary"]
                for summary in summaries if isinstance(summaries, list | tuple) else [summaries]:
                    self._writer.add_summary(summary, step)
        self._next = step + 1


class StepCounterHook(WritingHook):
    """A hook that writes and logs the number of steps per second.

    Args:
        every_n_steps: the steps between reports.
        every_n_secs: the seconds between reports; pass only one of the two.
        output_dir: the folder of the event file; None: only log.
        summary_writer: what writes, in place of a new writer for `output_dir`.
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: FileWriter | None = None,
    ) -> None:
        self._timer = Timer(None if every_n_secs is not None else every_n_steps, every_n_secs)
        super().__init__(output_dir, summary_writer)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._timer.reset()  # The time until a recovery does not count.

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = self._step_if_due(run_context, run_values)
        if step is not None:
            write_speed(self._timer, step, self._writer)


class LoggingTensorHook(SessionRunHook):
    """A hook that logs the values of tensors at intervals of runs or seconds.

    Args:
        tensors: a mapping of labels to tensors or their names, or a list of them.
        every_n_iter: the runs between lines.
        every_n_secs: the seconds between lines.
        at_end: whether to log at the end, too.
        formatter: a function from a dict of values to the line; None: ``label = value`` for each.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Sequence[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        if not isinstance(tensors, Mapping):
            tensors = {getattr(tensor, "name", str(tensor)): tensor for tensor in tensors}
        self._tensors = {label: _tensor(tensor) for label, tensor in tensors.items()}
        self._formatter, self._at_end = formatter, at_end
        alone = at_end and every_n_iter is None and every_n_secs is None
        self._timer = None if alone else Timer(every_n_iter, every_n_secs)
        self._runs = 0

    def begin(self) -> None:
        self._runs = 0
        if self._timer is not None:
            self._timer.reset()

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self._asked = self._timer is not None and self._timer.is_due(self._runs)
        return SessionRunArgs(self._tensors) if self._asked else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._asked and self._timer is not None:
            self._timer.mark(self._runs)
            self._tell(run_values.results)
        self._runs += 1

    def end(self, session: Any) -> None:
        if self._at_end:
            self._tell(session.run(self._tensors))

    def _tell(self, values: dict[str, Any]) -> None:
        plain = ", ".join(f"{name} = {value}" for name, value in values.items())
        _log.info("%s", self._formatter(values) if self._formatter else plain)


def _tensor(tensor: Any) -> Any:
    """Return a tensor or its name; the name of an operation stands for its first result."""
    return f"{tensor}:0" if isinstance(tensor, str) and ":" not in tensor else tensor


class NanLossDuringTrainingError(RuntimeError):
    """An error: the loss has become NaN."""


class NanTensorHook(SessionRunHook):
    """A hook that stops training when a loss becomes NaN.

    Args:
        loss_tensor: the loss.
        fail_on_nan_loss: whether to raise `NanLossDuringTrainingError`; if False, only stop.
    """

    def __init__(self, loss_tensor: Any, fail_on_nan_loss: bool = True) -> None:
        self._loss, self._fails = _tensor(loss_tensor), fail_on_nan_loss

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self._loss)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not np.isnan(run_values.results).any():
            return
        if self._fails:
            why = "the loss became NaN: lower the learning rate, or check the data."
            raise NanLossDuringTrainingError(why)
        _log.warning("the loss became NaN, so training stops")
        run_context.request_stop()


class FeedFnHook(SessionRunHook):
    """A hook that feeds each run the result of a function without arguments."""

    def __init__(self, feed_fn: Callable[[], Mapping[Any, Any]]) -> None:
        self._feed_fn = feed_fn

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(None, self._feed_fn())


class FinalOpsHook(SessionRunHook):
    """A hook that runs operations at the end, and keeps their values as `final_ops_values`."""

    def __init__(self, final_ops: Any, final_ops_feed_dict: Any = None) -> None:
        self._ops, self._feeds = final_ops, final_ops_feed_dict
        self.final_ops_values: Any = None

    def end(self, session: Any) -> None:
        if self._ops is not None:
            self.final_ops_values = session.run(self._ops, self._feeds)


class GlobalStepWaiterHook(_StepHook):
    """A hook that delays the first run until the global step has reached a number."""

    def __init__(self, wait_until_step: int) -> None:
        self._wait_until = wait_until_step

    def before_run(self, run_context: SessionRunContext) -> None:
        while self._wait_until > 0 and run_context.session.run(self._step) < self._wait_until:
            time.sleep(_POLL_SECONDS)
        self._wait_until = 0


_export(vars(), but="EarlyStoppingHook WritingHook write_speed")
