"""The thread that listens to the other processes of a group, and tells them that this one lives.

It alone reads and writes control connections; what a message means is for its owner to say. The
process's failure detector keeps the time of heartbeats. Nobody who posts a message ever waits for
the network.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from ndistribute.collective.messages import HEARTBEAT, Message, Reader
from ndistribute.transport.failure_detector import detector, not_for_forks

__all__ = ["Watch"]

_CHUNK = 64 * 1024
_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Line:
    """The connection to one process: what has come, what is to go, when it was last heard."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self.reader = Reader()
        self.posted: deque[bytes] = deque()
        self.unsent = bytearray()
        self.heard = time.monotonic()
        self.forgotten = False

    def push(self) -> None:
        """Write what the connection takes; called on the watching thread only."""
        while self.posted:
            self.unsent += self.posted.popleft()
        while self.unsent:
            try:
                sent = self.sock.send(memoryview(self.unsent)[:_CHUNK])
            except _LATER:
                return
            except OSError:
                self.unsent.clear()  # The reading side tells why.
                return
            del self.unsent[:sent]


class Watch:
    """Serve the control connections of a process.

    Args:
        rank: which process this is.
        connections: by rank of the other process, not blocking.
        silence_seconds: after how long a silence a process counts as lost.
        on_message: called with rank and message, on this thread.
        on_silence: called with a rank and a reason when a process was lost, on this thread.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        silence_seconds: float,
        on_message: Callable[[int, Message], None],
        on_silence: Callable[[int, str], None],
    ) -> None:
        self._lines = {other: _Line(other, sock) for other, sock in connections.items()}
        self.beat_within = silence_seconds
        self._on_message = on_message
        self._on_silence = on_silence
        self._ending = threading.Event()
        self._end_by = float("inf")
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        for line in self._lines.values():
            self._selector.register(line.sock, selectors.EVENT_READ, line)
        self._thread = threading.Thread(
            target=self._run, name=f"ndistribute-watch-{rank}", daemon=True
        )
        not_for_forks.add(self)

    def start(self) -> None:
        """Begin; from now on the owner is called."""
        self._thread.start()
        detector.watch(self)

    def tick(self, now: float, excused: bool) -> None:
        """Say that this process lives, and let the thread look for those that do not say so."""
        for line in list(self._lines.values()):
            if excused:
                line.heard = now
            line.posted.append(HEARTBEAT)
        self._wake()

    def post(self, rank: int, message: bytes) -> None:
        """Send a message as soon as the connection takes it."""
        line = self._lines.get(rank)
        if line is not None:
            # Left to the thread: an interrupt in the middle of a write would tear the stream.
            line.posted.append(message)
            self._wake()

    def post_all(self, message: bytes) -> None:
        """Send a message to every other process."""
        for rank in list(self._lines):
            self.post(rank, message)

    def forget(self, rank: int) -> None:
        """Take the end of a connection as no loss: the process has said good-bye."""
        line = self._lines.get(rank)
        if line is not None:
            line.forgotten = True

    def close(self, farewell: bytes, timeout: float) -> None:
        """Send a last message to everyone, wait until they have it, and end the thread.

        Args:
            farewell: the message.
            timeout: how long the others may take to close their ends, in seconds.
        """
        detector.forget(self)
        self.post_all(farewell)
        self._end_by = time.monotonic() + timeout
        self._ending.set()
        self._wake()
        self._thread.join(timeout=timeout + 5.0)

    def let_go(self) -> None:
        """Close a fork's copies, which would hide from the others that this process has died."""
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                line.sock.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            for rank in list(self._lines):
                self._on_silence(rank, f"this process can not listen to it any more: {error!r}")
        finally:
            for line in list(self._lines.values()):
                self._drop(line)
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    def _serve(self) -> None:
        while not self._finished():
            for key, mask in self._selector.select(0.05 if self._ending.is_set() else None):
                if key.data is None:
                    self._swallow_wakes()
                elif mask & selectors.EVENT_READ:
                    self._read(key.data)
            self._write()
            self._lose_the_silent()

    def _lose_the_silent(self) -> None:
        now = time.monotonic()
        silent = [one for one in self._lines.values() if now - one.heard > self.beat_within]
        if silent:
            # A process that was stopped itself has not read yet what the others said meanwhile.
            unread = [key.data for key, _ in self._selector.select(0)]
            for line in silent:
                if line not in unread:
                    self._lose(line, f"nothing was heard of it for {now - line.heard:.1f} s")

    def _finished(self) -> bool:
        """Say whether it is time to end: everyone has our farewell, or they take too long."""
        if not self._ending.is_set():
            return False
        for line in list(self._lines.values()):
            if not line.unsent and not line.posted:
                # The other end closes in answer; closing first could destroy what is under way.
                # Under TLS the plain shutdown, for SSLSocket's own would end the reading as well.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(line.sock, socket.SHUT_WR)
        return not self._lines or time.monotonic() > self._end_by

    def _read(self, line: _Line) -> None:
        try:
            data = line.sock.recv(_CHUNK)
            while isinstance(line.sock, ssl.SSLSocket) and line.sock.pending():
                data += line.sock.recv(line.sock.pending())  # No selector sees what TLS holds.
        except _LATER:
            return
        except ConnectionResetError:
            data = b""  # So it looks where a process ends that had not read all.
        except OSError as error:
            self._lose(line, f"its connection broke ({error})")
            return
        if not data:
            self._lose(line, "it closed its connection without a word, as a killed process does")
            return
        line.heard = time.monotonic()
        try:
            for message in line.reader.feed(data):
                self._on_message(line.rank, message)
        except Exception as error:  # Whatever it is, this thread has others to listen to.
            self._lose(line, f"it sent what no worker sends ({error!r})")

    def _write(self) -> None:
        """Push what is to go, and ask to be told when a connection takes more."""
        for line in list(self._lines.values()):
            line.push()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
            if self._selector.get_key(line.sock).events != wanted:
                self._selector.modify(line.sock, wanted, line)

    def _lose(self, line: _Line, why: str) -> None:
        if not line.forgotten and not self._ending.is_set():
            self._on_silence(line.rank, why)
            line.push()  # If it is only asleep, it finds there what became of it.
        self._drop(line)

    def _drop(self, line: _Line) -> None:
        self._lines.pop(line.rank, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.sock)
        line.sock.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def _swallow_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
