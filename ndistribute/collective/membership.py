"""The members of a job whose workers come and go, and when the next membership may be planned.

The code is pure: it has no sockets, clock or threads. `RosterMeeting` is told which workers have
arrived, have provably ended, or do not answer. It returns the plan of the next roster, or what it
waits for. The rule `may_go_on` ensures that two groups of workers never continue the same job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ndistribute.errors import WorkerLostError
from ndistribute.transport.codec import Record
from ndistribute.transport.waiting import shortened

FIRST_WAIT_SECONDS = 30.0  # How many seconds the first start waits for workers that have not come.


@dataclass(frozen=True)
class Elastic:
    """The limits of a job whose workers may come and go while it trains.

    Args:
        min_workers: with fewer workers the job waits for others, and fails after its timeout.
        max_workers: further workers wait until there is room; None admits every worker that has an
            address.
        batch: ``"constant"`` keeps the size of the global batch and divides it among the current
            workers; ``"scaled"`` keeps the size of each worker's batch.

    Raises:
        ValueError: a limit is below 1, `min_workers` is above `max_workers`, or `batch` is another
            text.

    >>> Elastic(min_workers=2, max_workers=8)
    Elastic(min_workers=2, max_workers=8, batch='constant')
    """

    min_workers: int = 1
    max_workers: int | None = None
    batch: str = "constant"

    def __post_init__(self) -> None:
        if self.min_workers < 1:
            raise ValueError(f"min_workers must be 1 or more, got {self.min_workers}.")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            least = f"min_workers={self.min_workers}"
            raise ValueError(f"max_workers must be at least {least}, got {self.max_workers}.")
        if self.batch not in ("constant", "scaled"):
            raise ValueError(f"batch must be 'constant' or 'scaled', got {self.batch!r}.")


class Member(Record, frozen=True, eq=True):
    """A process that belongs to a job; a process that is started again is another member."""

    task: str
    instance: str  # The identity of this start of the process.
    address: str  # The address at which it listens from its start to its end.
    host: str = ""  # Equal for processes that can share memory.
    machine: str = ""  # Equal for processes that see the same process numbers.
    pid: int = 0
    # The start time in the kernel's clock, because process numbers are reused; 0 if unknown.
    started: int = 0


class Doubt(Record, frozen=True, eq=True):
    """Members that were left out of a roster without proof that they have ended.

    If all witnesses end, the absent members may continue from the roster that they know.
    """

    absent: tuple[Member, ...]
    witnesses: tuple[str, ...]  # The instances of the members that continued.


class Roster(Record, frozen=True):
    """The members of a job in rank order, from one change to the next."""

    number: int
    id: str  # Sixteen hexadecimal digits, because two plans may have the same number.
    members: tuple[Member, ...]
    doubts: tuple[Doubt, ...] = ()

    @property
    def instances(self) -> list[str]:
        """Return the identities of its members, in rank order."""
        return [member.instance for member in self.members]


class WorkerReport(Record, frozen=True):
    """The facts about itself that a worker sends to a meeting."""

    unit: int = 0
    prepared: bool = False
    clean: bool = True
    kept: bool = False
    uncounted: bool = False  # Whether its unit is complete except for the sums at its end.
    loop: int = 0
    input: int = 0
    batch: int = 0
    newcomer: bool = False
    admits: bool = True  # Whether newcomers may join in its unit.
    # The address at which it would accept the connections of the new group.
    group_address: str = ""


class Arrival(Record, frozen=True):
    """A worker that has come to a meeting, and what it knows about the job."""

    member: Member
    report: WorkerReport
    established: Roster | None = None  # The last roster that it knows to be established somewhere.
    accepted: tuple[Roster, ...] = ()  # Later rosters that were planned.
    gone: tuple[str, ...] = ()  # Instances for which it has proof that they have ended.
    suspects: tuple[str, ...] = ()  # Instances that did not answer it.

    @property
    def rosters(self) -> list[Roster]:
        """Return the rosters that may be in force, as far as this worker knows."""
        return [*([] if self.established is None else [self.established]), *self.accepted]


class RosterPlan(Record, frozen=True):
    """The next roster, with the reports of its members in rank order."""

    roster: Roster
    reports: tuple[WorkerReport, ...]
    # The roster that was in force before. A newcomer must know it: until the group has formed,
    # members that have not received the plan may continue without it.
    established: Roster | None = None
    accepted: tuple[Roster, ...] = ()

    @property
    def addresses(self) -> list[str]:
        """Return the addresses of the new group, in rank order."""
        return [report.group_address for report in self.reports]


class JobStatus(Record, frozen=True):
    """The answer of a process about the job to which it belongs."""

    instance: str
    number: int = 0  # The number of its last roster; 0 without a roster, -1 if it has left.
    loop: int = 0
    admits: bool = False  # Whether newcomers may join in it.
    address: str = ""  # The address at which newcomers wait.
    members: tuple[str, ...] = ()  # Instances that belong to it, or may belong to it.
    results: bytes = b""  # The results of the loop that the inquiry names.


class Inquiry(Record, frozen=True):
    """The question for the `JobStatus`, or the message with which a member leaves."""

    leaving: str = ""  # The instance of the member.
    loop: int = 0  # The loop whose results a newcomer wants, if the loop is over.


class Redirection(Record, frozen=True):
    """The answer to an arrival that gets no plan: a keyword, and the reason."""

    kind: str
    why: str = ""


def may_go_on(roster: Roster, present: Collection[str], gone: Collection[str]) -> bool:
    """Return True if no other workers can continue from this roster, or from an earlier one.

    The present workers may continue if all others have provably ended. They may also continue if
    they are a majority of the roster, or half of it with its rank 0; workers that have ended count
    as absent. A witness of each doubt must be present.

    >>> five = Roster(1, "a", tuple(Member(f"worker:{i}", f"{i}", "") for i in range(5)))
    >>> may_go_on(five, "012", gone=""), may_go_on(five, "4", gone="0123")
    (True, True)
    >>> may_go_on(five, "34", gone=""), may_go_on(five, "34", gone="01")
    (False, False)
    """
    members = roster.instances
    here = [name for name in members if name in present]
    absent = [name for name in members if name not in present and name not in gone]
    if not all(any(name in present for name in doubt.witnesses) for doubt in roster.doubts):
        return False
    if not absent:
        return True
    return 2 * len(here) + (members[0] in here) > len(members)


class RosterMeeting:
    """The meeting at one coordinator: which workers have come, which are gone, and the plan.

    Args:
        limits: the limits of the job.
        addresses: the addresses of all workers that may start, in the order of their first ranks.
    """

    def __init__(self, limits: Elastic, addresses: Sequence[str]) -> None:
        self._limits, self._addresses = limits, list(addresses)
        self.arrivals: dict[str, Arrival] = {}  # By instance, in the order of arrival.
        self.gone: set[str] = set()  # Instances that ended or left.
        self.silent: set[str] = set()  # Instances that do not answer, though not proven to be gone.

    def arrive(self, arrival: Arrival) -> None:
        """Record the arrival of a worker; if it arrives again, the last arrival counts."""
        for name, other in list(self.arrivals.items()):
            if other.member.address == arrival.member.address:
                del self.arrivals[name]
        self.arrivals[arrival.member.instance] = arrival
        self.gone.update(arrival.gone)
        self.silent.discard(arrival.member.instance)

    def depart(self, instance: str) -> None:
        """Forget a worker whose connection has ended: it comes again, or its end gets proven."""
        self.arrivals.pop(instance, None)

    def lose(self, instance: str) -> None:
        """Record that a worker has ended, or has left."""
        self.gone.add(instance)
        self.depart(instance)

    @property
    def established(self) -> Roster | None:
        """Return the newest roster that any arrival knows to be established."""
        known = [each.established for each in self.arrivals.values() if each.established]
        return max(known, key=lambda roster: roster.number, default=None)

    @property
    def accepted(self) -> tuple[Roster, ...]:
        """Return the later rosters that any arrival has accepted."""
        known = {each.id: each for come in self.arrivals.values() for each in come.accepted}
        since = self.established.number if self.established else 0
        ordered = sorted(known.values(), key=lambda roster: roster.number)
        return tuple(roster for roster in ordered if roster.number > since)

    @property
    def rosters(self) -> list[Roster]:
        """Return the rosters from which others might continue: the rule must hold for each."""
        return [*([self.established] if self.established else ()), *self.accepted]

    @property
    def members(self) -> dict[str, Member]:
        """Return the members of these rosters by instance, in rank order."""
        return {each.instance: each for roster in self.rosters for each in roster.members}

    def admitted(self, size: int, loop: int) -> list[Arrival]:
        """Return the newcomers to a loop for which a roster with so many members has room."""
        members, come = self.members, self.arrivals.items()
        newcomers = [each for name, each in come if each.report.newcomer and name not in members]
        waiting = [each for each in newcomers if each.report.loop == loop]
        return waiting[: max(0, (self._limits.max_workers or len(self._addresses)) - size)]

    @property
    def outsiders(self) -> list[Arrival]:
        """Return the arrivals that belong to no roster in force, and did not come as newcomers."""
        members = self.members
        come = self.arrivals.items() if members else ()
        return [each for name, each in come if not each.report.newcomer and name not in members]

    @property
    def absent(self) -> list[Member]:
        """Return the members that have not come, but are not proven to be gone either."""
        self._see_restarts()
        here = self.arrivals.keys() | self.gone
        return [member for name, member in self.members.items() if name not in here]

    @property
    def doubtful(self) -> list[Member]:
        """Return the members whose end, once it is proven, resolves a doubt."""
        absent = {
            each.instance: each
            for roster in self.rosters
            for doubt in roster.doubts
            for each in doubt.absent
        }
        here = self.arrivals.keys() | self.gone
        return [member for name, member in absent.items() if name not in here]

    def decide(self, waited: float, admits: bool, new_id: str) -> RosterPlan | str:
        """Return the next membership, or the workers and the event for which the meeting waits.

        Args:
            waited: the seconds since the meeting began.
            admits: whether newcomers may join.
            new_id: the identity of the roster that is planned.

        Raises:
            WorkerLostError: all workers that had the state of the job have ended.
        """
        if not self.rosters:
            return self._begin(waited, new_id)
        absent, before = self.absent, self.established
        if before is not None and self.gone.issuperset(before.instances):
            what = "every worker that had the state of the job has ended"
            raise WorkerLostError(f"{what}. Start the job from its last checkpoint.", op="meet")
        if late := [each for each in absent if each.instance not in self.silent]:
            return _named(late)
        rosters, here = self.rosters, self.arrivals.keys()
        if not all(may_go_on(roster, here, self.gone) for roster in rosters):
            if absent:
                why = "which does not answer, and may continue the job with other workers"
                return f"{_named(absent)}, {why}"
            return "workers that were cut off, and may have continued since their witnesses ended"
        staying = [self.arrivals[name] for name in self.members if name in here]
        members = [each.report for each in staying if not each.report.newcomer]
        last = max((report.unit for report in members), default=0)
        # Others than these are in earlier units, and the next unit of all admits newcomers.
        can_join = any(report.admits and report.unit == last for report in members)
        loop = max((report.loop for report in members), default=0)
        coming = self.admitted(len(staying), loop) if admits and can_join else []
        least = self._limits.min_workers if can_join else 1
        doubts = {
            doubt: None for roster in rosters for doubt in [*roster.doubts, self._doubt(roster)]
        }
        return self._plan([*staying, *coming], rosters[-1].number + 1, new_id, doubts, least)

    def _begin(self, waited: float, new_id: str) -> RosterPlan | str:
        """Return the first roster of a job, if all workers, or enough of them, have come."""
        come = [each for each in self.arrivals.values() if not each.report.newcomer]
        places = {each.member.address: each for each in come}
        starting = [places[address] for address in self._addresses if address in places]
        missing = [address for address in self._addresses if address not in places]
        enough = waited >= FIRST_WAIT_SECONDS and len(starting) > len(missing)
        if missing and not (enough and len(starting) >= self._limits.min_workers):
            return f"the workers at {shortened(missing)} to start"
        least = self._limits.min_workers
        return self._plan(starting[: self._limits.max_workers], 1, new_id, (), least)

    def _plan(
        self,
        arrivals: Sequence[Arrival],
        number: int,
        new_id: str,
        doubts: Iterable[Doubt],
        least: int,
    ) -> RosterPlan | str:
        if len(arrivals) < least:
            return f"more workers: {len(arrivals)} of min_workers={least} came"
        members = tuple(each.member for each in arrivals)
        left = tuple(
            each for each in doubts if any(m.instance not in self.gone for m in each.absent)
        )
        roster = Roster(number, new_id, members, left)
        reports = tuple(each.report for each in arrivals)
        return RosterPlan(roster, reports, self.established, self.accepted)

    def _doubt(self, roster: Roster) -> Doubt:
        """Return which members of a roster are left out without proof, and which continue."""
        here = [name for name in roster.instances if name in self.arrivals]
        known = self.arrivals.keys() | self.gone
        return Doubt(tuple(m for m in roster.members if m.instance not in known), tuple(here))

    def _see_restarts(self) -> None:
        """Record the end of each worker that has been started again at the same address."""
        places = {each.member.address: name for name, each in self.arrivals.items()}
        for member in [*self.members.values(), *self.doubtful]:
            if places.get(member.address, member.instance) != member.instance:
                self.gone.add(member.instance)


def _named(members: Iterable[Member]) -> str:
    return shortened([f"{each.task} at {each.address}" for each in members])
