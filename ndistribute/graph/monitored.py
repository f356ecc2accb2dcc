"""`MonitoredTrainingSession`: it initialises or restores, calls hooks, and recovers.

`Scaffold` has the operations that start, save and restore; `Coordinator` stops threads together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from ndistribute import errors
from ndistribute.graph import hooks as h
from ndistribute.graph import summary
from ndistribute.graph import variables as v
from ndistribute.graph.graph import Tensor, get_default_graph
from ndistribute.graph.saver import Saver
from ndistribute.graph.session import Session
from ndistribute.timers import UNSET, Attempts, steps_or_seconds

T = TypeVar("T")
_RECOVERABLE = (errors.AbortedError, errors.UnavailableError)
_POLL_SECONDS = 0.2
_SILENT_SECONDS = 10.0  # The log tells about the wait, because the address may be mistyped.
_log = logging.getLogger("ndistribute")


@dataclass(eq=False)
class Scaffold:
    """The operations with which a session initialises, restores, saves and reports.

    Args:
        init_op: the operation that initialises variables; None: that of the global variables.
        init_feed_dict: the values to feed to `init_op`.
        init_fn: called as ``init_fn(scaffold, session)`` after `init_op`.
        ready_op: a boolean tensor, which is all True when the variables are ready; or a tensor of
            the names of variables without a value, which is then empty. None: all variables have
            values.
        local_init_op: the operation that each worker runs; None: that of the local variables.
        summary_op: the summary to write; None: all summaries.
        saver: the `Saver`; None: a saver for the global variables.
        ready_for_local_init_op: like `ready_op`, but tells when `local_init_op` can run; None: the
            global variables have values.
    """

    init_op: Any = None
    init_feed_dict: Any = None
    init_fn: Callable[[Any, Any], None] | None = None
    ready_op: Any = None
    local_init_op: Any = None
    summary_op: Any = None
    saver: Saver | None = None
    ready_for_local_init_op: Any = None
    max_to_keep: int | None = field(default=5, init=False)
    """Of the saver that is made if there is none."""
    listeners: Sequence[Any] = field(default=(), init=False)
    """What is told of the checkpoints that the session saves."""
    jobs: dict[str, str] = field(default_factory=dict, init=False)
    """By target: the job whose servers the training uses."""

    def finalize(self) -> Self:
        """Create the missing operations, make the graph read-only, and return the scaffold.

        If the graph is already read-only, the missing operations are those of its first scaffold.
        """
        graph = get_default_graph()
        earlier = graph.get_collection_ref(h.SCAFFOLD)
        if earlier:
            for name, made in vars(earlier[0]).items():
                if getattr(self, name) is None:
                    setattr(self, name, made)
        if not graph.finalized:
            variables = v.global_variables()
            makers: dict[str, Callable[[], Any]] = {
                "init_op": lambda: v.variables_initializer(variables),
                "local_init_op": lambda: v.variables_initializer(v.local_variables(), "local_init"),
                "ready_op": v.report_uninitialized_variables,
                "ready_for_local_init_op": lambda: v.report_uninitialized_variables(variables),
                "summary_op": summary.merge_all,
                "saver": lambda: Saver(max_to_keep=self.max_to_keep) if variables else None,
            }
            for name, make in makers.items():
                if getattr(self, name) is None:
                    setattr(self, name, make())
            earlier.append(self)
            graph.finalize()
        return self


class Coordinator:
    """A coordinator that stops threads together, when one of them asks for it or fails.

    Args:
        clean_stop_exception_types: exceptions that end the work without being failures; None: the
            end of the input, `OutOfRangeError` and `StopIteration`.

    >>> coordinator = Coordinator()
    >>> with coordinator.stop_on_exception():
    ...     coordinator.request_stop()
    >>> coordinator.should_stop()
    True
    """

    def __init__(self, clean_stop_exception_types: Sequence[type] | None = None) -> None:
        clean = clean_stop_exception_types
        self._clean = (errors.OutOfRangeError, StopIteration) if clean is None else tuple(clean)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def joined(self) -> bool:
        """Whether all registered threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def should_stop(self) -> bool:
        """Return True once a thread has asked to stop."""
        return self._stop.is_set()

    def request_stop(self, ex: Any = None) -> None:
        """Ask all threads to stop; `join` raises the first exception that was passed here.

        `ex` may also be a result of `sys.exc_info`.
        """
        ex = ex[1] if isinstance(ex, tuple) else ex
        with self._lock:
            if ex is not None and self._error is None and not isinstance(ex, self._clean):
                self._error = ex
        self._stop.set()

    def clear_stop(self) -> None:
        """Let threads start again."""
        self._stop.clear()
        self._error = None

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a thread has asked to stop; return False after the timeout."""
        return self._stop.wait(timeout)

    @contextlib.contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Return a context manager that passes an exception to `request_stop`."""
        try:
            yield
        except Exception as error:
            self.request_stop(error)

    def register_thread(self, thread: threading.Thread) -> None:
        """Make `join` wait for a thread."""
        self._threads.append(thread)

    def join(
        self,
        threads: Sequence[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120.0,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait until a stop is requested or all threads have ended; then wait for the threads.

        Args:
            threads: threads to wait for, in addition to the registered threads.
            stop_grace_period_secs: the seconds that threads have to end after the request.
            ignore_live_threads: whether to ignore threads that are still alive then, instead of
                raising.

        Raises:
            RuntimeError: a thread did not end in time.
            Exception: the exception that a thread passed to `request_stop`.
        """
        waited = [*self._threads, *(threads or [])]
        while any(thread.is_alive() for thread in waited) and not self._stop.wait(0.1):
            pass
        deadline = time.monotonic() + stop_grace_period_secs
        for thread in waited:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        alive = [thread.name for thread in waited if thread.is_alive()]
        if alive and not ignore_live_threads:
            why = f"{', '.join(alive)}. They must end when should_stop() is True."
            raise RuntimeError(f"threads did not stop within {stop_grace_period_secs:g} s: {why}")


def is_ready(session: Session, ready_op: Any) -> bool:
    """Return True if the variables have values."""
    if not isinstance(ready_op, Tensor):
        return True
    values = np.asarray(session.run(ready_op))
    return bool(values.all()) if values.dtype == bool else not values.size


def retried(make: Callable[[], T], max_wait_secs: float) -> T:
    """Return a function's result; if tasks fail meanwhile, call it again until a deadline."""
    attempts, is_silent = Attempts(time.monotonic() + max_wait_secs, _POLL_SECONDS), True
    for left in attempts:
        try:
            return make()
        except _RECOVERABLE as error:
            problem = error
            if is_silent and max_wait_secs - left > _SILENT_SECONDS:
                is_silent = False
                _log.warning("still waiting, for %g s at most: %s", max_wait_secs, str(error))
    raise problem


def open_session(
    scaffold: Scaffold,
    target: str,
    kind: type[Session],
    config: Any,
    folder: Any,
    max_wait_secs: float,
    is_chief: bool = True,
    is_recovered: bool = False,
) -> Session:
    """Return a session whose variables have values.

    The chief restores the last checkpoint of a folder. If there is none, it initialises the
    variables, but in a recovered session only if one of them has no value. The other workers wait
    for the chief, and all wait for tasks that come back.

    Raises:
        FailedPreconditionError: a variable has no value afterwards.
        DeadlineExceededError: the chief has not initialised them within `max_wait_secs`.
    """

    def attempt() -> Session:
        session = kind(target, config=config, job=scaffold.jobs.get(target, ""))
        try:
            restored = None
            if is_chief:
                restored = _restore_or_initialize(session, scaffold, folder, is_recovered)
            lacking = scaffold.ready_for_local_init_op
            if is_ready(session, lacking):
                lacking = scaffold.ready_op
                if scaffold.local_init_op is not None:
                    session.run(scaffold.local_init_op)
            if not is_ready(session, lacking):
                if not is_chief:
                    raise errors.UnavailableError("the chief has not initialised the variables.")
                raise errors.FailedPreconditionError(
                    "after the initialisation"
                    + (f" from checkpoint {restored}" if restored else "")
                    + f" these variables have no value: {session.run(lacking)}. init_op must "
                    "initialise, or the saver restore, all variables."
                )
            scaffold.jobs[target] = session.job
        except BaseException:
            session.close()
            raise
        return session

    try:
        return retried(attempt, max_wait_secs)
    except _RECOVERABLE as error:
        if is_chief:
            raise
        why = (
            f"no session after {max_wait_secs:g} s: {str(error).rstrip('.')}. Is the chief running?"
        )
        raise errors.DeadlineExceededError(why) from error


def _restore_or_initialize(
    session: Session, scaffold: Scaffold, folder: Any, is_recovered: bool
) -> str | None:
    """Give variables their values; return the path of the checkpoint that has been restored."""
    if folder and scaffold.saver is not None:
        restored = scaffold.saver.restore_latest(session, folder)
        if restored is not None:
            return restored
    if not (is_recovered and is_ready(session, scaffold.ready_op)):
        if scaffold.init_op is not None:
            session.run(scaffold.init_op, scaffold.init_feed_dict)
        if scaffold.init_fn is not None:
            scaffold.init_fn(scaffold, session)
    return None


class MonitoredTrainingSession:
    """A session that initialises or restores the model, calls hooks, and recovers.

    The chief restores the last checkpoint, or initialises the variables if there is none. The other
    workers wait for it. Use the session in a ``with`` block; the graph is read-only in it.

    If a task of `master` fails or is restarted, `run` creates a new session and runs the step
    again. If `checkpoint_dir` has a checkpoint, the chief restores it, also if the servers still
    have newer values: the steps since that checkpoint are lost. Without a checkpoint, variables
    keep their values if all of them still have one; else the chief initialises all of them again.
    A worker that is not the chief does not restore or initialise them.

    Args:
        master: the address of the server to use; empty: this process.
        is_chief: whether this process initialises variables, saves, and writes summaries.
        checkpoint_dir: the folder of checkpoints and summaries; None: write no files.
        scaffold: the operations to use; None: a new `Scaffold`.
        hooks: hooks to call.
        chief_only_hooks: hooks to call if this is the chief.
        save_checkpoint_secs: seconds between checkpoints; 600 if you pass neither this nor
            `save_checkpoint_steps`; None or 0: none.
        save_summaries_steps: steps between summaries; 100 if you pass neither this nor
            `save_summaries_secs`; None or 0: none.
        save_summaries_secs: seconds between summaries; None or 0: none.
        config: a `ConfigProto`.
        stop_grace_period_secs: the seconds that threads have to end.
        log_step_count_steps: steps between reports of the speed; None: no reports.
        max_wait_secs: how long to wait for the chief, and for tasks that come back.
        save_checkpoint_steps: steps between checkpoints.
        summary_dir: the folder of summaries; None: `checkpoint_dir`.

    >>> from ndistribute.graph.graph import Graph
    >>> from ndistribute.graph.hooks import StopAtStepHook
    >>> from ndistribute.graph.variables import get_or_create_global_step
    >>> with Graph().as_default():
    ...     step = get_or_create_global_step().assign_add(1)
    ...     with MonitoredTrainingSession(hooks=[StopAtStepHook(last_step=3)]) as session:
    ...         while not session.should_stop():
    ...             last = session.run(step)
    >>> int(last)
    3
    """

    _session_type: ClassVar[type[Session]] = Session

    def __init__(
        self,
        master: str = "",
        is_chief: bool = True,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        scaffold: Scaffold | None = None,
        hooks: Sequence[h.SessionRunHook] | None = None,
        chief_only_hooks: Sequence[h.SessionRunHook] | None = None,
        save_checkpoint_secs: float | None = UNSET,
        save_summaries_steps: int | None = UNSET,
        save_summaries_secs: float | None = UNSET,
        config: Any = None,
        stop_grace_period_secs: float = 120,
        log_step_count_steps: int | None = 100,
        max_wait_secs: float = 7200,
        save_checkpoint_steps: int | None = UNSET,
        summary_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._target, self._max_wait = master, max_wait_secs
        self._grace = stop_grace_period_secs
        self._scaffold = scaffold or Scaffold()
        start = self._session_type, config, checkpoint_dir, max_wait_secs, is_chief
        self._open = functools.partial(open_session, self._scaffold, master, *start)
        self._hooks = list(hooks or [])
        self.graph = get_default_graph()
        if is_chief:
            folder = summary_dir or checkpoint_dir
            summaries = steps_or_seconds(save_summaries_steps, save_summaries_secs, (100, None))
            saves = steps_or_seconds(save_checkpoint_steps, save_checkpoint_secs, (None, 600.0))
            self._hooks += chief_only_hooks or []
            if folder is not None and log_step_count_steps:
                self._hooks.append(h.StepCounterHook(log_step_count_steps, output_dir=folder))
            if folder is not None and any(summaries):
                self._hooks.append(h.SummarySaverHook(*summaries, folder, scaffold=self._scaffold))
            if checkpoint_dir is not None and any(saves):
                options: Any = {"scaffold": self._scaffold, "listeners": self._scaffold.listeners}
                self._hooks.append(h.CheckpointSaverHook(checkpoint_dir, *saves[::-1], **options))
        self.coordinator = Coordinator()
        self._session: Session | None = None
        try:
            for hook in self._hooks:
                hook.begin()
            self._scaffold.finalize()
            retried(lambda: self._create(recovered=False), max_wait_secs)
        except BaseException:
            self._abandon()
            raise

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Run a step with the additions of the hooks, and return the values; see `Session.run`.

        Raises:
            RuntimeError: the session was closed.
        """
        return self._recovering(lambda: self._run(fetches, feed_dict, options, run_metadata))

    def _recovering(self, work: Callable[[], T]) -> T:
        """Return a function's result; if a task fails, it is called again with a new session."""
        if self._session is None and self.should_stop():
            raise RuntimeError("this session was closed: create a new one.")

        def run() -> T:
            if self._session is None:
                self._create(recovered=True)
            try:
                return work()
            except _RECOVERABLE as error:
                _log.warning("a task failed, so a new session starts: %s", str(error))
                self._drop()
                raise

        # In this process no task can come back: its variables would be lost with the session.
        return retried(run, self._max_wait) if self._target else work()

    def run_step_fn(self, step_fn: Callable[..., Any]) -> Any:
        """Call a function with an object with `session` and `request_stop`; return its result."""

        def run() -> Any:
            context: Any = h.SessionRunContext(h.SessionRunArgs(None), self._session)
            context.run_with_hooks = self._run  # Not `run`: the context has this session.
            result = step_fn(context)
            if context.stop_requested:
                self.coordinator.request_stop()
            return result

        return self._recovering(run)

    def should_stop(self) -> bool:
        """Return True once a hook has asked to stop, or the session is closed."""
        return self.coordinator.should_stop()

    def close(self) -> None:
        """Call the hooks' `end`, and close the session; a second call does nothing."""
        try:
            if self._session is not None:
                self.coordinator.request_stop()
                for hook in self._hooks:
                    hook.end(self._session)
                self.coordinator.join(stop_grace_period_secs=self._grace)
        finally:
            self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        if error is None or isinstance(error, errors.OutOfRangeError | StopIteration):
            self.close()
            return error is not None
        self._abandon()
        return False

    def _run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        session, feeds = self._session, dict(feed_dict or {})
        context = h.SessionRunContext(h.SessionRunArgs(fetches, feed_dict), session)
        wanted: dict[Any, Any] = {"caller": fetches}
        for k, hook in enumerate(self._hooks):
            added = hook.before_run(context)
            if added is not None:
                if added.fetches is not None:
                    wanted[str(k)] = added.fetches
                for tensor, value in (added.feed_dict or {}).items():
                    if tensor in feeds:
                        name = type(hook).__name__
                        raise RuntimeError(
                            f"{name} feeds {tensor!r}, but run or another hook feeds it too."
                        )
                    feeds[tensor] = value
                options = options or added.options
        values = session.run(wanted, feeds, options)  # type: ignore[union-attr]
        for k, hook in enumerate(self._hooks):
            results = values.get(str(k))
            hook.after_run(context, h.SessionRunValues(results, options, run_metadata))
        if context.stop_requested:
            self.coordinator.request_stop()
        return values["caller"]

    def _create(self, recovered: bool) -> None:
        self._session = self._open(recovered)
        try:
            for hook in self._hooks:
                hook.after_create_session(self._session, self.coordinator)
        except _RECOVERABLE:
            self._drop()
            raise

    def _abandon(self) -> None:
        """Close the session without calling the hooks' `end`."""
        self.coordinator.request_stop()
        self._drop()
        for hook in self._hooks:
            if isinstance(hook, h.WritingHook):
                hook.close()

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
