"""Optional TLS between the processes of a job: each side shows a certificate of the job's own CA.

TLS hides and protects what is sent after the handshake; that a peer belongs to the job is proved
by the secret, with or without it.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ndistribute.errors import AuthenticationError
from ndistribute.transport.codec import Buffer

__all__ = ["NonBlockingTls", "TlsFiles", "tls_context", "tls_files"]

_VARIABLES = ("NDISTRIBUTE_TLS_CERT", "NDISTRIBUTE_TLS_KEY", "NDISTRIBUTE_TLS_CA")


@dataclass(frozen=True)
class TlsFiles:
    """Name the files of a process's certificate.

    Args:
        cert: this process's certificate, PEM.
        key: its private key, PEM, without a passphrase.
        ca: the certificate of the authority that signed every process's certificate, PEM.
    """

    cert: str
    key: str
    ca: str


def tls_files(environ: Mapping[str, str]) -> TlsFiles | None:
    """Return the files that the environment names for TLS.

    Args:
        environ: the environment, with all of ``NDISTRIBUTE_TLS_CERT``, ``_KEY`` and ``_CA``, or
            none of them.

    Returns:
        The files, or None where TLS is not wanted.

    Raises:
        ValueError: when only some are set.

    >>> tls_files({}) is None
    True
    """
    values = [environ.get(name, "") for name in _VARIABLES]
    missing = [name for name, value in zip(_VARIABLES, values, strict=True) if not value]
    if len(missing) == len(_VARIABLES):
        return None
    if missing:
        raise ValueError(
            f"TLS needs all of {', '.join(_VARIABLES)}, and {' and '.join(missing)} "
            "is not set. Set all three, or none to go without TLS."
        )
    return TlsFiles(*values)


def tls_context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    """Return settings with which each side shows its certificate and checks the other's.

    Args:
        files: this process's certificate.
        server: whether this side accepts connections.

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
        names = zip(_VARIABLES, (files.cert, files.key, files.ca), strict=True)
        raise AuthenticationError(
            f"Cannot use the TLS files {', '.join(f'{name}={file}' for name, file in names)}: "
            f"{error}. They must be a certificate, its private key, and the certificate of the "
            "authority that signed it, in PEM."
        ) from error
    if server:
        context.num_tickets = 0  # A connection is made once, and never resumed.
    return context


def _no_passphrase() -> str:
    raise ValueError("the private key asks for a passphrase, and nobody is there to type it")


class NonBlockingTls:
    """Make a TLS socket look like a plain one that does not block.

    OpenSSL wants one thread at a time in a connection, so a lock is held in each operation, and
    none while waiting.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._tls = sock
        self._lock = threading.Lock()
        self.fileno, self.close, self.detach = sock.fileno, sock.close, sock.detach

    def sendmsg(self, buffers: Sequence[Buffer], beside: object = None, flags: int = 0) -> int:
        try:
            with self._lock:
                return self._tls.send(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, view: memoryview) -> int:
        try:
            with self._lock:
                return self._tls.recv_into(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLZeroReturnError:
            return 0

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._tls, how)  # SSLSocket's own would end reading as well.
