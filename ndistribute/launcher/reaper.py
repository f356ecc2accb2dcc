"""Ends what a job started when its launcher is gone, however it went: also by SIGKILL.

The processes of a job carry a mark in their environment, by which they are found in /proc, even
those that left their process group and those that MPI started. This file is also run as a script,
without the package and its NumPy, beside every launcher and around every process on another host;
hence it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

__all__ = ["GRACE_SECONDS", "MARK", "SAVING", "end_processes", "remove_segments", "send"]

# The variable that marks a job's processes, and how long they have between SIGTERM and SIGKILL.
MARK = "NDISTRIBUTE_LAUNCH"
GRACE_SECONDS = 3.0
# What follows the job in the mark of a process that has longer, as it writes a last snapshot.
SAVING = ":saving"
# How the files in /dev/shm begin that MPICH and Open MPI leave when they are killed.
_MPI_SEGMENTS = ("mpich_shm_", "sm_segment.", "vader_segment.")


def send(marks: Sequence[str], signum: int) -> None:
    """Send a signal to every process that carries one of some marks."""
    with _pidfds(marks) as fds:
        for fd in fds:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(fd, signum)


def end_processes(job: str, saving_seconds: float = GRACE_SECONDS) -> None:
    """End every process of a job: SIGTERM, then SIGKILL to what is left after a grace.

    Args:
        job: the mark of the job.
        saving_seconds: how long those have that may write a last snapshot.
    """
    everything = (job, job + SAVING)
    saved_by = time.monotonic() + saving_seconds
    send(everything, signal.SIGTERM)
    if not _wait_until_gone((job,), GRACE_SECONDS):
        send((job,), signal.SIGKILL)
    _wait_until_gone((job + SAVING,), saved_by - time.monotonic())
    # One that forks while it is being killed leaves a child, which the next round finds.
    for _ in range(20):
        if _wait_until_gone(everything, 0.25):
            return
        send(everything, signal.SIGKILL)


def run(job: str, command: Sequence[str]) -> int:
    """Run one process until it ends, or until the launcher's end closes standard input.

    Returns:
        The exit code, 128 plus the number for a signal.
    """
    # In the job's environment, but not of the job: it must outlive what it ends.
    environ = {**os.environ, MARK: job}
    rank = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environ)
    pidfd = os.pidfd_open(rank.pid)
    while True:
        ready, _, _ = select.select([pidfd, 0], [], [], 60.0)
        if pidfd in ready or (0 in ready and not os.read(0, 4096)):
            break
    os.close(pidfd)
    end_processes(job)
    code = rank.wait(GRACE_SECONDS)
    return code if code >= 0 else 128 - code


def watch(job: str, saving_seconds: float, mpi: bool) -> int:
    """Wait until standard input is closed, then end what is left of the job."""
    since = time.time()
    while os.read(0, 4096):
        pass
    end_processes(job, saving_seconds)
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
    stale = []
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            is_ours = status.st_uid == os.getuid() and status.st_ctime >= since - 1.0
            if is_ours and entry.name.startswith(_MPI_SEGMENTS) and not _is_mapped(entry.path):
                os.unlink(entry.path)
                stale.append(entry.name)
    return stale


def main(arguments: Sequence[str]) -> int:
    """Do one of two things: ``watch JOB SECONDS [mpi]`` or ``run JOB COMMAND ...``."""
    # What ends the launcher must not end this before it has done its part. A function, since what
    # is ignored would be ignored by the rank as well.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    what, job, *rest = arguments
    return run(job, rest) if what == "run" else watch(job, float(rest[0]), "mpi" in rest)


@contextlib.contextmanager
def _pidfds(marks: Sequence[str]) -> Iterator[list[int]]:
    """Give open pidfds of the live processes that carry one of some marks, for a with block."""
    wanted = {f"{MARK}={mark}".encode() for mark in marks}
    found = []
    try:
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            with contextlib.suppress(OSError):
                found.append(os.pidfd_open(pid))
                # Read once the descriptor holds the process: its number can not be another's then.
                with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
                    if pid != os.getpid() and wanted & set(environ.read().split(b"\0")):
                        continue
                os.close(found.pop())
        yield found
    finally:
        for fd in found:
            os.close(fd)


def _is_mapped(path: str) -> bool:
    line_end = f" {path}\n".encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/maps", "rb") as maps:
                if line_end in maps.read():
                    return True
    return False


def _wait_until_gone(marks: Sequence[str], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        with _pidfds(marks) as fds:
            left = deadline - time.monotonic()
            if not fds:
                return True
            if left <= 0:
                return False
            poll = select.poll()
            for fd in fds:
                poll.register(fd, select.POLLIN)
            poll.poll(left * 1000)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
