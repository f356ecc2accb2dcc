"""Finds what a test left behind: threads, processes, open files, ports, shared memory, folders.

Linux only, by reading /proc; a test that leaves nothing costs well under a millisecond. Nothing is
closed here: a test closes the strategies that it opens.
"""

import contextlib
import functools
import gc
import multiprocessing.resource_tracker
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import held_by_zygote

# How long a thread, process or file may take to go away by itself once a test has ended.
LEAK_DEADLINE_SECONDS = float(os.environ.get("LEAK_DEADLINE_SECONDS", "20"))
_TCP_LISTEN = "0A"


class Snapshot:
    """What the process holds at one moment."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder or tempfile.gettempdir()  # Which a test may change.
        lifelong = _lifelong()
        self.threads = frozenset(threading.enumerate())
        self.children = _children() - {pid for pid, _ in lifelong}
        self.files = _open_files({fd for _, fd in lifelong})
        self.segments = frozenset(os.listdir("/dev/shm"))
        self.temporary = frozenset(os.listdir(self.folder))


def leaks_since(before: Snapshot, seconds: float = LEAK_DEADLINE_SECONDS) -> list[str]:
    """Describe what is new since a snapshot and does not go away before a deadline."""
    deadline = time.monotonic() + seconds
    for thread in set(threading.enumerate()) - before.threads:
        if thread.ident is not None:  # Else another thread is about to start it.
            thread.join(max(0.0, deadline - time.monotonic()))
    pause = 0.0005
    leaks = _new_since(before)
    if leaks:
        gc.collect()  # What only a reference cycle keeps open is not a leak.
    while leaks and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        leaks = _new_since(before)
    return [describe() for describe in leaks]


def _new_since(before: Snapshot) -> list[Callable[[], str]]:
    """Return a describer for each thing that is new; describing is slow and seldom needed."""
    now = Snapshot(before.folder)
    threads = [thread for thread in now.threads - before.threads if thread.is_alive()]
    segments = [name for name in now.segments - before.segments if not _held_by_others(name)]
    return [
        *(functools.partial(_describe_thread, thread) for thread in threads),
        *(functools.partial(_describe_child, pid) for pid in now.children - before.children),
        *(functools.partial(_describe_file, *file) for file in now.files - before.files),
        *(f"shared memory /dev/shm/{name}".format for name in segments),
        *(f"temporary {now.folder}/{name}".format for name in now.temporary - before.temporary),
    ]


def _describe_thread(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame else "  it has no Python frame\n"
    kind = "daemon thread" if thread.daemon else "thread"
    return f"{kind} {thread.name!r}, alive at:\n{stack.rstrip()}"


def _children() -> set[int]:
    children: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # A thread may end while we look.
            children.update(map(int, Path(f"/proc/self/task/{task}/children").read_bytes().split()))
    return children


def _open_files(without: set[int | None]) -> set[tuple[int, str]]:
    files: set[tuple[int, str]] = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # The listing's own descriptor is closed by now.
            if fd not in without:
                files.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return files


def _lifelong() -> tuple[tuple[int | None, int | None], ...]:
    """Return the processes that are started once and kept, each with the file that leads to it.

    They are that of multiprocessing which unlinks lost segments, and the zygote of the tests.
    """
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    return (tracker._pid, tracker._fd), held_by_zygote()


def _describe_child(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    command = b" ".join(words).decode(errors="replace").strip()
    return f"process {pid}: {command or 'it has ended, but nobody waited for it'}"


def _describe_file(fd: int, target: str) -> str:
    port = _listening_port(target)
    return f"open file {fd}: {target}" + (f", listening on port {port}" if port else "")


def _listening_port(target: str) -> int | None:
    inode = target.removeprefix("socket:[").removesuffix("]")
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[9] == inode and fields[3] == _TCP_LISTEN:
                    return int(fields[1].rpartition(":")[2], 16)
    return None


def _held_by_others(segment: str) -> bool:
    """Say whether another program on this machine uses a segment, and this process does not."""
    path = f"/dev/shm/{segment}"
    ours = {str(os.getpid()), *map(str, _children())}
    holders = {
        maps.parent.name
        for maps in Path("/proc").glob("[0-9]*/maps")
        if _mentions(maps, path)  # Slow, but asked only when a segment is new.
    }
    return bool(holders) and not holders & ours


def _mentions(maps: Path, path: str) -> bool:
    try:
        return path in maps.read_text(errors="replace")
    except OSError:
        return False
