"""The transports of the ring: their base class, and the transport over sockets.

No call blocks: while a rank waits for one message, all others keep moving in both directions, so
messages may exceed the kernel's buffers. Every wait has a deadline and detects failures of other
processes. Each pair of processes has one socket. Arrays are sent and received without copies.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ndistribute.collective.control_plane import ControlPlane, WaitMonitor
from ndistribute.devices import Array
from ndistribute.errors import WorkerLostError
from ndistribute.timers import Attempts
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.secret import NonBlockingTls

_CHECK_SECONDS = 0.05
# The reason why a connection closed may arrive later through the control plane: if a process was
# cut off from rank 0, it may end before rank 0 has noticed.
_GRACE_SECONDS = (0.5, 2.0)
_MOST_PARTS = 16
# If more bytes are missing, a rank does not spin. For 1 MiB between 2 hosts over 10 Gbit/s,
# spinning saves 0.3 ms.
_SPIN_BYTES = 1 << 20
# A rank is woken when this many bytes of a long message have arrived: each wake-up costs 25 us of
# processor time.
_WAKE_BYTES = 64 * 1024


class Handle(Protocol):
    """A pending message."""

    done: bool


class Transport(Protocol):
    """Moves flat arrays between processes; messages between two processes stay in order.

    Sleeping in the kernel and waking up costs about 30 us on each side, so a rank that waits first
    spins for a while. A subclass moves the messages.
    """

    # The best size of messages: smaller ones cost more, larger ones exceed the cache.
    block_bytes: int
    # How long a rank spins before it sleeps.
    spin_seconds: float

    _peers: ControlPlane
    _patience: WaitMonitor

    def __init__(self, peers: ControlPlane) -> None:
        self._peers = peers

    def begin(self, patience: WaitMonitor) -> None:
        """Start a call, whose waits `patience` ends."""
        self._patience = patience

    def wait(self, handle: Handle) -> None:
        """Wait until a message is done; keep moving all other messages."""
        self._wait(lambda: handle.done)

    def end(self) -> None:
        """Wait until all messages of the call are done."""
        self._wait(lambda: not self._waiting())

    def isend(self, peer: int, *arrays: Array) -> Handle:
        """Start to send each array as a message; return the handle of the last one.

        The arrays must not change until the handle is done.
        """

    def irecv(self, peer: int, array: Array, then: Callable[[], None] | None = None) -> Handle:
        """Start to receive into an array; call `then` when the message has arrived."""

    def close(self) -> None:
        """Drop all messages, and free the transport's resources."""

    def _advance(self) -> bool:
        """Move all messages as far as possible; return True if any moved."""

    def _sleep(self, idle: float) -> None:
        """Sleep briefly; nothing has moved for `idle` seconds."""

    def _spins(self) -> bool:
        """Return True if spinning may be shorter than sleeping."""
        return True

    def _waiting(self) -> Sequence[Any]:
        """Return pending messages, each with its `peer` and whether it `receives`."""

    def _wait(self, is_over: Callable[[], bool]) -> None:
        moved_at = time.monotonic()
        check_at = moved_at + _CHECK_SECONDS
        while not is_over():
            moved = self._advance()
            now = time.monotonic()
            if now >= check_at or self._peers.has_failure:
                check_at = now + _CHECK_SECONDS
                self._check()
            if moved:
                moved_at = now
            elif now - moved_at < self.spin_seconds and self._spins():
                os.sched_yield()  # The peer may need this core.
            else:
                self._sleep(now - moved_at)

    def _check(self) -> None:
        self._patience.check(self._missing)

    def _missing(self) -> list[int]:
        """Return the ranks from which messages are missing, or else those that do not receive."""
        waiting = self._waiting()
        owing = {pending.peer for pending in waiting if pending.receives}
        return sorted(owing or {pending.peer for pending in waiting})

    def _lost(
        self, reason: str, rank: int | None = None, look: Callable[[], None] = lambda: None
    ) -> WorkerLostError:
        """Return an error for a failed message, unless the control plane raises a better one."""
        shortest, longest = _GRACE_SECONDS
        seconds = min(max(shortest, silence_seconds() / 2), longest)
        for _ in Attempts(time.monotonic() + seconds, 0.002):
            self._check()
            look()
        return WorkerLostError(reason, rank=rank)


class TcpTransport(Transport):
    """Moves messages over the data connections of a group."""

    # Measured with 2 processes on 2 cores, 4 and 16 MiB: 2.1 and 8.9 ms in blocks of 128 KiB, 1.2
    # and 7.1 ms of 256 KiB, 0.9 and 4.1 ms of 512 KiB, 1.6 and 6.3 ms of 1 MiB.
    block_bytes = 512 * 1024
    spin_seconds = 50e-6

    def __init__(self, peers: ControlPlane) -> None:
        super().__init__(peers)
        self._directions: dict[tuple[int, bool], _Direction] = {}

    def isend(self, peer: int, *arrays: Array) -> Handle:
        direction = self._direction(peer, receives=False)
        for array in arrays:
            transfer = _TcpTransfer(memoryview(array.view(np.uint8)))
            direction.queue.append(transfer)
        self._move(direction)
        return transfer

    def irecv(self, peer: int, array: Array, then: Callable[[], None] | None = None) -> Handle:
        transfer = _TcpTransfer(memoryview(array.view(np.uint8)), then)
        self._direction(peer, receives=True).queue.append(transfer)
        return transfer

    def close(self) -> None:
        # The group owns the connections.
        self._directions.clear()

    def _direction(self, peer: int, receives: bool) -> _Direction:
        direction = self._directions.get((peer, receives))
        if direction is None:
            sock = self._peers.data_socket(peer, lambda: self._check_for(peer))
            direction = self._directions[peer, receives] = _Direction(sock, peer, receives)
        return direction

    def _check_for(self, peer: int) -> None:
        """Check the wait for a connection; keep others moving, since `peer` may need them."""
        self._advance()
        self._patience.check(lambda: [peer])

    def _waiting(self) -> list[_Direction]:
        return [direction for direction in self._directions.values() if direction.queue]

    def _advance(self) -> bool:
        return max([self._move(direction) for direction in self._waiting()], default=False)

    def _move(self, direction: _Direction) -> bool:
        try:
            return direction.move()
        except (OSError, EOFError) as error:
            reason = str(error) or "the stream ended"
            raise self._lost(
                f"worker {direction.peer} closed its data connection to worker {self._peers.rank}: "
                f"{reason}.",
                rank=direction.peer,
            ) from error

    def _spins(self) -> bool:
        return all(direction.left <= _SPIN_BYTES for direction in self._waiting())

    def _sleep(self, idle: float) -> None:
        events: dict[int, int] = defaultdict(int)
        for direction in self._waiting():
            if direction.receives and not direction.is_tls:
                direction.wake_late()
            event = select.POLLIN if direction.receives else select.POLLOUT
            events[direction.sock.fileno()] |= event
        poll = select.poll()
        for file, event in events.items():
            poll.register(file, event)
        poll.poll(_CHECK_SECONDS * 1000)


@dataclass(slots=True, eq=False)
class _TcpTransfer:
    """A pending message: the part that has not moved yet."""

    rest: memoryview
    then: Callable[[], None] | None = None
    done: bool = False


class _Direction:
    """One direction of a connection, with its pending messages in order."""

    def __init__(self, sock: socket.socket, peer: int, receives: bool) -> None:
        self.is_tls = isinstance(sock, ssl.SSLSocket)
        self.sock: Any = NonBlockingTls(sock) if isinstance(sock, ssl.SSLSocket) else sock
        self._least = 1  # The default of the operating system.
        self.peer, self.receives = peer, receives
        self.queue: deque[_TcpTransfer] = deque()

    @property
    def left(self) -> int:
        """The bytes that have not moved yet."""
        return sum([len(transfer.rest) for transfer in self.queue])

    def wake_late(self) -> None:
        """Let the next poll return when much of the first message has arrived, or all of it.

        This does not wait for the second message: the peer may send it only after an answer to the
        first.
        """
        least = min(_WAKE_BYTES, len(self.queue[0].rest))
        if least != self._least:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def move(self) -> bool:
        """Send or receive as much as possible now; return True if anything moved."""
        queue, moved = self.queue, False
        while queue:
            parts = [transfer.rest for transfer in itertools.islice(queue, _MOST_PARTS)]
            asked = sum(map(len, parts))
            try:
                if self.receives:
                    count = self.sock.recvmsg_into(parts)[0]
                else:
                    count = self.sock.sendmsg(parts)
            except BlockingIOError:
                break
            if not count:
                what = "sends" if self.receives else "takes"
                raise EOFError(f"worker {self.peer} {what} no more")
            moved, is_all = True, count == asked
            while queue and count >= len(queue[0].rest):
                transfer = queue.popleft()
                count -= len(transfer.rest)
                transfer.done = True
                if transfer.then is not None:
                    transfer.then()
            if count:
                queue[0].rest = queue[0].rest[count:]
            # Fewer bytes than asked for means that none are left. TLS moves one record at a time.
            if not is_all and not self.is_tls:
                break
        return moved
