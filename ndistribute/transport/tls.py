"""Optional TLS between the processes of a job: each side shows a certificate of the job's own CA.

TLS hides and protects what is sent after the handshake; that a peer belongs to the job is proved
by the secret, with or without it.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ndistribute.errors import AuthenticationError
from ndistribute.transport.codec import Buffer

_VARIABLES = ("NDISTRIBUTE_TLS_CERT", "NDISTRIBUTE_TLS_KEY", "NDISTRIBUTE_TLS_CA")


class TlsFiles(NamedTuple):
    """Name the PEM files of a process's certificate, its key without a passphrase, and the CA."""

    cert: str
    key: str
    ca: str


def tls_files(environ: Mapping[str, str]) -> TlsFiles | None:
    """Return the files that the environment names for TLS, None where it names none of them.

    Raises:
        ValueError: when only some are set.
    """
    values = TlsFiles(*[environ.get(name, "") for name in _VARIABLES])
    missing = [name for name, value in zip(_VARIABLES, values, strict=True) if not value]
    if missing and any(values):
        raise ValueError(
            f"TLS needs all of {', '.join(_VARIABLES)}, and {' and '.join(missing)} "
            "is not set. Set all three, or none to go without TLS."
        )
    return None if missing else values


def tls_context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    """Return settings with which each side shows its certificate and checks the other's.

    Raises:
        AuthenticationError: when a file cannot be read, or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Processes move among hosts, so certificates name none; the job's own CA is the test.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
        context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:
        named = ", ".join(map("=".join, zip(_VARIABLES, files, strict=True)))
        raise AuthenticationError(
            f"Cannot use the TLS files {named}: {error}. They must be a certificate, its private "
            "key, and the certificate of the authority that signed it, in PEM."
        ) from error
    if server:
        context.num_tickets = 0  # A connection is made once, and never resumed.
    return context


def _no_passphrase() -> str:
    raise ValueError("the private key asks for a passphrase, and nobody is there to type it")


class NonBlockingTls:
    """Make a TLS socket look like a plain one that does not block.

    OpenSSL wants one thread at a time in a connection: a lock is held, but never while waiting.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._tls = sock
        self._lock = threading.Lock()
        self.fileno, self.close, self.detach = sock.fileno, sock.close, sock.detach

    def sendmsg(self, buffers: Sequence[Buffer], *_: object) -> int:
        try:
            with self._lock:
                return self._tls.send(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recvmsg_into(self, views: Sequence[memoryview], *_: object) -> tuple[int, tuple[()]]:
        try:
            with self._lock:
                return self._tls.recv_into(views[0]), ()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLZeroReturnError:
            return 0, ()

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._tls, how)  # SSLSocket's own would end reading as well.
