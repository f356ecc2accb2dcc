"""Runs the tasks of one attempt at a job: starts, restarts and stops them, in one thread.

A selector waits for output, ends of tasks, signals and the next deadline. The function
`verdict` decides what the end of a task means for the job.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from subprocess import PIPE, Popen
from typing import IO, cast

from ndistribute.launcher import commands, reaper
from ndistribute.launcher.commands import MPIEXEC, Host
from ndistribute.launcher.output import Console, exit_text, is_loss_report
from ndistribute.transport.listener import LISTEN_FD, set_accepting

# If a task only reports the loss of another task, the time to wait for the other's report.
_REPORT_SECONDS = 2.0
# The time in which servers must end by themselves once the work is done.
_FINISH_SECONDS = 10.0
# The time that a reaper needs beyond the grace of its process.
_REAPING_SECONDS = 5.0
_LONGEST_DELAY_SECONDS = 30.0
# The exit code of a task ended by SIGTERM, such as a worker that handed over.
PREEMPTED = 128 + signal.SIGTERM
_BEATS = 8  # The number of beats within `silence`.
# More than a full pipe holds; limited, because a descendant may write forever.
_MOST_READS = 64


@dataclass(frozen=True)
class Start:
    """A task to start."""

    label: str  # Its rank, its task such as ``ps:0``, or `MPIEXEC`, which relays several ranks.
    argv: Sequence[str]
    settings: Mapping[str, str]  # Variables added to the environment of the job.
    task_type: str = "worker"
    host: Host | None = None  # The machine to connect to by ssh; None: this one.
    listener: socket.socket | None = None  # Inherited with the same number.
    saving: float = 0.0  # Seconds for a last snapshot when it is told to end.
    leaving: float = 0.0  # Seconds to hand over when it alone is told to end.
    outputs: Sequence[tuple[int, str, str]] = ()  # More pipes to read: descriptor, label, stream.
    around: Sequence[str] = ()  # The command that runs the reaper.
    inherited: Sequence[int] = ()  # More descriptors that it inherits, with the same numbers.

    @property
    def name(self) -> str:
        """The name in messages; in a job without servers, a worker's label is only its index."""
        return f"worker {self.label}" if self.label.isdigit() else self.label

    @property
    def grace(self) -> float:
        return max(self.saving, self.leaving, reaper.GRACE_SECONDS)


@dataclass(frozen=True)
class JobEnd:
    """The end of an attempt: the reason, the exit code, and the task that failed first."""

    # "done", "failed", "timeout", "signal", "unread" (the reader of the output has gone),
    # "unsaved" (a server did not write its last snapshot) or "unreached" (before a restart).
    reason: str
    code: int
    label: str | None = None
    host: str = ""  # The other machine on which the task ran.


class Verdict(enum.Enum):
    """What the end of a task means for the job."""

    GO_ON = "the others continue"
    AGAIN = "it is restarted, and the others continue"
    WAIT = "it only reports that another task was lost, whose own report is awaited"
    FAIL = "the job has failed, and all tasks are stopped"
    FINISH = "the work is done: the other tasks have some time to end, and are then stopped"


@dataclass(eq=False)
class Task:
    """The state of a task."""

    start: Start
    code: int | None = None  # None: it has not ended.
    reports_loss: bool = False  # It only reported the loss of another task.
    running: Process | None = None  # None: not started yet.
    restarts: int = 0
    # Only for workers of an elastic job:
    since: float = 0.0  # The monotonic time of its last start.
    quick: int = 0  # Restarts in a row, each soon after a start.
    unreached: int = 0  # Consecutive failures of ssh, not of the worker.
    joins: bool = False  # It was started while the job was running.
    late: bool = False  # It may not have joined before the work was done.
    removed: bool = False  # Its host was removed.

    @property
    def is_away(self) -> bool:
        """Whether ssh could not start the task, or lost the connection to it."""
        return self.start.host is not None and self.code == 255


def verdict(
    ended: Task, tasks: Collection[Task], restarts_left: int, min_workers: int = 0
) -> Verdict:
    """Return what the end of the task `ended`, one of `tasks`, means for the job.

    An elastic job continues with `min_workers` workers; 0 means that the job is not elastic.
    """
    if min_workers:
        return _elastic_verdict(ended, tasks, restarts_left, min_workers)
    chiefs = [task.code for task in tasks if task.start.task_type == "chief"]
    codes = chiefs or [task.code for task in tasks if task.start.task_type == "worker"]
    if all(code == 0 for code in codes):
        return Verdict.FINISH
    if ended.code == 0:
        return Verdict.GO_ON
    # Only the chief has the result, so without it the others' work is lost.
    if restarts_left > 0 and not any(chiefs):
        return Verdict.AGAIN
    return Verdict.WAIT if ended.reports_loss else Verdict.FAIL


def _elastic_verdict(
    ended: Task, tasks: Collection[Task], restarts_left: int, min_workers: int
) -> Verdict:
    left = [task for task in tasks if task.code is None]
    if any(task.code == 0 for task in tasks):
        # The work is done, so no task is restarted. The others may still write results.
        if ended.code in (0, PREEMPTED) or ended.late or ended.removed:
            return Verdict.FINISH if all(task.late for task in left) else Verdict.GO_ON
    elif not ended.removed and (ended.code == PREEMPTED or restarts_left > 0):
        return Verdict.AGAIN
    elif len(left) >= min_workers:
        return Verdict.GO_ON
    return Verdict.WAIT if ended.reports_loss else Verdict.FAIL


def restart_delay(restarts: int) -> float:
    """Return the seconds to wait before the next restart, after `restarts` restarts."""
    return min(_LONGEST_DELAY_SECONDS, 0.25 * 2**restarts) if restarts > 0 else 0.0


@dataclass
class TaskSupervisor:
    """One attempt at a job."""

    begin: Callable[[Start], Process]
    console: Console
    deadline: float | None  # The monotonic time at which all tasks are stopped.
    restarts: int  # The number of restarts of single tasks, not of the chief.
    signals: socket.socket | None = None  # Yields the signals that end the job.
    silence: float = 0.0  # Seconds without a beat after which reapers end tasks; 0: never.

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        if self.signals is not None:
            self._selector.register(self.signals, selectors.EVENT_READ, self._signalled)
        self._tasks: list[Task] = []
        self._failed: list[Task] = []
        self._outcome: JobEnd | None = None
        self._hurried = False
        self._finish = partial(self._stop, JobEnd("done", 0))
        self._due: dict[Callable[[], None], float] = {}
        if self.deadline is not None:
            self._due[partial(self._stop, JobEnd("timeout", 124))] = self.deadline

    def run(self, starts: Sequence[Start], delay: float = 0.0) -> JobEnd:
        """Start all tasks after a delay in seconds; return or raise when all have ended."""
        self._tasks = [Task(start) for start in starts]
        for task in self._tasks:
            self._due[partial(self._start, task)] = time.monotonic() + delay
        over = threading.Event()
        # A separate thread, because a slow disk may block the one that writes logs.
        name = "ndistribute beat"
        beat = threading.Thread(target=self._beat, args=[over], name=name, daemon=True)
        if self.silence:
            beat.start()
        try:
            self._wait_for_all()
        except BaseException:
            self._stop(JobEnd("failed", 1))
            self._wait_for_all()
            raise
        finally:
            over.set()
            if self.silence:
                beat.join()
            for task in self._tasks:
                if task.running is not None and task.code is None:
                    task.running.close()
            self._selector.close()
        # Without an outcome, all failed tasks only reported another task's loss.
        outcome = self._outcome or (self._failure() if self._failed else JobEnd("done", 0))
        for task in self._tasks:
            # SIGTERM asked it to end, so the code of SIGTERM also means a normal end.
            if task.start.saving and task.code not in (0, 128 + signal.SIGTERM):
                unsaved = JobEnd("unsaved", task.code or 1, task.start.label)
                return outcome if outcome.reason == "failed" else unsaved
        return outcome

    def _wait_for_all(self) -> None:
        while any(task.code is None for task in self._tasks):
            now = time.monotonic()
            for action in [action for action, moment in self._due.items() if moment <= now]:
                # An earlier action may have cancelled this one.
                if self._due.pop(action, None) is not None:
                    action()
            # Check at least once a second, because the reader of the output may leave at any time.
            left = min([1.0, *(moment - now for moment in self._due.values())])
            for key, _ in self._selector.select(max(0.0, left)):
                key.data()
            if self.console.nobody_reads:
                self._stop(JobEnd("unread", 128 + signal.SIGPIPE))

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(self.silence / _BEATS):
            for task in self._tasks:
                if (running := task.running) is not None:  # The other thread may set it.
                    running.beat()

    def _start(self, task: Task) -> None:
        if task.start.listener is not None:
            set_accepting(task.start.listener, True)
        task.running = self.begin(task.start)
        host = "" if task.start.host is None else task.start.host.name
        self.console.note(task=task.start.label, pid=task.running.pid, host=host)
        ended = partial(self._ended, task, task.running)
        self._selector.register(task.running.done, selectors.EVENT_READ, ended)
        for output in task.running.outputs:
            os.set_blocking(output[0], False)
            read = partial(self._read, *output)
            self._selector.register(output[0], selectors.EVENT_READ, read)

    def _read(self, fd: int, label: str, stream: str, most: int = 1) -> None:
        """Print what a pipe has now, with at most `most` reads."""
        # Another event of the same round may have ended its task and closed the pipe.
        while most > 0 and fd in self._selector.get_map():
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            self.console.feed(label, stream, data)
            if not data:
                self._selector.unregister(fd)
            most -= 1

    def _ended(self, task: Task, running: Process) -> None:
        self._selector.unregister(running.done)
        task.code = running.code()
        self.console.note(task=task.start.label, code=task.code)
        for output in running.outputs:
            self._read(*output, _MOST_READS)
            if output[0] in self._selector.get_map():
                self._selector.unregister(output[0])
                self.console.feed(*output[1:], b"")
        running.close()
        if task.start.listener is not None:
            # Tasks that connect to it learn at once that it does not run. The port stays reserved.
            set_accepting(task.start.listener, False)
        said = self.console.kept(task.start.label)
        task.reports_loss = bool(task.code) and is_loss_report(said)
        if self._outcome is not None:
            return
        can_restart = running.lost is None and self._give_up not in self._due
        match self._judge(task, can_restart):
            case Verdict.AGAIN:
                self._start_again(task)
            case Verdict.WAIT:
                self._failed.append(task)
                self._due.setdefault(self._give_up, time.monotonic() + _REPORT_SECONDS)
            case Verdict.FAIL:
                self._failed.append(task)
                self._give_up()
            case Verdict.FINISH if self._finish not in self._due:
                self._failed.clear()
                self._drop_waiting()
                self._due = {self._finish: time.monotonic() + _FINISH_SECONDS}

    def _judge(self, task: Task, can_restart: bool) -> Verdict:
        return verdict(task, self._tasks, self.restarts if can_restart else 0)

    def _start_again(self, task: Task) -> None:
        """Restart one task; the others continue."""
        delay = restart_delay(task.restarts)
        task.restarts += 1
        self.restarts -= 1
        self._say_end(task, f"restarting it in {delay:g} s (restarts left: {self.restarts}).")
        self._start_later(task, delay)

    def _say_end(self, task: Task, then: str) -> None:
        host = "" if task.start.host is None else task.start.host.name
        why = exit_text(task.code or 0, host, self.silence)
        self.console.say(f"{task.start.name} ended ({why}); {then}")

    def _start_later(self, task: Task, delay: float) -> None:
        self.console.forget(task.start.label)
        task.running = task.code = None
        self._due[partial(self._start, task)] = time.monotonic() + delay

    def _failure(self) -> JobEnd:
        """Return the outcome for the task that first failed by itself, or else first failed."""
        first = [task for task in self._failed if not task.reports_loss]
        task = [*first, *self._failed][0]
        label, host = task.start.label, task.start.host
        if label == MPIEXEC:
            # The first rank whose error is not another's loss.
            kept, reported = self.console.kept, self.console.reported
            label = next((r for r in reported if not is_loss_report(kept(r))), label)
        return JobEnd("failed", task.code or 1, label, "" if host is None else host.name)

    def _give_up(self) -> None:
        self._stop(self._failure())

    def _signalled(self) -> None:
        signum = self.signals.recv(64)[0] if self.signals is not None else 0
        if self._outcome is None:
            self._stop(JobEnd("signal", 128 + signum))
            return
        # The second signal skips the grace, and the third also skips last snapshots.
        for task in self._tasks:
            if task.running is not None and (self._hurried or not task.start.saving):
                task.running.hang_up()
                self._due[task.running.kill] = time.monotonic() + _REAPING_SECONDS
        self._hurried = True

    def _stop(self, outcome: JobEnd) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._drop_waiting()
        self._due = {self._tell_of_savers: time.monotonic() + reaper.GRACE_SECONDS}
        for task in self._tasks:
            self._ask_to_end(task)
            if task.start.leaving and task.running is not None:  # Only a lone task has it.
                self._due[task.running.hang_up] = time.monotonic() + reaper.GRACE_SECONDS

    def _ask_to_end(self, task: Task) -> None:
        if task.running is not None and task.code is None:
            task.running.ask_to_end()
            # Killed later if its reaper does not answer, such as on a lost host.
            latest = time.monotonic() + task.start.grace + _REAPING_SECONDS
            self._due[task.running.kill] = latest

    def _drop_waiting(self) -> None:
        self._tasks = [task for task in self._tasks if task.running is not None]

    def _tell_of_savers(self) -> None:
        savers = [task.start for task in self._tasks if task.start.saving and task.code is None]
        if savers:
            labels, most = ", ".join(start.label for start in savers), f"{savers[0].saving:g}"
            self.console.say(f"waiting at most {most} s for the last snapshot of {labels}.")


class Process:
    """A started process and its reaper, which ends the process when its input is closed."""

    done: int  # A descriptor that is readable once it has ended.
    outputs: Sequence[tuple[int, str, str]]  # Pipes to read: descriptor, label, stream.
    kill: Callable[[], None]  # Kills the reaper, so that the wait ends.
    lost: Exception | None = None  # Why it cannot be restarted, or None.
    pid = 0  # The number of its reaper, or of ssh.

    def __init__(self, environ: Mapping[str, str], start: Start) -> None:
        env, script, fds = dict(environ), "", [*start.inherited]
        if start.host is None:
            mpi = ["mpi"] if start.label == MPIEXEC else []
            reaping = [sys.executable, "-I", "-S", reaper.__file__, *mpi, str(start.grace), "0"]
            cmd = [*start.around, *reaping, *start.argv]
            env |= start.settings
        else:
            cmd = commands.ssh_command(start.host.name, commands.host_silence(environ))
            alone = (f"-{start.label}", start.grace) if start.leaving else ()
            sharing = start.host.slots
            script = commands.remote_script(start.argv, start.settings, environ, sharing, *alone)
        if start.listener is not None:
            fds.append(start.listener.fileno())
            env[LISTEN_FD] = str(fds[-1])
        self._popen = Popen(
            cmd, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, start_new_session=True, pass_fds=fds
        )
        self.kill, self.pid = self._popen.kill, self._popen.pid
        self.done = os.pidfd_open(self._popen.pid)
        pipes = self._popen.stdin, self._popen.stdout, self._popen.stderr
        self._input, *self._pipes = (cast("IO[bytes]", pipe) for pipe in pipes)
        out, err = (pipe.fileno() for pipe in self._pipes)
        mine = (out, start.label, "stdout"), (err, start.label, "stderr")
        self.outputs = (*mine, *start.outputs)
        self._write(script.encode())

    def code(self) -> int:
        """Return the exit code; 128 plus the number of a signal."""
        code = self._popen.wait(reaper.GRACE_SECONDS)
        return code if code >= 0 else 128 - code

    def ask_to_end(self) -> None:
        self._write(reaper.ASK)

    def beat(self) -> None:
        self._write(reaper.BEAT)

    def hang_up(self) -> None:
        """Close the input: the reaper then ends the process, at once if it was asked before."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def close(self) -> None:
        self.hang_up()
        for pipe in self._pipes:
            pipe.close()
        os.close(self.done)

    def _write(self, data: bytes) -> None:
        # The exit code shows why it does not read. Another thread may have closed its input.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(data)
            self._input.flush()


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[socket.socket]:
    """Yield a socket that receives one byte, the number, for each signal that ends a program."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    ending_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Ignored signals, as under nohup or in background jobs of sh, stay ignored.
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
