"""Runs one process of a job, and ends it with all its descendants when the launcher asks.

This script runs each process of a job: on this machine, on other hosts, and around mpiexec. The
launcher writes to its standard input: `ASK` asks it to end the process, and the end of the file
means that the launcher has ended, even by SIGKILL. On another host the file may never end, for
example after a power cut, so `BEAT` must arrive in time. The script imports only the standard
library, because it also runs at the other end of ssh, and starts faster without the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import syslog
import time
from collections.abc import Iterator, Sequence

ASK, BEAT = b".", b"+"
# Seconds from SIGTERM to SIGKILL, for a process and for descendants that outlive it.
GRACE_SECONDS = 3.0
_LEFT_BEHIND_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Prefixes of the files in /dev/shm that MPICH and Open MPI leave when they are killed.
_MPI_SEGMENTS = ("mpich_shm_", "sm_segment.", "vader_segment.")


def main(arguments: Sequence[str]) -> int:
    """Run a command until it ends or is ended; return its exit code.

    `arguments` are ``mpi`` (optional: remove the shared memory that MPI leaves), the seconds
    between SIGTERM and SIGKILL, the seconds within which a beat must arrive (0: none), and the
    command.
    """
    # Signals that end the launcher must not end this process. They get a handler, because the
    # started process would inherit ignored signals.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    since = time.time()
    mpi = arguments[0] == "mpi"
    grace, silence, *command = arguments[mpi:]
    prctl = ctypes.CDLL(None).prctl
    # Orphaned descendants, such as daemons, become children of this process.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    task = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,
        start_new_session=True,
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509
    )
    pidfd = os.pidfd_open(task.pid)
    order = _await_order(pidfd, float(silence))
    _end_descendants(pidfd, float(grace), bool(order))
    code = task.wait(GRACE_SECONDS)
    if mpi:
        _remove_segments(since)
    if order is None:
        _tell_of_silence(silence, command)
    return code if code >= 0 else 128 - code


def _await_order(task: int, silence: float) -> bytes | None:
    """Return the launcher's order; empty if the input or task ended; None after a silence.

    If this process itself was stopped, beats that arrived meanwhile are in the pipe and count.
    """
    while ready := select.select([task, 0], [], [], silence or None)[0]:
        said = b"" if task in ready else os.read(0, 1 << 12)
        if not said or ASK in said:
            return said
    return None


def _tell_of_silence(silence: str, command: Sequence[str]) -> None:
    """Write to the system's log, because the launcher's host may have vanished, and to stderr."""
    what = f"the launcher did not answer for {silence} s, so this task of its job was stopped"
    syslog.openlog("ndistribute", syslog.LOG_PID)
    syslog.syslog(syslog.LOG_ERR, f"{what}: {' '.join(command)[:200]}")
    os.set_blocking(2, False)  # Perhaps nobody reads it.
    with contextlib.suppress(OSError):
        os.write(2, f"ndistribute: {what}.\n".encode())


def _end_descendants(task: int, grace: float, asked: bool) -> None:
    """End all descendants of this process: SIGTERM, and after `grace` seconds SIGKILL."""
    deadline = time.monotonic() + grace
    signum: int = signal.SIGTERM
    killed = 0
    # The next round finds children that processes fork while they are being killed.
    while killed < 20:
        with _descendants() as fds:
            if not fds:
                return
            for fd in fds if signum else ():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(fd, signum)
            killed += signum == signal.SIGKILL
            left = 0.25 if signum == signal.SIGKILL else deadline - time.monotonic()
            poll = select.poll()
            for fd in [*fds, *([0] if asked else [])]:
                poll.register(fd, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(max(0.0, left) * 1000)]
        # The launcher closed the input: do not wait any longer.
        if 0 in ready and not os.read(0, 1 << 12):
            asked, deadline = False, 0.0
        if select.select([task], [], [], 0)[0]:
            deadline = min(deadline, time.monotonic() + _LEFT_BEHIND_SECONDS)
        signum = signal.SIGKILL if time.monotonic() >= deadline else 0


@contextlib.contextmanager
def _descendants() -> Iterator[list[int]]:
    """Yield open pidfds of all live descendants of this process."""
    parents = {int(name): _parent(name) for name in os.listdir("/proc") if name.isdigit()}
    family = [os.getpid()]
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid]
    with contextlib.ExitStack() as opened:
        fds = []
        for pid in family[1:]:
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pid)
                opened.callback(os.close, fd)
                # The open descriptor keeps the number from being reused.
                if _parent(str(pid)) in family:
                    fds.append(fd)
        yield fds


def _parent(pid: str) -> int:
    """Return the parent of a process, 0 if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        state, parent = file.read().rpartition(b")")[2].split()[:2]
        return 0 if state in (b"Z", b"X") else int(parent)
    return 0


def _remove_segments(since: float) -> None:
    """Remove new MPI segments of this user that no process maps: their owner was killed."""
    paths = []
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            is_ours = status.st_uid == os.getuid() and status.st_ctime >= since - 1.0
            paths += [entry.path] if is_ours and entry.name.startswith(_MPI_SEGMENTS) else []
    mapped = b""
    for name in filter(str.isdigit, os.listdir("/proc") if paths else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/maps", "rb") as maps:
            mapped += maps.read()
    for path in paths:
        if f" {path}\n".encode() not in mapped:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
