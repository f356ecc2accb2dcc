"""Ends what a job started when its launcher is gone, however it went: also by SIGKILL.

A job's processes carry a mark in their environment, by which they are found in /proc: those that
moved to a process group of their own, and those that MPI started, too. This file is run as a
script, without the package and its NumPy, and is also what runs a rank on another host; hence it
imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

__all__ = [
    "GRACE_SECONDS",
    "MARK",
    "end_processes",
    "processes_of",
    "remove_segments",
    "signal_processes",
]

# The variable that marks a job's processes, and how long they have between SIGTERM and SIGKILL.
MARK = "NDISTRIBUTE_LAUNCH"
GRACE_SECONDS = 3.0
# How the files in /dev/shm begin that MPICH and Open MPI leave when they are killed.
_MPI_SEGMENTS = ("mpich_shm_", "sm_segment.", "vader_segment.")


def processes_of(job: str) -> list[int]:
    """Return open pidfds of the live processes that carry a job's mark; the caller closes them."""
    mark = f"{MARK}={job}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            fd = _opened_if_marked(int(name), mark)
            if fd is not None:
                found.append(fd)
    return found


def signal_processes(job: str, signum: int) -> int:
    """Send a signal to every process of a job; return how many there were."""
    fds = processes_of(job)
    for fd in fds:
        _send(fd, signum)
        os.close(fd)
    return len(fds)


def end_processes(job: str, grace: float = GRACE_SECONDS) -> None:
    """End every process of a job: SIGTERM, then SIGKILL to what is left after a grace."""
    signal_processes(job, signal.SIGTERM)
    if _wait_until_gone(job, grace):
        return
    # One that forks while it is being killed leaves a child, which the next round finds.
    for _ in range(20):
        signal_processes(job, signal.SIGKILL)
        if _wait_until_gone(job, 0.25):
            return


def run(job: str, command: Sequence[str]) -> int:
    """Run one rank until it ends, or until standard input is closed by the launcher's end.

    Returns:
        The exit code, 128 plus the number for a signal.
    """
    # In the job's environment, but not of the job: it must outlive what it ends.
    environ = {**os.environ, MARK: job}
    rank = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environ)
    pidfd = os.pidfd_open(rank.pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(0, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll(60_000)}
        if pidfd in ready or (0 in ready and not os.read(0, 4096)):
            break
    os.close(pidfd)
    end_processes(job)
    code = rank.wait(GRACE_SECONDS)
    return code if code >= 0 else 128 - code


def watch(job: str, mpi: bool) -> int:
    """Wait until standard input is closed, then end what is left of the job."""
    since = time.time()
    while os.read(0, 4096):
        pass
    end_processes(job)
    if mpi:
        remove_segments(since)
    return 0


def remove_segments(since: float) -> list[str]:
    """Remove the shared memory that MPI's ranks left when they were killed.

    Args:
        since: the moment of `time.time` before which the job had made none.

    Returns:
        The names of what was removed: made since, by this user, and mapped by no process.
    """
    found = []
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            is_ours = status.st_uid == os.getuid() and status.st_ctime >= since - 1.0
            if is_ours and entry.name.startswith(_MPI_SEGMENTS):
                found.append(entry.path)
    stale = [path for path in found if not _is_mapped(path)]
    for path in stale:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return [os.path.basename(path) for path in stale]


def main(arguments: Sequence[str]) -> int:
    """Do one of two things: ``watch JOB [mpi]`` or ``run JOB COMMAND ...``."""
    # What ends the launcher must not end this before it has done its part. A function, since what
    # is ignored would be ignored by the rank as well.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    what, job, *rest = arguments
    return run(job, rest) if what == "run" else watch(job, rest == ["mpi"])


def _opened_if_marked(pid: int, mark: bytes) -> int | None:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    # Read once the descriptor holds the process: its number can then not be another's.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
        if mark in environ.read().split(b"\0"):
            return fd
    os.close(fd)
    return None


def _is_mapped(path: str) -> bool:
    line_end = f" {path}\n".encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/maps", "rb") as maps:
                if line_end in maps.read():
                    return True
    return False


def _send(fd: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(fd, signum)


def _wait_until_gone(job: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while fds := processes_of(job):
        left = deadline - time.monotonic()
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        ended = poll.poll(max(0.0, left) * 1000)
        for fd in fds:
            os.close(fd)
        if not ended and left <= 0:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
