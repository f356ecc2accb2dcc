"""What the processes of `tests/collective/test_meeting.py` do, each in meetings of its own."""

import os
import time
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
    elif "joined" in _here:
        _here["joined"].info.listener.close()


def waits(rank: int, size: int) -> bool:
    """Return whether a newcomer waits."""
    deadline = time.monotonic() + 10.0
    while not _here["meetings"].newcomers_wait and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(_here["meetings"].newcomers_wait)


def leave(rank: int, size: int) -> None:
    """Say good-bye."""
    _here["meetings"].leave()


def end(rank: int, size: int) -> int:
    """Close all; return how many threads are left."""
    import threading

    part(rank, size)
    _here.pop("meetings").close()
    _here.clear()
    return threading.active_count()
