"""Parameter servers as a process that uses them sees them.

All requests go out before the first reply is waited for. Changes are numbered, so that each is made
once however often it is sent. What a closure changes, a function that a coordinator sent, is kept
back until its end and goes out under the closure's number, the same wherever it is run again.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from ndistribute.errors import DistributeError, WorkerLostError
from ndistribute.parameter_server import messages as m
from ndistribute.timeline import enabled, recorded
from ndistribute.transport.codec import Array, Record

Changes = Mapping[int, Sequence[m.Change]]  # What to change on which server, and what became of it.
Outcomes = Mapping[int, tuple[m.Outcome, ...]]
Then = Callable[[Outcomes], None]

_SHIFT = 16  # A closure makes fewer than so many bits' worth of transactions.
_BUFFERED_BYTES, _BUFFERED_CHANGES = 1 << 28, 4096  # So much a closure keeps back at most.
_REUSED_BYTES = 1 << 16  # Smaller arrays the allocator keeps by itself.
_SMALL_BYTES = 1 << 14  # An initial value of so few bytes is sent without asking if it is wanted.
_TURN_SECONDS = 0.1  # So long one of several replies is waited for before the others are looked at.
# What a trace calls the wait for a reply of a kind, or for none yet.
_SPANS: dict[Any, str] = {m.Values: "pull", m.Changed: "push", m.Number: "wait", type(None): "wait"}
# A trace counts for a server what it is waited for; no server may be the first one always.
_order = random.Random() if enabled() else None
_ERRORS: dict[str, type[Exception]] = {"mismatch": ValueError, "left": WorkerLostError}
_log = logging.getLogger("ndistribute")


class Closure:
    """Number the transactions of one closure of a series, and hold what is kept back for it."""

    current: Closure | None = None  # The one that this process runs, with all its threads.

    def __init__(self, series: str, number: int, low_water: int) -> None:
        self.series = series
        self.low_water = low_water << _SHIFT  # Given as the lowest closure that is not over.
        self.in_main = threading.current_thread() is threading.main_thread()
        self.reports: dict[str, m.Report] = {}  # What was learned of each server on the way.
        self.buffers: dict[Servers, _WriteBuffer] = {}
        self._sequences = itertools.count((number << _SHIFT) + 1)
        self._end = (number + 1) << _SHIFT

    def sequence(self) -> int:
        sequence = next(self._sequences)
        if sequence >= self._end:
            made = f"one function made {1 << _SHIFT} separate updates"
            raise RuntimeError(f"{made}: schedule smaller ones.")
        return sequence


@contextlib.contextmanager
def closure(series: str, number: int, low_water: int = 1) -> Iterator[Closure]:
    """Make the changes of a ``with`` block those of a closure; those kept back go with an error."""
    if Closure.current is not None:
        raise RuntimeError("a worker runs one function at a time, and one is running.")
    running = Closure.current = Closure(series, number, low_water)
    try:
        yield running
        for buffer in list(running.buffers.values()):
            buffer.flush()
    finally:
        Closure.current = None
        running.buffers.clear()


def current_closure() -> Closure | None:
    """Return the closure that this thread works for, if there is one."""
    # The main one works for those alone that it runs: in a process that is its own worker it
    # schedules what another thread runs.
    running = Closure.current
    if running is None or running.in_main:
        return running
    return None if threading.current_thread() is threading.main_thread() else running


class _WriteBuffer:
    """Keep back what a closure changes on servers."""

    def __init__(self, servers: Servers, running: Closure) -> None:
        self._servers, self._running = servers, running
        self._reset()

    def add(self, changes: Changes, then: Then | None) -> None:
        """Keep changes, as they are now, until the end of the closure or until they are many."""
        with self._servers._lock:
            owned = {i: [self._owned(change) for change in some] for i, some in changes.items()}
            self._kept.append((owned, then))
            self._names.update(*(_written(change) for some in owned.values() for change in some))
            nbytes = sum(copy.nbytes for copy in self._copies)
            full = nbytes >= _BUFFERED_BYTES or len(self._kept) >= _BUFFERED_CHANGES
        if full:
            self.flush()

    def flush_before(self, names: Iterable[str]) -> None:
        """Send what is kept if it changes a variable that is about to be read."""
        if not self._names.isdisjoint(names):
            self.flush()

    def _reset(self) -> None:
        self._kept: list[tuple[Changes, Then | None]] = []
        self._names: set[str] = set()
        self._copies: list[Array] = []

    def flush(self) -> None:
        """Send what is kept, as one transaction to each server."""
        with self._servers._lock:
            kept, copies = self._kept, self._copies
            self._reset()
        if not kept:
            return
        changes: dict[int, list[m.Change]] = {}
        for some, _ in kept:
            for i, own in some.items():
                changes.setdefault(i, []).extend(own)
        made_by = self._servers._change(changes, self._running)
        outcomes = {i: iter(made) for i, made in made_by.items()}
        with self._servers._lock:  # To touch new memory costs more than to copy: the next has it.
            self._servers._spare = [copy for copy in copies if copy.nbytes >= _REUSED_BYTES]
        for some, then in kept:
            made = {i: tuple(itertools.islice(outcomes[i], len(own))) for i, own in some.items()}
            if then is not None:
                then(made)

    def _owned(self, part: Any) -> Any:
        """Return a change, or a part of one, with arrays that nobody else can write to."""
        if isinstance(part, np.ndarray):
            if not _writable(part):
                return part
            self._copies.append(self._copy_of(part))
            return self._copies[-1]
        if isinstance(part, tuple):
            return tuple(self._owned(item) for item in part)
        if isinstance(part, Record):
            names = part.__struct_fields__
            return type(part)(**{name: self._owned(getattr(part, name)) for name in names})
        return part

    def _copy_of(self, array: Array) -> Array:
        for index, spare in enumerate(self._servers._spare):
            if (spare.shape, spare.dtype) == (array.shape, array.dtype):
                del self._servers._spare[index]
                np.copyto(spare, array)
                return spare
        return array.copy(order="C")


def _written(change: m.Change) -> tuple[str, ...]:
    """Return the names of the variables that a change writes to."""
    if isinstance(change, m.Aggregate):
        return _written(change.apply)
    if isinstance(change, m.Apply):
        return (*change.names, *(name for some in change.slots for name in some), change.counter)
    return (change.name,)


def _writable(array: Array) -> bool:
    """Return True if an array can still change, through itself or through what it is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    return base is not None


class Caller(Protocol):
    """What carries requests to one server: `rpc.Client`, or a server of this process."""

    name: str
    instance: str

    def start(self, request: Record) -> Any: ...
    def close(self) -> None: ...


class ServerClient:
    """Ask one server, from any number of threads at once, and notice when it was started again."""

    def __init__(self, caller: Caller, title: str) -> None:
        self.name, self.title = caller.name, title
        self.start, self.close = caller.start, caller.close  # `finish` returns the reply.
        self._caller = caller
        self._lock = threading.Lock()
        self._lives: dict[str, m.Report] = {}

    @property
    def lost_updates(self) -> int:
        """Return how many updates are known to be lost with the server's earlier lives."""
        # A life that began with less than is known of the one before has lost the difference. They
        # are sorted by age, since another process may tell late of an earlier one.
        pairs = itertools.pairwise([life for _, life in sorted(self._lives.items())])
        return sum(max(0, before.total - after.began) for before, after in pairs)

    @property
    def current_life(self) -> m.Report | None:
        return self._lives.get(self._caller.instance)

    @recorded(lambda reply, self, *_: (_SPANS.get(type(reply), "request"), self.title))
    def finish(self, call: Any, until: float = float("inf")) -> Any:
        """Return the reply to a request, None if it has not come by then; raise a failure."""
        reply = call.result(until)
        if isinstance(reply, m.Changed):
            with self._lock:
                known = self._lives.get(call.instance)  # What else it began with, `meet` asks.
                if known is not None and reply.total > known.total:
                    self._lives[known.life] = replace(known, total=reply.total)
        if not isinstance(reply, m.Failure):
            return reply
        raise _ERRORS.get(reply.kind, DistributeError)(f"{self.title}: {reply.message}")

    def meet(self) -> None:
        """Learn what the server began with if it is another life than those that are known."""
        if self._caller.instance and self._caller.instance not in self._lives:
            call = self.start(m.Status())
            totals = self.finish(call)
            self.learn(m.Report(self.title, call.instance, totals.began, totals.total))

    def learn(self, report: m.Report) -> None:
        """Take what this process, or another one, knows of a life of the server."""
        with self._lock:
            known, before = self._lives.get(report.life, report), self.lost_updates
            is_news = bool(self._lives) and report.life not in self._lives
            self._lives[report.life] = replace(report, total=max(known.total, report.total))
            lost = self.lost_updates - before
        if is_news:
            what = "%s was started again, with its first %d updates; %d are known to be lost."
            _log.warning(what, self.title, report.began, lost)


class Servers:
    """Use all parameter servers of a job, from any number of threads at once.

    Mappings are by the place of a server among the clients. What does not fit is a `ValueError`; a
    server that is not reached in time, or others who left while waited for, a `WorkerLostError`.
    """

    def __init__(self, clients: Sequence[ServerClient]) -> None:
        self._clients = tuple(clients)
        self._spare: list[Array] = []  # Memory of changes that a closure kept back.
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        atexit.register(self.close)  # So that servers see this process leave, and not die.
        self._open: list[set[int]] = [set() for _ in clients]  # Numbers that may be sent again.

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def lost_updates(self) -> int:
        """Return how many updates are known to be lost with servers that were killed."""
        return sum(client.lost_updates for client in self._clients)

    def ask(self, requests: Mapping[int, Record]) -> dict[int, Any]:
        """Return the replies of servers, asked all at once; raise an error after all ended."""
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
            self._clients[i].meet()
        if errors:
            raise errors[0]
        return replies

    def replies(self, requests: Mapping[int, Record]) -> Generator[tuple[int, Any], None, None]:
        """Yield each server's reply once it has come; who stops halfway waits no more."""
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
                        self._clients[i].meet()
                        yield i, reply
        finally:
            for call in calls.values():
                call.cancel()

    def ask_all(self, request: Record) -> None:
        """Wait until every server has done what a request asks."""
        self.ask(dict.fromkeys(range(len(self)), request))

    def create(self, initial: Mapping[int, Sequence[tuple[str, Array]]]) -> None:
        """Make variables of some names and values, but for those that there are."""
        asked = {i: tuple(_described(*one) for one in some) for i, some in initial.items()}
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
        """Return what is asked for, with what a closure that asks has changed."""
        running = current_closure()
        if running is not None and (buffer := running.buffers.get(self)) is not None:
            buffer.flush_before(item.name for some in asked.values() for item in some)
        return self.ask({i: m.Read(tuple(some)) for i, some in asked.items()})

    def change(self, changes: Changes, then: Then | None = None) -> None:
        """Make changes, on each server all or none, in a closure at its end; `then` is told."""
        running = current_closure()
        if running is not None:
            buffer = running.buffers.get(self) or _WriteBuffer(self, running)
            running.buffers.setdefault(self, buffer).add(changes, then)
            return
        outcomes = self._change(changes, None)
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

    def _change(self, changes: Changes, running: Closure | None) -> Outcomes:
        """Make changes under the next number of a closure, or of this process."""
        orders = {}
        with self._lock:  # A number is known to be open before another thread sends a higher one.
            number = next(self._numbers) if running is None else running.sequence()
            for i, some in changes.items():
                if running is None:
                    self._open[i].add(number)
                    name, low_water = self._clients[i].name, min(self._open[i])
                else:
                    name, low_water = running.series, running.low_water
                orders[i] = m.Transaction(name, number, low_water, tuple(some))
        try:
            return {i: reply.outcomes for i, reply in self.ask(orders).items()}
        finally:
            for i in orders:
                if running is None:
                    self._open[i].discard(number)
                elif life := self._clients[i].current_life:
                    running.reports[life.server] = life


def _described(name: str, array: Array) -> m.NewVariable:
    """Describe a new variable, with its value if that is short or the same number everywhere."""
    dtype = array.dtype.newbyteorder("=").name
    fill = initial = None
    if array.size > 1 and not any(array.strides) and array.dtype.kind in "fiub":
        fill = float(array.flat[0])
    elif array.nbytes <= _SMALL_BYTES:
        initial = array
    return m.NewVariable(name, tuple(array.shape), dtype, fill, initial)
