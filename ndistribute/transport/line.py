"""A connection to a peer that may be anybody: known sizes, one deadline, errors that say who.

The handshake reads and writes through it. It never allocates more than its caller asks for, and
never waits past its deadline, however slowly the peer drips.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator

from ndistribute.errors import AuthenticationError, CollectiveTimeoutError
from ndistribute.transport.address import name_of_peer
from ndistribute.transport.tls import TlsFiles, tls_context

__all__ = ["Line"]

_FAREWELL_SECONDS = 0.2
_FAREWELL_READS = 64
_ALERT = bytes.fromhex("15 0301 0002 0246")  # TLS: fatal, protocol version.


class Line:
    """Send to and receive from a peer that has not proved itself.

    Args:
        sock: a connected socket; ``sock`` of the line is the one to go on with.
        deadline: when every call gives up, on the clock of ``time.monotonic``.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.peer = name_of_peer(sock)

    def start_tls(self, files: TlsFiles, *, server: bool) -> None:
        """Speak TLS from here on; an accepting side lets a peer know why it refuses."""
        context = tls_context(files, server=server)
        try:
            with self._attempt():
                tls = context.wrap_socket(
                    self.sock, server_side=server, do_handshake_on_connect=False
                )
                self.sock = tls
                self._limit()
                tls.do_handshake()
        except AuthenticationError:
            if server:
                self.farewell(_ALERT)  # OpenSSL sends none to a peer that does not use TLS.
            raise

    def send(self, data: bytes) -> None:
        """Send all of a short message."""
        self._limit()
        with self._attempt():
            self.sock.sendall(data)

    def receive(self, count: int) -> bytes:
        """Return exactly so many bytes; the count is never one that the peer chose unchecked."""
        data = bytearray()
        while len(data) < count:
            self._limit()
            with self._attempt():
                part = self.sock.recv(count - len(data))
            if not part:
                raise self._closed()
            data += part
        return bytes(data)

    def farewell(self, data: bytes = b"") -> None:
        """Send a last word, outside TLS, to a peer that has sent more than was read.

        The system would discard it on its way if the socket were closed with something unread.
        """
        with contextlib.suppress(OSError):
            self.sock = socket.socket(fileno=self.sock.detach())
            stop = min(self.deadline, time.monotonic() + _FAREWELL_SECONDS)
            self.sock.settimeout(_FAREWELL_SECONDS)
            self.sock.sendall(data)
            self.sock.shutdown(socket.SHUT_WR)
            for _ in range(_FAREWELL_READS):
                self.sock.settimeout(max(0.001, stop - time.monotonic()))
                if not self.sock.recv(4096):
                    return

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self._late()
        self.sock.settimeout(left)

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Say in the package's words what went wrong with a peer."""
        try:
            yield
        except TimeoutError as error:
            raise self._late() from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError) as error:
            raise self._closed() from error
        except ssl.SSLError as error:
            raise AuthenticationError(
                f"TLS with the peer {self.peer} failed: {error}. All processes need a certificate "
                "of the CA in NDISTRIBUTE_TLS_CA, or none of them uses TLS."
            ) from error

    def _late(self) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"The peer {self.peer} did not finish the handshake in time. It may have stopped, or "
            "be no process of this job: check the addresses."
        )

    def _closed(self) -> ConnectionResetError:
        return ConnectionResetError(
            f"The peer {self.peer} closed the connection during the handshake. Its log may say "
            "why: it may have ended or be too busy, or the address is another program's."
        )
