"""Runs the processes of one attempt at a job in a single thread: relays, waits, stops together.

One selector waits for output, for ends of processes (by pidfd) and for signals, with a timeout to
the next deadline.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ndistribute.cluster import guardian
from ndistribute.cluster.output import Console, Lines, Parse, tells_of_another
from ndistribute.cluster.processes import Process, Start, guarded, signals_as_bytes

__all__ = ["Outcome", "Supervisor"]

# How long a rank that only tells of another's end waits for that other one's own report.
_PATIENCE_SECONDS = 2.0
# The other side of a connection has its own grace; this is for the way there and back.
_REMOTE_SECONDS = 2.0
_DRAIN_SECONDS = 1.0
_LEAST_DRAIN_SECONDS = 0.1


@dataclass
class Outcome:
    """How an attempt ended.

    Args:
        reason: ``done``, ``failed``, ``timeout``, ``signal`` or ``deaf`` (nobody read the output).
        code: the exit code that tells of it.
        rank: the rank that failed first.
    """

    reason: str
    code: int
    rank: str | None = None


class Supervisor:
    """Run one attempt.

    Args:
        job: the mark of the job, which the processes have in their environment.
        console: where output goes.
        deadline: the moment of `time.monotonic` at which everything is stopped, or None.
    """

    def __init__(self, job: str, console: Console, deadline: float | None = None) -> None:
        self._job = job
        self._console = console
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()
        self._processes: list[Process] = []
        self._lines: dict[int, tuple[Lines, str, str, Parse | None]] = {}
        self._outcome: Outcome | None = None
        self._failed: list[Process] = []
        self._kill_at: float | None = None
        self._stop_at: float | None = None

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
                self._relay(stream.fileno(), start.label, name, start.parse)
        for fd, rank, name in start.pipes:
            self._relay(fd, rank, name, None)

    def _relay(self, fd: int, label: str, stream: str, parse: Parse | None) -> None:
        os.set_blocking(fd, False)
        self._lines[fd] = (Lines(), label, stream, parse)
        self._selector.register(fd, selectors.EVENT_READ, None)

    def _turn(self, signals: int) -> None:
        for key, _ in self._selector.select(self._seconds_to_next_deadline()):
            if isinstance(key.data, Process):
                key.data.look()
                self._selector.unregister(key.fd)
                self._ended(key.data)
            elif key.fd == signals:
                self._signalled(signals)
            else:
                self._read(key.fd)
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._stop(Outcome("timeout", 124))
        if self._stop_at is not None and now >= self._stop_at:
            self._stop(self._failure())
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def _seconds_to_next_deadline(self) -> float:
        deadlines = [d for d in (self._deadline, self._kill_at, self._stop_at) if d is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else 60.0

    def _read(self, fd: int) -> bool:
        """Relay what can be read now; say whether there may be more later."""
        if fd not in self._lines:
            return False  # It ended while another event of the same turn was handled.
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        lines, label, stream, parse = self._lines[fd]
        self._take(label, stream, parse, lines.feed(data) if data else lines.close())
        if not data:
            self._selector.unregister(fd)
            del self._lines[fd]
        return bool(data)

    def _take(self, label: str, stream: str, parse: Parse | None, lines: list[bytes]) -> None:
        try:
            if parse is None:
                self._console.take(label, stream, lines)
                return
            for line in lines:
                rank, text = parse(line)
                self._console.take(rank, stream, [text])
        except BrokenPipeError:
            self._stop(Outcome("deaf", 128 + signal.SIGPIPE))

    def _ended(self, process: Process) -> None:
        if not process.code or self._outcome is not None:
            return
        self._failed.append(process)
        self._drain(0.0)
        if tells_of_another(self._console.kept(process.start.label)) and self._stop_at is None:
            self._stop_at = time.monotonic() + _PATIENCE_SECONDS
        elif not tells_of_another(self._console.kept(process.start.label)):
            self._stop(self._failure())

    def _failure(self) -> Outcome:
        """Name the first that failed by itself; where all tell of another, the first of those."""
        kept = self._console.kept
        first = [p for p in self._failed if not tells_of_another(kept(p.start.label))]
        process = [*first, *self._failed][0]
        rank = process.start.label
        if _relays(process.start):
            # One process relays several ranks: the first that reported an error of its own.
            reported = self._console.reported
            rank = next((r for r in reported if not tells_of_another(kept(r))), rank)
        return Outcome("failed", process.code or 1, rank)

    def _signalled(self, signals: int) -> None:
        numbers = os.read(signals, 64)
        if self._outcome is not None and self._outcome.reason == "signal":
            self._kill()  # Asked twice.
        self._stop(Outcome("signal", 128 + numbers[0]))

    def _stop(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome, self._stop_at = outcome, None
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
        self._drain(_DRAIN_SECONDS)
        for fd in list(self._lines):
            lines, label, stream, parse = self._lines.pop(fd)
            self._take(label, stream, parse, lines.close())
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

    def _drain(self, seconds: float) -> None:
        """Relay what has been written, for a time, since an end of file may never come.

        Nor may a pause: what goes on writing is not waited for either.
        """
        start = time.monotonic()
        while self._lines and time.monotonic() < start + max(seconds, _LEAST_DRAIN_SECONDS):
            left = max(0.0, start + seconds - time.monotonic())
            ready = [k.fd for k, _ in self._selector.select(left) if k.fd in self._lines]
            if not ready:
                return
            for fd in ready:
                self._read(fd)


def _relays(start: Start) -> bool:
    """Say whether a process stands for several ranks, as mpiexec does."""
    return start.parse is not None or bool(start.pipes)
