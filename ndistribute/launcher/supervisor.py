"""Runs the tasks of one attempt at a job: waits, starts again, stops, all in one thread.

One selector waits for output, for ends of tasks and for signals, with a timeout to the next
deadline. What an end means for the job is `verdict`, a function of plain values.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from subprocess import PIPE, Popen
from typing import IO, cast

from ndistribute.launcher import reaper
from ndistribute.launcher.hosts import Host, remote_script, ssh_command
from ndistribute.launcher.mpiexec import MPIEXEC
from ndistribute.launcher.output import Console, exit_text, tells_of_another
from ndistribute.transport.listener import LISTEN_FD

# How long a rank that only tells of another's end waits for that other one's own report.
_PATIENCE_SECONDS = 2.0
# How long servers have to end by themselves once the work is done.
_FINISH_SECONDS = 10.0
# Beyond the grace of its process, how long a reaper may take.
_REAPING_SECONDS = 5.0
_LONGEST_DELAY_SECONDS = 30.0
# More than a pipe holds: somebody may go on writing for ever.
_MOST_READS = 64


@dataclass(frozen=True)
class Start:
    """A task to start."""

    label: str  # Its rank, its task such as ``ps:0``, or `MPIEXEC`, which relays several ranks.
    argv: Sequence[str]
    settings: Mapping[str, str]  # What is added to the environment of the job.
    task_type: str = "worker"
    host: Host | None = None  # The machine to connect to by ssh; None: this one.
    listener: socket.socket | None = None  # Inherited under its number.
    saving: float = 0.0  # How many seconds it has for a last snapshot when it is told to end.
    outputs: Sequence[tuple[int, str, str]] = ()  # Pipes to read beside its own.

    @property
    def grace(self) -> float:
        return max(self.saving, reaper.GRACE_SECONDS)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, the exit code that tells of it, and what failed first."""

    # "done", "failed", "timeout", "signal", "unread" (nobody reads the output) or "unsaved" (a
    # server did not write its last snapshot).
    reason: str
    code: int
    label: str | None = None
    host: str = ""  # Where it ran, if that is another machine.


class Verdict(enum.Enum):
    """What follows from the end of a process."""

    GO_ON = "the others go on"
    AGAIN = "it is started again, alone"
    WAIT = "it only tells of another: that one gets a moment for a report of its own"
    FAIL = "the job has failed, and all are stopped"
    FINISH = "the work is done: the rest gets a moment to end by itself, and is stopped then"


@dataclass(eq=False)
class TaskState:
    """What is known of a task: its type, its exit code, whether it reports a loss of another."""

    task_type: str
    code: int | None = None
    tells_of_another: bool = False


def verdict(ended: TaskState, tasks: Collection[TaskState], restarts_left: int) -> Verdict:
    """Return what follows from the end of a task, of all tasks of the job."""
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
    """Return how many seconds to wait before one more restart of what was restarted before."""
    return min(_LONGEST_DELAY_SECONDS, 0.25 * 2**restarts) if restarts > 0 else 0.0


@dataclass(eq=False, kw_only=True)
class _Task(TaskState):
    start: Start
    running: Process | None = None  # None: it waits to be started.
    restarts: int = 0


@dataclass
class Supervisor:
    """Run one attempt."""

    begin: Callable[[Start], Process]
    console: Console
    deadline: float | None  # The moment of `time.monotonic` at which everything is stopped.
    restarts: int  # How many tasks, the chief aside, may be started again alone.
    signals: socket.socket | None = None  # From which the signals that end the job can be read.

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        if self.signals is not None:
            self._selector.register(self.signals, selectors.EVENT_READ, self._signalled)
        self._tasks: list[_Task] = []
        self._failed: list[_Task] = []
        self._outcome: Outcome | None = None
        self._hurried = False
        self._finish = partial(self._stop, Outcome("done", 0))
        self._due: dict[Callable[[], None], float] = {}
        if self.deadline is not None:
            self._due[partial(self._stop, Outcome("timeout", 124))] = self.deadline

    def run(self, starts: Sequence[Start], delay: float = 0.0) -> Outcome:
        """Start everything after a delay; return, or raise an error, once all of it has ended."""
        self._tasks = [_Task(start.task_type, start=start) for start in starts]
        for task in self._tasks:
            self._due[partial(self._start, task)] = time.monotonic() + delay
        try:
            self._wait_for_all()
        except BaseException:
            self._stop(Outcome("failed", 1))
            self._wait_for_all()
            raise
        finally:
            for task in self._tasks:
                if task.running is not None and task.code is None:
                    task.running.close()
            self._selector.close()
        # If nothing else happened, every one that failed only told of another.
        outcome = self._outcome or (self._failure() if self._failed else Outcome("done", 0))
        for task in self._tasks:
            # SIGTERM is how it was asked to end; with that code it has done so in order.
            if task.start.saving and task.code not in (0, 128 + signal.SIGTERM):
                unsaved = Outcome("unsaved", task.code or 1, task.start.label)
                return outcome if outcome.reason == "failed" else unsaved
        return outcome

    def _wait_for_all(self) -> None:
        while any(task.code is None for task in self._tasks):
            now = time.monotonic()
            for action in [action for action, moment in self._due.items() if moment <= now]:
                # One that was done before may have called the others off.
                if self._due.pop(action, None) is not None:
                    action()
            # At least once a second, for who reads the output may go while nothing is written.
            left = min([1.0, *(moment - now for moment in self._due.values())])
            for key, _ in self._selector.select(max(0.0, left)):
                key.data()
            if self.console.nobody_reads:
                self._stop(Outcome("unread", 128 + signal.SIGPIPE))

    def _start(self, task: _Task) -> None:
        task.running = self.begin(task.start)
        ended = partial(self._ended, task, task.running)
        self._selector.register(task.running.done, selectors.EVENT_READ, ended)
        for output in task.running.outputs:
            os.set_blocking(output[0], False)
            read = partial(self._read, *output)
            self._selector.register(output[0], selectors.EVENT_READ, read)

    def _read(self, fd: int, label: str, stream: str, most: int = 1) -> None:
        """Show what a pipe has now, with so many reads at most."""
        # In another event of the same turn its task may have ended, and the pipe with it.
        while most > 0 and fd in self._selector.get_map():
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            self.console.feed(label, stream, data)
            if not data:
                self._selector.unregister(fd)
            most -= 1

    def _ended(self, task: _Task, running: Process) -> None:
        self._selector.unregister(running.done)
        task.code = running.code()
        for output in running.outputs:
            self._read(*output, _MOST_READS)
            if output[0] in self._selector.get_map():
                self._selector.unregister(output[0])
                self.console.feed(*output[1:], b"")
        running.close()
        said = self.console.kept(task.start.label)
        task.tells_of_another = bool(task.code) and tells_of_another(said)
        if self._outcome is not None:
            return
        can_restart = running.lost is None and self._give_up not in self._due
        match verdict(task, self._tasks, self.restarts if can_restart else 0):
            case Verdict.AGAIN:
                self._start_again(task)
            case Verdict.WAIT:
                self._failed.append(task)
                self._due.setdefault(self._give_up, time.monotonic() + _PATIENCE_SECONDS)
            case Verdict.FAIL:
                self._failed.append(task)
                self._give_up()
            case Verdict.FINISH if self._finish not in self._due:
                self._failed.clear()
                self._drop_waiting()
                self._due = {self._finish: time.monotonic() + _FINISH_SECONDS}

    def _start_again(self, task: _Task) -> None:
        """Have a new process take the task's place; nothing else of the job notices."""
        label, delay = task.start.label, restart_delay(task.restarts)
        task.restarts += 1
        self.restarts -= 1
        when = f"starting it again in {delay:g} s ({self.restarts} left)"
        self.console.say(f"{label} ended ({exit_text(task.code or 0)}); {when}.")
        self.console.forget(label)
        task.running = task.code = None
        self._due[partial(self._start, task)] = time.monotonic() + delay

    def _failure(self) -> Outcome:
        """Name the first that failed by itself; where all tell of another, the first of those."""
        first = [task for task in self._failed if not task.tells_of_another]
        task = [*first, *self._failed][0]
        label, host = task.start.label, task.start.host
        if label == MPIEXEC:
            # The first rank that reported an error of its own.
            kept, reported = self.console.kept, self.console.reported
            label = next((r for r in reported if not tells_of_another(kept(r))), label)
        return Outcome("failed", task.code or 1, label, "" if host is None else host.name)

    def _give_up(self) -> None:
        self._stop(self._failure())

    def _signalled(self) -> None:
        signum = self.signals.recv(64)[0] if self.signals is not None else 0
        if self._outcome is None:
            self._stop(Outcome("signal", 128 + signum))
            return
        # Asked again, it does not wait for the grace; and once more, nor for last snapshots.
        for task in self._tasks:
            if task.running is not None and (self._hurried or not task.start.saving):
                task.running.hang_up()
                self._due[task.running.kill] = time.monotonic() + _REAPING_SECONDS
        self._hurried = True

    def _stop(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._drop_waiting()
        now = time.monotonic()
        self._due = {self._tell_of_savers: now + reaper.GRACE_SECONDS}
        for task in self._tasks:
            if task.running is not None and task.code is None:
                task.running.ask_to_end()
                # It is ended in time, if it can be reached: the other host may be gone.
                self._due[task.running.kill] = now + task.start.grace + _REAPING_SECONDS

    def _drop_waiting(self) -> None:
        self._tasks = [task for task in self._tasks if task.running is not None]

    def _tell_of_savers(self) -> None:
        savers = [task.start for task in self._tasks if task.start.saving and task.code is None]
        if savers:
            labels = ", ".join(start.label for start in savers)
            wait = f"waiting {savers[0].saving:g} s at most"
            self.console.say(f"{wait} until {labels} wrote a last snapshot.")


class Process:
    """A started process with its reaper, which ends it when its input is closed."""

    done: int  # A descriptor that can be read once it has ended.
    outputs: Sequence[tuple[int, str, str]]  # Pipes to read: whose, and which stream.
    kill: Callable[[], None]  # After which it is not waited for any longer.
    lost: Exception | None = None  # Why what is needed to start it again is not there.

    def __init__(
        self,
        environ: Mapping[str, str],
        start: Start,
        around: Sequence[str] = (),
        inherited: Sequence[int] = (),
    ) -> None:
        own, script, fds = dict(environ), "", [*inherited]
        if start.host is None:
            mpi = ["mpi"] if start.label == MPIEXEC else []
            reaping = [sys.executable, "-I", "-S", reaper.__file__, *mpi, str(start.grace)]
            cmd = [*around, *reaping, *start.argv]
            own |= start.settings
        else:
            cmd = ssh_command(start.host.name)
            script = remote_script(start.argv, start.settings, environ, start.host.slots)
        if start.listener is not None:
            fds.append(start.listener.fileno())
            own[LISTEN_FD] = str(fds[-1])
        self._popen = Popen(
            cmd, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=own, start_new_session=True, pass_fds=fds
        )
        self.kill = self._popen.kill
        self.done = os.pidfd_open(self._popen.pid)
        pipes = self._popen.stdin, self._popen.stdout, self._popen.stderr
        self._input, *self._pipes = (cast("IO[bytes]", pipe) for pipe in pipes)
        streams = zip(self._pipes, ("stdout", "stderr"), strict=True)
        mine = [(pipe.fileno(), start.label, stream) for pipe, stream in streams]
        self.outputs = (*mine, *start.outputs)
        self._write(script.encode())

    def code(self) -> int:
        """Return the exit code, 128 plus the number for a signal."""
        code = self._popen.wait(reaper.GRACE_SECONDS)
        return code if code >= 0 else 128 - code

    def ask_to_end(self) -> None:
        self._write(b".")

    def hang_up(self) -> None:
        """Have it ended as if the launcher were gone; at once if it was asked before."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def close(self) -> None:
        self.hang_up()
        for pipe in self._pipes:
            pipe.close()
        os.close(self.done)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # Its exit code will say why.
            self._input.write(data)
            self._input.flush()


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[socket.socket]:
    """Give a socket from which the signals that end a program can be read, a byte each."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    ending_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What is ignored, as by nohup and in jobs that sh runs in the background, stays so.
    heeded = [signum for signum in ending_signals if signal.getsignal(signum) != signal.SIG_IGN]
    with reader, writer:
        before = {signum: signal.signal(signum, lambda *_: None) for signum in heeded}
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)
