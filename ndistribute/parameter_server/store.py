"""`Store`: the state machine of a parameter server.

It has no sockets, threads, files or clocks. The same requests in the same order give the same
replies and the same state, so tests can simulate any behaviour of a network.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.shared import SharedVariables
from ndistribute.parameter_server.stored_variables import Aggregation, Refused, Variables

MAX_CLIENTS = 1 << 16
MAX_APPLIED = 1 << 20

Answers = list[tuple[Any, m.Reply]]
"""Pairs of a call, as passed to `Store.handle`, and its reply."""


@dataclass(slots=True)
class Applied:
    """The changes that were made for a client: all below `low_water`, others up to `last`."""

    low_water: int = 0
    # By number of a transaction or closure, and by counter: the last update that was made.
    last: dict[int, dict[str, m.Mark]] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)  # Of closures that ran again.

    def missing(self, request: m.Transaction) -> list[m.Mark | None]:
        """Return the mark of each change that was not made before, and None for the others."""
        if request.sequence < self.low_water:
            return [None] * len(request.changes)
        if request.attempt < self.attempts.get(request.sequence, 1):
            raise Refused(f"function {request.sequence} runs on another worker.", "superseded")
        made = {mark.counter: mark.number for mark in self.last.get(request.sequence, {}).values()}
        marks = request.marks or (m.Mark(),) * len(request.changes)
        return [mark if mark.number > made.get(mark.counter, -1) else None for mark in marks]

    def add(self, request: m.Transaction, made: Iterable[m.Mark | None]) -> None:
        """Add changes, and forget numbers that the client will not send again."""
        last = self.last.setdefault(request.sequence, {})
        last.update({mark.counter: mark for mark in made if mark is not None})
        if request.low_water > self.low_water:
            self.low_water = request.low_water
            self.last = {n: last for n, last in self.last.items() if n >= request.low_water}
            self.attempts = {n: a for n, a in self.attempts.items() if n >= request.low_water}


@dataclass(slots=True)
class ClockGroup:
    """The clocks of present clients, and the names of all clients that ever came."""

    present: dict[str, int] = field(default_factory=dict)
    came: set[str] = field(default_factory=set)

    def arrive(self, client: str, clock: int) -> None:
        """Record that a client is about to begin a step."""
        member = _member(client)
        self.came.add(member)
        if client not in self.present:
            for earlier in [other for other in self.present if _member(other) == member]:
                del self.present[earlier]
            # Start at the others' clocks, so that they do not wait for a restarted client.
            clock = max(clock, min(self.present.values(), default=0))
        self.present[client] = max(clock, self.present.get(client, 0))

    def reply(self, client: str, request: m.AwaitClock) -> m.Number | None:
        clock = self.present.get(client)
        if clock is None or len(self.came) < request.count:
            return None
        return m.Number(clock) if min(self.present.values()) >= clock - request.slack else None


class Store:
    """Hold the state of a server, and execute requests one at a time.

    The caller holds a lock. Replies may be encoded without the lock, because their arrays never
    change. The store keeps no array of a request, except values if its variables may keep arrays.
    """

    def __init__(self, floor: int = 0) -> None:
        # Called before a change; only this call can still fail.
        self.log: Callable[[m.Logged], None] = lambda request: None
        self.total = self.began = 0  # Transactions of all instances, and of earlier instances.
        self.kept = 0  # All changes, including those outside transactions.
        self.start = 0  # See `Totals`.
        self.epoch = 0  # The leader's epoch, for a shard with two copies.
        self.keeps_pending, self.pending = False, list[m.Logged]()  # Changes for the other copy.
        self.variables = Variables(floor)
        self.shared = SharedVariables()  # The variables of graphs; strategies have other ones.
        self.applied: dict[str, Applied] = {}
        self.aggregates: dict[str, Aggregation] = {}
        self.clocks: dict[str, ClockGroup] = {}
        # One wait per kind, name and client.
        self._waits: dict[tuple[type, str, str], tuple[Any, m.Wait]] = {}

    @property
    def clients(self) -> frozenset[str]:
        """Return the clients that others may wait for, which count as left unless they return."""
        members = {client for held in self.aggregates.values() for client in held.members}
        return frozenset(members.union(*(group.present for group in self.clocks.values())))

    @property
    def totals(self) -> m.Totals:
        return m.Totals(self.total, self.began, self.start)

    def handle(self, client: str, call: Any, request: m.Request | m.Logged) -> Answers:
        """Return the replies that are ready: to this call, unless it waits, and to other calls."""
        try:
            if isinstance(request, m.Wait):
                return self._wait(client, call, request)
            reply = self._reply(request)
        except Refused as refused:
            return [(call, m.Failure(refused.kind, str(refused)))]
        except MemoryError as error:
            why = f"this server has not enough memory for a {type(request).__name__}: {error}"
            return [(call, m.Failure("full", why))]
        answers: Answers = [(call, reply)]
        if self._waits and isinstance(request, m.Transaction):
            answers += self._serve()
        return answers

    def left(self, client: str) -> Answers:
        """Remove a client, and return the replies to calls that waited for it."""
        for place in [place for place in self._waits if place[2] == client]:
            del self._waits[place]
        for aggregate in self.aggregates.values():
            aggregate.leave(client)
        for group in self.clocks.values():
            group.present.pop(client, None)
        return self._serve()

    def _reply(self, request: m.Request | m.Logged) -> m.Reply:
        match request:
            case m.Transaction():
                return self._transact(request)
            case m.Rerun(client, sequence, attempt):
                self._keep(request)
                applied = self.applied.setdefault(client, Applied())
                applied.attempts[sequence] = max(attempt, applied.attempts.get(sequence, 1))
                return m.Marks(tuple(applied.last.get(sequence, {}).values()))
            case m.Read(items):
                read = [self.variables.read(item) for item in items]
                return m.Values(tuple(v for v, _ in read), tuple(array for _, array in read))
            case m.Create(wanted):
                made, reply = self.variables.plan(wanted)
                if made:
                    self._keep(request)
                    self.variables.cells.update(made)
                return reply
            case m.Delete(names):
                if not self.variables.cells.keys().isdisjoint(names):
                    self._keep(request)
                return m.Number(self.variables.delete(names))
            case m.Status("memory"):
                return self.totals
            case m.NewEpoch(epoch):
                self._keep(request)
                self.epoch = epoch
                return self.totals
            case m.Assign() | m.VariableUpdate() | m.Apply():
                with np.errstate(all="ignore"):
                    self.shared.replay(request)
                return self.totals
        why = "this server writes nothing to a disk: start it with a snapshot directory."
        raise Refused(why, "unknown")

    def _keep(self, request: m.Logged) -> None:
        """Keep a change for the log and for the other copy, before it is made."""
        self.log(request)
        self.kept += 1
        if self.keeps_pending:
            self.pending.append(request)

    def _transact(self, request: m.Transaction) -> m.Changed:
        if request.low_water > request.sequence:
            raise Refused(f"number {request.sequence} is below its low water {request.low_water}.")
        applied = self.applied.get(request.client) or Applied()
        missing = applied.missing(request)
        if not any(missing):
            outcomes = tuple(map(self._outcome_now, request.changes))
            return m.Changed(outcomes, self.total, repeated=True)
        if len(applied.last) >= MAX_APPLIED and request.sequence not in applied.last:
            why = f"{MAX_APPLIED} updates of {request.client!r} are above {applied.low_water}."
            raise Refused(why, "full")
        fresh: dict[str, Aggregation] = {}
        aggregates = ChainMap(fresh, self.aggregates)
        planned = [
            self.variables.plan_change(aggregates, request.client, change)
            if mark is not None
            else functools.partial(self._outcome_now, change)
            for change, mark in zip(request.changes, missing, strict=True)
        ]
        self._keep(request)
        # If a warning raised an error, the remaining changes would be lost.
        with np.errstate(all="ignore"):
            outcomes = tuple(make() for make in planned)
        self.aggregates.update(fresh)
        self.total += 1
        applied.add(request, missing)
        self.applied.pop(request.client, None)
        self.applied[request.client] = applied  # Most recently used last.
        if len(self.applied) > MAX_CLIENTS:
            del self.applied[next(iter(self.applied))]
        return m.Changed(outcomes, self.total)

    def _outcome_now(self, change: m.Change) -> m.Outcome:
        """Return the current outcome of a change that was made before."""
        if isinstance(change, m.Aggregate):
            held = self.aggregates.get(change.name) or Aggregation()
            return m.Accumulated(True, held.step)
        names = change.names if isinstance(change, m.Apply) else (change.name,)
        cells = map(self.variables.cells.get, names)
        return m.Done(tuple(cell.version if cell is not None else 0 for cell in cells))

    def _wait(self, client: str, call: Any, request: m.Wait) -> Answers:
        """Let a call wait in place of the client's earlier one; return the replies now ready."""
        name, place = request.name, (type(request), request.name, client)
        if isinstance(request, m.AwaitClock):
            self._check_clock(client, request)
            self.clocks.setdefault(name, ClockGroup()).arrive(client, request.clock)
        elif request.count < 1:
            raise Refused(f"nobody can wait at {name!r} for {request.count}.")
        elif name in self.aggregates:
            self.aggregates[name].join(client)
        earlier = self._waits.pop(place, None)
        self._waits[place] = (call, request)
        answers = self._serve()
        if earlier is not None:
            why = "the same client asked again; that call gets the answer."
            answers.append((earlier[0], m.Failure("superseded", why)))
        return answers

    def _check_clock(self, client: str, request: m.AwaitClock) -> None:
        if request.clock < 0 or request.slack < 0 or request.count < 1:
            raise Refused(f"{request!r}: steps and slack must be at least 0, the count at least 1.")
        for (kind, name, other), (_, waits) in self._waits.items():
            same = kind is m.AwaitClock and name == request.name and other != client
            if same and waits.count != request.count:
                why = f"{client!r} waits for {request.count}, {other!r} for {waits.count}"
                raise Refused(f"{why} at {name!r}: all clients must wait for the same number.")

    def _serve(self) -> Answers:
        """Return the replies to all waiting calls whose wait is over."""
        answers: Answers = []
        for place, (call, request) in list(self._waits.items()):
            client = place[2]
            if isinstance(request, m.AwaitStep):
                held = self.aggregates.get(request.name) or Aggregation()
                reply: m.Reply | None = held.reply(client, request)
            else:
                reply = self.clocks[request.name].reply(client, request)
            if reply is not None:
                del self._waits[place]
                answers.append((call, reply))
        return answers


def _member(client: str) -> str:
    return client.partition("#")[0]
