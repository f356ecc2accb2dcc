"""TensorFlow 1's sessions without built-in hooks, their manager, and their timer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.compat.graphs import BytesSession, MonitoredBytesSession
from ndistribute.graph.graph import get_default_graph
from ndistribute.graph.monitored import Scaffold, is_ready, open_session
from ndistribute.graph.saver import Saver, latest_checkpoint
from ndistribute.mistakes import accepting
from ndistribute.timers import Timer


def ChiefSessionCreator(  # noqa: N802
    scaffold: Any = None, *, checkpoint_filename_with_path: str | None = None, **options: Any
) -> dict[str, Any]:
    """Return the creator of a chief's `MonitoredSession`, as `MonitoredTrainingSession` has it.

    Args:
        scaffold: see `MonitoredTrainingSession`.
        checkpoint_filename_with_path: the checkpoint to restore; None means the newest in a folder.
        options: `master`, `config` and `checkpoint_dir`, see `MonitoredTrainingSession`.
    """
    path = checkpoint_filename_with_path
    if path is not None:
        scaffold = scaffold or Scaffold()
        scaffold.init_fn = lambda scaffold, session: scaffold.saver.restore(session, path)
    return {**options, "scaffold": scaffold}


def WorkerSessionCreator(scaffold: Any = None, **options: Any) -> dict[str, Any]:  # noqa: N802
    """Return the creator of another worker's `MonitoredSession`, which waits for the chief.

    Its options are those of a chief, and `max_wait_secs`, by default half an hour.
    """
    return {"max_wait_secs": 30 * 60, **ChiefSessionCreator(scaffold, **options), "is_chief": False}


class MonitoredSession(MonitoredBytesSession):
    """A session that calls only the hooks that are passed to it.

    Args:
        session_creator: the creator of the session; None means that of a chief in this process.
        hooks: the hooks.
        stop_grace_period_secs: the time for threads to end.
    """

    def __init__(
        self, session_creator: Any = None, hooks: Any = None, stop_grace_period_secs: float = 120
    ) -> None:
        none = dict.fromkeys(("save_checkpoint_secs", "save_summaries_steps"), None)
        how = {**none, "log_step_count_steps": None, **(session_creator or {})}
        super().__init__(hooks=hooks, stop_grace_period_secs=stop_grace_period_secs, **how)


class SingularMonitoredSession(MonitoredSession):
    """A chief's `MonitoredSession` that also gives access to the raw session; it recovers too.

    Args:
        hooks: the hooks.
        options: those of `ChiefSessionCreator`.
    """

    def __init__(self, hooks: Sequence[Any] | None = None, **options: Any) -> None:
        super().__init__(ChiefSessionCreator(**options), hooks)

    def raw_session(self) -> Any:
        """Return the session without hooks."""
        return self.run_step_fn(lambda step_context: step_context.session)


class SessionManager:
    """Opens sessions in which the variables of a graph have values.

    Args:
        local_init_op: the operation to run in each session; None means none.
        ready_op: see `Scaffold`; None means that sessions are ready at once.
        graph: the graph; None means the default graph.
        ops: `ready_for_local_init_op`, which tells when `local_init_op` can run; None means at
            once.

    >>> from ndistribute.graph import Graph, Variable, global_variables_initializer
    >>> with Graph().as_default():
    ...     w = Variable(2.0)
    ...     with SessionManager().prepare_session("", global_variables_initializer()) as session:
    ...         float(session.run(w))
    2.0
    """

    @accepting("recovery_wait_secs", "local_init_run_options")
    def __init__(
        self, local_init_op: Any = None, ready_op: Any = None, *, graph: Any = None, **ops: Any
    ) -> None:
        self._graph = graph or get_default_graph()
        self._scaffold = Scaffold(local_init_op=local_init_op, ready_op=ready_op, **ops)

    def prepare_session(
        self,
        master: str,
        init_op: Any = None,
        saver: Any = None,
        checkpoint_dir: Any = None,
        **how: Any,
    ) -> Any:
        """Return a session with the values of the newest checkpoint, or else of `init_op`.

        Args:
            master: the address of the server to use; an empty text means this process.
            init_op: see `Scaffold`.
            saver: the saver that restores the checkpoint.
            checkpoint_dir: its folder.
            how: `max_wait_secs`, how long to wait for tasks that come back; `config`, a
                `ConfigProto`; `init_feed_dict`, see `Scaffold`; `init_fn`, a function of a session.

        Raises:
            RuntimeError: there is neither a checkpoint nor an operation or function that
                initialises.
            FailedPreconditionError: the session is not ready afterwards.
        """
        start = how.get("init_fn")
        none = init_op is start is self._scaffold.local_init_op is None
        if none and not _has_checkpoint(saver, checkpoint_dir):
            why = "pass init_op, init_fn or local_init_op, or checkpoint_dir with a saver."
            raise RuntimeError(
                f"prepare_session: there is no checkpoint in {checkpoint_dir}: {why}"
            )
        how |= {"init_op": init_op, "saver": saver, "init_fn": of_session(start)}
        return self._opened(master, checkpoint_dir, how)

    def recover_session(
        self, master: str, saver: Any = None, checkpoint_dir: Any = None, **how: Any
    ) -> tuple[Any, bool]:
        """Return a session with the values of the newest checkpoint, and whether it is ready."""
        session = self._opened(master, checkpoint_dir, {"saver": saver, "ready_op": None, **how})
        is_restored = _has_checkpoint(saver, checkpoint_dir)
        return session, is_restored and is_ready(session, self._scaffold.ready_op)

    def wait_for_session(self, master: str, **how: Any) -> Any:
        """Return a session once another process has initialised the variables.

        Raises:
            DeadlineExceededError: the variables have no values within `max_wait_secs`.
        """
        return self._opened(master, None, {"max_wait_secs": math.inf, **how}, is_chief=False)

    def completed(self, scaffold: Scaffold) -> Scaffold:
        """Return a scaffold, completed with the operations of this manager."""
        made = {name: each for name, each in vars(self._scaffold).items() if each is not None}
        lacking = [name for name, each in vars(scaffold).items() if each is None]
        return dataclasses.replace(scaffold, **{k: made[k] for k in lacking if k in made})

    def _opened(self, master: str, folder: Any, how: Any, is_chief: bool = True) -> Any:
        config, max_wait_secs = how.pop("config", None), how.pop("max_wait_secs", 7200)
        with self._graph.as_default():
            scaffold = dataclasses.replace(self._scaffold, **how)
            start = scaffold, master, BytesSession, config, folder, max_wait_secs, is_chief
            return open_session(*start)


def of_session(init_fn: Callable[[Any], None] | None) -> Any:
    """Return a function of a session, or None, as the `init_fn` of a `Scaffold`."""
    return None if init_fn is None else lambda scaffold, session: init_fn(session)


def _has_checkpoint(saver: Saver | None, folder: str | None) -> bool:
    return saver is not None and folder is not None and latest_checkpoint(folder) is not None


class SecondOrStepTimer(Timer):
    """Tells when a number of seconds or steps has passed; see `Timer`.

    >>> timer = SecondOrStepTimer(every_steps=3)
    >>> timer.update_last_triggered_step(1)
    (None, None)
    >>> timer.should_trigger_for_step(3), timer.should_trigger_for_step(4)
    (False, True)
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        super().__init__(every_steps, every_secs)

    def should_trigger_for_step(self, step: int) -> bool:
        """Return True at the first step, and at another step when the time has come."""
        return step != self.last_step and self.is_due(step)

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Start again at a step; return the seconds and the steps since the last time."""
        last, before = self.last_step, self._last_time
        self.mark(step)
        return (None, None) if last is None else (self._last_time - before, step - last)

    def last_triggered_step(self) -> int | None:
        """Return the step at which the timer last started."""
        return self.last_step
