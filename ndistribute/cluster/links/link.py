"""One server as the process that uses it sees it.

A link numbers what the process changes there, so that each change is made once however often it is
sent, and notices when the server was started again: what it knew may be gone then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from ndistribute.cluster.links.copy import Copy, known_version
from ndistribute.cluster.links.expecting import array_of, error_of, expected
from ndistribute.cluster.links.origins import Numbers, current_closure
from ndistribute.cluster.links.totals import Report, Totals
from ndistribute.cluster.protocol.replies import (
    Batched,
    Changed,
    Created,
    Failure,
    Outcome,
    Total,
    Value,
)
from ndistribute.cluster.protocol.requests import (
    Acknowledge,
    Batch,
    Change,
    Create,
    Join,
    Origin,
    Read,
    ReadRows,
    ReadTotal,
    Request,
    SaveSnapshot,
    Transaction,
)
from ndistribute.cluster.protocol.spans import Span
from ndistribute.cluster.shelf.view import ShelfView
from ndistribute.cluster.wire.client import Client
from ndistribute.cluster.wire.tensors import Array

__all__ = ["Link"]

# A server remembers the answers that nobody has acknowledged: few enough to cost it nothing.
_ACKNOWLEDGE_EVERY = 64
_log = logging.getLogger("ndistribute")


class Link:
    """Speak with one server, from any number of threads at once.

    Args:
        client: of the server; the link closes it.
        title: the server, as messages name it.
        timeout: seconds that a request may take; the server may be started again meanwhile.
    """

    def __init__(self, client: Client, title: str, timeout: float) -> None:
        self.title = title
        self.restarts = 0
        self._client = client
        self._timeout = timeout
        self._numbers = Numbers()
        self._acknowledged = 0
        self._incarnation = b""
        self._totals = Totals()
        self._groups: list[str] = []
        self._lock = threading.Lock()
        self._shelf = ShelfView(client)

    @property
    def series(self) -> str:
        """Return the series of what this process changes."""
        return self._client.name

    @property
    def lost_updates(self) -> int:
        """Return how many updates are known to be lost with the server's earlier lives."""
        with self._lock:
            return self._totals.lost

    def create(self, initial: Sequence[tuple[str, Array]]) -> list[Created]:
        """Make variables, but for those that there are; each keeps its first value."""
        replies = self.batch([Create(name, array) for name, array in initial])
        return [expected(Created, reply) for reply in replies]

    def look(self, copies: Sequence[Copy]) -> bool:
        """Bring copies up to date in memory that the server shares; say whether that was done."""
        before, known = self.restarts, self._incarnation
        return bool(known) and self._client.server == known and self._shelf.pull(copies, before)

    def pull(self, copies: Sequence[Copy]) -> None:
        """Ask the server for what is newer than copies."""
        before = self.restarts
        values = self._read(copies, before)
        if self.restarts != before:  # A version of the server that was says nothing here.
            before = self.restarts
            values = self._read(copies, before)
        for copy, value in zip(copies, values, strict=True):
            if value.array is not None:
                copy.receive(value.array, (before, value.version))

    def read_rows(self, asked: Sequence[tuple[Copy, Array]]) -> list[Array]:
        """Return rows of variables, in the order asked; the copies only learn the versions."""
        replies = self.batch([ReadRows(copy.server_name, rows) for copy, rows in asked])
        values = [expected(Value, reply) for reply in replies]
        for (copy, _), value in zip(asked, values, strict=True):
            copy.saw((self.restarts, value.version))
        return [array_of(value) for value in values]

    def transact(
        self, changes: Sequence[Change], origin: Origin | None = None
    ) -> tuple[Outcome, ...]:
        """Make changes, all or none.

        Args:
            changes: what to change.
            origin: of a closure; None: this process's next.
        """
        if origin is not None:
            return self._transact(Transaction(origin, tuple(changes)))
        with self.numbered() as own:
            return self._transact(Transaction(own, tuple(changes)))

    @contextlib.contextmanager
    def numbered(self) -> Iterator[Origin]:
        """Give a request of this process its origin for a ``with`` block."""
        number = self._numbers.take()
        try:
            yield Origin(self.series, number)
        finally:
            self._numbers.give_back(number)
        settled = self._numbers.settled
        if settled >= self._acknowledged + _ACKNOWLEDGE_EVERY:
            self._acknowledged = settled
            self.request(Acknowledge(self.series, settled))

    def batch(self, requests: Sequence[Any]) -> list[Any]:
        """Ask for several things in one message; none of the replies is a failure."""
        if len(requests) == 1:
            return [self.request(requests[0])]
        replies = expected(Batched, self.request(Batch(tuple(requests)))).replies
        for reply in replies:
            if isinstance(reply, Failure):
                raise error_of(reply, self.title)
        return list(replies)

    def request(self, request: Request) -> Any:
        """Return the server's reply.

        Raises:
            ValueError: what was asked for does not fit what the server holds.
            WorkerLostError: the server was not reached in time, or one that was waited for left.
            CollectiveTimeoutError: the answer did not come in time.
            DistributeError: the server refused.
        """
        reply = self._client.request(request, self._timeout)
        life = self._client.server
        if life not in (self._incarnation, b""):
            self._meet(life)
        if isinstance(reply, Failure):
            raise error_of(reply, self.title)
        return reply

    def greet(self) -> None:
        """Wait until the server is up; from now on it knows whether this process lives."""
        self.request(ReadTotal())

    def join_group(self, group: str) -> None:
        """Become a member of a group that others may wait for."""
        self._groups.append(group)
        self.request(Join(group))

    def learn(self, report: Report) -> None:
        """Take what another process knows of the server."""
        with self._lock:
            self._totals.saw(report.life, report.total)
        self._began(report.life, report.began)

    def save_snapshot(self) -> None:
        """Let the server write what it holds to its disk."""
        self.request(SaveSnapshot())

    def acknowledge(self, series: str, numbers: Sequence[Span]) -> None:
        """Promise not to repeat what a series did under some numbers."""
        self.request(Acknowledge(series, 0, tuple(numbers)))

    def close(self) -> None:
        """Say good-bye to the server."""
        self._shelf.close()
        self._client.close()

    def _transact(self, transaction: Transaction) -> tuple[Outcome, ...]:
        before = self._client.server
        changed = expected(Changed, self.request(transaction))
        self._saw(before, changed.total)
        return changed.outcomes

    def _saw(self, before: bytes, total: int) -> None:
        """Note how many updates the server has made, which was asked when it was this one."""
        after = self._client.server
        life = (before or after).hex()
        if after not in (before, b"") and before:
            return  # Either of the two may have answered.
        with self._lock:
            self._totals.saw(life, total)
            report = self._totals.report(self.title, life)
        running = current_closure()
        if running is not None and report is not None:
            running.reports[self.title] = report

    def _read(self, copies: Sequence[Copy], restarts: int) -> list[Value]:
        reads = [Read(copy.server_name, known_version(copy, restarts)) for copy in copies]
        return [expected(Value, reply) for reply in self.batch(reads)]

    def _meet(self, life: bytes) -> None:
        """Learn that the server is another incarnation, and what the one before took with it."""
        # First of all: what is read from the old shelf must not pass for the new server's.
        self._shelf.forget()
        with self._lock:
            before, self._incarnation = self._incarnation, life
            if before == life:
                return
            self.restarts += bool(before)
        if before:
            for group in self._groups:
                self._client.request(Join(group), self._timeout)
        total = expected(Total, self._client.request(ReadTotal(), self._timeout))
        if self._client.server == life:  # Else it was started again meanwhile.
            self._began(life.hex(), total.began)

    def _began(self, life: str, total: int) -> None:
        """Note with how many updates a life of the server began."""
        with self._lock:
            before = self._totals.lost
            news = self._totals.began(life, total)
            lost = self._totals.lost - before
        if news and lost > 0:
            _log.warning(
                "%s was started again with what its first %d updates made: at least %d are lost.",
                self.title,
                total,
                lost,
            )
        elif news:
            _log.warning("%s was started again; of no update is known that it is lost.", self.title)
