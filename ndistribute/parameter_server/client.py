"""The client of all parameter servers of a job.

A call sends all requests before it waits for the first reply. Changes are numbered, so a server
makes each of them once. A closure is a function that a coordinator sent. The client holds back the
changes of a closure until it returns, or reads what it changed. Then it sends them with the number
of the closure and with numbers that are the same in every attempt to run the closure.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import random
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from ndistribute.errors import DistributeError, WorkerLostError
from ndistribute.parameter_server import messages as m
from ndistribute.timeline import enabled, recorded
from ndistribute.transport.buffers import ReusedMemory
from ndistribute.transport.codec import Array, Record
from ndistribute.transport.failures import error_of

Changes = Mapping[int, Sequence[m.Change]]  # By server: changes; below: their outcomes.
Outcomes = Mapping[int, tuple[m.Outcome, ...]]
Then = Callable[[Outcomes], None]

_BUFFERED_BYTES, _BUFFERED_CHANGES = 1 << 28, 4096  # The most that a closure holds back.
_SMALL_BYTES = 1 << 14  # Initial values up to this size are sent without asking.
_TURN_SECONDS = 0.1  # The wait for one reply before polling the others.
# The kind of the span that a trace records for a reply, or for none yet.
_SPANS: dict[Any, str] = {m.Values: "pull", m.Changed: "push", m.Number: "wait", type(None): "wait"}
# A trace attributes waits to the server that is asked first, so the order is random in a trace.
_order = random.Random() if enabled() else None
_ERRORS = {"mismatch": ValueError, "left": WorkerLostError, "": DistributeError}
_log = logging.getLogger("ndistribute")


class RunningClosure:
    """The number of a closure, and the changes that it holds back."""

    current: RunningClosure | None = None  # The closure that this process runs.

    def __init__(self, client_id: str, number: int, low_water: int) -> None:
        self.client_id, self.number, self.attempt = client_id, number, 1
        self.low_water = low_water  # The lowest unfinished closure.
        self._made: set[m.Mark] = set()  # By earlier attempts; this attempt must repeat them all.
        self.in_main = threading.current_thread() is threading.main_thread()
        self.reports: dict[str, m.Report] = {}  # What the closure learned about each server.
        self.buffers: dict[Servers, _WriteBuffer] = {}
        # Called with each report that a server is out of reach, and why.
        self.stuck: Callable[[str], None] = lambda why: None

    def begin_again(self, attempt: int, strategy: Any) -> None:
        """Begin a later attempt: stop the earlier ones, and get the updates that they made."""
        self.attempt = attempt
        replies = strategy.servers.ask_all(m.Rerun(self.client_id, self.number, attempt))
        self._made.update(*(reply.marks for reply in replies.values()))

    def match(self, mark: m.Mark | None) -> None:
        """Raise ValueError if an update, or None for the end, contradicts earlier attempts."""
        self._made.discard(mark or m.Mark())
        if any(mark is None or made[:2] == mark[:2] for made in self._made):
            raise ValueError(
                f"function {self.number} runs again, but does not update the same variables in "
                "the same order as the attempt before, whose updates are already made. Which "
                "variables it updates must not depend on a clock, a random number or a value "
                "that it reads."
            )


@contextlib.contextmanager
def closure(client_id: str, number: int, low_water: int = 1) -> Iterator[RunningClosure]:
    """Run a ``with`` block as a closure; an error drops the changes that it holds back."""
    if RunningClosure.current is not None:
        raise RuntimeError("a worker runs one function at a time, and another one is running.")
    running = RunningClosure.current = RunningClosure(client_id, number, low_water)
    try:
        yield running
        running.match(None)
        for buffer in list(running.buffers.values()):
            buffer.flush()
    finally:
        RunningClosure.current = None
        running.buffers.clear()


def current_closure() -> RunningClosure | None:
    """Return the closure that this thread runs, or None."""
    # The main thread counts only if the closure runs on it: in a process that is its own worker,
    # the main thread schedules closures that another thread runs.
    running = RunningClosure.current
    if running is None or running.in_main:
        return running
    return None if threading.current_thread() is threading.main_thread() else running


class _WriteBuffer:
    """The changes that a closure holds back."""

    def __init__(self, servers: Servers, running: RunningClosure) -> None:
        self._servers, self._running = servers, running
        self._index = len(running.buffers)  # Two strategies may use the same servers.
        self._marks: dict[int, m.Mark] = {}  # By replica: the mark of its last update.
        self._flushing = threading.RLock()  # Keeps updates in the order of their numbers.
        self._reset()

    def _reset(self) -> None:
        self._updates: list[tuple[Changes, m.Mark, Then | None]] = []
        self._names: set[str] = set()
        self._nbytes = 0

    def add(self, changes: Changes, what: str, then: Then | None, replica: int) -> None:
        """Hold back copies of changes until the closure ends or the buffer is full."""
        with self._servers._lock:
            owned = {i: [self._owned(change) for change in some] for i, some in changes.items()}
            names = [n for some in owned.values() for change in some for n in _written(change)]
            last = self._marks.get(replica) or m.Mark(f"{self._index}.{replica}", number=-1)
            digest = zlib.crc32(" ".join([what, *names]).encode(), last.digest)
            mark = self._marks[replica] = m.Mark(last.counter, last.number + 1, digest)
            self._running.match(mark)
            self._updates.append((owned, mark, then))
            self._names.update(names)
            full = self._nbytes >= _BUFFERED_BYTES or len(self._updates) >= _BUFFERED_CHANGES
        if full:
            self.flush()

    def flush_before(self, names: Iterable[str]) -> None:
        """Send the changes before a read, if they change one of these variables."""
        with self._flushing:  # Another thread may be sending them.
            if not self._names.isdisjoint(names):
                self.flush()

    def flush(self) -> None:
        with self._flushing:
            with self._servers._lock:
                buffered = self._updates
                self._reset()
            outcomes = {i: iter(made) for i, made in self._send(buffered).items()}
            for some, _, then in buffered:
                made = {i: tuple(itertools.islice(outcomes[i], len(o))) for i, o in some.items()}
                if then is not None:
                    then(made)

    def _send(self, buffered: Sequence[tuple[Changes, m.Mark, Then | None]]) -> Outcomes:
        running = self._running
        sent: dict[int, list[tuple[m.Change, m.Mark]]] = defaultdict(list)
        for some, mark, _ in buffered:
            for i, held in some.items():
                sent[i] += [(change, mark) for change in held]
        orders = {}
        for i, pairs in sent.items():
            changes, marks = zip(*pairs, strict=True)
            numbers = running.number, running.low_water
            orders[i] = m.Transaction(running.client_id, *numbers, changes, marks, running.attempt)
        try:
            return {i: reply.outcomes for i, reply in self._servers.ask(orders).items()}
        finally:
            for i in orders:
                if report := self._servers._clients[i].current_report:
                    running.reports[report.server] = report

    def _owned(self, part: Any) -> Any:
        """Return a change, or a part of a change, with copies of all writable arrays."""
        if isinstance(part, np.ndarray):
            if not _writable(part):
                return part
            self._nbytes += part.nbytes
            memory = self._servers._memory.take(part.nbytes)
            copy: Array = np.ndarray(part.shape, part.dtype, memory)
            np.copyto(copy, part)
            return copy
        if isinstance(part, tuple):
            return tuple(self._owned(item) for item in part)
        if isinstance(part, Record):
            names = part.__struct_fields__
            return type(part)(**{name: self._owned(getattr(part, name)) for name in names})
        return part


def _written(change: m.Change) -> tuple[str, ...]:
    if isinstance(change, m.Aggregate):
        return _written(change.apply)
    if isinstance(change, m.Apply):
        return change.written
    return (change.name,)


def _writable(array: Array) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    return base is not None


class ServerClient:
    """Sends requests to one server from any thread, and detects restarts of the server.

    `caller` is an `rpc.Client`, or a client of a server in this process.
    """

    def __init__(self, caller: Any, title: str) -> None:
        self.name, self.title = caller.name, title
        self.start, self.close = caller.start, caller.close  # `finish` returns the reply.
        self._caller = caller
        caller.waits = _tell_closure
        self._lock = threading.Lock()
        self._instances: dict[str, m.Report] = {}

    @property
    def lost_updates(self) -> int:
        """Return how many updates earlier instances of the server are known to have lost."""
        # An instance lost the difference between the total of the one before and its own start.
        # They are sorted by start, because another process may report an earlier one late.
        reports = sorted(self._instances.values(), key=lambda report: report.start)
        pairs = itertools.pairwise(reports)
        return sum(max(0, before.total - after.began) for before, after in pairs)

    @property
    def current_report(self) -> m.Report | None:
        return self._instances.get(self._caller.instance)

    @recorded(lambda reply, self, *_: (_SPANS.get(type(reply), "request"), self.title))
    def finish(self, call: Any, until: float = float("inf")) -> Any:
        """Return the reply to a request, or None if there is none yet; raise for a `Failure`."""
        reply = call.result(until)
        if isinstance(reply, m.Changed):
            with self._lock:
                known = self._instances.get(call.instance)  # None before `ask_status`.
                if known is not None and reply.total > known.total:
                    self._instances[known.instance] = replace(known, total=reply.total)
        if not isinstance(reply, m.Failure):
            return reply
        raise error_of(reply, _ERRORS, f"{self.title}: ")

    def ask_status(self) -> None:
        """Ask a new instance of the server how many updates it contains."""
        if self._caller.instance and self._caller.instance not in self._instances:
            call = self.start(m.Status())
            totals = self.finish(call)
            known = totals.began, totals.total, totals.start
            self.learn(m.Report(self.title, call.instance, *known))

    def learn(self, report: m.Report) -> None:
        """Record what this or another process knows about an instance of the server."""
        with self._lock:
            known, before = self._instances.get(report.instance, report), self.lost_updates
            is_news = bool(self._instances) and report.instance not in self._instances
            self._instances[report.instance] = replace(report, total=max(known.total, report.total))
            lost = self.lost_updates - before
        if is_news:
            what = "%s was restarted with its first %d updates; %d later ones are known to be lost."
            _log.warning(what, self.title, report.began, lost)


class Servers:
    """Sends requests to all parameter servers of a job, from any thread.

    The keys of mappings are the indices of servers. A mismatch raises `ValueError`. An unreachable
    server, or other workers that left during a wait for them, raise `WorkerLostError`.
    """

    def __init__(self, clients: Sequence[ServerClient]) -> None:
        self._clients = tuple(clients)
        self._memory = ReusedMemory()  # For the changes that closures hold back.
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        atexit.register(self.close)  # So that servers see a clean end.
        self._open: list[set[int]] = [set() for _ in clients]  # Numbers not yet acknowledged.

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def lost_updates(self) -> int:
        """Return how many updates killed servers are known to have lost."""
        return sum(client.lost_updates for client in self._clients)

    def ask(self, requests: Mapping[int, Record]) -> dict[int, Any]:
        """Send requests to servers and return all replies; raise the first error at the end."""
        calls: dict[int, Any] = {}
        replies, errors = {}, []
        try:
            for i, request in requests.items():
                calls[i] = self._clients[i].start(request)
            waiting = list(calls.items())
            if _order is not None:
                _order.shuffle(waiting)
            for i, call in waiting:
                try:
                    replies[i] = self._clients[i].finish(call)
                except Exception as error:
                    errors.append(error)
        finally:
            for call in calls.values():
                call.cancel()
        for i in replies:
            self._clients[i].ask_status()
        if errors:
            raise errors[0]
        return replies

    def replies(self, requests: Mapping[int, Record]) -> Generator[tuple[int, Any], None, None]:
        """Yield each server's reply when it arrives; closing the generator cancels the rest."""
        calls: dict[int, Any] = {}
        try:
            for i, request in requests.items():
                calls[i] = self._clients[i].start(request)
            while calls:
                for i, call in list(calls.items()):
                    until = time.monotonic() + _TURN_SECONDS if len(calls) > 1 else float("inf")
                    reply = self._clients[i].finish(call, until)
                    if reply is not None:
                        del calls[i]
                        self._clients[i].ask_status()
                        yield i, reply
        finally:
            for call in calls.values():
                call.cancel()

    def ask_all(self, request: Record) -> dict[int, Any]:
        """Send a request to every server, and return all replies."""
        return self.ask(dict.fromkeys(range(len(self)), request))

    def create(self, initial: Mapping[int, Sequence[tuple[str, Array]]]) -> None:
        """Create variables with names and values, except those that exist."""
        asked = {i: tuple(_described(*new) for new in some) for i, some in initial.items()}
        wanted = {}
        for i, reply in self.ask({i: m.Create(some) for i, some in asked.items()}).items():
            sent = tuple(
                replace(new, initial=array)
                for new, (_, array), state in zip(asked[i], initial[i], reply.states, strict=True)
                if state == "wanted"
            )
            if sent:
                wanted[i] = m.Create(sent)
        self.ask(wanted)

    def read(self, asked: Mapping[int, Sequence[m.Item]]) -> dict[int, m.Values]:
        """Read items from servers, including the changes of the running closure."""
        running = current_closure()
        if running is not None and (buffer := running.buffers.get(self)) is not None:
            buffer.flush_before(item.name for some in asked.values() for item in some)
        return self.ask({i: m.Read(tuple(some)) for i, some in asked.items()})

    def change(
        self, changes: Changes, what: str = "", then: Then | None = None, replica: int = 0
    ) -> None:
        """Make changes, atomic per server, or at the end of the closure; then call `then`.

        Args:
            changes: an update; for each server, the parts that it makes.
            what: the kind of the update, or the optimizer; the same in every attempt.
            then: called with the outcomes.
            replica: the number, from 1, of the updating replica; 0: all replicas together.
        """
        running = current_closure()
        if running is not None:
            buffer = running.buffers.get(self) or _WriteBuffer(self, running)
            running.buffers.setdefault(self, buffer).add(changes, what, then, replica)
            return
        outcomes = self._change(changes)
        if then is not None:
            then(outcomes)

    def learn(self, reports: Iterable[m.Report]) -> None:
        clients = {client.title: client for client in self._clients}
        for report in reports:
            if report.server in clients:
                clients[report.server].learn(report)

    def close(self) -> None:
        """Say good-bye to the servers; a second call does nothing."""
        atexit.unregister(self.close)
        for client in self._clients:
            client.close()

    def _change(self, changes: Changes) -> Outcomes:
        """Make changes with the next number of this process."""
        orders = {}
        with self._lock:  # Record the number before another thread sends a higher one.
            number = next(self._numbers)
            for i, some in changes.items():
                self._open[i].add(number)
                name, low_water = self._clients[i].name, min(self._open[i])
                orders[i] = m.Transaction(name, number, low_water, tuple(some))
        try:
            return {i: reply.outcomes for i, reply in self.ask(orders).items()}
        finally:
            for i in orders:
                self._open[i].discard(number)


def _tell_closure(why: str) -> None:
    if running := current_closure():
        running.stuck(why)


def _described(name: str, array: Array) -> m.NewVariable:
    """Describe a new variable, including its value if it is short or constant."""
    dtype = array.dtype.newbyteorder("=").name
    fill = initial = None
    if array.size > 1 and not any(array.strides) and array.dtype.kind in "fiub":
        fill = float(array.flat[0])
    elif array.nbytes <= _SMALL_BYTES:
        initial = array
    return m.NewVariable(name, tuple(array.shape), dtype, fill, initial)
