"""The server of graph programs, which runs parts of graphs and is the master of sessions.

The master of a session prunes the graph of a step, places it and cuts it by task. It registers each
part once at its task, and then runs a step with one message for each task. Values go directly from
task to task. If a step fails in one task, all tasks abort it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from ndistribute import errors
from ndistribute.graph import requests as m
from ndistribute.graph.definition import OperationDef, Value, sendable, unpack
from ndistribute.graph.executor import Plan
from ndistribute.graph.partition import cut, placed, pruned
from ndistribute.graph.placement import task_of
from ndistribute.graph.pool import ClientPool, TaskClient
from ndistribute.graph.step import Resources, Step
from ndistribute.mistakes import count_of
from ndistribute.parameter_server.store_service import StoreService
from ndistribute.task.server import ServedTask, TaskService
from ndistribute.transport.rpc import ClientCount, Peer, PendingCall

_ENDED = 4096  # The number of ended steps whose late values and aborts are dropped.
_REGISTER_SECONDS = 10.0
_GIVE_UP_SECONDS = 1.0
_WAIT_SECONDS = 0.02  # The time between looks at several tasks.
_LOOK_SECONDS = 1.0  # Between looks at the client, while one task computes.
_log = logging.getLogger("ndistribute")
_here: dict[str, GraphService] = {}
os.register_at_fork(after_in_child=_here.clear)


def service_at(address: str) -> GraphService | None:
    """Return the service of a server in this process; None if another one listens there."""
    return _here.get(address)


@dataclass(eq=False)
class SessionClient:
    """The client of a session in the same process, which cannot be lost."""

    name: str
    functions: Mapping[str, Callable[..., Any]]
    """The Python functions of its graph, by operation."""
    is_open = True


Requester = Peer | SessionClient


class GraphService(TaskService):
    """A service that runs graphs for clients, and parts of graphs for the masters of other tasks.

    Args:
        served: the task, whose store keeps its variables if it has one.
    """

    requests = m.Request
    macs = False
    clients_may_restart = True

    def __init__(self, served: ServedTask) -> None:
        self.task = f"/job:{served.job}/task:{served.index}"
        self.tasks = {
            f"/job:{job}/task:{index}": served.cluster.task_address(job, index)
            for job in served.cluster.jobs
            for index in served.cluster.task_indices(job)
        }
        """The addresses of all tasks, by the names of devices."""
        names = {address: name for name, address in self.tasks.items()}
        self.pool = ClientPool(served.credentials, served.name, names)
        store = served.services.get("ps")
        self.resources = Resources(store.store.shared if isinstance(store, StoreService) else None)
        self.rendezvous = _Rendezvous()
        self._lock = threading.Lock()
        self._clients = ClientCount()
        self._near: WeakValueDictionary[str, Requester] = WeakValueDictionary()
        """The clients in this process, which may end without closing their sessions."""
        self._callers: WeakSet[Requester] = WeakSet()
        """Connections with replies; on the others come the values of other tasks."""
        self._sessions: dict[str, _MasterSession] = {}
        self._parts: dict[str, dict[str, Plan]] = {}  # By session.
        self._masters: dict[str, str] = {}  # Of the sessions with parts here.
        self._steps: dict[str, Step] = {}
        self.is_closed = False

    def listens_at(self, address: str) -> None:
        """Let the sessions of this process call this service, whose server listens there."""
        _here[address] = self

    def client(self, task: str) -> TaskClient:
        """Return the client of another task."""
        return self.pool.client(self.tasks[task])

    def connected(self, peer: Requester) -> None:
        """Count a connection of a client."""
        with self._lock:
            self._clients.add(peer)

    def disconnected(self, peer: Requester, died: bool) -> None:
        """Drop the sessions of a client, or their parts of a master, that has ended."""
        if died and peer not in self._callers:
            self._lose(peer.name)
        with self._lock:
            if not self._clients.remove(peer, died):
                return
            ended = [each.name for each in self._sessions.values() if each.client == peer.name]
            orphaned = [name for name, master in self._masters.items() if master == peer.name]
        for name in ended:
            self._close(name)
        for name in orphaned:
            self._forget(name)

    def handle(self, peer: Requester, call: int, request: m.Request) -> m.Reply | None:
        """Carry out a request; return the reply, or None if it has none."""
        try:
            if isinstance(request, m.Deliver):
                session = request.step.partition("/")[0]
                if (
                    session in self._parts or session in self._sessions
                ):  # Otherwise the session has ended.
                    values = {key: unpack(value) for key, value in request.values.items()}
                    self.rendezvous.deliver(request.step, values)
                return None
            if isinstance(request, m.Abort):
                self._abort(request)
                return None
            if isinstance(request, m.ForgetParts):
                self._forget(request.session)
                return None
            self._callers.add(peer)
            if isinstance(request, m.RunPart):
                return self._run_part(peer, request)
            if isinstance(request, m.RunStep):
                return self._session(peer, request.session).run(peer, request)
            if isinstance(request, m.Register):
                plan = Plan(request.operations, request.feeds, request.fetches, request.soft)
                with self._lock:
                    self._masters[request.session] = peer.name
                    self._parts.setdefault(request.session, {})[request.part] = plan
            elif isinstance(request, m.Close):
                self._close(request.session)
            else:
                self._reset(request.everywhere)
            return m.FetchedValues()
        except Exception as error:
            return m.failure_of(error, self.task)

    def run_plan(
        self,
        plan: Plan,
        number: str,
        values: Any,
        check: Any,
        ends: float,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> tuple[Value, ...]:
        """Run a part of a step in this task; return the values of its fetches."""
        outside = _OtherTasks(self, number, check, ends, plan.sources)
        session = number.partition("/")[0]
        step = Step(self.resources, session=session, outside=outside, functions=functions)
        with self._lock:  # An abort that comes now meets either the step or its refusal.
            failure = self.rendezvous.begin(number)
            self._steps[number] = step
            if self.is_closed:  # `end` does not know this step.
                step.abort(self._stopped())
        try:
            step.check()
            if failure is not None:
                raise m.error_of(failure)
            results = plan.run(step, values)
            step.resources.variables.sync()
            return tuple(map(sendable, plan.fetches, results))
        except errors.OperationError as error:
            if self.is_closed:  # Its variables were dropped, and its connections have ended.
                raise self._stopped() from error
            if isinstance(error, errors.CancelledError):
                raise step.error or error from None
            raise
        finally:
            self.rendezvous.end(number)
            with self._lock:
                self._steps.pop(number, None)

    def end(self) -> None:
        """End all steps, and close the connections to the other tasks."""
        for address in [address for address, service in _here.items() if service is self]:
            del _here[address]
        with self._lock:
            self.is_closed = True
            steps = list(self._steps.values())
        for step in steps:
            step.abort(self._stopped())
        self.pool.close()
        self.resources = Resources()

    def _stopped(self) -> errors.UnavailableError:
        return errors.UnavailableError(f"{self.task} was stopped.", task=self.task)

    def _session(self, peer: Requester, name: str) -> _MasterSession:
        left: list[str] = []
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                if peer.name not in self._clients:
                    self._near[peer.name] = peer
                clients = {*self._clients, *self._near}
                left = [each.name for each in self._sessions.values() if each.client not in clients]
                session = self._sessions[name] = _MasterSession(self, name, peer.name)
        for other in left:
            self._close(other)
        return session

    def _run_part(self, peer: Requester, request: m.RunPart) -> m.Reply:
        session = request.part.partition("/")[0]
        plan = self._parts.get(session, {}).get(request.part)
        if plan is None:
            raise restarted(self.task)

        def check(step: Step) -> None:
            if not peer.is_open:
                step.abort(
                    errors.CancelledError(
                        "the connection to the task that controls this step broke.", task=self.task
                    )
                )

        values = [unpack(value) for value in request.values]
        return m.FetchedValues(self.run_plan(plan, request.step, values, check, math.inf))

    def _lose(self, name: str) -> None:
        """Abort steps that get values from a task whose connection broke: values may be lost."""
        task = "/job:" + name.partition("#")[0].replace(":", "/task:")
        with self._lock:
            steps = list(self._steps.values())
        for step in steps:
            if step.outside is not None and task in step.outside.sources:
                why = f"the connection from {task} broke. A new session can continue."
                step.abort(errors.UnavailableError(why, task=task))

    def _abort(self, request: m.Abort) -> None:
        with self._lock:
            step = self._steps.get(request.step)
            if step is None:
                self.rendezvous.end(request.step, request.failure)
        if step is not None:
            step.abort(m.error_of(request.failure))

    def _close(self, name: str) -> None:
        with self._lock:
            session = self._sessions.pop(name, None)
        if session is not None:
            until = time.monotonic() + _GIVE_UP_SECONDS
            for task in session.end():
                with contextlib.suppress(errors.OperationError):
                    self.client(task).send_one_way(m.ForgetParts(name), until=until)
            self._forget(name)

    def _forget(self, session: str) -> None:
        with self._lock:
            self._parts.pop(session, None)
            self._masters.pop(session, None)
        self.resources.forget(session)
        self.rendezvous.forget(session)

    def _reset(self, everywhere: bool) -> None:
        self.resources.clear()
        self.resources.variables.sync()
        for task in self.tasks if everywhere else ():
            if task != self.task:
                reset = m.Reset(everywhere=False)
                m.values_of(self.client(task).call(reset, _REGISTER_SECONDS))


def restarted(task: str) -> errors.AbortedError:
    """Return the error for a task that has lost a session's graph and variables."""
    return errors.AbortedError(f"{task} was restarted: make a new session.", task=task)


@dataclass
class _Cut:
    """A step that was placed and cut: the part of each task."""

    fetches: tuple[str, ...]
    here: Plan | None = None
    feeds_here: list[int] = field(default_factory=list)  # Positions among the feeds of the step.
    others: list[tuple[str, str, list[int], list[str]]] = field(default_factory=list)
    """Of the other tasks: the task, its part, the positions of its feeds, and its fetches."""


class _MasterSession:
    """A session whose master is this task."""

    def __init__(self, service: GraphService, name: str, client: str) -> None:
        self.name, self.client = name, client
        self.others: dict[str, str] = {}  # The instances of the other tasks that take part.
        self.service = service
        self._lock = threading.Lock()
        self._operations: dict[str, OperationDef] = {}
        self._cuts: dict[Any, _Cut] = {}
        self._numbers = itertools.count(1)
        self.has_ended = False

    def end(self) -> list[str]:
        """Register no more parts, and return the other tasks that may have parts."""
        with self._lock:
            self.has_ended = True
            return list(self.others)

    def run(self, peer: Requester, request: m.RunStep) -> m.Reply:
        if len(request.values) != len(request.feeds):
            why = (
                f"{count_of(len(request.feeds), 'feed')} got "
                f"{count_of(len(request.values), 'value')}."
            )
            raise errors.InvalidArgumentError(why)
        cut_ = self._prepared(request)
        ends = math.inf if request.timeout is None else time.monotonic() + request.timeout
        number = f"{self.name}/{next(self._numbers)}"
        return _Running(self, cut_, number, peer, ends).run(request.values)

    def _prepared(self, request: m.RunStep) -> _Cut:
        key = (request.fetches, request.targets, request.feeds)
        with self._lock:
            if self.has_ended:
                raise errors.CancelledError("the session was closed.")
            if request.known + len(request.operations) > len(self._operations):
                new = request.operations[len(self._operations) - request.known :]
                if request.known > len(self._operations):
                    raise restarted(self.service.task)
                self._operations.update({op.name: op for op in new})
            prepared = self._cuts.get(key)
            if prepared is None:
                prepared = self._cuts[key] = self._cut(request)
            return prepared

    def _cut(self, request: m.RunStep) -> _Cut:
        service = self.service
        feeds, fetches = list(request.feeds), list(request.fetches)
        needed = pruned(self._operations, fetches, request.targets, feeds)
        where = service.tasks, service.task
        tasks = placed(needed, lambda op: task_of(op, *where, soft=request.soft))
        for name, task in tasks.items() if request.log else ():
            _log.info("%s: %s", name, task)
        made = _Cut(request.fetches)
        number = len(self._cuts)
        registers = {}
        for task, part in cut(needed, tasks, fetches, feeds).items():
            at = [feeds.index(name) for name in part.feeds]
            if task == service.task:
                made.here = Plan(part.operations, part.feeds, part.fetches, request.soft)
                made.feeds_here = at
                continue
            name = f"{self.name}/{number}"
            lists = tuple(part.operations), tuple(part.feeds), tuple(part.fetches)
            registers[task] = m.Register(name, self.name, *lists, request.soft)
            made.others.append((task, name, at, part.fetches))
        self._register(registers, request.timeout)
        return made

    def _register(self, requests: dict[str, m.Register], timeout: float | None) -> None:
        """Give tasks their parts; those that are stopped are not waited for as long as others."""
        seconds = _REGISTER_SECONDS if timeout is None else timeout + _GIVE_UP_SECONDS
        until = time.monotonic() + min(_REGISTER_SECONDS, seconds)
        pending: dict[str, PendingCall] = {}
        try:
            for task, request in requests.items():
                # Aborts use this connection. While it is open, the task keeps its parts.
                client = self.service.client(task)
                client.send_one_way(until=until)
                pending[task] = client.start(request, until - time.monotonic())
                if self.others.setdefault(task, pending[task].instance) != pending[task].instance:
                    raise restarted(task)
            for task, call in pending.items():
                reply = call.result(until)
                if reply is None:
                    why = "it did not accept its part of the graph"
                    raise self.service.client(task).lost(why)
                m.values_of(reply)
        finally:
            for call in pending.values():
                call.cancel()


class _Running:
    """One step of a session: the calls to the other tasks, and the first failure."""

    def __init__(
        self, session: _MasterSession, cut_: _Cut, number: str, peer: Requester, ends: float
    ) -> None:
        self._session, self._service = session, session.service
        self._cut, self._number = cut_, number
        self._peer, self._ends = peer, ends
        self._pending: dict[str, PendingCall] = {}
        self._replies: dict[str, m.FetchedValues] = {}
        self._failure: m.Failure | None = None
        self._looking = threading.Lock()

    def run(self, values: tuple[Any, ...]) -> m.Reply:
        try:
            results = self._compute(values)
            self._collect()
        except BaseException:  # Such as Ctrl-C on a client in this process.
            why = errors.CancelledError("the step was interrupted.")
            self._fail(m.failure_of(why, self._service.task))
            self._collect()
            raise
        if self._failure is not None:
            return self._failure
        for task, _, _, fetches in self._cut.others:
            results.update(zip(fetches, self._replies[task].values, strict=True))
        return m.FetchedValues(tuple(results[name] for name in self._cut.fetches))

    def _compute(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """Let the other tasks begin, and return the values that this task computes."""
        service, made = self._service, self._cut
        try:
            for task, part, feeds, _ in made.others:
                request = m.RunPart(part, self._number, tuple(values[k] for k in feeds))
                seconds = self._ends - time.monotonic()
                self._pending[task] = service.client(task).start(request, seconds)
            if made.here is not None:
                fed = [unpack(values[k]) for k in made.feeds_here]
                functions = self._peer.functions if isinstance(self._peer, SessionClient) else None
                options = self._check, self._ends, functions
                results = service.run_plan(made.here, self._number, fed, *options)
                return dict(zip(made.here.fetches, results, strict=True))
        except Exception as error:
            self._check_ends(str(error))
            self._fail(m.failure_of(error, service.task))
        return {}

    def _collect(self) -> None:
        """Wait for the replies of the other tasks, but only briefly after a failure."""
        ends = None
        alone = len(self._pending) == 1 and self._ends == math.inf and self._failure is None
        while self._pending:
            until = time.monotonic() + (_LOOK_SECONDS if alone else _WAIT_SECONDS)
            with self._looking:  # A thread of a failed step may be about to end.
                self._look(until)
            self._check_ends()
            if self._failure is not None:
                ends = ends or time.monotonic() + _GIVE_UP_SECONDS
                if time.monotonic() > ends:  # The tasks are stopped, or cannot abort.
                    for pending in self._pending.values():
                        pending.cancel()
                    self._pending.clear()
        if self._failure is not None:
            self._service.rendezvous.end(self._number)  # This task's part may not have begun.

    def _check(self, step: Step) -> None:
        """Abort this task's part if another one has failed; called while it waits or computes."""
        if self._looking.acquire(blocking=False):  # Otherwise another thread of the step does it.
            try:
                self._look(0.0)
                self._check_ends()
            finally:
                self._looking.release()
        if self._failure is not None:
            step.abort(m.error_of(self._failure))

    def _check_ends(self, why: str = "") -> None:
        task = self._service.task
        error: errors.OperationError | None = None
        if time.monotonic() > self._ends:
            if self._pending and not why:
                why = f"{' and '.join(self._pending)} did not answer."
            why = f": {why}" if why else "."
            error = errors.DeadlineExceededError(f"the step took longer than its timeout{why}")
        elif self._service.is_closed:  # A client in this process does not notice by itself.
            error = errors.UnavailableError(f"{task} was stopped.")
        elif self._session.has_ended:
            error = errors.CancelledError("the session was closed.")
        elif not self._peer.is_open:
            error = errors.CancelledError("the client of the session is gone.")
        if error is not None:
            self._fail(m.failure_of(error, task))

    def _look(self, until: float) -> None:
        """Take the replies that have arrived, and wait until a time for the first of them."""
        for task, pending in list(self._pending.items()):
            try:
                reply = pending.result(until)
            except errors.OperationError as error:
                reply = m.failure_of(error, task)
            if reply is None:
                continue
            until = 0.0
            del self._pending[task]
            if isinstance(reply, m.FetchedValues):
                self._replies[task] = reply
            else:
                self._fail(reply)

    def _fail(self, failure: m.Failure) -> None:
        """Keep the first failure, and send it to the other tasks."""
        if self._failure is not None:
            return
        self._failure = failure
        service, until = self._service, time.monotonic() + _GIVE_UP_SECONDS
        for task, *_ in self._cut.others:  # A task that has not begun may get values.
            with contextlib.suppress(errors.OperationError):
                abort = m.Abort(self._number, failure)
                service.client(task).send_one_way(abort, until=until)


@dataclass(eq=False)
class _OtherTasks:
    """The other tasks of a cluster, for one step."""

    service: GraphService
    number: str
    check: Callable[[Step], None]
    """Aborts the step if another task has failed or has ended."""
    ends: float
    sources: Container[Any]
    """The tasks that send values to this one."""

    def send(self, task: str, values: Mapping[str, Any]) -> None:
        """Send values, by their keys, to another task."""
        packed = {key: sendable(key, value) for key, value in values.items()}
        delivery = m.Deliver(self.number, packed)
        self.service.client(task).send_one_way(delivery, until=self.ends)

    def receive(self, key: str, then: Callable[[Any], None]) -> None:
        """Call a function with a value once another task has sent it."""
        self.service.rendezvous.receive(self.number, key, then)


class _Rendezvous:
    """Values that arrived for steps, and the functions that wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._waiting: dict[str, dict[str, Callable[[Any], None]]] = {}
        self._ended: OrderedDict[str, m.Failure | None] = OrderedDict()

    def begin(self, step: str) -> m.Failure | None:
        """Return why a step has failed already, if it has."""
        with self._lock:
            return self._ended.get(step)

    def deliver(self, step: str, values: Mapping[str, Any]) -> None:
        """Keep values for a step, or give them to the functions that wait for them."""
        due = []
        with self._lock:
            if step in self._ended:
                return
            waiting = self._waiting.get(step, {})
            for key, value in values.items():
                if key in waiting:
                    due.append((waiting.pop(key), value))
                else:
                    self._steps.setdefault(step, {})[key] = value
            while len(self._steps) > _ENDED:  # Steps whose masters died early.
                self._steps.popitem(last=False)
        for then, value in due:
            then(value)

    def receive(self, step: str, key: str, then: Callable[[Any], None]) -> None:
        """Call a function with a value, at once or when it arrives."""
        with self._lock:
            kept = self._steps.get(step, {})
            if key not in kept:
                self._waiting.setdefault(step, {})[key] = then
                return
            value = kept.pop(key)
        then(value)

    def forget(self, session: str) -> None:
        """Drop the values of a session's steps that did not begin here."""
        with self._lock:
            for step in [step for step in self._steps if step.startswith(f"{session}/")]:
                del self._steps[step]

    def end(self, step: str, failure: m.Failure | None = None) -> None:
        """Drop the values of a step, also later ones; the step fails if it begins later."""
        with self._lock:
            self._steps.pop(step, None)
            self._waiting.pop(step, None)
            self._ended[step] = failure
            while len(self._ended) > _ENDED:
                self._ended.popitem(last=False)
