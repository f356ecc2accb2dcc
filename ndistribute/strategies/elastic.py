"""`ElasticSession`: one worker's part in an elastic job, whose members may change.

A unit is an operation that either all members complete or none: a step, a reduction, or a read or
write of a variable that is synchronized on read. Each unit ends with the commit, for which all
members meet. If a member is lost, the others agree on the next membership and form a new group.
Then they complete the unit or run it again. Newcomers receive their state from them. The loop's
iterator divides the batch of the unit among the new members.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ndistribute import context
from ndistribute.cluster import ClusterResolver
from ndistribute.collective.communicator import (
    CommunicationImplementation,
    CommunicationOptions,
    Communicator,
)
from ndistribute.collective.meeting import JobOver, Joined, LoopOver, Meetings, NotAMember
from ndistribute.collective.membership import Elastic, Roster, WorkerReport
from ndistribute.collective.objects import all_gather_object
from ndistribute.collective.select import join_members
from ndistribute.collective.workers import Workers
from ndistribute.data import Topology
from ndistribute.devices import Device
from ndistribute.errors import WorkerLostError
from ndistribute.mistakes import count_of
from ndistribute.strategies.elastic_input import ElasticIterator
from ndistribute.strategies.elastic_results import LoopResults, UnitOutcome, outcome_of
from ndistribute.strategies.elastic_state import ReplicatedState
from ndistribute.timeline import identify, recorded

T = TypeVar("T")
_PREEMPTED = 128 + signal.SIGTERM

_log = logging.getLogger("ndistribute")


class _NewcomersWaitError(WorkerLostError):
    """Starts a change of members because newcomers wait; no worker is lost."""


class ElasticSession:
    """One worker's part in an elastic job; input pipelines use it as their process group.

    Args:
        addresses: the addresses of all workers that are known at the start.
        index: the index of this worker.
        task: the name of this worker, such as ``worker:1``.
        limits: how many workers the job may have, and whether the batch grows with them.
        devices: the devices of this worker's replicas.
        options: how the workers communicate.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        index: int,
        task: str,
        limits: Elastic,
        devices: Sequence[Device],
        options: CommunicationOptions,
    ) -> None:
        self.limits, self._devices, self._options = limits, tuple(devices), options
        self.state = ReplicatedState()
        self.users_call = ""
        self.changes = 0  # The number of changes of members in which this worker took part.
        self.warned = 0  # `changes` at the last warning about incomplete results.
        self.last_change = ""  # The membership after it, and who joined and left.
        self.workers: Workers | None = None  # None: this worker is the only one.
        self.loop = 0  # The number of loops begun so far.
        self._input: Callable[[], ElasticIterator | None] = lambda: None
        self.inputs = 0  # The number of switches of the input; the same on all members.
        self.at_batch = False  # Whether the next unit is the first with the loop's batch.
        self.share: Callable[[], Any] = lambda: None  # Returns what newcomers receive,
        self.take: Callable[[Any], None] | None = None  # and newcomers call this with it.
        self._strategy: Callable[[], Any] = lambda: None
        self._owner: Callable[[], Any] = lambda: None  # Returns the owner of the loop.
        self._unit = self._depth = 0
        self._uncounted = False  # Whether the last unit is complete without known sums.
        self._result: Any = None
        self._results = LoopResults()  # The results read since the last loop began.
        self._admits = self._preempted = self._is_closed = False
        self._waits_after_writes: dict[Hashable, bool] = {}  # By function.
        self._closing: list[threading.Thread] = []
        self._meetings = Meetings(addresses, index, task, limits, options.timeout)
        self._meetings.results_of = self._results.of
        names = [f"worker {number}" for number in range(len(addresses))]
        identify(names[index], names, settles=True)  # Its rank may change.
        try:
            self.is_newcomer = self._meetings.look() is not None
            while not self.is_newcomer and self._meetings.roster is None:
                joined = self._meetings.meet(WorkerReport())
                with contextlib.suppress(WorkerLostError):  # A lost member: meet again.
                    self._form(joined)
                    self._meetings.establish(joined.plan)
        except NotAMember:  # The first look did not find the running job.
            self.is_newcomer = True
        except BaseException:
            self.close()
            raise

    def attach(self, strategy: Any) -> None:
        """Set the strategy of this session, and begin to heed preemption notices."""
        self._strategy = weakref.ref(strategy)
        self._first_size = 0 if self.is_newcomer else self.size
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_notice)

    def end(self) -> None:
        """Leave the job at the end of the program.

        Raises:
            NotAMember: this worker never joined the job, so it does not have the job's results.
        """
        never = self.is_newcomer and not self._is_closed
        error = sys.exception() or getattr(sys, "last_value", None)  # As the process ends.
        self.close()
        if never and error is None:
            raise NotAMember(
                "this worker ends without having joined its job, which ran before the worker "
                "started: its variables are not those of the job. All workers must run the same "
                "loops over strategy.elastic(...)."
            )

    def close(self) -> None:
        """Leave the job, and free all resources."""
        self._is_closed = True
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._on_notice:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.ExitStack() as each:
            each.callback(self._meetings.close)
            for thread in self._closing:
                each.callback(thread.join, 5.0)
            if self.workers is not None:
                each.callback(self.workers.close)
            each.callback(self._meetings.leave)

    def _on_notice(self, signum: int, frame: object) -> None:
        """Hand over to the other workers: at the end of a running unit, otherwise at once."""
        self._preempted = True
        if self.is_newcomer or not self._depth:
            self._hand_over()

    def _hand_over(self) -> None:
        _log.warning(
            "got SIGTERM: this worker leaves after unit %d; the others continue", self._unit
        )
        self.close()
        raise SystemExit(_PREEMPTED)

    # The process group of input pipelines and checkpoints.

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return 0 if self.workers is None else self.workers.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return 1 if self.workers is None else self.workers.size

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the files that only one worker writes."""
        return self.rank == 0 and not self.is_newcomer

    def all_gather(self, value: Any, axis: int) -> Any:
        """Return a nest whose arrays are concatenated over workers, in rank order."""

        def gather() -> Any:
            if self.workers is None:
                return value
            self.workers.users_call = self.users_call
            return self.workers.all_gather(value, axis)

        return self.attempt(gather)

    @property
    def batch_scale(self) -> Fraction:
        """The ratio of the batch size to that at the first start of the job."""
        is_scaled = self.limits.batch == "scaled" and self._first_size
        return Fraction(self.size, self._first_size) if is_scaled else Fraction(1)

    def topology(self) -> Topology:
        """Return the replicas of this worker and of all workers."""
        if self.workers is None:
            return Topology(self._devices, (len(self._devices),))
        return Topology(self._devices, self.workers.replica_counts, self.rank, self)

    # Loops.

    @property
    def in_loop(self) -> bool:
        """Whether a loop has begun and not ended, and its owner still exists."""
        return self._owner() is not None

    def begin_loop(self, owner: Any) -> None:
        """Begin a loop, which lasts until `end_loop`, or until its owner is freed."""
        self._results.end(self.loop)
        self.loop += 1
        self._owner = weakref.ref(owner)

    @property
    def input(self) -> ElasticIterator | None:
        """The iterator in use, of a loop or of a part of it; None if it was freed."""
        return self._input()

    def use(self, iterator: ElasticIterator) -> None:
        """Make an iterator the input in use."""
        if self.input is not iterator:
            self._input = weakref.ref(iterator)
            self.inputs += 1
        self.at_batch = False

    def join(self) -> bool:
        """Join the loop if this is a newcomer, and admit others; return False if it has ended."""
        if self.is_newcomer:
            try:
                self._change(False)
            except LoopOver as error:
                level = logging.DEBUG if self.loop > 1 else logging.WARNING
                text = "loop %d ended before this worker joined, so the worker skips it"
                _log.log(level, text, self.loop)
                self._results.replay(self.loop, error.results)
                if self.take is not None:
                    self.take(self._results.next("the end of the loop"))
                self.end_loop()
                return False
            except JobOver as error:
                _log.error("%s This worker has no results.", error)
                self.close()
                raise SystemExit(_PREEMPTED) from None
        self._admits = True
        self._meetings.tell(self.loop, admits=True)
        return True

    def note_share(self) -> None:
        """Keep what newcomers receive from the loop, for newcomers that skip it."""
        if not self.is_newcomer:
            self._results.note("the end of the loop", self.share())

    def end_loop(self) -> None:
        """End the loop; newcomers wait for the next one."""
        self._admits, self._owner = False, lambda: None
        self._meetings.tell(self.loop + 1, admits=False)

    # Units.

    def attempt(self, call: Callable[[], T], function: Hashable = None, what: str = "") -> T:
        """Return the result of a function, once all members have completed the call.

        Args:
            call: the function, which is called again if members change before that.
            function: identifies the step that `call` runs; None: `call` writes no variables.
            what: names the result, if it is the same on all members.
        """
        if self._depth or self._is_closed:
            return call()
        is_kept = what and not self.in_loop
        if self.is_newcomer:
            if is_kept and self._results.theirs is not None:
                return self._results.next(what)  # type: ignore[no-any-return]
            with self._inside():
                return call()
        keeps = function is not None and (
            self.state.is_small or self._waits_after_writes.get(function, True)
        )
        try:
            self._complete(call, keeps)
        finally:
            self.state.end()
            self.at_batch = False
        result, self._result = self._result, None
        if function is not None:
            waits = self._waits_after_writes.get(function, False)
            waits |= any(each.waited_since for each in self._communicators)
            self._waits_after_writes[function] = waits
        if is_kept and self.loop:
            self._results.note(what, result)
        if self._preempted:
            self._hand_over()
        return result  # type: ignore[no-any-return]

    def _complete(self, call: Callable[[], Any], keeps: bool) -> None:
        """Run a unit until it is complete on all members, and keep its result."""
        while True:
            prepared = False
            self.state.begin(keeps_all=keeps)
            try:
                with self._inside():
                    self._take_in_newcomers()
                    if self.input is not None:
                        self.input.catch_up()
                    self._result = call()
                    prepared = True
                    self._commit()
                return
            except WorkerLostError as error:
                if self._change_after(error, prepared):
                    return

    def collect(self, call: Callable[[], T]) -> T:
        """Return the result of a function that reads input; a change calls it again."""
        while True:
            try:
                with self._inside():
                    return call()
            except WorkerLostError as error:
                self._change_after(error, prepared=False)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        for each in self._communicators:
            each.has_written = each.waited_since = False
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def _communicators(self) -> list[Communicator]:
        return [each.communicator for each in self._strategy().replica_contexts]

    def _take_in_newcomers(self) -> None:
        """Begin a change at a batch if newcomers wait at this worker, or the job needs more."""
        if not (self._admits and self.at_batch and self.in_loop and self.rank == 0):
            return
        if self._meetings.newcomers_wait or self.size < self.limits.min_workers:
            text = f"worker {self.rank} admits the workers that wait."
            if self.workers is not None:
                self.workers.peers.abort(WorkerLostError(text))
            raise _NewcomersWaitError(text)

    def _commit(self) -> None:
        """Meet all members at the end of a unit; on return, all have completed it."""
        sums = parts = self.state.parts_of_sums(self.rank)
        if self.workers is not None:
            with self.workers.meeting("the end of a step") as communicator:
                sums = communicator.all_reduce("sum", parts)
        self.state.set_sums(sums, parts)
        self._unit += 1

    # Changes of members.

    def _change_after(self, error: WorkerLostError, prepared: bool) -> bool:
        """Change the members if they caused an error; return True if the unit is complete."""
        is_change = isinstance(error, _NewcomersWaitError)
        if self.workers is not None:
            is_change |= self.workers.peers.has_changed
        if not is_change:
            raise error
        return self._change(prepared)

    @recorded(lambda _, session, prepared: ("members", session.last_change))
    def _change(self, prepared: bool) -> bool:
        """Agree on the next members, and synchronise with them; see `_change_after`."""
        begun, suspects, complete = time.monotonic(), self._leave_group(), False
        clean = not any(each.has_written for each in self._communicators)
        while True:
            joined = self._meet(prepared, clean, suspects)
            reports, rank = joined.plan.reports, joined.info.rank
            outcome = outcome_of(reports)
            try:
                with self._inside():
                    self._form(joined)
                    self.changes += 1
                    if outcome.commits[rank]:
                        self._uncounted = outcome.uncounted
                        complete, clean, self._unit = True, True, self._unit + 1
                        self.state.end()
                        self.at_batch = False
                    else:
                        self.state.take_back()
                        clean = clean or not outcome.lacks[rank]
                    prepared = False
                    self._synchronise(reports, outcome)
                    clean = True  # Every member has the state now.
                    if self.workers is not None:
                        self.workers.peers.exchange("synchronised", b"", self._options.timeout)
                    self._tell(joined.plan.roster, time.monotonic() - begun)
                    self._meetings.establish(joined.plan)
                break
            except WorkerLostError as error:  # A member of the new group was lost.
                _log.info("the new group of workers failed (%s): they form another", error)
                suspects = self._leave_group()
        self.is_newcomer = False
        return complete

    def _meet(self, prepared: bool, clean: bool, suspects: Sequence[int]) -> Joined:
        iterator = self.input
        report = WorkerReport(
            unit=self._unit,
            prepared=prepared,
            clean=clean,
            kept=self.state.keeps_all,
            uncounted=self._uncounted,
            loop=self.loop,
            input=0 if iterator is None else self.inputs,
            batch=0 if iterator is None else iterator.wanted,
            admits=self._admits and self.at_batch and (clean or self.state.keeps_all),
            newcomer=self.is_newcomer,
        )
        if self.is_newcomer:
            return self._meetings.join(report)
        try:
            return self._meetings.meet(report, suspects)
        except NotAMember as error:
            return self._join_anew(error)

    def _join_anew(self, reason: NotAMember) -> Joined:
        """Rejoin as a newcomer if this worker is at a batch of the loop, where newcomers start."""
        why = str(reason)
        if self.at_batch:
            _log.warning("the job continues without this worker, which joins it again")
            self.is_newcomer = True
            try:
                return self._meet(prepared=False, clean=False, suspects=[])
            except (LoopOver, JobOver) as error:
                why = str(error)
        self.close()
        raise NotAMember(
            "the job continues without this worker, because it did not answer the others for "
            f"some time. Start it again: it then joins the loop that is running ({why})"
        ) from reason

    def _form(self, joined: Joined) -> None:
        """Connect to the other members of the plan."""
        if joined.info.size > 1:
            self.workers = join_members(
                joined.info,
                self._devices,
                self._options,
                partial(self._meetings.check, joined.plan),
            )
            self.workers.may_use_nccl = False
        else:
            joined.info.listener.close()

    def _leave_group(self) -> list[int]:
        """Close the group in the background, and return the ranks that it has lost."""
        workers, self.workers = self.workers, None
        if workers is None:
            return []
        workers.held.close()
        # `close` starts another thread if its own thread has a name of the package.
        thread = threading.Thread(target=workers.peers.close, name="elastic farewell", daemon=True)
        thread.start()
        self._closing = [each for each in self._closing if each.is_alive()] + [thread]
        return sorted(workers.peers.lost)

    def _synchronise(self, reports: Sequence[WorkerReport], outcome: UnitOutcome) -> None:
        """Send the state to members that lack it, and divide the input among all members."""
        rank, members = self.rank, [report for report in reports if not report.newcomer]
        number = min(report.batch for report in members)
        # If inputs differ, a member has not begun its own: each reopens its input at the next use.
        iterator = self.input if len({report.input for report in members}) == 1 else None
        mine: dict[str, Any] = {}
        if rank == outcome.source:
            seed: Any = context.current_seed()
            mine = {"variables": self.state.described(), "sums": self.state.known_sums()}
            mine |= {"seed": [str(seed.entropy), seed.n_children_spawned]}
            mine |= {"shared": self.share(), "unit": self._unit, "inputs": self.inputs}
            mine |= {"first_size": self._first_size, "plain": self.state.plain_states()}
        if outcome.uncounted:
            _log.warning("metrics do not contain what lost workers counted in unit %d", self._unit)
            mine["growth"] = self.state.growth(rank)
        if fresh := self.state.fresh():
            mine["fresh"] = fresh
        if iterator is not None and reports[rank].batch == number:
            mine["input"] = iterator.state()
        everyone = [mine] if self.workers is None else all_gather_object(self.workers, mine)
        source = everyone[outcome.source]
        if self.workers is not None and any(outcome.lacks):
            values = self._passed_on(source["variables"], outcome.source)
            if outcome.lacks[rank]:
                self.state.receive(source["variables"], values, mirrored=not self.is_newcomer)
        for each in everyone:
            self.state.receive_fresh(each.get("fresh", ()))
        self._strategy().regroup(self.workers, self.changes)
        self.state.give_out_sums(
            source["sums"], [each.get("growth", {}) for each in everyone], rank
        )
        self._uncounted = False
        if self.is_newcomer:
            self._unit, self.inputs = source["unit"], source["inputs"]
            self._first_size = source["first_size"]
            self.state.receive_plain(dict(source["plain"]))
            context.restore_seed(int(source["seed"][0]), source["seed"][1])
            if self.take is not None:
                self.take(source["shared"])
        if iterator is not None:
            if self.is_newcomer:
                iterator.number = number - (not iterator._in_body)
            states = [each["input"] for each in everyone if each.get("input") is not None]
            iterator.cut_anew(number, states[0] if states else None)

    def _passed_on(self, described: Sequence[Any], source: int) -> list[Any]:
        """Return the values of one member's variables, which this member broadcasts."""
        values = self.state.values()
        if self.rank != source:
            values = [np.empty(shape, dtype) for *_, dtype, shape in described]
        with self.workers.meeting("the state of a worker") as communicator:  # type: ignore[union-attr]
            return communicator.broadcast(values, source)  # type: ignore[no-any-return]

    def _tell(self, roster: Roster, seconds: float) -> None:
        """Log who joined and left, and how long the change took; as a warning on the chief."""
        before = () if self._meetings.roster is None else self._meetings.roster.members
        lost = ", ".join(member.task for member in before if member not in roster.members)
        come = ", ".join(member.task for member in roster.members if member not in before)
        parts = [f"lost {lost}"] if lost else []
        parts += [f"{come} joined"] if come and before else []
        size = count_of(len(roster.members), "worker")
        what = f"{'; '.join(parts) or 'joined'}: {size} in the job"
        self.last_change = f"membership {roster.number}" + (f": {what}" if before else "")
        level = logging.INFO if self.rank else logging.WARNING
        text = "membership %d: %s after %.0f ms"
        _log.log(level, text, roster.number, what, seconds * 1e3)


def code_of(function: Any) -> Hashable:
    """Return a key that identifies a step, even if each call creates its function again."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", id(function))


def join_elastic_job(
    resolver: ClusterResolver,
    devices: Sequence[Device],
    options: CommunicationOptions | None,
    limits: Elastic,
) -> ElasticSession | None:
    """Return this worker's session in the job of a resolver; None if it works alone.

    Raises:
        TypeError: `limits` is not `Elastic`.
        ValueError: this job cannot be elastic.
    """
    if not isinstance(limits, Elastic):
        raise TypeError(f"elastic must be nd.Elastic(...) or None, got {limits!r}.")
    options = options or CommunicationOptions()
    if options.implementation in (
        CommunicationImplementation.NCCL,
        CommunicationImplementation.MPI,
    ):
        raise ValueError(
            f"elastic=Elastic(...) and implementation={options.implementation.value!r}: a group "
            "of MPI or NCCL cannot continue after it has lost a member. Leave the implementation "
            "out: workers then use shared memory and TCP, also between GPUs."
        )
    if resolver.task_type == "evaluator" or resolver.task_type is None:
        return None
    addresses, index = resolver.worker_addresses, resolver.worker_index
    if index is None or not addresses or not all(addresses):
        raise ValueError(
            "elastic=Elastic(...) needs the addresses of all workers, which MPI and torchrun do "
            "not provide: start the job with `ndistribute run --elastic`, or set TF_CONFIG."
        )
    task = f"{resolver.task_type}:{resolver.task_id}"
    return ElasticSession(addresses, index, task, limits, devices, options)
