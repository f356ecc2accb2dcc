"""`Store`: what a parameter server does with each request.

A machine without sockets, threads, clocks or chance: the same requests in the same order give the
same answers and the same state, so whatever a network does to them can be tried without one.
"""

from __future__ import annotations

from typing import Any

from ndistribute.cluster.protocol.replies import (
    Batched,
    Done,
    Plain,
    Reply,
    Step,
    Total,
)
from ndistribute.cluster.protocol.requests import (
    Accumulate,
    Acknowledge,
    Aggregate,
    Batch,
    Change,
    Create,
    Enqueue,
    Join,
    Leave,
    Locate,
    Read,
    ReadRows,
    ReadStep,
    ReadTotal,
    Request,
    SaveSnapshot,
    Single,
    Transaction,
    Waiting,
)
from ndistribute.cluster.shelf.shelf import Shelf
from ndistribute.cluster.store.answer import Answer
from ndistribute.cluster.store.clocks import Clocks
from ndistribute.cluster.store.groups import Groups
from ndistribute.cluster.store.limits import Limits
from ndistribute.cluster.store.once import Once
from ndistribute.cluster.store.origins import Windows
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.store.snapshot import Parts, restored, taken
from ndistribute.cluster.store.state import State
from ndistribute.cluster.store.variables import create, locate, read, read_rows
from ndistribute.cluster.store.waiting import Wait, WaitingRoom
from ndistribute.cluster.wire.tensors import Array

__all__ = ["Store"]


class Store:
    """Hold variables and what else a server keeps; answer requests one after the other.

    Not safe for threads: a transport calls it under one lock, but may encode replies outside of
    it, since arrays in replies never change. Of a request it keeps no array beyond its answer.

    Args:
        limits: what clients can make it hold beside variables.
        shelf: where its variables lie, if other processes read them there.

    >>> import numpy as np
    >>> store = Store()
    >>> answers = store.handle("worker", 1, Create("weights", np.zeros(2)))
    >>> answers += store.handle("worker", 2, Read("weights"))
    >>> answers[0].reply, answers[1].reply.array
    (Created(new=True, version=1, shape=(2,), dtype='float64'), array([0., 0.]))
    """

    def __init__(self, limits: Limits | None = None, shelf: Shelf | None = None) -> None:
        self._limits = limits or Limits()
        self._state = State(shelf)
        self._groups = Groups()
        self._clocks = Clocks()
        self._windows = Windows(self._limits)
        self._gone: dict[str, None] = {}
        self._room = WaitingRoom(self._state, self._groups, self._clocks)
        self._once = Once(self._state, self._windows, self._limits)
        self._late: list[Answer] = []

    @property
    def shelf(self) -> Shelf | None:
        """Return where variables lie that other processes may read."""
        return self._state.shelf

    @property
    def total(self) -> int:
        """Return how many transactions were made, in earlier lives as well."""
        return self._state.total

    @property
    def clients(self) -> frozenset[str]:
        """Return the clients that others may wait for: who does not come back must leave."""
        members = {client for group in self._groups.by_name.values() for client in group.members}
        for group in self._clocks.by_name.values():
            members.update(clock.client for clock in group.present.values())
        return frozenset(members)

    def handle(self, client: str, ticket: int, request: Request) -> list[Answer]:
        """Do what a request asks.

        Args:
            client: who calls; after a restart it calls itself otherwise.
            ticket: the transport's number of the call, each used once for a client.
            request: what is asked.

        Returns:
            The answers that are known now: to this call, unless it waits, and to calls that waited.
        """
        try:
            self._check_known(client, request)
            reply = self._reply(client, ticket, request)
        except Refused as refused:
            reply = refused.failure
        late, self._late = self._late, []
        return late if reply is None else [Answer(client, ticket, reply), *late]

    def snapshot(self) -> tuple[Any, list[Array]]:
        """Return the state as what JSON can hold and arrays that never change.

        Everything is in it but calls that wait: who made them asks again.
        """
        return taken(self._parts())

    @classmethod
    def restore(
        cls,
        head: Any,
        tensors: list[Array],
        limits: Limits | None = None,
        epoch: int = 0,
        shelf: Shelf | None = None,
    ) -> Store:
        """Return a store in the state of a snapshot.

        Args:
            head: from `snapshot`.
            tensors: from `snapshot`, copied.
            limits: as of a new store.
            epoch: a number that rises with every start of a server, for example the seconds since
                1970. Versions go on far above those of earlier starts, so clients that read what
                the snapshot does not have read again.
            shelf: as of a new store.

        Raises:
            MalformedError: it is no snapshot.
        """
        store = cls(limits, shelf)
        restored(store._parts(), head, tensors, epoch)
        return store

    def _parts(self) -> Parts:
        return Parts(self._state, self._windows, self._groups, self._clocks, self._gone)

    def _check_known(self, client: str, request: Request) -> None:
        """Check that who asks did not leave, if others count on that.

        A client that was only silent for long may still read, and make the changes of other series:
        what it did in its own was forgotten.
        """
        origin = getattr(request, "origin", None)
        series = origin.series if origin is not None else getattr(request, "series", None)
        who = client if isinstance(request, Join) else series
        if who in self._gone:
            raise Refused(
                "left",
                f"{who!r} left, or was silent for so long that the others went on without it: "
                "start it again.",
            )

    def _reply(self, client: str, ticket: int, request: Request) -> Reply | None:
        if isinstance(request, Waiting):
            return self._wait(client, ticket, request)
        if isinstance(request, SaveSnapshot):
            raise Refused(
                "unknown", "this server writes no snapshots: start it with a directory for them."
            )
        if isinstance(request, Batch):
            return Batched(tuple(self._in_batch(client, single) for single in request.requests))
        return self._single(client, request)

    def _in_batch(self, client: str, request: Single) -> Plain:
        try:
            if not isinstance(request, Single):
                raise Refused("mismatch", f"a {type(request).__name__} has no place in a batch.")
            self._check_known(client, request)
            reply = self._single(client, request)
            if not isinstance(reply, Plain):
                raise Refused("mismatch", "the number was used for something else.")
        except Refused as refused:
            return refused.failure
        return reply

    def _single(self, client: str, request: Single) -> Reply:
        match request:
            case Create():
                return create(self._state, request)
            case Read():
                return read(self._state, request)
            case ReadRows():
                return read_rows(self._state, request)
            case ReadStep():
                return Step(self._state.step)
            case ReadTotal():
                return Total(self._state.total, self._state.began)
            case Locate(names):
                return locate(self._state, names)
            case Transaction():
                return self._transaction(request)
            case Acknowledge(series, number, beyond):
                self._windows.acknowledge(series, number, beyond)
                self._answer(self._room.dismiss_up_to(series, number))
            case Join(group):
                self._groups.join(group, client)
            case Leave(who):
                self._leave(who)
        return Done()

    def _transaction(self, request: Transaction) -> Reply:
        reply, new = self._once.make(request, self._room.count(request.origin.series))
        if new:
            self._serve(request.changes)
        return reply

    def _leave(self, who: str) -> None:
        self._gone[who] = None
        if len(self._gone) > self._limits.series:  # Nothing of the first is under way any more.
            del self._gone[next(iter(self._gone))]
        self._windows.close(who)
        self._groups.leave(who)
        self._clocks.leave(who)
        self._answer(self._room.dismiss(who))
        self._answer(self._room.serve_all(), final=True)

    def _wait(self, client: str, ticket: int, request: Waiting) -> Reply | None:
        origin = request.origin
        answered = self._windows.answer_to(origin)
        if answered is not None:
            return answered
        again = self._room.ask_again(client, ticket, request)
        if again is not None:
            self._answer(again)
            return None
        self._windows.check_room(origin, self._room.count(origin.series))
        try:
            served = self._room.arrive(client, ticket, request)
        except Refused as refused:
            self._windows.remember(origin, refused.failure)
            raise
        self._answer(served, final=True)
        return None

    def _serve(self, changes: tuple[Change, ...]) -> None:
        """Answer those who waited for what was changed."""
        for change in changes:
            if isinstance(change, Accumulate):
                self._answer(self._room.serve(("accumulator", change.name)), final=True)
            elif isinstance(change, Aggregate):
                self._answer(self._room.serve(("step", change.name)), final=True)
            elif isinstance(change, Enqueue):
                self._answer(self._room.serve(("queue", change.name)), final=True)

    def _answer(self, served: list[tuple[Wait, Reply]], final: bool = False) -> None:
        """Answer calls that waited; what is not final may be asked for again."""
        for wait, reply in served:
            if final:
                self._windows.remember(wait.request.origin, reply)
            self._late.append(Answer(wait.client, wait.ticket, reply))
