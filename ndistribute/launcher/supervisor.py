"""Runs the processes of one attempt at a job: waits, starts again, stops, all in one thread.

One selector waits for output, for ends of processes (by pidfd) and for signals, with a timeout to
the next deadline. What an end means for the job is `verdict`, a function of plain values.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ndistribute.launcher import reaper
from ndistribute.launcher.hosts import LISTEN_FD, Host, remote_script, ssh_command
from ndistribute.launcher.output import Console, Lines, ending, tells_of_another

__all__ = [
    "Outcome",
    "Start",
    "Supervisor",
    "TaskState",
    "Verdict",
    "restart_delay",
    "signals_as_bytes",
    "verdict",
]

_Parse = Callable[[bytes], tuple[str, bytes]]

# How long a rank that only tells of another's end waits for that other one's own report.
_PATIENCE_SECONDS = 2.0
# How long servers have to end by themselves once the work is done.
_FINISH_SECONDS = 10.0
# Beyond the grace of its process, how long a reaper may take.
_REAPING_SECONDS = 5.0
_LONGEST_DELAY_SECONDS = 30.0


@dataclass(frozen=True)
class Start:
    """A process to start."""

    label: str  # Its rank, its task such as ``ps:0``, or a name for its own output.
    argv: Sequence[str]
    settings: Mapping[str, str]  # What is added to the environment of the job.
    task_type: str = "worker"
    host: Host | None = None  # The machine to reach by ssh; None: this one.
    listener: socket.socket | None = None  # Inherited under its number.
    saves: bool = False  # It may write a last snapshot when it is told to end.
    pipes: tuple[tuple[int, str, str], ...] = ()  # Those that ranks write to; rank and stream.
    parse: _Parse | None = None  # Whose a line is, where one process relays several ranks.


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, the exit code that tells of it, and what failed first.

    The reason is ``done``, ``failed``, ``timeout``, ``signal``, ``deaf`` (nobody reads the output)
    or ``unsaved`` (a server did not write its last snapshot).
    """

    reason: str
    code: int
    label: str | None = None


class Verdict(enum.Enum):
    """What follows from the end of a process."""

    GO_ON = "the others go on"
    AGAIN = "it is started again, alone"
    WAIT = "it only tells of another: that one gets a moment for a report of its own"
    FAIL = "the job has failed, and all are stopped"
    FINISH = "the work is done: the rest gets a moment to end by itself, and is stopped then"


@dataclass(frozen=True)
class TaskState:
    """What is known of a task: its type, its exit code, whether it reports a loss of another."""

    task_type: str
    code: int | None = None
    tells_of_another: bool = False


def verdict(ended: TaskState, tasks: Collection[TaskState], restarts_left: int) -> Verdict:
    """Return what follows from the end of a task, of all tasks of the job.

    >>> killed, others = TaskState("ps", 137), [TaskState("worker"), TaskState("worker")]
    >>> verdict(killed, [killed, *others], restarts_left=1).name
    'AGAIN'
    """
    chiefs = [task.code for task in tasks if task.task_type == "chief"]
    codes = chiefs or [task.code for task in tasks if task.task_type == "worker"]
    if all(code == 0 for code in codes):
        return Verdict.FINISH
    if ended.code == 0:
        return Verdict.GO_ON
    # What the others do is worth nothing without the chief, who alone knows the result.
    if restarts_left > 0 and not any(chiefs):
        return Verdict.AGAIN
    return Verdict.WAIT if ended.tells_of_another else Verdict.FAIL


def restart_delay(restarts: int) -> float:
    """Return how many seconds to wait before one more restart of what was restarted before.

    >>> [restart_delay(n) for n in (0, 1, 2, 9)]
    [0.0, 0.5, 1.0, 30.0]
    """
    return min(_LONGEST_DELAY_SECONDS, 0.25 * 2**restarts) if restarts > 0 else 0.0


@dataclass
class Supervisor:
    """Run one attempt."""

    environ: Mapping[str, str]  # The environment of all of them.
    console: Console
    signals: int  # A descriptor from which the signals that end the job can be read.
    deadline: float | None  # The moment of `time.monotonic` at which everything is stopped.
    restarts: int  # How many tasks, the chief aside, may be started again alone.
    saving_seconds: float  # How long a server has for its last snapshot.

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.signals, selectors.EVENT_READ, self._signalled)
        self._sources: dict[int, _Source] = {}
        self._processes: list[_Process] = []
        self._waiting: list[Start] = []
        self._again: Counter[str] = Counter()
        self._failed: list[_Process] = []
        self._outcome: Outcome | None = None
        self._hurried = False
        self._due: dict[Callable[[], None], float] = {}
        if self.deadline is not None:
            self._due[partial(self._stop, Outcome("timeout", 124))] = self.deadline

    def run(self, starts: Sequence[Start], delay: float = 0.0) -> Outcome:
        """Start everything after a delay, and return once all of it has ended.

        If one can not be started, the error is raised once those that were have been ended.
        """
        try:
            for start in starts:
                self._start_after(delay, start)
            while self._waiting or any(process.code is None for process in self._processes):
                self._turn()
            if self._failed and self._outcome is None:
                self._outcome = self._failure()  # Every one that failed only told of another.
        finally:
            self._end()
        outcome = self._outcome or Outcome("done", 0)
        for process in self._processes:
            # SIGTERM is how it was asked to end; with that code it has done so in order.
            if process.start.saves and process.code not in (0, 128 + signal.SIGTERM):
                unsaved = Outcome("unsaved", process.code or 1, process.start.label)
                return outcome if outcome.reason == "failed" else unsaved
        return outcome

    def _start_after(self, delay: float, start: Start) -> None:
        self._waiting.append(start)
        self._due[partial(self._start, start)] = time.monotonic() + delay

    def _start(self, start: Start) -> None:
        self._waiting.remove(start)
        grace = self.saving_seconds if start.saves else reaper.GRACE_SECONDS
        process = _Process(start, self.environ, max(grace, reaper.GRACE_SECONDS))
        self._processes.append(process)
        ended = partial(self._ended, process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, ended)
        for name in ("stdout", "stderr"):
            fd = getattr(process.popen, name).fileno()
            self._relay(fd, _Source(start.label, name, start.parse))
        for fd, rank, name in start.pipes:
            self._relay(fd, _Source(rank, name, None))

    def _turn(self) -> None:
        now = time.monotonic()
        for action in [action for action, moment in self._due.items() if moment <= now]:
            # One that was done before may have called the others off.
            if self._due.pop(action, None) is not None:
                action()
        # At least once a second, for whoever reads the output may go while nothing is written.
        left = min([1.0, *(moment - now for moment in self._due.values())])
        for key, _ in self._selector.select(max(0.0, left)):
            key.data()
        if self.console.nobody_reads:
            self._stop(Outcome("deaf", 128 + signal.SIGPIPE))

    def _ended(self, process: _Process) -> None:
        self._selector.unregister(process.pidfd)
        code = process.popen.wait(reaper.GRACE_SECONDS)
        process.code = code if code >= 0 else 128 - code
        if self._outcome is not None:
            return
        if process.code:
            self._drain(0.1)
        states = [self._state(p) for p in self._processes]
        states += [TaskState(start.task_type) for start in self._waiting]
        restarts = 0 if self._give_up in self._due else self.restarts
        match verdict(self._state(process), states, restarts):
            case Verdict.AGAIN:
                self._start_again(process)
            case Verdict.WAIT:
                self._failed.append(process)
                self._due.setdefault(self._give_up, time.monotonic() + _PATIENCE_SECONDS)
            case Verdict.FAIL:
                self._failed.append(process)
                self._give_up()
            case Verdict.FINISH if self._finish not in self._due:
                self._failed.clear()
                self._waiting.clear()
                self._due = {self._finish: time.monotonic() + _FINISH_SECONDS}

    def _state(self, process: _Process) -> TaskState:
        told = bool(process.code) and tells_of_another(self.console.kept(process.start.label))
        return TaskState(process.start.task_type, process.code, told)

    def _start_again(self, process: _Process) -> None:
        """Put a new process in the place of one that ended; nothing else of the job notices."""
        label, how = process.start.label, ending(process.code or 0)
        delay = restart_delay(self._again[label])
        self._again[label] += 1
        self.restarts -= 1
        when = f"starting it again in {delay:g} s ({self.restarts} left)"
        self.console.say(f"{label} ended ({how}); {when}.")
        self._let_go(label)
        self.console.forget(label)
        self._processes.remove(process)
        process.close()
        self._start_after(delay, process.start)

    def _failure(self) -> Outcome:
        """Name the first that failed by itself; where all tell of another, the first of those."""
        first = [p for p in self._failed if not self._state(p).tells_of_another]
        process = [*first, *self._failed][0]
        label = process.start.label
        if process.start.pipes or process.start.parse:
            # One process relays several ranks: the first that reported an error of its own.
            kept, reported = self.console.kept, self.console.reported
            label = next((r for r in reported if not tells_of_another(kept(r))), label)
        return Outcome("failed", process.code or 1, label)

    def _give_up(self) -> None:
        self._stop(self._failure())

    def _finish(self) -> None:
        self._stop(Outcome("done", 0))

    def _signalled(self) -> None:
        numbers = os.read(self.signals, 64)
        if self._outcome is None:
            self._stop(Outcome("signal", 128 + numbers[0]))
            return
        # Asked again, it does not wait for the grace; and once more, nor for last snapshots.
        for process in self._processes:
            if self._hurried or not process.start.saves:
                process.hang_up()
                self._due[process.popen.kill] = time.monotonic() + _REAPING_SECONDS
        self._hurried = True

    def _stop(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._waiting.clear()
        now = time.monotonic()
        self._due = {self._tell_of_savers: now + reaper.GRACE_SECONDS}
        for process in self._processes:
            process.ask_to_end()
            # A reaper ends its process in time, if it is reached: the other host may be gone.
            self._due[process.popen.kill] = now + process.grace + _REAPING_SECONDS

    def _tell_of_savers(self) -> None:
        savers = [p.start.label for p in self._processes if p.start.saves and p.code is None]
        if savers:
            wait = f"waiting {self.saving_seconds:g} s at most"
            self.console.say(f"{wait} until {', '.join(savers)} wrote a last snapshot.")

    def _end(self) -> None:
        """Leave nothing, not after an error of the launcher's own either."""
        for process in self._processes:
            process.hang_up()
        self._drain(1.0)
        self._let_go()
        self._selector.close()
        for process in self._processes:
            process.close()

    def _relay(self, fd: int, source: _Source) -> None:
        os.set_blocking(fd, False)
        self._sources[fd] = source
        self._selector.register(fd, selectors.EVENT_READ, partial(self._read, fd))

    def _read(self, fd: int) -> None:
        if fd not in self._sources:
            return  # It ended while another event of the same turn was handled.
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, 1 << 16)
            self._sources[fd].show(self.console, data)
            if not data:
                self._selector.unregister(fd)
                del self._sources[fd]

    def _drain(self, seconds: float) -> None:
        """Read what has been written, for a time at most: some may go on writing for ever."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ready = [key.fd for key, _ in self._selector.select(0) if key.fd in self._sources]
            if not ready:
                return
            for fd in ready:
                self._read(fd)

    def _let_go(self, label: str | None = None) -> None:
        """Close the pipes of a process, or of all; lines that were not ended are shown."""
        for fd, source in list(self._sources.items()):
            if label is None or source.label == label:
                source.show(self.console, b"")
                self._selector.unregister(fd)
                del self._sources[fd]


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[int]:
    """Turn the signals that end a program into bytes that can be waited for.

    Those that were ignored, as by nohup and in jobs that sh runs in the background, stay so.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ending_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [signum for signum in ending_signals if signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, lambda *_: None) for signum in heeded}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(reader)
        os.close(writer)


@dataclass
class _Source:
    """One pipe: whose it is, and the line that is not complete yet."""

    label: str
    stream: str
    parse: _Parse | None
    lines: Lines = field(default_factory=Lines)

    def show(self, console: Console, data: bytes) -> None:
        """Show the lines that are complete now; without data, that is at the end, all of them."""
        lines = self.lines.feed(data) if data else self.lines.close()
        if self.parse is None:
            console.take(self.label, self.stream, lines)
            return
        for rank, line in map(self.parse, lines):
            console.take(rank, self.stream, [line])


class _Process:
    """A started process with its reaper, which ends it when its input is closed."""

    def __init__(self, start: Start, environ: Mapping[str, str], grace: float) -> None:
        self.start = start
        self.code: int | None = None
        self.grace = grace
        own, script, fds = dict(environ), "", []
        if start.host is None:
            mpi = ["mpi"] if start.pipes or start.parse else []
            argv = [sys.executable, "-I", "-S", reaper.__file__, *mpi, str(grace), *start.argv]
            own |= start.settings
        else:
            argv = ssh_command(start.host.name)
            script = remote_script(start.argv, start.settings, environ, start.host.slots)
        if start.listener is not None:
            fds = [start.listener.fileno()]
            own[LISTEN_FD] = str(fds[0])
        self.popen = subprocess.Popen(
            argv,
            env=own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=fds,
        )
        self.pidfd = os.pidfd_open(self.popen.pid)
        self._write(script.encode())

    def ask_to_end(self) -> None:
        """Have it ended, with a grace; when it is hung up on then, at once."""
        self._write(b".")

    def hang_up(self) -> None:
        """Have it ended as if the launcher were gone."""
        if self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.popen.stdin.close()

    def close(self) -> None:
        """Wait until it has ended, and close what belongs to it."""
        self.hang_up()
        try:
            self.popen.wait(self.grace + _REAPING_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(reaper.GRACE_SECONDS)
        for stream in filter(None, (self.popen.stdout, self.popen.stderr)):
            stream.close()
        os.close(self.pidfd)

    def _write(self, data: bytes) -> None:
        if self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # Its exit code will say why.
                self.popen.stdin.write(data)
                self.popen.stdin.flush()
