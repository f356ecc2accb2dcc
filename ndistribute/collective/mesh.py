"""The connections among all processes of a group: one a pair for control, one a pair for data.

The higher rank of a pair connects, the lower one accepts; who speaks is known before a byte of his
is believed. What flows over the connections is not this file's concern.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from typing import Any

from ndistribute.collective.address import split_address
from ndistribute.collective.gate import Gate
from ndistribute.collective.handshake import authenticate
from ndistribute.collective.membership import Membership
from ndistribute.errors import AuthenticationError, CollectiveTimeoutError, DistributeError

__all__ = ["Mesh"]

_log = logging.getLogger("ndistribute")

_RETRY_SECONDS = 0.05
_ATTEMPT_SECONDS = 10.0
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
        self.hellos: dict[int, dict[str, Any]] = {self.rank: self._hello("self", 0)}
        self._arrived: dict[tuple[str, int, int], socket.socket] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._gate = Gate(
            membership.listener,
            membership.secret,
            self._admit,
            hello=json.dumps(self._hello("answer", 0)).encode(),
            tls=membership.tls,
        )

    def connect(self, purpose: str, generation: int, timeout: float) -> dict[int, socket.socket]:
        """Return a connection to each other process.

        Args:
            purpose: ``"control"`` or ``"data"``; the processes must ask for the same in turn.
            generation: which of several sets of connections for this purpose.
            timeout: seconds to wait for all processes together.

        Raises:
            CollectiveTimeoutError: some did not come; it names them.
            AuthenticationError: a process does not know the job's secret.
        """
        deadline = time.monotonic() + timeout
        made: dict[int, socket.socket] = {}
        try:
            for rank in range(self.rank):
                made[rank] = self._call(rank, purpose, generation, deadline, timeout)
            for rank in range(self.rank + 1, self.size):
                made[rank] = self._await(rank, purpose, generation, deadline, timeout)
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
        self._gate.close(timeout=5.0)
        with self._changed:
            self._closed = True
            for sock in self._arrived.values():
                sock.close()
            self._arrived.clear()

    def _hello(self, purpose: str, generation: int) -> dict[str, Any]:
        return {
            "rank": self._membership.rank,
            "size": self._membership.size,
            "host": self._membership.host,
            "name": socket.gethostname(),
            "pid": os.getpid(),
            "group": self._group,
            "purpose": purpose,
            "generation": generation,
        }

    def _admit(self, sock: socket.socket, hello: bytes) -> None:
        """Keep a connection that a process of a higher rank made."""
        try:
            fields = json.loads(hello)
            rank, size = int(fields["rank"]), int(fields["size"])
            key = (str(fields["purpose"]), int(fields["generation"]), rank)
            group = int(fields["group"])
        except (ValueError, KeyError, TypeError):
            sock.close()
            return
        if size != self.size or not self.rank < rank < size:
            _log.warning(
                "worker %d of %d was refused: this is worker %d of %d. Every process needs the "
                "same cluster, and an index of its own.",
                rank,
                size,
                self.rank,
                self.size,
            )
            sock.close()
            return
        with self._changed:
            stale = self._arrived.pop(key, None)
            if stale is not None:
                stale.close()
            if self._closed or group != self._group:
                sock.close()  # It tries again, and finds the group that it looks for.
                return
            sock.settimeout(_ATTEMPT_SECONDS)
            sock.sendall(_WELCOME)
            self.hellos[rank] = fields
            self._arrived[key] = sock
            self._changed.notify_all()

    def _await(
        self, rank: int, purpose: str, generation: int, deadline: float, timeout: float
    ) -> socket.socket:
        key = (purpose, generation, rank)
        with self._changed:
            while key not in self._arrived:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._absent(rank, timeout, "it did not connect")
                self._changed.wait(timeout=min(left, 1.0))
            return self._arrived.pop(key)

    def _call(
        self, rank: int, purpose: str, generation: int, deadline: float, timeout: float
    ) -> socket.socket:
        """Connect to a process of a lower rank, which may not have started yet."""
        hello = json.dumps(self._hello(purpose, generation)).encode()
        reason: Exception = TimeoutError("there was no time to try")
        pause = threading.Event()
        while (left := deadline - time.monotonic()) > 0:
            try:
                return self._attempt(rank, hello, time.monotonic() + min(left, _ATTEMPT_SECONDS))
            except AuthenticationError:
                raise
            except OSError as error:
                reason = error
            pause.wait(timeout=_RETRY_SECONDS)
        raise self._absent(rank, timeout, f"{type(reason).__name__}: {reason}") from reason

    def _attempt(self, rank: int, hello: bytes, deadline: float) -> socket.socket:
        membership = self._membership
        sock = socket.create_connection(
            split_address(membership.addresses[rank]),
            timeout=max(0.001, deadline - time.monotonic()),
        )
        try:
            sock, answer = authenticate(
                sock, membership.secret, hello, server=False, deadline=deadline, tls=membership.tls
            )
            fields = json.loads(answer)
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if sock.recv(1) != _WELCOME:
                raise ConnectionResetError("it is not ready for this group of processes")
        except BaseException:
            sock.close()
            raise
        if (fields["rank"], fields["size"]) != (rank, self.size):
            sock.close()
            raise DistributeError(
                f"{membership.addresses[rank]} answered as worker {fields['rank']} of "
                f"{fields['size']}, expected worker {rank} of {self.size}. Every process needs the "
                "same cluster, and an index of its own.",
                rank=rank,
            )
        self.hellos[rank] = fields
        return sock

    def _absent(self, rank: int, timeout: float, why: str) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"worker {self.rank} waited {timeout:g} s for worker {rank} at "
            f"{self._membership.addresses[rank]} to start: {why}. Were all {self.size} processes "
            "started, and is that address reachable from here?",
            rank=rank,
            op="start",
        )
