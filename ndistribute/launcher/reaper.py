"""Runs one process of a job, and ends it with all that it started when the launcher wants it.

This file is run as a script around each process: on this machine, on other hosts, around mpiexec.
Its standard input comes from the launcher: a byte asks for the end, and the end of the file says
that the launcher is gone, however it went, also by SIGKILL. It starts without the package and its
NumPy, and runs on its own at the end of ssh: it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

# How long a process has between SIGTERM and SIGKILL, and what is left of it when it has ended.
GRACE_SECONDS = 3.0
_LEFT_BEHIND_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# How the files in /dev/shm begin that MPICH and Open MPI leave when they are killed.
_MPI_SEGMENTS = ("mpich_shm_", "sm_segment.", "vader_segment.")


def main(arguments: Sequence[str]) -> int:
    """Run a command until it ends, or is to end; return its exit code.

    In front of it come the seconds of its grace; before them ``mpi``, to remove what MPI leaves.
    """
    # What ends the launcher must not end this before it has done its part. A function, since what
    # is ignored would be ignored by the process as well.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    since = time.time()
    mpi = arguments[0] == "mpi"
    grace, *command = arguments[mpi:]
    prctl = ctypes.CDLL(None).prctl
    # What loses its parent, as daemons do, becomes a child of this process.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    task = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,
        start_new_session=True,
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509
    )
    pidfd = os.pidfd_open(task.pid)
    ready = select.select([pidfd, 0], [], [])[0]
    asked = pidfd not in ready and os.read(0, 1) != b""
    _end_descendants(pidfd, float(grace), asked)
    code = task.wait(GRACE_SECONDS)
    if mpi:
        _remove_segments(since)
    return code if code >= 0 else 128 - code


def _end_descendants(task: int, grace: float, asked: bool) -> None:
    """End all that this process started: SIGTERM, after a grace SIGKILL."""
    deadline = time.monotonic() + grace
    signum: int = signal.SIGTERM
    killed = 0
    # One that forks while it is being killed leaves a child, which the next round finds.
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
        if 0 in ready:  # The launcher has hung up as well: it does not want to wait for that long.
            asked, deadline = False, 0.0
        if select.select([task], [], [], 0)[0]:
            deadline = min(deadline, time.monotonic() + _LEFT_BEHIND_SECONDS)
        signum = signal.SIGKILL if time.monotonic() >= deadline else 0


@contextlib.contextmanager
def _descendants() -> Iterator[list[int]]:
    """Give open pidfds of the live processes that this one started, or that they started."""
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
                # Once the descriptor holds the process, its number can not be another's.
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
    """Remove this user's new shared memory of MPI's that no process has mapped: it was killed."""
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
