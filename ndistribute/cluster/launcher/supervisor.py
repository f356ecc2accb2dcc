"""Runs the processes of one attempt at a job in a single thread: waits, starts again, stops.

One selector waits for output, for ends of processes (by pidfd) and for signals, with a timeout to
the next deadline. What an end means is decided in `endings.py`, and done here.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ndistribute.cluster.launcher import guardian
from ndistribute.cluster.launcher.endings import TaskState, Verdict, verdict
from ndistribute.cluster.launcher.output import Console, ending, tells_of_another
from ndistribute.cluster.launcher.processes import Process, Start, guarded, signals_as_bytes
from ndistribute.cluster.launcher.relay import Relay

__all__ = ["Outcome", "Supervisor"]

# How long a rank that only tells of another's end waits for that other one's own report.
_PATIENCE_SECONDS = 2.0
# How long servers have to end by themselves once the work is done.
_FINISH_SECONDS = 10.0
# The other side of a connection has its own grace; this is for the way there and back.
_REMOTE_SECONDS = 2.0
_DRAIN_SECONDS = 1.0


@dataclass
class Outcome:
    """How an attempt ended.

    Args:
        reason: ``done``, ``failed``, ``timeout``, ``signal`` or ``deaf`` (nobody read the output).
        code: the exit code that tells of it.
        label: the rank or task that failed first.
    """

    reason: str
    code: int
    label: str | None = None


class Supervisor:
    """Run one attempt.

    Args:
        job: the mark of the job, which the processes have in their environment.
        console: where output goes.
        deadline: the moment of `time.monotonic` at which everything is stopped, or None.
        restarts: how many tasks, the chief aside, may be started again alone.
    """

    def __init__(
        self, job: str, console: Console, deadline: float | None = None, restarts: int = 0
    ) -> None:
        self._job = job
        self._console = console
        self._deadline = deadline
        self._restarts = restarts
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(console, self._selector)
        self._processes: list[Process] = []
        self._outcome: Outcome | None = None
        self._failed: list[Process] = []
        self._kill_at: float | None = None
        self._stop_at: float | None = None
        self._finish_at: float | None = None

    def run(self, starts: Sequence[Start]) -> Outcome:
        """Start everything, and return once all of it has ended.

        Raises:
            OSError: a process could not be started; those that were have been ended.
        """
        with signals_as_bytes() as signals, guarded(self._job, any(map(_relays, starts))):
            self._selector.register(signals, selectors.EVENT_READ, None)
            try:
                for start in starts:
                    self._start(start)
                while any(process.code is None for process in self._processes):
                    self._turn(signals)
                if self._failed and self._outcome is None:
                    # All have ended, and every one that failed only told of another.
                    self._outcome = self._failure()
            finally:
                self._end()
        return self._outcome or Outcome("done", 0)

    def _start(self, start: Start) -> None:
        process = Process(start)
        if start.listener is not None:
            # Held here as well, it would go on accepting for a rank that has ended.
            start.listener.close()
        self._processes.append(process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        for stream, name in ((process.popen.stdout, "stdout"), (process.popen.stderr, "stderr")):
            if stream is not None:
                self._relay.add(stream.fileno(), start.label, name, start.parse)
        for fd, rank, name in start.pipes:
            self._relay.add(fd, rank, name, None)

    def _turn(self, signals: int) -> None:
        for key, _ in self._selector.select(self._seconds_to_next_deadline()):
            if isinstance(key.data, Process):
                key.data.look()
                self._selector.unregister(key.fd)
                self._ended(key.data)
            elif key.fd == signals:
                self._signalled(signals)
            else:
                self._relay.read(key.fd)
        if self._relay.nobody_reads:
            self._stop(Outcome("deaf", 128 + signal.SIGPIPE))
        self._heed_deadlines(time.monotonic())

    def _heed_deadlines(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._stop(Outcome("timeout", 124))
        if self._finish_at is not None and now >= self._finish_at:
            self._finish_at = None
            self._stop(Outcome("done", 0))
        if self._stop_at is not None and now >= self._stop_at:
            self._stop(self._failure())
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def _seconds_to_next_deadline(self) -> float:
        all_deadlines = (self._deadline, self._finish_at, self._stop_at, self._kill_at)
        deadlines = [moment for moment in all_deadlines if moment is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else 60.0

    def _ended(self, process: Process) -> None:
        if self._outcome is not None:
            return
        if process.code:
            self._relay.drain(0.0)
        restarts = self._restarts if self._stop_at is None else 0
        match verdict(self._state(process), [self._state(p) for p in self._processes], restarts):
            case Verdict.AGAIN:
                self._start_again(process)
            case Verdict.WAIT:
                self._failed.append(process)
                self._stop_at = self._stop_at or time.monotonic() + _PATIENCE_SECONDS
            case Verdict.FAIL:
                self._failed.append(process)
                self._stop(self._failure())
            case Verdict.FINISH:
                self._failed.clear()
                self._deadline = self._stop_at = None
                self._finish_at = self._finish_at or time.monotonic() + _FINISH_SECONDS

    def _state(self, process: Process) -> TaskState:
        told = bool(process.code) and tells_of_another(self._console.kept(process.start.label))
        return TaskState(process.start.task_type, process.code, told)

    def _start_again(self, process: Process) -> None:
        """Put a new process in the place of one that ended; nothing else of the job notices."""
        label, how = process.start.label, ending(process.code or 0)
        self._restarts -= 1
        self._console.say(f"{label} ended ({how}); starting it again ({self._restarts} left).")
        # What it left behind could hold its port, and would go on beside its successor.
        process.signal(signal.SIGKILL)
        self._relay.finish(label)
        self._console.forget(label)
        self._processes.remove(process)
        process.close()
        self._start(process.start)

    def _failure(self) -> Outcome:
        """Name the first that failed by itself; where all tell of another, the first of those."""
        first = [p for p in self._failed if not self._state(p).tells_of_another]
        process = [*first, *self._failed][0]
        label = process.start.label
        if _relays(process.start):
            # One process relays several ranks: the first that reported an error of its own.
            kept, reported = self._console.kept, self._console.reported
            label = next((r for r in reported if not tells_of_another(kept(r))), label)
        return Outcome("failed", process.code or 1, label)

    def _signalled(self, signals: int) -> None:
        numbers = os.read(signals, 64)
        if self._outcome is not None and self._outcome.reason == "signal":
            self._kill()  # Asked twice.
        self._stop(Outcome("signal", 128 + numbers[0]))

    def _stop(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome, self._stop_at, self._finish_at = outcome, None, None
        remote = [process.hang_up() for process in self._processes]
        for process, is_remote in zip(self._processes, remote, strict=True):
            if not is_remote:
                process.signal(signal.SIGTERM)
        grace = guardian.GRACE_SECONDS + (_REMOTE_SECONDS if any(remote) else 0.0)
        self._kill_at = time.monotonic() + grace

    def _kill(self) -> None:
        self._kill_at = None
        for process in self._processes:
            process.signal(signal.SIGKILL)
        guardian.signal_processes(self._job, signal.SIGKILL)

    def _end(self) -> None:
        """Leave nothing: what the ranks started and left behind ends as well."""
        self._stop_everything()
        for process in self._processes:
            for fd in process.start.writers:
                os.close(fd)
        self._relay.drain(_DRAIN_SECONDS)
        self._relay.finish()
        self._selector.close()
        for process in self._processes:
            process.close()

    def _stop_everything(self) -> None:
        if any(process.code is None for process in self._processes):
            # An error of the launcher's own, or a process that could not be started.
            for process in self._processes:
                process.hang_up()
                process.signal(signal.SIGTERM)
        guardian.end_processes(self._job)
        for process in self._processes:
            process.signal(signal.SIGKILL)


def _relays(start: Start) -> bool:
    """Say whether a process stands for several ranks, as mpiexec does."""
    return start.parse is not None or bool(start.pipes)
