"""`tf.train.Supervisor`: a session of a graph, with threads that save it and write its summaries.

It opens its session and restores variables as a `MonitoredTrainingSession` does. The hooks of that
session work between steps; the threads here do the same work at fixed intervals.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ndistribute.compat.graph_sessions import SessionManager, of_session
from ndistribute.compat.graphs import BytesSession
from ndistribute.graph.graph import Graph, get_default_graph
from ndistribute.graph.hooks import write_speed
from ndistribute.graph.monitored import Coordinator, Scaffold, open_session
from ndistribute.graph.saver import Saver
from ndistribute.graph.session import Session
from ndistribute.graph.summary import FileWriter
from ndistribute.graph.variables import find_global_step
from ndistribute.mistakes import accepting
from ndistribute.timers import UNSET, Timer


class Supervisor(Coordinator):
    """Starts training, saves its state and summaries, counts its steps, and stops its threads.

    The supervisor itself is the coordinator, `coord`, of these threads.

    The chief gives variables their values: from the last checkpoint in `logdir`, if there is one.
    The other processes wait for the chief. Create the supervisor when the graph is complete.

    Args:
        graph: the graph; None means the default graph.
        is_chief: whether this is the process that initialises and saves.
        logdir: the folder of checkpoints and summaries; None means no folder.
        summary_op: the summary to write; None means that no summary is written automatically.
        saver: the saver that saves and restores; None saves nothing.
        global_step: the variable that counts the steps; None means that of the graph.
        save_summaries_secs: seconds between summaries, and between reports of the speed; 0 means
            none.
        save_model_secs: seconds between checkpoints; 0 means none.
        stop_grace_secs: the time for threads to end.
        checkpoint_basename: the beginning of the names of checkpoints.
        summary_writer: the writer of summaries; None writes none.
        session_manager: a manager with `ready_op` and `local_init_op`, which are used if they are
            not in `ops`.
        init_fn: called as ``init_fn(session)`` after `init_op`.
        ops: `init_op`, `init_feed_dict`, `ready_op` and other operations of a `Scaffold`.

    >>> from ndistribute.graph import Variable
    >>> with Graph().as_default():
    ...     w = Variable(2.0)
    ...     with Supervisor().managed_session() as session:
    ...         float(session.run(w))
    2.0
    """

    @accepting("recovery_wait_secs")
    def __init__(
        self,
        graph: Graph | None = None,
        is_chief: bool = True,
        logdir: str | os.PathLike[str] | None = None,
        summary_op: Any = UNSET,
        saver: Any = UNSET,
        global_step: Any = None,
        save_summaries_secs: float = 120,
        save_model_secs: float = 600,
        stop_grace_secs: float = 120,
        checkpoint_basename: str = "model.ckpt",
        session_manager: SessionManager | None = None,
        summary_writer: Any = UNSET,
        init_fn: Callable[[Any], None] | None = None,
        **ops: Any,
    ) -> None:
        super().__init__()
        self.graph = graph or get_default_graph()
        self.is_chief, self.coord = is_chief, self
        self.save_path = str(Path(logdir or "", checkpoint_basename))
        """The beginning of the paths of checkpoints."""
        self._folder, self._grace = logdir or None, stop_grace_secs
        self.save_model_secs, self.save_summaries_secs = save_model_secs, save_summaries_secs
        with self.graph.as_default():
            self.global_step = find_global_step(self.graph) if global_step is None else global_step
            scaffold = Scaffold(init_fn=of_session(init_fn), **ops)
            if session_manager is not None:
                scaffold = session_manager.completed(scaffold)
            scaffold.saver = None if saver is UNSET else saver
            self._scaffold = scaffold.finalize()
        self.saver: Saver | None = None if saver is None else scaffold.saver
        """What saves and restores."""
        scaffold.saver = self.saver
        scaffold.summary_op = scaffold.summary_op if summary_op is UNSET else summary_op
        self._writes = summary_writer is UNSET and self._folder is not None and is_chief
        if summary_writer is UNSET:
            summary_writer = FileWriter(str(logdir)) if self._writes else None
        self.summary_writer: FileWriter | None = summary_writer

    def prepare_or_wait_for_session(
        self,
        master: str = "",
        config: Any = None,
        max_wait_secs: float = 7200,
        start_standard_services: bool = True,
    ) -> Session:
        """Return a session in which the variables have values; start the threads of the chief.

        Args:
            master: the address of the server to use; an empty text means this process.
            config: a `ConfigProto`.
            max_wait_secs: how long to wait for the chief, and for tasks that come back.
            start_standard_services: whether the chief saves and writes summaries from threads.
        """
        self.clear_stop()  # An earlier session may have ended.
        self._threads.clear()
        if self.summary_writer is None and self._writes:
            self.summary_writer = FileWriter(str(self._folder))
        with self.graph.as_default():
            options = BytesSession, config, self._folder, max_wait_secs, self.is_chief
            session = open_session(self._scaffold, master, *options)
        if start_standard_services and self.is_chief:
            self.start_standard_services(session)
        return session

    @contextlib.contextmanager
    def managed_session(
        self, master: str = "", config: Any = None, *, close_summary_writer: bool = True, **how: Any
    ) -> Iterator[Session]:
        """Return a context manager with a session; at its end the threads are stopped.

        A failure in the block or in a thread is raised at the end of the block. The end of the
        input is not a failure. The chief saves a last checkpoint, unless an interrupt ended the
        block. Other options are those of `prepare_or_wait_for_session`.
        """
        session, is_interrupted = None, True
        try:
            with self.stop_on_exception():
                session = self.prepare_or_wait_for_session(master, config, **how)
                with self.graph.as_default(), session.as_default():
                    yield session
            is_interrupted = False
        finally:
            try:
                self.stop(close_summary_writer=close_summary_writer)
                if session and self.is_chief and self.save_model_secs and not is_interrupted:
                    self._save(session)
            finally:
                if session:
                    session.close()

    def stop(
        self, threads: list[threading.Thread] | None = None, close_summary_writer: bool = True
    ) -> None:
        """Stop the threads, and raise the first failure."""
        self.request_stop()
        try:
            self.join(threads, stop_grace_period_secs=self._grace)
        finally:
            if close_summary_writer and self.summary_writer is not None:
                self.summary_writer.close()
                self.summary_writer = None

    def loop(
        self, timer_interval_secs: float | None, target: Any, args: Any = None, kwargs: Any = None
    ) -> threading.Thread:
        """Start a thread that calls a function now, and then at an interval until the stop.

        With None as the interval, it calls the function again at once.
        """

        def work() -> None:
            with self.stop_on_exception():
                due = time.monotonic()
                while not self.wait_for_stop(max(0.0, due - time.monotonic())):
                    due += timer_interval_secs or 0.0
                    target(*(args or ()), **(kwargs or {}))

        thread = threading.Thread(target=work, name="supervisor", daemon=True)
        self.register_thread(thread)
        thread.start()
        return thread

    def start_queue_runners(self, sess: Any = None, queue_runners: Any = None) -> list[Any]:
        """Do nothing, because there are no queues and no runners."""
        if any(runner is not None for runner in queue_runners or ()):
            raise ValueError(f"there are no queues to run, got {queue_runners!r}.")
        return []

    def summary_computed(self, sess: Any, summary: Any, global_step: Any = None) -> None:
        """Write the value of a summary."""
        if self.summary_writer is None:
            raise RuntimeError("this supervisor writes no summaries: pass logdir to the chief's.")
        if global_step is None and self.global_step is not None:
            global_step = sess.run(self.global_step)
        self.summary_writer.add_summary(summary, global_step)

    def start_standard_services(self, sess: Session) -> None:
        """Start the chief's threads, which save, write summaries and report the speed."""
        if not self.is_chief:
            raise RuntimeError("only the chief saves and writes summaries: pass is_chief=True.")
        session = sess
        if self._folder and self.save_model_secs and self.saver is not None:
            self.loop(self.save_model_secs, self._save, (session,))
        if self.summary_writer and self.save_summaries_secs:
            run, op, step = session.run, self._scaffold.summary_op, self.global_step
            timer, writer = Timer(seconds=0.0), self.summary_writer
            if op is not None:
                self.loop(self.save_summaries_secs, lambda: self.summary_computed(session, run(op)))
            if step is not None:
                self.loop(
                    self.save_summaries_secs, lambda: write_speed(timer, int(run(step)), writer)
                )

    def _save(self, session: Session) -> None:
        if self._folder and self.saver is not None:
            self.saver.save(session, self.save_path, self.global_step)
