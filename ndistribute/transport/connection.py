"""Connections between two processes of a job: frames over TCP, TLS or a Unix socket.

A frame is a header, a control record and raw buffers:

    magic, kind, flags, number of buffers, call, bytes of control, bytes of all buffers
    the length of each buffer; the control record; a MAC if asked for
    the buffers, aligned; a MAC that also covers them

The receiver checks sizes before it allocates memory. On a Unix socket, long buffers go through a
ring buffer in shared memory, whose descriptor is sent with the first frame that needs it. Any
thread may send; one thread at a time receives. The receiver owns the received arrays.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import itertools
import os
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from ndistribute.errors import AuthenticationError, DistributeError
from ndistribute.transport.address import is_of_this_user, unix_name
from ndistribute.transport.buffers import ALIGNMENT, ReusedMemory, Ring, make_file, padded
from ndistribute.transport.codec import Array, Buffer, Decoder, MalformedError, encode
from ndistribute.transport.failure_detector import FORKED, detector, not_for_forks, silence_seconds
from ndistribute.transport.handshake import Accepted, Hello, authenticate
from ndistribute.transport.reach import is_out_of_reach, tcp_socket, why_unreached
from ndistribute.transport.secret import Credentials, NonBlockingTls

HANDSHAKE_SECONDS = 10.0
BODY_LIMIT_BYTES = 16 << 30
CONTROL_LIMIT_BYTES = 1 << 30
_MOST_BUFFERS = 1 << 20
_HEADER = struct.Struct("<HBBIQIIQ")
_MAGIC = 0x444E
_DATA, _HEARTBEAT, _GOODBYE = 1, 2, 3
_SHARED = 2
_HEARTBEAT_FRAME, _GOODBYE_FRAME = (
    _HEADER.pack(_MAGIC, kind, 0, 0, 0, 0, 0, 0) for kind in (_HEARTBEAT, _GOODBYE)
)
_PIECE_BYTES = 1 << 20  # One end hashes a piece while the next one travels.
_READ_BYTES = 65536
_SHARED_FROM_BYTES = 65536
_SPINS, _PAUSE_SECONDS = 1000, 50e-6  # Before and between checks.
_BUFFERS_AT_ONCE = 512  # sendmsg accepts at most 1024.
_SOCKET_BYTES = 4 << 20
_IDLE_SECONDS, _SHUTDOWN_SECONDS = 10.0, 1.0
_LONGEST_WAIT_SECONDS = 3600.0  # poll accepts this many milliseconds.
_QUIET = socket.MSG_NOSIGNAL  # The program may have reset SIGPIPE.
_PADDING = bytes(ALIGNMENT)
_CLOSED = "it closed the connection, as a process does when it ends."
_CUT = "it closed the connection before it had acknowledged all data: the network is cut."
_CLOSED_HERE = "this process closed it."
_NO_MAC: Any = SimpleNamespace(update=lambda data: None, digest=bytes)  # For frames without a MAC.
_FILE_ROOM = socket.CMSG_LEN(struct.calcsize("i"))  # Room for one descriptor.


class ConnectionLostError(DistributeError, ConnectionError):
    """The connection has ended; `clean` is True if the peer said good-bye first."""

    def __init__(self, reason: str, clean: bool = False) -> None:
        super().__init__(reason)
        self.clean = clean


def unix_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if processes of one host should use Unix sockets."""
    return environ.get("NDISTRIBUTE_UNIX_SOCKETS", "1") != "0"


def connect(
    address: str,
    credentials: Credentials,
    hello: Hello,
    kinds: Decoder[Any],
    *,
    deadline: float,
    macs: bool = False,
) -> Connection:
    """Return an authenticated connection; over a Unix socket if the process is on this host."""
    deadline = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
    by_unix = functools.partial(_unix_socket, address, deadline)
    wanted = unix_wanted()
    try:
        sock = by_unix() if wanted else None
        # The launcher listens for processes that are still starting.
        instead = by_unix if wanted and sock is None else None
        if sock is None:
            sock = tcp_socket(address, deadline)
        sock, accepted = authenticate(sock, credentials, hello, deadline=deadline, instead=instead)
        silence = min(hello.silence, silence_seconds())
        return Connection(sock, accepted, kinds, macs=macs, silence=silence)
    except OSError as error:
        if isinstance(error, AuthenticationError | ConnectionLostError):
            raise
        raise ConnectionLostError(why_unreached(address, error)) from error


def _unix_socket(address: str, deadline: float) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(unix_name(address))
        if is_of_this_user(sock):  # Any user may bind the name; send no proof to another user.
            return sock
    sock.close()
    return None


class Connection:
    """Send and receive records on an authenticated socket, which the connection owns.

    If `macs` is True, every record's frame carries MACs over all of its bytes, and its place in the
    sequence. This is required if a record contains data that will be unpickled.
    """

    def __init__(
        self,
        sock: socket.socket,
        accepted: Accepted,
        kinds: Decoder[Any],
        *,
        macs: bool = False,
        silence: float | None = None,
    ) -> None:
        self.peer = accepted.hello
        self.is_unix = sock.family == socket.AF_UNIX
        self._sock: Any = NonBlockingTls(sock) if isinstance(sock, ssl.SSLSocket) else sock
        self._kinds = kinds
        self._macs = macs
        keys = accepted.sending_key, accepted.receiving_key
        self._sending_mac, self._receiving_mac = (
            _macs_of(key) if macs else lambda head: _NO_MAC for key in keys
        )
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._lost: tuple[str, bool] | None = None  # The reason, and whether it was clean.
        self.was_cut = False  # Whether the connection was lost because the peer was out of reach.
        self._closed = False
        self._unsent = b""  # The rest of a partly sent heartbeat.
        self._input = memoryview(bytearray(_READ_BYTES))
        self._start = self._end = 0
        self._arrays = ReusedMemory()
        self._file = -1  # A received descriptor that is not used yet.
        self._outgoing: Ring | None = None
        self._incoming: Ring | None = None
        self._last_input = self._used = time.monotonic()
        try:
            self.silence_seconds = silence or silence_seconds()
            self.beat_within = max(0.01, min(self.silence_seconds, self.peer.silence))
            sock.setblocking(False)
            if self.is_unix:
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # Up to the host's limit.
                    sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
            else:
                milliseconds = int(self.silence_seconds * 1000)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            detector.watch(self)
        except BaseException:
            sock.close()
            raise
        not_for_forks.add(self)

    @property
    def is_open(self) -> bool:
        """Return True until a loss is detected, at the next heartbeat or the next use."""
        return self._lost is None

    @property
    def is_left(self) -> bool:
        """Return True if the peer has closed its end, even if some of its data is still unread."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    @property
    def is_broken(self) -> bool:
        """Return True once the connection has ended without a good-bye."""
        return self._lost is not None and not self._lost[1]

    def send(self, record: Any, call: int = 0, deadline: float = float("inf")) -> None:
        """Send a record with the number of its call; the caller may change the record afterwards.

        If the peer has not read it by the deadline, the connection is aborted.
        """
        control, buffers = encode(record)
        lengths = list(map(len, buffers))
        body = sum(map(padded, lengths))
        if body > BODY_LIMIT_BYTES or len(control) > CONTROL_LIMIT_BYTES:
            what = f"a message of {len(control)} + {body} bytes cannot be sent:"
            raise ValueError(f"{what} the limits are {CONTROL_LIMIT_BYTES} and {BODY_LIMIT_BYTES}.")
        ring, file = None, -1
        with self._writing:
            if self._lost is not None:
                raise ConnectionLostError(*self._lost)
            try:
                if self.is_unix and body > _SHARED_FROM_BYTES:
                    file = self._make_ring()
                    ring = self._outgoing
                flags = 0 if ring is None else _SHARED
                head = _HEADER.pack(_MAGIC, _DATA, flags, len(lengths), call, len(control), 0, body)
                head += struct.pack(f"<{len(lengths)}Q", *lengths) + control
                mac = self._sending_mac(head)
                self._used = time.monotonic()
                parts: list[Buffer] = [head, mac.digest()]
                pieces = ring is not None or self._macs
                if not pieces:
                    for buffer, length in zip(buffers, lengths, strict=True):
                        parts += buffer, _PADDING[: padded(length) - length]
                self._write(parts, deadline, file)
                if pieces:
                    self._send_pieces(buffers, ring, mac, deadline)
            except BaseException as error:  # A part of the frame may have been sent.
                self._raise_broken(error, deadline)
            finally:
                if file >= 0:
                    os.close(file)

    def receive(
        self, deadline: float = float("inf"), until: float = float("inf")
    ) -> tuple[int, Any]:
        """Return the number of a call and its record, which must start to arrive by `until`.

        The connection survives a `TimeoutError`; a `MalformedError` aborts it.
        """
        with self._reading:
            while True:
                if self._lost is not None:
                    raise ConnectionLostError(*self._lost)
                begun = False
                try:
                    self._read_header(min(until, deadline))
                    begun = True
                    message = self._read_frame(deadline)
                except BaseException as error:
                    if isinstance(error, TimeoutError) and not begun and not error.errno:
                        raise
                    self._raise_broken(error, deadline)  # A part of the frame may have been read.
                if message is not None:
                    return message
                self._give_back(self._last_input)

    def abort(self, reason: str, *, clean: bool = False, wait: float = 0.0) -> None:
        """End the connection from any thread; threads that wait on it raise with this reason.

        If `clean` is True, first send a good-bye, for at most `wait` seconds.
        """
        try:
            if clean and self._lost is None:
                with contextlib.suppress(OSError):
                    self._say_goodbye(time.monotonic() + wait)
            if self._lost is None:
                self.was_cut = is_out_of_reach(self._sock)
        finally:
            self._lost = self._lost or (reason, clean)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Say good-bye, wait briefly until the peer has read it, and close the socket."""
        if self._closed:
            return
        self._closed = True
        try:
            detector.forget(self)
            self.abort(_CLOSED_HERE, clean=True, wait=_SHUTDOWN_SECONDS)
        finally:
            # Wait for the threads that were woken: the number of the descriptor may be reused.
            locks = [self._writing, self._reading]
            held = [lock for lock in locks if lock.acquire(timeout=_SHUTDOWN_SECONDS)]
            self._free()
            for lock in held:
                lock.release()

    def let_go(self) -> None:
        """Close the copy of a forked child; the parent keeps its connection."""
        self._lost, self._closed = (FORKED, False), True
        self._writing, self._reading = threading.Lock(), threading.Lock()  # No thread holds these.
        self._free()

    def _free(self) -> None:
        self._sock.close()
        self._outgoing = self._incoming = None
        self._take_file(-1)

    def _say_goodbye(self, deadline: float) -> None:
        if self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                self._write([_GOODBYE_FRAME], deadline)
                self._sock.shutdown(socket.SHUT_WR)
            finally:
                self._writing.release()
        # Closing a socket with unread input may discard output that is under way. If another thread
        # receives, that thread reads until the peer closes.
        if self._reading.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                while time.monotonic() < deadline:
                    self._start = self._end = 0
                    self._read_into(self._input, deadline)
            finally:
                self._reading.release()

    def tick(self, now: float, excused: bool) -> None:
        """Send a heartbeat, and end the connection after a long silence; never block."""
        if self._writing.acquire(blocking=False):
            try:
                # TLS requires that unsent bytes are sent first, unchanged.
                self._unsent = self._unsent or _HEARTBEAT_FRAME
                self._unsent = self._unsent[self._sock.sendmsg([self._unsent], (), _QUIET) :]
            except BlockingIOError:
                pass  # The peer does not read; its silence will tell.
            except OSError as error:  # Data that arrived before the end is read first.
                if is_out_of_reach(self._sock):
                    self.abort(f"{error}")
            finally:
                self._writing.release()
        if self._reading.acquire(blocking=False):
            try:
                self._listen(now)
            finally:
                self._reading.release()
        if excused:
            self._last_input = now
        elif (quiet := now - self._last_input) > self.silence_seconds:
            with contextlib.suppress(ValueError):  # The connection was just closed.
                if not self._poll(select.POLLIN, 0):  # Otherwise a thread is about to read.
                    self.abort(f"it sent nothing for {quiet:.1f} s: it is stopped, or cut off.")

    def _listen(self, now: float) -> None:
        """Read what has arrived while no thread receives; the caller holds the reading lock."""
        try:
            while self._end < len(self._input):
                self._end += self._read_some(self._input[self._end :])
                while self._input[self._start : self._end][: _HEADER.size] == _HEARTBEAT_FRAME:
                    self._start += _HEADER.size
                if self._start == self._end:
                    self._start = self._end = 0
            self._last_input = now  # The input is full: heartbeats wait behind it.
        except BlockingIOError:
            pass
        except OSError as error:
            if self._start == self._end:  # Otherwise a good-bye may be in the unread input.
                self.abort(f"{error}")
        self._give_back(now)

    def _give_back(self, now: float) -> None:
        """Free idle memory for long messages; the caller holds the reading lock."""
        if now - self._used > _IDLE_SECONDS:
            self._arrays.forget()

    def _make_ring(self) -> int:
        """Create the outgoing ring if needed; return its descriptor if the peer lacks it."""
        file = -1
        if self._outgoing is None:
            with contextlib.suppress(OSError, AttributeError):  # No memory, or no memfd.
                file = make_file()
                self._outgoing = Ring(file, writes=True)
        return file

    def _write(self, parts: Sequence[Buffer], deadline: float, file: int = -1) -> None:
        """Write the buffers in order; send the descriptor `file`, if any, with the first bytes."""
        if self._unsent:
            parts, self._unsent = [self._unsent, *parts], b""
        left = [memoryview(part).cast("B") for part in parts]
        beside = []
        if file >= 0:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file))]
        first = 0
        while first < len(left):
            try:
                sent = self._sock.sendmsg(left[first : first + _BUFFERS_AT_ONCE], beside, _QUIET)
            except BlockingIOError:
                self._wait(select.POLLOUT, min(deadline, time.monotonic() + self.silence_seconds))
                continue
            beside = []
            while first < len(left) and sent >= len(left[first]):
                sent -= len(left[first])
                first += 1
            if sent:
                left[first] = left[first][sent:]

    def _send_pieces(
        self, buffers: Sequence[Buffer], ring: Ring | None, mac: hmac.HMAC, deadline: float
    ) -> None:
        for buffer in buffers:
            for start in range(0, len(buffer), _PIECE_BYTES):
                piece = buffer[start : start + _PIECE_BYTES]
                mac.update(piece)
                if ring is not None:
                    self._pass(ring, np.frombuffer(piece, np.uint8), deadline)
                else:
                    padding = _PADDING[: padded(len(piece)) - len(piece)]
                    mac.update(padding)
                    self._write([piece, padding], deadline)
        if buffers:
            self._write([mac.digest()], deadline)

    def _read_header(self, deadline: float) -> None:
        while (held := self._end - self._start) < _HEADER.size:
            if self._start:
                self._input[:held] = bytes(self._input[self._start : self._end])
                self._start, self._end = 0, held
            self._end += self._read_into(self._input[held:], deadline)

    def _read_frame(self, deadline: float) -> tuple[int, Any] | None:
        """Return the frame whose header has been read, or None for a heartbeat."""
        header = _HEADER.unpack_from(self._input, self._start)
        magic, kind, flags, count, call, nbytes, zero, body = header
        if magic != _MAGIC or zero or kind not in (_DATA, _HEARTBEAT, _GOODBYE):
            raise MalformedError("the data do not begin like a frame.")
        if nbytes > CONTROL_LIMIT_BYTES or count > _MOST_BUFFERS or body > BODY_LIMIT_BYTES:
            what = f"a frame of {nbytes} + {body} bytes in {count} parts is too long."
            raise MalformedError(what)
        if kind == _HEARTBEAT:
            self._start += _HEADER.size
            return None
        if kind == _GOODBYE:
            raise ConnectionLostError("it said good-bye.", clean=True)
        start = _HEADER.size + 8 * count
        end = start + nbytes
        head = memoryview(bytearray(end))
        self._read_whole(head, deadline)
        mac = self._receiving_mac(head)
        self._verify(mac, deadline)
        lengths = struct.unpack_from(f"<{count}Q", head, _HEADER.size)
        if sum(map(padded, lengths)) != body:
            raise MalformedError(f"{count} parts do not make {body} bytes.")
        ring = self._ring() if flags & _SHARED else None
        buffers = []
        for length in lengths:
            view = self._arrays.take(padded(length))
            buffers.append(view[:length])
            for at in range(0, length, _PIECE_BYTES):
                if ring is None:
                    piece = view[at : at + _PIECE_BYTES]
                    self._read_whole(piece, deadline)
                else:  # Read without the padding.
                    piece = buffers[-1][at : at + _PIECE_BYTES]
                    self._pass(ring, np.frombuffer(piece, np.uint8), deadline)
                mac.update(piece)
        if lengths:
            self._verify(mac, deadline)
        self._used = time.monotonic()
        return call, self._kinds.decode(head[start:], buffers)

    def _verify(self, mac: hmac.HMAC, deadline: float) -> None:
        expected = mac.digest()
        received = memoryview(bytearray(len(expected)))
        self._read_whole(received, deadline)
        if not hmac.compare_digest(expected, received):
            what = "a frame was changed on the way, or another program sent it."
            how = "Set NDISTRIBUTE_TLS_CERT, _KEY and _CA to protect connections with TLS."
            raise MalformedError(f"{what} {how}")

    def _ring(self) -> Ring:
        """Return the incoming ring, made from the received descriptor if it is new."""
        if self._file >= 0:
            self._incoming = Ring(self._file, writes=False)
            self._take_file(-1)
        if self._incoming is None:
            raise MalformedError("a message refers to shared memory that did not come.")
        return self._incoming

    def _read_whole(self, view: memoryview, deadline: float) -> None:
        here = min(len(view), self._end - self._start)
        view[:here] = self._input[self._start : self._start + here]
        self._start += here
        while here < len(view):
            here += self._read_into(view[here:], deadline)

    def _read_into(self, view: memoryview, deadline: float) -> int:
        """Wait for input, read some bytes, and return their number."""
        while True:
            try:
                return self._read_some(view)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)

    def _read_some(self, view: memoryview) -> int:
        """Read available bytes, and keep a descriptor that comes with them."""
        count, beside, *_ = self._sock.recvmsg_into([view], _FILE_ROOM, socket.MSG_CMSG_CLOEXEC)
        for _, _, file in beside:
            self._take_file(int.from_bytes(file, sys.byteorder))
        if not count:
            raise ConnectionLostError(_CUT if is_out_of_reach(self._sock) else _CLOSED)
        self._last_input = time.monotonic()
        return int(count)

    def _pass(self, ring: Ring, data: Array, deadline: float) -> None:
        """Copy all bytes of `data` into a ring, or fill `data` from it."""
        start = idle = 0
        since = time.monotonic()
        while start < len(data):
            moved = ring.move(data[start:])
            if moved:
                start, idle = start + moved, 0
                self._last_input = since = time.monotonic()
                continue
            idle += 1
            os.sched_yield()
            if idle > _SPINS:
                self._wait(0, min(deadline, since + self.silence_seconds))
                time.sleep(_PAUSE_SECONDS)

    def _wait(self, event: int, deadline: float) -> None:
        """Wait for an event of the socket; without an event, only check that it is open."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end did not answer in time")
        events = self._poll(event, min(left, _LONGEST_WAIT_SECONDS) if event else 0)
        if events & select.POLLHUP and not event:
            raise ConnectionLostError(_CLOSED)
        if self._lost is not None:
            raise ConnectionLostError(*self._lost)

    def _poll(self, event: int, seconds: float) -> int:
        """Return the socket's events after at most this many seconds; 0 if there are none."""
        poll = select.poll()
        poll.register(self._sock.fileno(), event)
        events = poll.poll(seconds * 1000)
        return events[0][1] if events else 0

    def _take_file(self, file: int) -> None:
        file, self._file = self._file, file
        if file >= 0:
            os.close(file)

    def _raise_broken(self, error: BaseException, deadline: float) -> NoReturn:
        clean = isinstance(error, ConnectionLostError) and error.clean
        why = _CLOSED_HERE if self._closed else str(error) or type(error).__name__
        self.abort(why, clean=clean)
        # After `close`, polling the socket is a ValueError.
        expected = (OSError, ValueError) if self._closed else OSError
        # Before the caller's deadline, the kernel's ETIMEDOUT or a long silence raised it.
        late = isinstance(error, TimeoutError) and time.monotonic() >= deadline
        if late or not isinstance(error, expected):
            raise error
        raise ConnectionLostError(*(self._lost or (why, clean))) from error


def _macs_of(key: bytes) -> Callable[[bytes | memoryview], hmac.HMAC]:
    """Return a function that begins the MAC of a direction's next frame, and counts frames."""
    numbers = itertools.count(1)
    return lambda head: hmac.new(key, next(numbers).to_bytes(8, "little") + head, "sha256")
