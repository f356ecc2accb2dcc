"""The processes that a launcher holds: those of the job, and the guardian that outlives it.

A process leads a group of its own, and is reaped last of all, so that the group's number stays its
own as long as a signal may be sent to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ndistribute.cluster.launcher import guardian
from ndistribute.cluster.launcher.output import Parse

__all__ = ["Process", "Start", "guarded", "signals_as_bytes"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Start:
    """A process to start.

    Args:
        label: its rank, its task such as ``ps:0``, or a name for its own output.
        argv: its command line.
        environ: its whole environment.
        task_type: chief, worker or ps; what starts ranks counts as a worker.
        listener: a socket that it inherits under its number, or None.
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
    listener: socket.socket | None = None
    script: bytes | None = None
    pipes: tuple[tuple[int, str, str], ...] = ()
    writers: tuple[int, ...] = ()
    parse: Parse | None = None


class Process:
    """A started process; it stays unreaped until it is closed.

    Args:
        start: what to start.

    Raises:
        OSError: it could not be started.
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
        """Send a signal to its process group, whose number is its own until it is reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signum)

    def hang_up(self) -> bool:
        """Close its input, which ends a process on another host; say whether it had one."""
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
        for fd, _, _ in self.start.pipes:
            os.close(fd)
        os.close(self.pidfd)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(guardian.GRACE_SECONDS)


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[int]:
    """Turn the signals that end a program into bytes that can be waited for."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    # What nohup set to be ignored stays so.
    heeded = [signum for signum in _ENDING if signal.getsignal(signum) != signal.SIG_IGN]
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
def guarded(job: str, mpi: bool) -> Iterator[None]:
    """Keep a guardian for a ``with`` block, which ends the job when this process is gone.

    Args:
        job: the mark of the job.
        mpi: whether MPI starts it, which leaves shared memory when it is killed.
    """
    environ = {name: value for name, value in os.environ.items() if name != guardian.MARK}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, "watch", job, *(["mpi"] if mpi else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environ,
    )
    try:
        yield
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(3 * guardian.GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(guardian.GRACE_SECONDS)
