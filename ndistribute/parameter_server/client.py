"""Parameter servers as a process that uses them sees them.

Several servers are asked at once: all requests go out before the first reply is waited for. Changes
are numbered, so that each is made once however often it is sent.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from ndistribute.errors import DistributeError, WorkerLostError
from ndistribute.parameter_server.closure import (
    Changes,
    Closure,
    Outcomes,
    Then,
    WriteBuffer,
    current_closure,
)
from ndistribute.parameter_server.messages import (
    AwaitClock,
    AwaitStep,
    Change,
    Changed,
    Create,
    Created,
    Delete,
    Deleted,
    Failure,
    KeepLog,
    NewVariable,
    Outcome,
    Read,
    ReadRows,
    Released,
    Report,
    RowsOf,
    Saved,
    SaveSnapshot,
    Status,
    Step,
    Totals,
    Transaction,
    Values,
)
from ndistribute.transport.codec import Array, Record

__all__ = ["Caller", "Copy", "Pending", "ServerClient", "Servers"]

R = TypeVar("R")
T = TypeVar("T")

_SMALL_BYTES = (
    1 << 14
)  # An initial value of so few bytes is sent without asking whether it is wanted.
_log = logging.getLogger("ndistribute")


class Copy(Protocol):
    """What a process holds of a variable that lies on a server."""

    server_name: str
    """The variable's name there."""
    version: int
    """Which version is held, 0 for none; later ones are higher, also after a restart."""

    def receive(self, array: Array, version: int) -> None:
        """Hold an array, which nobody changes any more."""

    def saw(self, version: int) -> None:
        """Know that rows of a version were read, which are not held here."""


class Pending(Protocol):
    """A call that is under way."""

    def result(self) -> Any:
        """Wait for the reply, and return what was taken from it."""

    def cancel(self) -> None:
        """Wait no more."""


class Caller(Protocol):
    """What carries requests to one server: `rpc.Client`, or a server of this process."""

    name: str
    instance: str

    def start(self, request: Record, timeout: float | None, take: Callable[[Any], Any]) -> Pending:
        """Send a request; `take` is called with the reply while its arrays are valid."""

    def close(self) -> None:
        """Say good-bye to the server."""


class ServerClient:
    """Ask one server, from any number of threads at once, and notice when it was started again.

    Args:
        caller: carries requests; closed with this.
        title: the server, as messages name it.
        timeout: seconds that a request may take; the server may be started again meanwhile.
    """

    def __init__(self, caller: Caller, title: str, timeout: float) -> None:
        self.title = title
        self._caller = caller
        self._timeout = timeout
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()
        self._life = ""
        self._lives: dict[str, Report] = {}

    @property
    def lost_updates(self) -> int:
        """Return how many updates are known to be lost with the server's earlier lives.

        A server counts what it changes, and its snapshots hold the count: a life that began with
        less than is known of the one before has lost the difference. There may be more.
        """
        with self._lock:
            # By age: what another process knows of an earlier life may be heard of late.
            lives = [life for _, life in sorted(self._lives.items()) if life.began >= 0]
        pairs = itertools.pairwise(lives)
        return sum(max(0, before.total - after.began) for before, after in pairs)

    def request(self, request: Record, kind: type[R]) -> R:
        """Return the reply to a request, whose arrays are not looked at.

        Raises:
            ValueError: what was asked for does not fit what the server holds.
            WorkerLostError: the server was not reached in time, or one that was waited for left.
            CollectiveTimeoutError: the answer did not come in time.
            DistributeError: the server refused.
        """
        found: R = self.start(request, lambda reply: self.expected(kind, reply)).result()
        return found

    def start(self, request: Record, take: Callable[[Any], Any]) -> Pending:
        """Send a request; `take` is called with the reply, which may be a `Failure`."""
        return self._caller.start(request, self._timeout, take)

    def expected(self, kind: type[R], reply: Any) -> R:
        """Return a reply of the kind that is expected, or raise what it means instead."""
        if isinstance(reply, kind):
            return reply
        if not isinstance(reply, Failure):
            raise DistributeError(f"{self.title} answered {reply!r}, not a {kind.__name__}.")
        errors: dict[str, type[Exception]] = {"mismatch": ValueError, "left": WorkerLostError}
        hint = ""
        if reply.kind == "unknown":
            hint = (
                " If the server was started again, what it held is lost: give servers a directory "
                "for snapshots."
            )
        raise errors.get(reply.kind, DistributeError)(f"{self.title}: {reply.message}{hint}")

    def transact(self, changes: Sequence[Change], running: Closure | None) -> Pending:
        """Begin to make changes, all or none: of a closure, or under this process's next number."""
        if running is not None:
            sequence = running.sequence(self.title)
            order = Transaction(running.series, sequence, running.low_water, tuple(changes))
            return self.start(order, lambda reply: self._made(reply, running))
        with self._lock:
            self._last += 1
            sequence = self._last
            self._open.add(sequence)
            low_water = min(self._open)
        order = Transaction(self._caller.name, sequence, low_water, tuple(changes))
        try:
            pending = self.start(order, lambda reply: self._made(reply, None))
        except BaseException:
            self._open.discard(sequence)
            raise
        return _Numbered(pending, lambda: self._open.discard(sequence))

    def meet(self) -> None:
        """Learn that the server is another life than before, and what that began with."""
        life = self._caller.instance
        if life in (self._life, ""):
            return
        began = self.request(Status(), Totals)
        with self._lock:
            before, self._life = self._life, life
        self.learn(Report(self.title, life, began.began, began.total), quiet=not before)

    def learn(self, report: Report, *, quiet: bool = False) -> None:
        """Take what this process, or another one, knows of a life of the server."""
        before = self.lost_updates
        with self._lock:
            known = self._lives.get(report.life, report)
            news = (known is report or known.began < 0 <= report.began) and bool(self._lives)
            began = max(known.began, report.began)
            total = max(known.total, report.total)
            self._lives[report.life] = Report(self.title, report.life, began, total)
        if not news or quiet:
            return
        lost = self.lost_updates - before
        what = (
            f"with what its first {began} updates made: at least {lost} are lost"
            if lost
            else "of no update is known that it is lost"
        )
        _log.warning("%s was started again, %s.", self.title, what)

    def close(self) -> None:
        """Say good-bye to the server."""
        self._caller.close()

    def _made(self, reply: Any, running: Closure | None) -> tuple[Outcome, ...]:
        changed = self.expected(Changed, reply)
        life = self._caller.instance
        with self._lock:
            known = self._lives.get(life)
            if known is None:
                known = Report(self.title, life, -1, 0)  # What it began with, `meet` asks.
            if changed.total > known.total:
                known = msgspec.structs.replace(known, total=changed.total)
            self._lives[life] = known
        if running is not None and known.began >= 0:
            running.reports[self.title] = known
        return changed.outcomes


class _Numbered:
    """A transaction under way, whose number is open until its end is known."""

    def __init__(self, pending: Pending, over: Callable[[], None]) -> None:
        self._pending, self._over = pending, over

    def result(self) -> Any:
        try:
            return self._pending.result()
        finally:
            self._over()

    def cancel(self) -> None:
        self._pending.cancel()
        self._over()


class Servers:
    """Use all parameter servers of a job, from any number of threads at once.

    Args:
        clients: one of each server, in the order in which variables are placed on them; closed with
            this object.
    """

    def __init__(self, clients: Sequence[ServerClient]) -> None:
        self._clients = tuple(clients)
        self._buffer = WriteBuffer(self._change)

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def lost_updates(self) -> int:
        """Return how many updates are known to be lost with servers that were killed."""
        return sum(client.lost_updates for client in self._clients)

    def create(self, initial: Mapping[int, Sequence[tuple[str, Array]]]) -> None:
        """Make variables, but for those that there are; each keeps its first value.

        A value is sent only where it is wanted. One that is the same everywhere, as made by
        `numpy.broadcast_to`, is not sent at all.

        Args:
            initial: on which server, which names and values.

        Raises:
            ValueError: there is one of another shape or dtype.
        """
        asked = {server: [_described(*item) for item in some] for server, some in initial.items()}
        made = self._ask({s: (Create(tuple(some)), Created) for s, some in asked.items()})
        wanted = {}
        for server, some in initial.items():
            states = [variable.state for variable in made[server].variables]
            sent = [
                msgspec.structs.replace(new, initial=array)
                for new, (_, array), state in zip(asked[server], some, states, strict=True)
                if state == "wanted"
            ]
            if sent:
                wanted[server] = (Create(tuple(sent)), Created)
        self._ask(wanted)

    def delete(self, names: Mapping[int, Sequence[str]]) -> None:
        """Delete variables, as far as they exist."""
        self._ask({i: (Delete(tuple(some)), Deleted) for i, some in names.items()})

    def pull(self, copies: Mapping[int, Sequence[Copy]]) -> None:
        """Bring copies up to date.

        Args:
            copies: of which server, which.
        """
        self._buffer.flush_before(copy.server_name for some in copies.values() for copy in some)

        def begin(server: int, client: ServerClient) -> Pending:
            some = copies[server]
            request = Read(
                tuple(copy.server_name for copy in some), tuple(copy.version for copy in some)
            )

            def take(reply: Any) -> None:
                values = client.expected(Values, reply).values
                for copy, value in zip(some, values, strict=True):
                    if value.array is not None:
                        copy.receive(value.array, value.version)

            return client.start(request, take)

        self._each(copies, begin)

    def read_rows(
        self, asked: Mapping[int, Sequence[tuple[Copy, Array]]]
    ) -> dict[int, list[Array]]:
        """Return rows of variables, in the order asked; the copies only learn the versions.

        Args:
            asked: of which server, of which variables which rows: indices of one axis, from 0, that
                may repeat.
        """
        self._buffer.flush_before(copy.server_name for some in asked.values() for copy, _ in some)

        def begin(server: int, client: ServerClient) -> Pending:
            some = asked[server]
            items = tuple(RowsOf(copy.server_name, rows) for copy, rows in some)

            def take(reply: Any) -> list[Array]:
                found = []
                for (copy, _), value in zip(
                    some, client.expected(Values, reply).values, strict=True
                ):
                    if value.array is None:
                        raise DistributeError(f"{client.title} answered a read without rows.")
                    copy.saw(value.version)
                    found.append(value.array)
                return found

            return client.start(ReadRows(items), take)

        return self._each(asked, begin)

    def change(self, changes: Changes, then: Then | None = None) -> None:
        """Make changes: on each server all or none, in a closure at its end.

        Args:
            changes: on which server, which. Their arrays are not changed, and in a closure copied.
            then: called with what became of them, once that is known.
        """
        running = current_closure()
        if running is not None:
            self._buffer.add(running, changes, then)
            return
        outcomes = self._change(changes, None)
        if then is not None:
            then(outcomes)

    def greet(self, durability: Literal["snapshot", "log"] = "snapshot") -> None:
        """Wait until all servers are up; from now on they know whether this process lives.

        Args:
            durability: ``"log"``: updates are acknowledged once they are in a log on the disk.

        Raises:
            DistributeError: a server has no directory for a log.
        """
        logged = durability == "log"
        asked: tuple[Record, type[Any]] = (KeepLog(), Saved) if logged else (Status(), Totals)
        self._ask(dict.fromkeys(range(len(self)), asked))

    def await_step(self, steps: Mapping[int, tuple[str, int]], count: int) -> dict[int, int]:
        """Wait until aggregates have come to a step, and return at which each is.

        Args:
            steps: on which server, the name of which aggregate, and the step.
            count: how many sets of gradients make a step.
        """
        asked = {i: (AwaitStep(name, step, count), Step) for i, (name, step) in steps.items()}
        return {i: reply.value for i, reply in self._ask(asked).items()}

    def await_clock(self, group: str, clock: int, slack: int, count: int) -> None:
        """Wait until nobody of a group is too far behind.

        Args:
            group: its name.
            clock: this process's step, from 0.
            slack: how many steps others may be behind.
            count: how many members the group has.
        """
        self._ask({0: (AwaitClock(group, clock, slack, count), Released)})

    def learn(self, reports: Iterable[Report]) -> None:
        """Take what another process knows of the servers."""
        clients = {client.title: client for client in self._clients}
        for report in reports:
            if report.server in clients:
                clients[report.server].learn(report)

    def save_snapshots(self) -> None:
        """Let every server write what it holds to its disk, and wait until it did.

        Raises:
            DistributeError: a server was given no directory for it.
        """
        self._ask({i: (SaveSnapshot(), Saved) for i in range(len(self))})

    def close(self) -> None:
        """Say good-bye to the servers; a second call does nothing."""
        for client in self._clients:
            client.close()

    def _change(self, changes: Changes, running: Closure | None) -> Outcomes:
        return self._each(changes, lambda i, client: client.transact(changes[i], running))

    def _ask(self, asked: Mapping[int, tuple[Record, type[Any]]]) -> dict[int, Any]:
        def begin(server: int, client: ServerClient) -> Pending:
            request, kind = asked[server]
            return client.start(request, lambda reply: client.expected(kind, reply))

        return self._each(asked, begin)

    def _each(
        self, servers: Iterable[int], begin: Callable[[int, ServerClient], Pending]
    ) -> dict[int, Any]:
        """Make a call to each of several servers, all at once; raise an error after all ended."""
        pending: dict[int, Pending] = {}
        results, errors = {}, []
        try:
            for server in servers:
                pending[server] = begin(server, self._clients[server])
            for server, call in list(pending.items()):
                try:
                    results[server] = call.result()
                except Exception as error:
                    errors.append(error)
                del pending[server]
        finally:
            for call in pending.values():
                call.cancel()
        for server in results:
            self._clients[server].meet()
        if errors:
            raise errors[0]
        return results


def _described(name: str, array: Array) -> NewVariable:
    dtype = array.dtype.newbyteorder("=").name
    fill = initial = None
    if array.size > 1 and not any(array.strides) and array.dtype.kind in "fiub":
        fill = float(array.flat[0])
    elif array.nbytes <= _SMALL_BYTES:
        initial = array
    return NewVariable(name, tuple(array.shape), dtype, fill, initial)
