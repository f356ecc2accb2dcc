"""A client's side of the protocol: messages to a server, and those that go in parts.

Here a message is sent once, and what goes wrong is raised; ``client.py`` asks again. What is sealed
of a message rides in the call itself, and what is longer than a part goes before it in parts, of
which a few are on their way at any time; so it is with answers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from ndistribute.cluster.wire.connection import Connection
from ndistribute.cluster.wire.opened import Opened, Sent
from ndistribute.cluster.wire.pieces import Pieces
from ndistribute.cluster.wire.tensors import MalformedError, parts
from ndistribute.cluster.wire.transport import Envelope, Transport

__all__ = ["Conversation"]

PARTS_IN_FLIGHT = 4


class Conversation:
    """Ask one server, from any number of threads at once.

    Args:
        connection: what calls it.
        limit_bytes: the longest answer.
    """

    def __init__(self, connection: Connection, limit_bytes: int) -> None:
        self._connection = connection
        self._limit = limit_bytes
        self._transfers = itertools.count(1)

    def ask(self, pieces: Pieces, covered: int, deadline: float) -> memoryview | None:
        """Ask once; return None where the answer is not known yet.

        Args:
            pieces: the message.
            covered: how much of it is sealed.
            deadline: when to give up, on the clock of ``time.monotonic``.

        Raises:
            Exception: those of a ``Transport``.
            ValueError: the answer is too long.
        """
        opened = self._connection.opened(deadline)
        road = opened.road
        total, transfer, stop = len(pieces), 0, len(pieces)
        if total > road.part_bytes:
            transfer, stop = next(self._transfers), covered
            self._upload(opened, road, pieces, transfer, deadline)
        envelope = Envelope(total, covered, transfer, 0)
        body, others = b"".join(pieces.cut(0, covered)), pieces.cut(covered, stop)
        answer, rest = self._connection.exchange(
            opened, road, "Call", envelope, deadline, body, others
        )
        if answer.total == 0:
            return None
        if answer.total > self._limit:
            raise ValueError(f"The answer has {answer.total} bytes: the limit is {self._limit}.")
        if not answer.transfer:
            return rest.toreadonly()
        data = np.empty(answer.total, np.uint8)
        self._download(opened, road, data.data, answer.transfer, deadline)
        data[: answer.covered] = np.frombuffer(rest, np.uint8)[: answer.covered]
        return data.data.toreadonly()

    def _upload(
        self, opened: Opened, road: Transport, pieces: Pieces, transfer: int, deadline: float
    ) -> None:
        total = len(pieces)
        calls = (
            self._connection.begin(
                opened,
                road,
                "Part",
                Envelope(total, 0, transfer, part.start),
                deadline,
                pieces.cut(part.start, part.stop),
            )
            for part in parts(total, road.part_bytes)
        )
        for _ in self._several(calls):
            pass

    def _download(
        self, opened: Opened, road: Transport, data: memoryview, number: int, deadline: float
    ) -> None:
        plan = parts(len(data), road.part_bytes)
        calls = (
            self._connection.begin(
                opened, road, "Fetch", Envelope(len(data), 0, number, part.start), deadline
            )
            for part in plan
        )
        for part, (_, rest) in zip(plan, self._several(calls), strict=True):
            if len(rest) != part.stop - part.start:
                raise MalformedError(f"{len(rest)} bytes came as the part {part} of an answer.")
            data[part] = rest

    def _several(self, calls: Iterable[Sent]) -> Iterator[tuple[Envelope, memoryview]]:
        """Yield the answers to calls, of which a few are on their way at any time."""
        flying: deque[Sent] = deque()
        try:
            for sent in calls:
                flying.append(sent)
                if len(flying) == PARTS_IN_FLIGHT:
                    yield self._connection.end(flying.popleft())
            while flying:
                yield self._connection.end(flying.popleft())
        finally:
            for sent in flying:
                sent.pending.cancel()
