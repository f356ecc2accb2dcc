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
from ndistribute.launcher.output import Console, Lines, ending, tells_of_another

__all__ = [
    "Outcome",
    "Start",
    "Supervisor",
    "TaskState",
    "Verdict",
    "reaped",
    "restart_delay",
    "signals_as_bytes",
    "verdict",
]

# How long a rank that only tells of another's end waits for that other one's own report.
_PATIENCE_SECONDS = 2.0
# How long servers have to end by themselves once the work is done.
_FINISH_SECONDS = 10.0
# The other side of a connection has its own grace; this is for the way there and back.
_REMOTE_SECONDS = 2.0
_LONGEST_DELAY_SECONDS = 30.0
_NEVER = float("inf")


@dataclass(frozen=True)
class Start:
    """A process to start.

    Args:
        label: its rank, its task such as ``ps:0``, or a name for its own output.
        argv: its command line.
        environ: its whole environment.
        task_type: chief, worker or ps; what starts ranks counts as a worker.
        saves: it may write a last snapshot when it is told to end, and has longer for it.
        listener: a socket that it inherits under its number, or None; the caller closes it.
        script: what it reads on standard input, which then stays open for as long as the job
            runs; None for no input.
        pipes: read ends of pipes that its children write to, with the rank and stream of each.
        writers: the other ends, which are kept open for as long as a child may come to open them.
        parse: finds out which rank a line came from, where one process relays several.
    """

    label: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    task_type: str = "worker"
    saves: bool = False
    listener: socket.socket | None = None
    script: bytes | None = None
    pipes: tuple[tuple[int, str, str], ...] = ()
    writers: tuple[int, ...] = ()
    parse: _Parse | None = None

    @property
    def relays(self) -> bool:
        """Return True if the process stands for several ranks, as mpiexec does."""
        return self.parse is not None or bool(self.pipes)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Args:
        reason: ``done``, ``failed``, ``timeout``, ``signal``, ``deaf`` (nobody read the output) or
            ``unsaved`` (a server did not write its last snapshot).
        code: the exit code that tells of it.
        label: the rank or task that failed first.
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


class Supervisor:
    """Run one attempt.

    Args:
        job: the mark of the job, which the processes have in their environment.
        console: where output goes.
        signals: a descriptor from which signals that end the job can be read.
        deadline: the moment of `time.monotonic` at which everything is stopped, or None.
        restarts: how many tasks, the chief aside, may be started again alone.
        saving_seconds: how long a server has for its last snapshot.
    """

    def __init__(
        self,
        job: str,
        console: Console,
        signals: int,
        deadline: float | None = None,
        restarts: int = 0,
        saving_seconds: float = reaper.GRACE_SECONDS,
    ) -> None:
        self._job = job
        self._console = console
        self._restarts = restarts
        self._saving_seconds = saving_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ, partial(self._signalled, signals))
        self._sources: dict[int, _Source] = {}
        self._processes: list[_Process] = []
        self._waiting: list[Start] = []
        self._again: Counter[str] = Counter()
        self._failed: list[_Process] = []
        self._outcome: Outcome | None = None
        self._due: dict[Callable[[], None], float] = {}
        if deadline is not None:
            self._due[partial(self._stop, Outcome("timeout", 124))] = deadline

    def run(self, starts: Sequence[Start], delay: float = 0.0) -> Outcome:
        """Start everything after a delay, and return once all of it has ended.

        Raises:
            OSError: a process could not be started; those that were have been ended.
        """
        try:
            for start in starts:
                self._start_after(delay, start)
            while self._waiting or any(process.code is None for process in self._processes):
                self._turn()
            if self._failed and self._outcome is None:
                self._outcome = self._failure()  # Every one that failed only told of another.
        finally:
            self._end(starts)
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
        process = _Process(start)
        self._processes.append(process)
        ended = partial(self._ended, process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, ended)
        for stream, name in ((process.popen.stdout, "stdout"), (process.popen.stderr, "stderr")):
            if stream is not None:
                self._relay(stream.fileno(), start.label, name, start.parse)
        for fd, rank, name in start.pipes:
            self._relay(fd, rank, name, None)

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
        if self._console.nobody_reads:
            self._stop(Outcome("deaf", 128 + signal.SIGPIPE))

    def _ended(self, process: _Process) -> None:
        self._selector.unregister(process.pidfd)
        process.look()
        if self._outcome is not None:
            return
        if process.code:
            self._drain(0.1)
        states = [self._state(p) for p in self._processes]
        states += [TaskState(start.task_type) for start in self._waiting]
        restarts = 0 if self._give_up in self._due else self._restarts
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
        told = bool(process.code) and tells_of_another(self._console.kept(process.start.label))
        return TaskState(process.start.task_type, process.code, told)

    def _start_again(self, process: _Process) -> None:
        """Put a new process in the place of one that ended; nothing else of the job notices."""
        label, how = process.start.label, ending(process.code or 0)
        delay = restart_delay(self._again[label])
        self._again[label] += 1
        self._restarts -= 1
        when = f" in {delay} s" if delay else ""
        self._console.say(
            f"{label} ended ({how}); starting it again{when} ({self._restarts} left)."
        )
        # What it left behind would go on beside its successor.
        process.signal(signal.SIGKILL)
        self._finish_output(label)
        self._console.forget(label)
        self._processes.remove(process)
        process.close()
        self._start_after(delay, process.start)

    def _failure(self) -> Outcome:
        """Name the first that failed by itself; where all tell of another, the first of those."""
        first = [p for p in self._failed if not self._state(p).tells_of_another]
        process = [*first, *self._failed][0]
        label = process.start.label
        if process.start.relays:
            # One process relays several ranks: the first that reported an error of its own.
            kept, reported = self._console.kept, self._console.reported
            label = next((r for r in reported if not tells_of_another(kept(r))), label)
        return Outcome("failed", process.code or 1, label)

    def _give_up(self) -> None:
        self._stop(self._failure())

    def _finish(self) -> None:
        self._stop(Outcome("done", 0))

    def _signalled(self, signals: int) -> None:
        numbers = os.read(signals, 64)
        if self._outcome is None:
            self._stop(Outcome("signal", 128 + numbers[0]))
        elif self._due:  # Asked again: what was to come later comes now.
            action = min(self._due, key=self._due.__getitem__)
            del self._due[action]
            action()

    def _stop(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._waiting.clear()
        remote = [process.hang_up() for process in self._processes]
        for process, is_remote in zip(self._processes, remote, strict=True):
            if not is_remote:
                process.signal(signal.SIGTERM)
        grace = reaper.GRACE_SECONDS + (_REMOTE_SECONDS if any(remote) else 0.0)
        now = time.monotonic()
        self._due = {
            partial(self._kill, saving=False): now + grace,
            partial(self._kill, saving=True): now + max(grace, self._saving_seconds),
        }

    def _kill(self, saving: bool) -> None:
        """Kill what is left, at first but for those that may be writing a last snapshot."""
        left = [process for process in self._processes if process.code is None]
        for process in left:
            if saving or not process.start.saves:
                process.signal(signal.SIGKILL)
        reaper.send((self._job, self._job + reaper.SAVING)[: 1 + saving], signal.SIGKILL)
        savers = ", ".join(process.start.label for process in left if process.start.saves)
        if savers and not saving:
            self._console.say(
                f"waiting {self._saving_seconds:g} s at most until {savers} wrote a last snapshot."
            )

    def _end(self, starts: Sequence[Start]) -> None:
        """Leave nothing: what the ranks started and left behind ends as well."""
        for process in self._processes:
            # Those that still run are here after an error of the launcher's own.
            process.hang_up()
        still = any(process.code is None for process in self._processes)
        reaper.end_processes(self._job, self._saving_seconds if still else reaper.GRACE_SECONDS)
        for process in self._processes:
            process.signal(signal.SIGKILL)
        for fd in [fd for start in starts for fd in start.writers]:
            os.close(fd)
        self._drain(1.0)
        self._finish_output()
        self._selector.close()
        for process in self._processes:
            process.close()
        for fd in [pipe[0] for start in starts for pipe in start.pipes]:
            os.close(fd)

    def _relay(self, fd: int, label: str, stream: str, parse: _Parse | None) -> None:
        os.set_blocking(fd, False)
        self._sources[fd] = _Source(label, stream, parse)
        self._selector.register(fd, selectors.EVENT_READ, partial(self._read, fd))

    def _read(self, fd: int) -> None:
        if fd not in self._sources:
            return  # It ended while another event of the same turn was handled.
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, 1 << 16)
            if data:
                self._take(self._sources[fd], self._sources[fd].lines.feed(data))
            else:
                self._finish_source(fd)

    def _drain(self, seconds: float) -> None:
        """Read what has been written, for a time at most: some may go on writing for ever."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ready = [key.fd for key, _ in self._selector.select(0) if key.fd in self._sources]
            if not ready:
                return
            for fd in ready:
                self._read(fd)

    def _finish_output(self, label: str | None = None) -> None:
        """Let go of the pipes of a process, or of all; lines that were not ended are shown."""
        for fd, source in list(self._sources.items()):
            if label is None or source.label == label:
                self._finish_source(fd)

    def _finish_source(self, fd: int) -> None:
        self._selector.unregister(fd)
        source = self._sources.pop(fd)
        self._take(source, source.lines.close())

    def _take(self, source: _Source, lines: list[bytes]) -> None:
        if source.parse is None:
            self._console.take(source.label, source.stream, lines)
            return
        for line in lines:
            rank, text = source.parse(line)
            self._console.take(rank, source.stream, [text])


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[int]:
    """Turn the signals that end a program into bytes that can be waited for.

    Those that were ignored, as by nohup and in jobs that sh runs in the background, stay so.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    heeded = [
        signum
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signum) != signal.SIG_IGN
    ]
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


@contextlib.contextmanager
def reaped(job: str, saving_seconds: float, mpi: bool) -> Iterator[None]:
    """Keep a reaper for a ``with`` block, which ends the job when this process is gone.

    Args:
        job: the mark of the job.
        saving_seconds: how long a server has for its last snapshot.
        mpi: whether MPI starts it, which leaves shared memory when it is killed.
    """
    arguments = ["watch", job, str(saving_seconds), *(["mpi"] if mpi else [])]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != reaper.MARK},
    )
    try:
        yield
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(3 * reaper.GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(reaper.GRACE_SECONDS)


_Parse = Callable[[bytes], tuple[str, bytes]]


@dataclass
class _Source:
    """One pipe: whose it is, and the line that is not complete yet."""

    label: str
    stream: str
    parse: _Parse | None
    lines: Lines = field(default_factory=Lines)


class _Process:
    """A started process; it stays unreaped until it is closed.

    It leads a group of its own, and its number stays its own until it is reaped, so that signals
    can be sent to the group.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self.popen = subprocess.Popen(
            start.argv,
            env=start.environ,
            stdin=subprocess.DEVNULL if start.script is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=() if start.listener is None else (start.listener.fileno(),),
        )
        self.pidfd = os.pidfd_open(self.popen.pid)
        self.code: int | None = None
        if self.popen.stdin is not None and start.script is not None:
            with contextlib.suppress(BrokenPipeError):  # Its exit code will say why.
                self.popen.stdin.write(start.script)
                self.popen.stdin.flush()

    def look(self) -> None:
        """Note the exit code, and leave the process unreaped."""
        found = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            signalled = found.si_code != os.CLD_EXITED
            self.code = 128 + found.si_status if signalled else found.si_status

    def signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signum)

    def hang_up(self) -> bool:
        """Close its input, which ends a process on another host; return True if it had one."""
        if self.popen.stdin is None:
            return False
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        return True

    def close(self) -> None:
        """Reap it, and close what belongs to it."""
        self.hang_up()
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()
        os.close(self.pidfd)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(reaper.GRACE_SECONDS)
