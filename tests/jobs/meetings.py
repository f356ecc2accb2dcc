"""What the processes of `tests/collective/test_meeting.py` do, each in meetings of its own."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from ndistribute.collective.control_plane import ControlPlane
from ndistribute.collective.meeting import Joined, Meetings
from ndistribute.collective.membership import Elastic, WorkerReport

_here: dict[str, Any] = {}


def begin(rank: int, size: int, addresses: list[str], index: int, *limits: Any) -> bool:
    """Listen for meetings; return whether a job runs."""
    os.environ.pop("NDISTRIBUTE_LISTEN_FD", None)
    timeout, *more = limits or (20.0,)
    _here["meetings"] = Meetings(addresses, index, f"worker:{index}", Elastic(*more), timeout)
    _here["meetings"].tell(0, admits=True)
    return _here["meetings"].look() is not None


def meet(rank: int, size: int, unit: int = 0, suspects: tuple[int, ...] = ()) -> dict[str, Any]:
    """Meet, and do not make the group yet."""
    begun = time.monotonic()
    return _planned(_here["meetings"].meet(WorkerReport(unit=unit), suspects), begun)


def join(rank: int, size: int) -> dict[str, Any]:
    """Wait as a newcomer, and do not make the group yet."""
    return _planned(_here["meetings"].join(WorkerReport()), time.monotonic())


def _planned(joined: Joined, begun: float) -> dict[str, Any]:
    now = time.monotonic()
    _here["joined"] = joined
    roster = joined.plan.roster
    return {
        "rank": joined.info.rank,
        "number": roster.number,
        "tasks": [member.task for member in roster.members],
        "units": [report.unit for report in joined.plan.reports],
        "at": now,
        "seconds": now - begun,
    }


def form(rank: int, size: int, timeout: float = 20.0) -> tuple[str, ...]:
    """Make the group of the last plan, and establish it."""
    joined = _here["joined"]
    plane = _here["plane"] = ControlPlane(joined.info, timeout)
    _here["meetings"].establish(joined.plan)
    plane.exchange("hello", b"", timeout)
    return plane.addresses


def part(rank: int, size: int) -> None:
    """Close the group."""
    if "plane" in _here:
        _here.pop("plane").close()
    if "joined" in _here:
        _here.pop("joined").info.listener.close()


def waits(rank: int, size: int) -> bool:
    """Return whether a newcomer waits."""
    deadline = time.monotonic() + 10.0
    while not _here["meetings"].newcomers_wait and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(_here["meetings"].newcomers_wait)


def room(rank: int, size: int) -> bool:
    """Return whether newcomers wait for whom there is room."""
    return bool(_here["meetings"].newcomers_wait)


def still_there(rank: int, size: int) -> None:
    """Raise an error if a member of the last plan has ended."""
    _here["meetings"].check(_here["joined"].plan)


def gathered(rank: int, size: int, count: int) -> int:
    """Return once so many workers wait here, or after a while, how many wait."""
    deadline = time.monotonic() + 10.0
    while len(_here["meetings"]._peers) < count and time.monotonic() < deadline:
        time.sleep(0.002)
    return len(_here["meetings"]._peers)


def sockets(rank: int, size: int) -> int:
    """Return how many sockets listen in this process."""
    files = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    links = {os.readlink(each) for each in files if os.path.islink(each)}
    rows = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return sum(row.split()[3] == "0A" and f"socket:[{row.split()[9]}]" in links for row in rows)


def leave(rank: int, size: int) -> None:
    """Say good-bye."""
    _here["meetings"].leave()


def end(rank: int, size: int) -> int:
    """Close all; return how many threads are left."""
    part(rank, size)
    _here.pop("meetings").close()
    _here.clear()
    return threading.active_count()
