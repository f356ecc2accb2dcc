"""What the processes of `tests/collective/test_meeting.py` do, each in meetings of its own."""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ndistribute.collective import meeting
from ndistribute.collective.control_plane import ControlPlane
from ndistribute.collective.meeting import JobOver, Joined, Meetings, NotAMember
from ndistribute.collective.membership import Elastic, WorkerReport
from ndistribute.errors import DistributeError, WorkerLostError

_here: dict[str, Any] = {}


def begin(rank: int, size: int, addresses: list[str], index: int, *limits: Any) -> bool:
    """Listen for meetings; return whether a job runs."""
    os.environ.pop("NDISTRIBUTE_LISTEN_FD", None)
    timeout, *more = limits or (20.0,)
    _here["meetings"] = Meetings(addresses, index, f"worker:{index}", Elastic(*more), timeout)
    _here["meetings"].tell(0, admits=True)
    return _here["meetings"].look() is not None


def move(rank: int, size: int) -> None:
    """Pretend to be on a machine of its own, where nobody else sees this process."""
    meetings = _here["meetings"]
    meetings.member = replace(meetings.member, machine=f"machine {rank}")


class _Unreached:
    """A client of a host behind a cut network."""

    def call(self, *_: object, **__: object) -> None:
        raise WorkerLostError("the network is cut")

    start = call

    def close(self) -> None:
        """Do nothing."""


def cut(rank: int, size: int, *indices: int) -> None:
    """Reach these workers no more; or all again, if there are none."""
    meetings, whole = _here["meetings"], _here.setdefault("clients", _here["meetings"]._clients)
    away = {meetings._addresses[index]: _Unreached() for index in indices}
    meetings._clients = whole | away
    meeting._refuses = lambda address: False


def ends(rank: int, size: int) -> str:
    """Return what `check` says when a member of the last plan has ended."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            _here["meetings"].check(_here["joined"].plan)
        except WorkerLostError as error:
            return str(error)
        time.sleep(0.002)
    return ""


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


def compute(rank: int, size: int, seconds: float) -> None:
    """Do something else."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(1000))


def goes_on(rank: int, size: int, loop: int) -> None:
    """Tell others of the next loop."""
    _here["meetings"].tell(loop, admits=True)


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


def work(rank: int, size: int, addresses: list[str], index: int, log: str, seconds: float) -> int:
    """Be a worker that goes on whatever happens to others; return how often it was in a group."""
    os.environ.pop("NDISTRIBUTE_LISTEN_FD", None)
    deadline, groups, suspects, newcomer = time.monotonic() + seconds, 0, (), False
    with contextlib.closing(
        Meetings(addresses, index, f"worker:{index}", Elastic(), 30.0)
    ) as meetings:
        meetings.tell(0, admits=True)
        newcomer = meetings.look() is not None
        while True:
            try:
                report = WorkerReport(newcomer=newcomer, unit=groups)
                joined = meetings.join(report) if newcomer else meetings.meet(report, suspects)
            except NotAMember:
                newcomer = True
                continue
            except JobOver:
                return groups
            suspects, plane = (), None
            try:
                if joined.info.size > 1:
                    plane = ControlPlane(joined.info, 0.4)
                    plane.exchange("state", b"", 2.0)
                else:
                    joined.info.listener.close()
                meetings.establish(joined.plan)
                newcomer, groups = False, groups + 1
                with open(log, "a") as file:
                    roster = joined.plan.roster
                    words = roster.number, roster.id, *roster.instances, meetings.member.instance
                    file.write(" ".join(map(str, words)) + "\n")
                if _units(plane, meetings, deadline):
                    return groups
            except DistributeError:
                suspects = tuple(sorted(plane._lost)) if plane is not None else ()
            finally:
                if plane is not None:
                    threading.Thread(target=plane.close).start()


def _units(plane: ControlPlane | None, meetings: Meetings, deadline: float) -> bool:
    """Run units until somebody waits for admission, or all know that the time is over."""
    while True:
        mine = b"w" if meetings.newcomers_wait else b"e" if time.monotonic() > deadline else b""
        said = [mine] if plane is None else plane.exchange("unit", mine, 10.0)
        if said[0]:
            return said[0] == b"e"
        time.sleep(0.001)
