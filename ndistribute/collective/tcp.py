"""The transport over sockets, for processes that were started without MPI.

Each pair of processes has one connection. Nothing blocks: while a rank waits for one message, all
others go on, in both directions, so messages may be larger than what the system buffers. Arrays are
sent from where they are, and received where they belong.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence

from ndistribute.collective.control import ControlPlane, WaitMonitor
from ndistribute.collective.ring import Handle
from ndistribute.device import Array
from ndistribute.errors import WorkerLostError

__all__ = ["TcpTransport"]

_SLICE_SECONDS = 0.05
# Waiting in the system and being woken costs about 30 us on each side, so a rank first looks
# again and again for as long as that.
_HOT_SECONDS = 50e-6
# A process that fails closes its connections; what failed comes over another one, maybe later.
_GRACE_SECONDS = 0.5
_MOST_PARTS = 16
_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TcpTransport:
    """Carry messages over the data connections of a group.

    Args:
        peers: the processes of the group, and the connections to them.
    """

    # Measured with 2 processes on 2 cores, 4 and 16 MiB: 2.1 and 8.9 ms in blocks of 128 KiB, 1.2
    # and 7.1 ms of 256 KiB, 0.9 and 4.1 ms of 512 KiB, 1.6 and 6.3 ms of 1 MiB.
    block_bytes = 512 * 1024

    def __init__(self, peers: ControlPlane) -> None:
        self._peers = peers
        self._links: dict[int, _Link] = {}
        self._patience: WaitMonitor | None = None

    def begin(self, patience: WaitMonitor) -> None:
        """Start a call."""
        self._patience = patience

    def isend(self, peer: int, *arrays: Array) -> Handle:
        """Begin to send arrays, which stay unchanged until the handle is done."""
        link = self._link(peer)
        for array in arrays:
            transfer = _Transfer(memoryview(array.view("u1")))
            link.outgoing.append(transfer)
        self._guarded(link, link.push)
        return transfer

    def irecv(self, peer: int, array: Array, then: Callable[[], None] | None = None) -> Handle:
        """Begin to receive into an array."""
        transfer = _Transfer(memoryview(array.view("u1")), then)
        self._link(peer).incoming.append(transfer)
        return transfer

    def wait(self, handle: Handle) -> None:
        """Wait until a message is done, and push all others on meanwhile."""
        self._wait(lambda: handle.done)

    def end(self) -> None:
        """Wait until all messages of the call are done."""
        self._wait(lambda: not any(link.is_busy for link in self._links.values()))

    def close(self) -> None:
        """Forget the connections, which belong to the group."""
        self._links.clear()
        self._patience = None

    def _link(self, peer: int) -> _Link:
        link = self._links.get(peer)
        if link is None:
            sock = self._peers.data_socket(peer, lambda: self._check_for(peer))
            link = self._links[peer] = _Link(sock, peer)
        return link

    def _check_for(self, peer: int) -> None:
        """Check a wait for a connection; the others go on, or that process might wait for them."""
        self._advance()
        if self._patience is not None:
            self._patience.check(lambda: [peer])

    def _wait(self, is_over: Callable[[], bool]) -> None:
        hot_until = 0.0
        check_at = time.monotonic() + _SLICE_SECONDS
        while not is_over():
            moved = self._advance()
            now = time.monotonic()
            if now >= check_at or self._peers.is_alarmed:
                self._check()
                check_at = now + _SLICE_SECONDS
            if moved or not hot_until:
                hot_until = now + _HOT_SECONDS
            elif now < hot_until:
                os.sched_yield()  # The peer may be waiting for this very core.
            elif not is_over():
                self._sleep()

    def _advance(self) -> bool:
        """Move what can be moved, and say whether anything could."""
        moved = False
        for link in self._links.values():
            if link.incoming and self._guarded(link, link.pull):
                moved = True
            if link.outgoing and self._guarded(link, link.push):
                moved = True
        return moved

    def _sleep(self) -> None:
        """Wait until a connection can go on, or a moment has passed."""
        poll = select.poll()
        for link in self._links.values():
            events = (select.POLLIN if link.incoming else 0) | (
                select.POLLOUT if link.outgoing else 0
            )
            if events:
                poll.register(link.sock, events)
        if not poll.poll(int(_SLICE_SECONDS * 1000)):
            self._check()

    def _check(self) -> None:
        if self._patience is not None:
            self._patience.check(self._missing)

    def _missing(self) -> Sequence[int]:
        """Return the ranks that owe this one something, or else do not take what it sends."""
        links = self._links.values()
        owing = [link.peer for link in links if link.incoming]
        return owing or [link.peer for link in links if link.outgoing]

    def _guarded(self, link: _Link, action: Callable[[], bool]) -> bool:
        try:
            return action()
        except (OSError, EOFError) as error:
            raise self._closed(link.peer, error) from error

    def _closed(self, peer: int, error: Exception) -> WorkerLostError:
        """Return the error for a connection that ended, unless the group knows a better one."""
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until:
            self._check()
            time.sleep(0.002)
        return WorkerLostError(
            f"worker {peer} closed its data connection to worker {self._peers.rank}: "
            f"{str(error) or 'the stream ended'}.",
            rank=peer,
        )


class _Transfer:
    """A message on its way: what of it is still to be moved."""

    __slots__ = ("done", "on_done", "rest")

    def __init__(self, rest: memoryview, on_done: Callable[[], None] | None = None) -> None:
        self.rest = rest
        self.on_done = on_done
        self.done = False

    def advance(self, count: int) -> int:
        """Take note of bytes that moved; return how many of them were another message's."""
        length = len(self.rest)
        if count < length:
            self.rest = self.rest[count:]
            return 0
        self.rest = self.rest[length:]
        self.done = True
        if self.on_done is not None:
            self.on_done()
        return count - length


class _Link:
    """One connection, with the messages that wait on it in order."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.sock = sock
        self.peer = peer
        self.outgoing: deque[_Transfer] = deque()
        self.incoming: deque[_Transfer] = deque()
        self._encrypted = isinstance(sock, ssl.SSLSocket)

    @property
    def is_busy(self) -> bool:
        """Return whether a message is on its way."""
        return bool(self.outgoing or self.incoming)

    def push(self) -> bool:
        """Send what the system takes; say whether that was anything."""
        return self._move(self.outgoing, self._send)

    def pull(self) -> bool:
        """Receive what is there; say whether that was anything."""
        return self._move(self.incoming, self._receive)

    def _move(self, queue: deque[_Transfer], move: Callable[[list[memoryview]], int]) -> bool:
        moved = False
        while queue:
            parts = [transfer.rest for transfer, _ in zip(queue, range(_MOST_PARTS), strict=False)]
            try:
                count = move(parts)
            except _LATER:
                return moved
            moved = True
            while queue:
                count = queue[0].advance(count)
                if not queue[0].done:
                    break
                queue.popleft()
        return moved

    def _send(self, parts: list[memoryview]) -> int:
        return self.sock.send(parts[0]) if self._encrypted else self.sock.sendmsg(parts)

    def _receive(self, parts: list[memoryview]) -> int:
        if self._encrypted:
            count = self.sock.recv_into(parts[0])
        else:
            count = self.sock.recvmsg_into(parts)[0]
        if count == 0:
            raise EOFError(f"worker {self.peer} sends no more")
        return count
