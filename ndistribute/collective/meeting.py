"""Meetings of the workers of an elastic job: how they agree on its next membership.

Each process listens at its address from its start to its end, for meetings only. Workers connect to
the lowest rank that they can reach. This coordinator plans the next roster when `RosterMeeting`
says that it is time, and answers all workers at once. A new group of processes opens new listeners,
so that no connection of an earlier group reaches it. Nothing here moves the state of a model.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ndistribute import errors
from ndistribute.collective.bootstrap import ProcessInfo, host_identity, start_of
from ndistribute.collective.membership import (
    Arrival,
    Elastic,
    Inquiry,
    JobStatus,
    Member,
    Redirection,
    Roster,
    RosterMeeting,
    RosterPlan,
    WorkerReport,
)
from ndistribute.timers import Attempts
from ndistribute.transport.address import address_of, split_address
from ndistribute.transport.codec import Record
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.listener import listen
from ndistribute.transport.reach import refuses
from ndistribute.transport.rpc import Client, Peer, RpcServer
from ndistribute.transport.secret import credentials_of
from ndistribute.transport.waiting import WaitReport

_PURPOSE = "meeting"
_REACH_SECONDS = 1.0  # For an answer: a stopped process accepts connections, but is silent.
_PAUSES = (0.002, 0.005, 0.01, 0.02, 0.05)
_ALONE_SECONDS = 0.005  # Seconds that a coordinator waits before it asks the absent members.
_WATCH_SECONDS = 0.1  # Seconds between two questions to a member that may have ended.
_LOOK_SECONDS = 2.0  # Seconds between two searches of a starting worker for a running job.
_SUSPECT_SECONDS = 5.0  # Without an answer, if the failure detector reports a member as silent.
_GRACE_SECONDS = 2.0  # Seconds to wait until the coordinator says who is missing.
_OVER_SECONDS = 20.0  # Seconds without an answer of any member after which a newcomer gives up.


class NotAMember(errors.DistributeError):
    """The job has continued without this process, which may join it as a newcomer."""


class JobOver(errors.DistributeError):
    """The job that a newcomer wants to join has ended."""


class LoopOver(errors.DistributeError):
    """The loop that a newcomer wants to join has ended, with results."""

    results: bytes = b""


_ANSWERS = JobStatus | RosterPlan | Redirection
_ELSEWHERE, _GONE = "elsewhere", "gone"
_RAISED = NotAMember, errors.CollectiveTimeoutError, errors.WorkerLostError  # By others too.


@dataclass(frozen=True)
class Joined:
    """The next membership, and this process's place in its new group of processes."""

    plan: RosterPlan
    info: ProcessInfo


class Meetings:
    """The meetings of one process; it listens at its address until `close`.

    Args:
        addresses: the addresses of all workers that may start.
        index: the index of this process among them.
        task: the name of this process in messages, such as ``"worker:1"``.
        limits: how many workers the job may have.
        timeout: the seconds that a meeting waits for workers.
    """

    requests: Any = Inquiry | Arrival
    macs = False

    def __init__(
        self, addresses: Sequence[str], index: int, task: str, limits: Elastic, timeout: float
    ) -> None:
        if limits.min_workers > len(addresses):
            what = f"min_workers is {limits.min_workers}, and the cluster has {len(addresses)}"
            raise ValueError(f"{what} workers: lower it, or give more workers an address.")
        self.roster: Roster | None = None
        self.results_of: Callable[[int], bytes] = lambda loop: b""  # For newcomers to a later loop.
        self._addresses, self._index, self._task = list(addresses), index, task
        self._timeout, self._silence = timeout, silence_seconds()
        self._credentials = credentials_of(addresses)
        place, pid = addresses[index], os.getpid()
        process = host_identity(), host_identity({}), pid, start_of(pid) or 0
        self.member = Member(task, secrets.token_hex(8), place, *process)
        self._established: Roster | None = None  # The last roster known to be established.
        self._accepted: tuple[Roster, ...] = ()  # Later rosters, which may be established.
        self._meeting = RosterMeeting(limits, addresses)
        # The connections on which arrivals wait for their answer, and since when.
        self._peers: dict[str, tuple[Peer, int, float]] = {}
        self._begun = 0.0  # When the meeting began that this process coordinates.
        self._host = ""  # The address of the coordinator that this process has gone to.
        self._suspects: set[str] = set()
        # Whether a lower rank, or a job without this process, has answered.
        self._hinted = self._runs = False
        self._loop, self._admits, self._left = 0, False, False
        self._changed = threading.Condition()
        self._options: Any = {"timeout": _REACH_SECONDS, "repeats": False, "replies": _ANSWERS}
        self._options |= {"name": task, "purpose": _PURPOSE}
        self._clients: dict[str, Client] = {}  # By address.
        for each in addresses:
            self._client(each)
        self._threads: list[threading.Thread] = []
        self._closing, self._formed = threading.Event(), threading.Event()
        self._server = RpcServer(place, self._credentials, task, {_PURPOSE: self})

    def look(self) -> JobStatus | None:
        """Return, within 2 s, the status of a job that runs at the other addresses, or None."""
        return self._survey()[0]

    def tell(self, loop: int, admits: bool) -> None:
        """Set the status that others see, and whether newcomers may join in this loop."""
        with self._changed:
            self._loop, self._admits = loop, admits
            self._answer_waiting()

    @property
    def newcomers_wait(self) -> bool:
        """Whether a newcomer waits here that may join, and there is room for it."""
        if not self._peers or self.roster is None or not self._admits:
            return False
        with self._changed:
            return bool(self._meeting.admitted(len(self.roster.members), self._loop))

    def meet(self, report: WorkerReport, suspects: Sequence[int] = ()) -> Joined:
        """Meet the other workers, and return the next membership.

        Args:
            report: the facts about this process that the others get.
            suspects: ranks of the last planned roster that the failure detector reports as silent.

        Raises:
            CollectiveTimeoutError: too few workers came in time; the message names those missing.
            NotAMember: the job has continued without this process, or already runs.
        """
        with self._arriving(report, suspects) as (arrival, listener):
            deadline, waiting = time.monotonic() + self._timeout, WaitReport(self._task)
            missing = "a worker that it can reach"
            if not arrival.rosters:
                missing = f"the first worker, at {self._addresses[0]}, to start"
            for _ in Attempts(deadline, *_PAUSES, wait=self._closing.wait):
                waiting.tell(missing)
                plan = self._go_to_lower_ranks(arrival, deadline)
                if self._runs:
                    raise NotAMember(_outside(arrival).why)
                if plan is None and (arrival.rosters or not self._index):
                    plan = self._lead(arrival, deadline)
                if isinstance(plan, RosterPlan):
                    return self._accept(plan, listener)
            raise self._late(missing)

    def join(self, report: WorkerReport) -> Joined:
        """Wait as a newcomer until the job admits this process, and return the next membership.

        Raises:
            JobOver: the job has ended.
            LoopOver: the job has finished the loop of the report.
            WorkerLostError: no member of the job answers now.
        """
        report = msgspec.structs.replace(report, newcomer=True)
        if self._accepted:  # This process was admitted, but the group has not formed.
            with contextlib.suppress(NotAMember):
                return self.meet(report)
        in_order, since = False, time.monotonic()
        with self._arriving(report) as (arrival, listener):
            for _ in Attempts(float("inf"), *_PAUSES, wait=self._closing.wait):
                status, silent = self._survey(report.loop)
                if status is None:
                    late = time.monotonic() - since > _OVER_SECONDS
                    if in_order and (late or not silent):
                        raise JobOver(f"the job ended before {self._task} could join it.")
                    if late:
                        what = f"no worker of the job that {self._task} waits for answers"
                        raise errors.WorkerLostError(f"{what}: all were lost. Start the job again.")
                    continue
                if status.loop > report.loop + (not status.admits):
                    over = LoopOver(f"the job of {self._task} is past loop {report.loop}.")
                    over.results = status.results
                    raise over
                if status.loop > report.loop:  # Another loop may begin, or the job may end.
                    self._closing.wait(_LOOK_SECONDS / 4)
                    in_order, since = True, time.monotonic()
                    continue
                reply = self._go_to(status.address, arrival, float("inf"))
                since = time.monotonic()
                if isinstance(reply, RosterPlan):
                    return self._accept(reply, listener)
                in_order |= reply is not None and reply.kind == _GONE
        raise self._late("a job to join")

    def establish(self, plan: RosterPlan) -> None:
        """Record that the group of a plan has formed and has its state: the plan is in force."""
        with self._changed:
            self._formed.set()
            self.roster = self._established = plan.roster
            self._accepted = ()
            self._answer_waiting()

    def check(self, plan: RosterPlan) -> None:
        """Raise WorkerLostError if a member of a plan has ended before the group has formed."""
        for member in plan.roster.members:
            if self._is_gone(member) or self._runs:
                raise errors.WorkerLostError(f"{member.task} was lost before the group formed.")

    def leave(self) -> None:
        """Tell the others that this process is no longer a member, so that none waits for it."""
        with self._changed:
            if self._left:
                return
            self._left, name = True, self.member.instance
            others = {each.address for roster in self._rosters for each in roster.members}
            self._forget()
            self._dismiss(Redirection(_GONE))
        list(self._ask(others - {self.member.address}, Inquiry(leaving=name)))

    def close(self) -> None:
        """Leave, and end all threads and connections; a second call has no effect."""
        if self._closing.is_set():
            return
        self.leave()
        self._closing.set()
        self._formed.set()
        with self._changed:
            self._changed.notify_all()
        self._server.close()
        for client in self._clients.values():
            client.close()
        for thread in self._threads:
            thread.join(timeout=2 * _REACH_SECONDS)

    def connected(self, peer: Peer) -> None:
        """Do nothing: this waits for the first request."""

    def handle(self, peer: Peer, call: int, request: Any) -> Record | None:
        """Answer a request at once, or keep an arrival until its meeting has a plan."""
        with self._changed:
            if isinstance(request, Inquiry):
                if request.leaving:
                    self._lose(request.leaving)
                results = self.results_of(request.loop)
                return msgspec.structs.replace(self._status(), results=results)
            if (reply := self._answer_to(request)) is None:
                self._meeting.arrive(request)
                self._peers[request.member.instance] = peer, call, time.monotonic()
                self._changed.notify_all()
            return reply

    def disconnected(self, peer: Peer, died: bool) -> None:
        """Forget the arrival that waited on this connection."""
        with self._changed:
            for name in [name for name, waits in self._peers.items() if waits[0] is peer]:
                del self._peers[name]
                self._meeting.depart(name)
            self._changed.notify_all()

    @property
    def _rosters(self) -> list[Roster]:
        return [each for each in (self._established, *self._accepted) if each]

    def _status(self) -> JobStatus:
        if self._left or not self._rosters:
            return JobStatus(self.member.instance, -1 if self._left else 0)
        last = self._rosters[-1]
        here = self.member.address if self._begun else last.members[0].address
        members = tuple(name for roster in self._rosters for name in roster.instances)
        name, place = self.member.instance, self._host or here
        return JobStatus(name, last.number, self._loop, self._admits, place, members)

    def _answer_to(self, arrival: Arrival) -> Redirection | None:
        """Return why an arrival cannot wait here, or None if it can."""
        if self._left:
            return Redirection(_GONE)
        if arrival.report.newcomer and not arrival.rosters:
            here = self._status().address == self.member.address
            # After a loop, its newcomers wait until another loop begins or the job ends.
            waits = here and arrival.report.loop >= self._loop - (not self._admits)
            return None if waits else Redirection(_ELSEWHERE)
        newest = max((each.number for each in arrival.rosters), default=0)
        rosters, name = self._rosters, arrival.member.instance
        is_known = any(name in each.instances for each in rosters)
        if rosters and newest <= rosters[-1].number and not is_known:
            return _outside(arrival)
        return Redirection(_ELSEWHERE) if self._host else None

    def _answer_waiting(self) -> None:
        for name, arrival in list(self._meeting.arrivals.items()):
            if (reply := self._answer_to(arrival)) is not None:
                self._send(name, reply)

    def _go_to_lower_ranks(
        self, arrival: Arrival, deadline: float
    ) -> RosterPlan | Redirection | None:
        """Return the answer of the first reachable lower rank, or None if there is none."""
        for member in self._below(arrival):
            if self._is_gone(member):
                continue
            reply = self._go_to(member.address, arrival, deadline, member.instance)
            for kind in _RAISED:
                if isinstance(reply, Redirection) and reply.kind == kind.__name__:
                    raise kind(reply.why)
            if isinstance(reply, Redirection) and reply.kind == _GONE and member.instance:
                self._lose(member.instance)
            elif reply is not None:
                return reply
        return None

    def _below(self, arrival: Arrival) -> list[Member]:
        """Return the members that precede this process as coordinator, in order."""
        if not arrival.rosters:
            return [Member("", "", self._addresses[0])] if self._index else []  # Whoever it is.
        order = {each.instance: each for roster in arrival.rosters for each in roster.members}
        return list(order.values())[: list(order).index(self.member.instance)]

    def _go_to(
        self, address: str, arrival: Arrival, deadline: float, instance: str = ""
    ) -> RosterPlan | Redirection | None:
        """Return the answer of a coordinator, or None if it no longer answers."""
        arrival = msgspec.structs.replace(arrival, suspects=tuple(self._suspects))
        try:
            call = self._client(address).start(arrival, timeout=_REACH_SECONDS)
        except errors.DistributeError as error:
            if isinstance(error, errors.AuthenticationError) and not arrival.rosters:
                raise  # Later it only means that another process has the address.
            return None
        with self._changed:
            self._host, heard = address, time.monotonic()
            self._dismiss(Redirection(_ELSEWHERE))
        try:
            while not self._closing.is_set():
                until = time.monotonic() + _REACH_SECONDS
                reply: RosterPlan | Redirection | None = call.result(until)
                if reply is not None:
                    return reply
                if time.monotonic() > deadline + _GRACE_SECONDS:
                    raise self._late(f"the plan of the worker at {address}")
                if self._ask_at(address, Inquiry()) is not None:
                    heard = time.monotonic()
                elif self._patience(instance) < time.monotonic() - heard:
                    self._suspects.add(instance)
                    return None
            return None
        except errors.WorkerLostError:
            return None
        finally:
            call.cancel()
            self._host = ""

    def _patience(self, instance: str) -> float:
        """Return the seconds without an answer after which a member counts as silent."""
        with self._changed:
            told = {name for each in self._meeting.arrivals.values() for name in each.suspects}
        suspected = instance in self._suspects | told
        return min(_SUSPECT_SECONDS, self._silence) if suspected else self._silence

    def _lead(self, arrival: Arrival, deadline: float) -> RosterPlan | None:
        """Return the plan, or None if a lower rank answers, to which this process then connects."""
        stop, waiting, pause, asked = threading.Event(), WaitReport(self._task), 0.001, set[str]()
        with self._changed:
            self._hinted = False
            self._meeting.silent.clear()
            come, led = self._meeting.arrivals, time.monotonic()
            here = [name for name in self._peers if name in come and not come[name].report.newcomer]
            self._begun = min([led, *(self._peers[name][2] for name in here)])
            self._meeting.arrive(arrival)
            try:
                while not self._closing.is_set():
                    decision = self._decide()
                    if isinstance(decision, RosterPlan):
                        return decision
                    if self._hinted or self._runs:
                        return None
                    if (now := time.monotonic()) >= min(deadline, self._begun + self._timeout):
                        raise self._late(decision)
                    waiting.tell(decision)
                    if now >= led + _ALONE_SECONDS:
                        self._ask_absent(arrival, asked, stop)
                    notified = self._changed.wait(timeout=pause)
                    pause = 0.001 if notified else min(2 * pause, _PAUSES[-1])
                return None
            except errors.DistributeError as error:
                self._dismiss(Redirection(type(error).__name__, str(error)))
                raise
            finally:
                stop.set()
                self._begun = 0.0
                self._meeting.depart(self.member.instance)

    def _decide(self) -> RosterPlan | str:
        """Return the plan, after sending it to all its members, or what is missing."""
        meeting = self._meeting
        for member in [*meeting.absent, *meeting.doubtful]:
            self._is_gone(member)
        for outsider in meeting.outsiders:
            self._send(outsider.member.instance, _outside(outsider))
            self._runs |= outsider.member.instance == self.member.instance
        waited = time.monotonic() - self._begun
        decision = meeting.decide(waited, self._admits, secrets.token_hex(8))
        if isinstance(decision, RosterPlan):
            # A process that was stopped may read messages of workers that have gone elsewhere.
            for name, (peer, *_) in list(self._peers.items()):
                if not peer.is_waiting:
                    meeting.depart(name)
                    decision = "workers that have left for another group"
        if isinstance(decision, RosterPlan):
            for name in decision.roster.instances:
                self._send(name, decision)
        return decision

    def _ask_absent(self, arrival: Arrival, asked: set[str], stop: threading.Event) -> None:
        """Start to ask each absent member whether it is running."""
        below = {each.instance for each in self._below(arrival)}
        for member in [*self._meeting.absent, *self._meeting.doubtful]:
            if member.instance not in asked:
                asked.add(member.instance)
                self._run(self._ask_often, member, member.instance in below, stop)

    def _ask_often(self, member: Member, below: bool, stop: threading.Event) -> None:
        """Find out whether a member answers or has ended, until the meeting ends."""
        name, heard = member.instance, time.monotonic()
        for _ in Attempts(float("inf"), *_PAUSES, _WATCH_SECONDS, wait=stop.wait):
            answers = self._seek(member)
            with self._changed:
                if stop.is_set():
                    return
                if answers:
                    heard = time.monotonic()
                    self._meeting.silent.discard(name)
                    self._hinted |= below
                elif time.monotonic() - heard > self._patience(name):
                    self._meeting.silent.add(name)
                self._changed.notify_all()

    def _seek(self, member: Member) -> bool:
        """Return whether a member answers; record what that proves about it and this process."""
        status, last = self._ask_at(member.address, Inquiry()), self._rosters[-1:]
        if status is None:
            elsewhere = member.machine != self.member.machine
            ended = elsewhere and refuses(member.address, _REACH_SECONDS)
        else:
            ended = status.instance != member.instance or status.number < 0
            later = any(roster.number <= status.number for roster in last)
            self._runs |= later and self.member.instance not in status.members
        if ended:
            self._lose(member.instance)
        return status is not None

    def _watch(self, members: Sequence[Member], formed: threading.Event) -> None:
        """Find out which members end, or continue elsewhere, before their group has formed."""
        while not formed.wait(_WATCH_SECONDS):
            for member in members:
                self._seek(member)

    def _look_again(self, stop: threading.Event) -> None:
        """Find out whether a job already runs while this process waits for others to start."""
        while not stop.wait(_LOOK_SECONDS):
            self._runs |= self.look() is not None

    @contextlib.contextmanager
    def _arriving(
        self, report: WorkerReport, suspects: Sequence[int] = ()
    ) -> Iterator[tuple[Arrival, socket.socket]]:
        """Yield an arrival, and the listener of the new group, which is closed on an error."""
        host, stop = split_address(self.member.address)[0], threading.Event()
        listener = listen(address_of(host, 0))
        address = address_of(host, listener.getsockname()[1])
        try:
            with self._changed:
                rosters, self._runs = self._rosters, False
                for member in {each for roster in rosters for each in roster.members}:
                    self._is_gone(member)
                self._suspects = {rosters[-1].instances[rank] for rank in suspects}
                known = self._established, self._accepted, tuple(self._meeting.gone)
            if not rosters and not report.newcomer:
                self._run(self._look_again, stop)
            report = msgspec.structs.replace(report, group_address=address)
            yield Arrival(self.member, report, *known, tuple(self._suspects)), listener
        except BaseException as error:
            listener.close()
            if isinstance(error, NotAMember):
                self._forget()
            raise
        finally:
            stop.set()

    def _accept(self, plan: RosterPlan, listener: socket.socket) -> Joined:
        addresses, roster = plan.addresses, plan.roster
        with self._changed:
            self._established, self._accepted = plan.established, (*plan.accepted, roster)
            self._formed.set()
            self._formed = threading.Event()
        others = [each for each in roster.members if each != self.member]
        self._run(self._watch, others, self._formed)
        rank = roster.instances.index(self.member.instance)
        place = rank, len(addresses), addresses[0], addresses[rank], listener, self._credentials
        # The number of the group is equal on all members, and different in each plan.
        info = ProcessInfo(*place, addresses=addresses, group=int(roster.id, 16) >> 1)
        return Joined(plan, info)

    def _forget(self) -> None:
        """Leave the membership; if this process comes again, it is another member."""
        self.roster, self._established, self._accepted = None, None, ()
        self.member = msgspec.structs.replace(self.member, instance=secrets.token_hex(8))

    def _survey(self, loop: int = 0) -> tuple[JobStatus | None, bool]:
        """Return the status of a running job, if any, and whether any process did not answer."""
        begun = time.monotonic()
        for status in self._ask({*self._addresses} - {self.member.address}, Inquiry(loop=loop)):
            if status is not None and status.number > 0:
                return status, False
        return None, time.monotonic() - begun > _REACH_SECONDS / 2

    def _ask(self, addresses: Collection[str], request: Record) -> Iterator[JobStatus | None]:
        """Yield the answers of several processes, the fastest first."""
        replies = queue.SimpleQueue[JobStatus | None]()
        for address in addresses:
            self._run(lambda place: replies.put(self._ask_at(place, request)), address)
        for _ in addresses:
            with contextlib.suppress(queue.Empty):  # Looking up a name may take longer.
                yield replies.get(timeout=2 * _REACH_SECONDS)

    def _ask_at(self, address: str, request: Record) -> JobStatus | None:
        with contextlib.suppress(OSError, errors.DistributeError):  # As for an unknown name.
            return self._client(address).call(request)  # type: ignore[no-any-return]
        return None

    def _client(self, address: str) -> Client:
        """Return the client of a worker, which may have been added since this process started."""
        with self._changed:
            if address not in self._clients:
                self._clients[address] = Client(address, self._credentials, **self._options)
            return self._clients[address]

    def _run(self, work: Callable[..., None], *args: object) -> None:
        name = f"ndistribute meeting {self._task}"
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _is_gone(self, member: Member) -> bool:
        """Return True if a member has left, or its process on this machine has ended."""
        here = member.machine == self.member.machine
        if here and member.started and start_of(member.pid) != member.started:
            self._lose(member.instance)
        return member.instance in self._meeting.gone

    def _lose(self, instance: str) -> None:
        with self._changed:
            self._meeting.lose(instance)
            self._changed.notify_all()

    def _send(self, instance: str, reply: Record) -> None:
        """Answer an arrival that waits here."""
        self._meeting.depart(instance)
        if instance in self._peers:
            peer, call, _ = self._peers.pop(instance)
            peer.send(reply, call)

    def _dismiss(self, reply: Record) -> None:
        for name in list(self._peers):
            self._send(name, reply)

    def _late(self, missing: str) -> errors.CollectiveTimeoutError:
        what = f"{self._task} waited {self._timeout:g} s for {missing}."
        how = "Start them unless the job is over, lower min_workers, or raise timeout_seconds."
        return errors.CollectiveTimeoutError(f"{what} {how}", op="meet")


def _outside(arrival: Arrival) -> Redirection:
    return Redirection(
        "NotAMember", f"the job continues without {arrival.member.task}, which may join."
    )
