"""`PairClient`: the client of a shard with two copies, which sends requests to the one that leads.

Every request may be repeated. If the connection of a call is lost, or its copy no longer leads, the
call asks both copies which of them leads, and sends its request there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ndistribute.cluster.spec import ClusterSpec
from ndistribute.errors import WorkerLostError
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.copies import COPIES, SILENCE_SECONDS, homes
from ndistribute.transport.codec import Record
from ndistribute.transport.connection import ConnectionLostError
from ndistribute.transport.rpc import Client, PendingCall, RepeatedCall

_CONNECT_SECONDS = 0.2
_LOOK_SECONDS = 0.7  # A copy that is undecided whether it will lead answers after 0.5 s.


class PairClient:
    """Sends requests to one shard from any thread; `copies` are the clients of both copies."""

    def __init__(self, copies: Sequence[Client], timeout: float) -> None:
        self.copies, self.leads, self._timeout = tuple(copies), 0, timeout
        self.name = copies[0].name
        self.waits = copies[0].waits  # As in `Client`; each call sets it.
        self.server = ""  # The instance of the leading server.
        self.instance = ""  # The instance of the state, which outlives a change of the leader.

    @classmethod
    def of(
        cls, cluster: ClusterSpec, shard: int, connect: Callable[..., Client], timeout: float
    ) -> PairClient:
        """Return the client of the shard of a server."""
        copies = [
            connect(
                cluster.task_address("ps", index),
                purpose=purpose,
                audience=f"ps:{index}",
                silence=SILENCE_SECONDS,
            )
            for purpose, index in zip(COPIES, homes(cluster, shard), strict=True)
        ]
        return cls(copies, timeout)

    def start(self, request: Record) -> PairCall:
        """Send a request, whose reply the caller will wait for."""
        return PairCall(self, request, time.monotonic() + self._timeout)

    def close(self) -> None:
        """Say good-bye to both servers."""
        for client in self.copies:
            client.close()

    def find(self) -> Client:
        """Return the client of the leading copy; ask first the copy that did not lead.

        Raises:
            ConnectionLostError: neither copy says that it leads.
            ValueError: a server has variables of strategies with `replicas=1`.
        """
        problems = []
        for index in (1 - self.leads, self.leads):
            client, until = self.copies[index], time.monotonic() + _LOOK_SECONDS
            try:
                call = PendingCall(client, m.Beat(), until)
                beat = call.result(until)
            except WorkerLostError as error:
                problems.append(str(error).rstrip("."))
                continue
            if beat is None:
                call.cancel()
                problems.append(f"{client.title} does not answer")
            elif isinstance(beat, m.Failure):
                raise ValueError(f"{client.title}: {beat.message}")
            elif beat.role == "leads":
                self.leads, self.instance = index, f"{beat.start}"
                self.server = call.connection.peer.instance
                return client
            else:
                problems.append(beat.why)
        raise ConnectionLostError("; ".join(problems))


class PairCall(RepeatedCall):
    """A request that is repeated until a deadline, to the copy that leads.

    A request for a snapshot or a log goes to both copies.
    """

    def __init__(self, pair: PairClient, request: Record, deadline: float) -> None:
        self._pair = pair
        for client in pair.copies:
            client.waits = pair.waits
        super().__init__(pair.copies[pair.leads], request, deadline)

    @property
    def instance(self) -> str:
        """Return which state of the shard got the request."""
        return self._pair.instance

    def _send_once(self) -> None:
        self.cancel()
        if self._problem is not None or not self._pair.instance:
            self._client = self._pair.find()
        self._connect_until = time.monotonic() + _CONNECT_SECONDS
        super()._send_once()
        if self.connection.peer.instance != self._pair.server:  # The server has restarted.
            self._pair.find()

    def _receive(self, deadline: float, until: float) -> None:
        super()._receive(deadline, until)
        if isinstance(self.reply, m.Failure) and self.reply.kind == "moved":
            why, self.reply, self._is_pending = self.reply.message, None, False
            raise ConnectionLostError(why)
