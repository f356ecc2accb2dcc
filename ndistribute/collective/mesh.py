"""The connections among all processes of a group: one a pair for control, one a pair for data.

The higher rank of a pair connects, the lower one accepts; who speaks is known before a byte of his
is believed. What flows over the connections is not this file's concern.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ndistribute.collective.membership import Membership
from ndistribute.errors import AuthenticationError, CollectiveTimeoutError, DistributeError
from ndistribute.transport.address import split_address
from ndistribute.transport.handshake import Accepted, Hello, authenticate
from ndistribute.transport.listener import Listener

__all__ = ["Mesh"]

_log = logging.getLogger("ndistribute")

_RETRY_SECONDS = 0.05
_ATTEMPT_SECONDS = 10.0
_CHECK_SECONDS = 0.1
_WELCOME = b"+"

# Counts the groups of this process: a process that is ahead of another, in the next group already,
# must not be taken for a member of the last.
_groups = itertools.count()


class Mesh:
    """Connect this process with every other of its group.

    Args:
        membership: who this process is, and where the others are.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._group = next(_groups)
        self.rank = membership.rank
        self.size = membership.size
        # Rank 0 names this start of the job, and the others learn it there before they meet.
        self._started = secrets.token_hex(8) if membership.rank == 0 else ""
        self.hellos: dict[int, dict[str, Any]] = {self.rank: self._details("self", 0)}
        self._arrived: dict[tuple[str, int, int], socket.socket] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._refusal = ""
        self._latest: dict[int, socket.socket] = {}
        self._listener = Listener(
            [membership.listener],
            membership.credentials,
            self._hello("answer", 0),
            self._admit,
            check=self._refusal_of,
        )

    def connect(
        self,
        purpose: str,
        generation: int,
        timeout: float,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, socket.socket]:
        """Return a connection to each other process.

        Args:
            purpose: ``"control"`` or ``"data"``; the processes must ask for the same in turn.
            generation: which of several sets of connections for this purpose.
            timeout: seconds to wait for all processes together.
            check: called now and then; raises where waiting has become vain.

        Raises:
            DistributeError: another process was started for another cluster, or as this one.
            CollectiveTimeoutError: some did not come; it names them.
            AuthenticationError: a process does not know the job's secret.
        """
        deadline = time.monotonic() + timeout
        made: dict[int, socket.socket] = {}
        try:
            for rank in range(self.rank):
                made[rank] = self._call(rank, purpose, generation, deadline, timeout, check)
            for rank in range(self.rank + 1, self.size):
                made[rank] = self._await(rank, purpose, generation, deadline, timeout, check)
        except BaseException:
            for sock in made.values():
                sock.close()
            raise
        for sock in made.values():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
        return made

    def close(self) -> None:
        """Stop listening, and close what nobody fetched."""
        self._listener.close()
        with self._changed:
            self._closed = True
            for sock in self._arrived.values():
                sock.close()
            self._arrived.clear()

    def _hello(self, purpose: str, generation: int) -> Hello:
        name = f"worker {self._membership.rank}"
        return Hello(name=name, purpose="mesh", details=self._details(purpose, generation))

    def _details(self, purpose: str, generation: int) -> dict[str, str | int]:
        return {
            "rank": self._membership.rank,
            "size": self._membership.size,
            "host": self._membership.host,
            "name": socket.gethostname(),
            "pid": os.getpid(),
            "group": self._group,
            "purpose": purpose,
            "generation": generation,
            "started": self._started,
        }

    def _admit(self, sock: socket.socket, accepted: Accepted) -> None:
        """Keep a connection that a process of a higher rank made."""
        fields: dict[str, Any] = accepted.hello.details
        rank = fields["rank"]
        key = (fields["purpose"], fields["generation"], rank)
        with self._changed:
            stale = self._arrived.pop(key, None)
            if stale is not None:
                stale.close()
            if self._closed or fields["group"] != self._group or not self._started:
                sock.close()  # It tries again, and finds the group that it looks for.
                return
            sock.send(_WELCOME)
            self.hellos[rank] = fields
            self._arrived[key] = self._latest[rank] = sock
            self._changed.notify_all()

    def _refusal_of(self, hello: Hello) -> str:
        """Return what is wrong with a process that says which one it is, if anything is."""
        refusal = self._fault_of(hello.details)
        if refusal:
            self._refusal = f" It refused one: {refusal}."
            _log.warning("worker %d refused a worker: %s", self.rank, refusal)
        return refusal

    def _fault_of(self, fields: dict[str, Any]) -> str:
        try:
            rank, size, group = (int(fields[key]) for key in ("rank", "size", "group"))
            started = str(fields["started"])
            int(fields["generation"]), str(fields["purpose"])
        except (ValueError, KeyError, TypeError):
            return "it is no worker of a group"
        if size != self.size or not self.rank < rank < size:
            return (
                f"it is worker {rank} of {size}, here is worker {self.rank} of {self.size}; "
                "every process needs the same cluster, and an index of its own"
            )
        if group == self._group and self.rank and self._started and started != self._started:
            return (
                "it met another worker 0 than this process: two jobs use the same addresses; give "
                "each its own ports, and NDISTRIBUTE_JOB_ID where no launcher sets it"
            )
        known = self.hellos.get(rank)
        same = known is not None and all(known[key] == fields.get(key) for key in ("name", "pid"))
        if known is None or same or _has_ended(self._latest[rank]):
            return ""
        return (
            f"two processes are worker {rank}, pid {known['pid']} on {known['name']} and pid "
            f"{fields.get('pid')} on {fields.get('name')}; every process needs an index of its own"
        )

    def _await(
        self,
        rank: int,
        purpose: str,
        generation: int,
        deadline: float,
        timeout: float,
        check: Callable[[], None],
    ) -> socket.socket:
        key = (purpose, generation, rank)
        with self._changed:
            while key not in self._arrived:
                check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._absent(rank, timeout, "it did not connect")
                self._changed.wait(timeout=min(left, _CHECK_SECONDS))
            return self._arrived.pop(key)

    def _call(
        self,
        rank: int,
        purpose: str,
        generation: int,
        deadline: float,
        timeout: float,
        check: Callable[[], None],
    ) -> socket.socket:
        """Connect to a process of a lower rank, which may not have started yet."""
        reason: Exception = TimeoutError("there was no time to try")
        pause = threading.Event()
        while (left := deadline - time.monotonic()) > 0:
            check()
            try:
                until = time.monotonic() + min(left, _ATTEMPT_SECONDS)
                return self._attempt(rank, purpose, generation, until)
            except AuthenticationError:
                raise
            except OSError as error:
                reason = error
            pause.wait(timeout=_RETRY_SECONDS)
        raise self._absent(rank, timeout, f"{type(reason).__name__}: {reason}") from reason

    def _attempt(self, rank: int, purpose: str, generation: int, deadline: float) -> socket.socket:
        membership = self._membership
        sock = socket.create_connection(
            split_address(membership.addresses[rank]),
            timeout=max(0.001, deadline - time.monotonic()),
        )
        hello = self._hello(purpose, generation)
        sock, accepted = authenticate(sock, membership.credentials, hello, deadline=deadline)
        try:
            fields: dict[str, Any] = accepted.hello.details
            if (fields.get("rank"), fields.get("size")) != (rank, self.size):
                raise DistributeError(
                    f"{membership.addresses[rank]} answered as worker {fields.get('rank')} of "
                    f"{fields.get('size')}, expected worker {rank} of {self.size}. Every process "
                    "needs the same cluster, and an index of its own.",
                    rank=rank,
                )
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if sock.recv(1) != _WELCOME:
                raise ConnectionResetError("it is not ready for this group of processes")
        except BaseException:
            sock.close()
            raise
        if rank == 0:
            self._started = str(fields["started"])
        self.hellos[rank] = fields
        return sock

    def _absent(self, rank: int, timeout: float, why: str) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"worker {self.rank} waited {timeout:g} s for worker {rank} at "
            f"{self._membership.addresses[rank]} to start: {why}.{self._refusal} Were all "
            f"{self.size} processes started, with the same secret, and is that address reachable "
            "from here?",
            rank=rank,
            op="start",
        )


def _has_ended(sock: socket.socket) -> bool:
    """Say whether the other end of a connection has closed it, as when a process starts anew."""
    try:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        # Not by way of TLS, which has no such look.
        return bool(poll.poll(0)) and not socket.socket.recv(sock, 1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True  # It is closed on this side.
