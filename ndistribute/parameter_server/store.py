"""`Store`: what a parameter server does with each request.

A machine without sockets, threads, files or time: the same requests in the same order give the same
answers and the same state, so whatever a network does to them can be tried without one.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.messages import AwaitClock, AwaitStep, Failure, Number, Reply
from ndistribute.parameter_server.updates import (
    Aggregation,
    Planned,
    plan_aggregate,
    plan_apply,
    plan_update,
)
from ndistribute.parameter_server.variables import Refused, Variables

__all__ = ["MAX_CLIENTS", "Answers", "Applied", "Clock", "ClockGroup", "Store"]

MAX_CLIENTS = 1 << 16
MAX_APPLIED = 1 << 20

Answers = list[tuple[Any, Reply]]
"""Calls as `Store.handle` was given them, each with its reply."""


@dataclass(slots=True)
class Applied:
    """Hold which transactions of a client were made: all below `low_water`, and those of `done`."""

    low_water: int = 0
    done: set[int] = field(default_factory=set)

    def __contains__(self, sequence: int) -> bool:
        return sequence < self.low_water or sequence in self.done

    def add(self, sequence: int, low_water: int) -> None:
        """Add a transaction, and forget those that nobody sends again."""
        self.done.add(sequence)
        if low_water > self.low_water:
            self.low_water = low_water
            self.done = {number for number in self.done if number >= low_water}


@dataclass(slots=True)
class Clock:
    """Hold how far a member of a group is, and by how much that is more than it said."""

    client: str
    value: int
    ahead: int


@dataclass(slots=True)
class ClockGroup:
    """Hold the clocks of the members that are there, and all members that ever came."""

    present: dict[str, Clock] = field(default_factory=dict)
    came: set[str] = field(default_factory=set)

    def arrive(self, client: str, clock: int) -> None:
        """Note that a client is about to begin a step."""
        member = _member(client)
        held = self.present.get(member)
        if held is not None and held.client == client:
            held.value = max(held.value, clock + held.ahead)
            return
        others = [other.value for name, other in self.present.items() if name != member]
        # Counted on from the others' steps: else they would wait while it repeats what they did.
        ahead = max(0, min(others, default=0) - clock)
        self.present[member] = Clock(client, clock + ahead, ahead)
        self.came.add(member)

    def leave(self, client: str) -> None:
        """Count on a client no more, unless its successor came before it was known that it left."""
        held = self.present.get(_member(client))
        if held is not None and held.client == client:
            del self.present[_member(client)]

    def reply(self, client: str, request: AwaitClock) -> Number | None:
        """Return the reply to a wait once it is over."""
        clock = self.present.get(_member(client))
        if clock is None or len(self.came) < request.count:
            return None
        slowest = min(held.value for held in self.present.values())
        return Number(len(self.present)) if slowest >= clock.value - request.slack else None


class Store:
    """Hold variables and what else a server keeps; answer requests one after the other.

    Not safe for threads: it is called under one lock, but replies may be encoded outside of it,
    since arrays in replies never change. Of a request it keeps no array beyond its answer, but for
    values that `variables.adopts`. The versions of its variables are above `floor`.

    >>> from ndistribute.parameter_server.messages import Create, Item, NewVariable, Read
    >>> store = Store()
    >>> _ = store.handle("worker", 1, Create((NewVariable("w", (2,), "float32", fill=1.0),)))
    >>> store.handle("worker", 2, Read((Item("w"),)))
    [(2, Values(versions=(1,), arrays=(array([1., 1.], dtype=float32),)))]
    """

    def __init__(self, floor: int = 0) -> None:
        self.log: Callable[[m.Logged], None] = lambda request: None
        """Called with what is about to change variables, once only this call can still fail."""
        self.total = 0
        """How many transactions were made, in earlier lives as well."""
        self.began = 0
        """How many of them in earlier lives."""
        self.variables = Variables(floor)
        self.applied: dict[str, Applied] = {}
        self.aggregates: dict[str, Aggregation] = {}
        self.clocks: dict[str, ClockGroup] = {}
        # A client waits once for the same: by the kind of wait, its name and the client.
        self._waits: dict[tuple[type, str, str], tuple[Any, m.Wait]] = {}

    @property
    def clients(self) -> frozenset[str]:
        """Return the clients that others may wait for: who does not come back must leave."""
        members = {client for held in self.aggregates.values() for client in held.members}
        clocks = (clock for group in self.clocks.values() for clock in group.present.values())
        return frozenset(members.union(clock.client for clock in clocks))

    @property
    def totals(self) -> m.Totals:
        """Return how many transactions were made."""
        return m.Totals(self.total, self.began)

    def handle(self, client: str, call: Any, request: m.Request) -> Answers:
        """Return the replies that are known now: to this call, unless it waits, and to others.

        A client calls itself otherwise after a restart; a reply is returned with its `call`.
        """
        try:
            if isinstance(request, m.Wait):
                return self._wait(client, call, request)
            reply = self._reply(request)
        except Refused as refused:
            return [(call, Failure(refused.kind, str(refused)))]
        except MemoryError as error:
            why = f"this server has not enough memory for a {type(request).__name__}: {error}"
            return [(call, Failure("full", why))]
        answers: Answers = [(call, reply)]
        if self._waits and isinstance(request, m.Transaction):
            answers += self._serve()
        return answers

    def left(self, client: str) -> Answers:
        """Count on a client no more, and return the replies to those who waited for it."""
        for place in [place for place in self._waits if place[2] == client]:
            del self._waits[place]
        for aggregate in self.aggregates.values():
            aggregate.leave(client)
        for group in self.clocks.values():
            group.leave(client)
        return self._serve()

    def _reply(self, request: m.Request) -> Reply:
        match request:
            case m.Transaction():
                return self._transact(request)
            case m.Read(items):
                found = [self.variables.read(item) for item in items]
                return m.Values(tuple(v for v, _ in found), tuple(array for _, array in found))
            case m.Create(wanted):
                made, reply = self.variables.plan(wanted)
                if made:
                    self.log(request)
                    self.variables.cells.update(made)
                return reply
            case m.Delete(names):
                if not self.variables.cells.keys().isdisjoint(names):
                    self.log(request)
                return Number(self.variables.delete(names))
            case m.Status("memory"):
                return self.totals
        raise Refused(
            "this server writes nothing to a disk: start it with a snapshot directory.", "unknown"
        )

    def _transact(self, request: m.Transaction) -> m.Changed:
        if request.low_water > request.sequence:
            raise Refused(
                f"transaction {request.sequence} of {request.client!r} is below its low water, "
                f"{request.low_water}."
            )
        applied = self.applied.get(request.client) or Applied()
        if request.sequence in applied:
            outcomes = tuple(map(self._outcome_now, request.changes))
            return m.Changed(outcomes, self.total, repeated=True)
        if len(applied.done) >= MAX_APPLIED:
            raise Refused(
                f"the server remembers {MAX_APPLIED} transactions of {request.client!r} above "
                f"{applied.low_water}, which never ended there.",
                "full",
            )
        fresh: dict[str, Aggregation] = {}
        aggregates = ChainMap(fresh, self.aggregates)
        planned = [self._plan(request.client, change, aggregates) for change in request.changes]
        self.log(request)
        # A warning that becomes an error would leave the rest unmade.
        with np.errstate(all="ignore"):
            outcomes = tuple(make() for make in planned)
        self.aggregates.update(fresh)
        self.total += 1
        applied.add(request.sequence, request.low_water)
        self.applied.pop(request.client, None)
        self.applied[request.client] = applied  # The last is the one that was here last.
        if len(self.applied) > MAX_CLIENTS:
            del self.applied[next(iter(self.applied))]
        return m.Changed(outcomes, self.total)

    def _plan(
        self, client: str, change: m.Change, aggregates: ChainMap[str, Aggregation]
    ) -> Planned:
        match change:
            case m.Update():
                return plan_update(self.variables, change)
            case m.Apply():
                return plan_apply(self.variables, change)
            case m.Aggregate():
                held = aggregates.setdefault(change.name, Aggregation())
                return plan_aggregate(self.variables, held, client, change)

    def _outcome_now(self, change: m.Change) -> m.Outcome:
        """Return the outcome of a change that was made before, as far as it can be known."""
        if isinstance(change, m.Aggregate):
            held = self.aggregates.get(change.name)
            return m.Accumulated(True, held.step if held is not None else 0)
        names = change.names if isinstance(change, m.Apply) else (change.name,)
        cells = map(self.variables.cells.get, names)
        return m.Done(tuple(cell.version if cell is not None else 0 for cell in cells))

    def _wait(self, client: str, call: Any, request: m.Wait) -> Answers:
        """Let a call wait in the place of an earlier one; return all replies that this gives."""
        name, place = request.name, (type(request), request.name, client)
        if isinstance(request, AwaitClock):
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
            answers.append((earlier[0], Failure("superseded", why)))
        return answers

    def _check_clock(self, client: str, request: AwaitClock) -> None:
        if request.clock < 0 or request.slack < 0 or request.count < 1:
            raise Refused(f"{request!r}: steps and slack are from 0, the count is from 1.")
        for (kind, name, other), (_, waits) in self._waits.items():
            same = kind is AwaitClock and name == request.name and other != client
            if same and waits.count != request.count:
                raise Refused(
                    f"{client!r} waits at {name!r} for {request.count}, {other!r} for "
                    f"{waits.count}; all must say the same."
                )

    def _serve(self) -> Answers:
        """Return replies to all calls that need not wait any longer."""
        answers: Answers = []
        for place, (call, request) in list(self._waits.items()):
            client = place[2]
            if isinstance(request, AwaitStep):
                held = self.aggregates.get(request.name) or Aggregation()
                reply: Reply | None = held.reply(client, request)
            else:
                reply = self.clocks[request.name].reply(client, request)
            if reply is not None:
                del self._waits[place]
                answers.append((call, reply))
        return answers


def _member(client: str) -> str:
    return client.partition("#")[0]
