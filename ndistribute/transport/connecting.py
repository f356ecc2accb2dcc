"""How a process connects to another one: by a Unix socket on its own host, else by the network."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from ndistribute.errors import AuthenticationError
from ndistribute.transport.address import is_of_this_user, split_address, unix_name
from ndistribute.transport.codec import Decoder
from ndistribute.transport.connection import Connection, ConnectionLostError
from ndistribute.transport.handshake import Hello, authenticate
from ndistribute.transport.secret import Credentials

__all__ = ["HANDSHAKE_SECONDS", "connect", "unix_wanted"]

HANDSHAKE_SECONDS = 10.0


def unix_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if processes of one host are to meet at Unix sockets.

    >>> unix_wanted({}), unix_wanted({"NDISTRIBUTE_UNIX_SOCKETS": "0"})
    (True, False)
    """
    environ = os.environ if environ is None else environ
    return environ.get("NDISTRIBUTE_UNIX_SOCKETS", "1") != "0"


def connect(
    address: str,
    credentials: Credentials,
    hello: Hello,
    kinds: Decoder[Any],
    *,
    deadline: float,
    sealed: bool = False,
    unix: bool | None = None,
) -> Connection:
    """Return an authenticated connection to a process: by a Unix socket if it is on this host.

    Args:
        address: ``host:port``.
        credentials: the job's secret and identity, and this process's certificate.
        hello: what the process is told of this one.
        kinds: reads what it sends.
        deadline: on the clock of `time.monotonic`.
        sealed: whether frames carry a MAC; both ends must agree.
        unix: whether to try a Unix socket; None: as `NDISTRIBUTE_UNIX_SOCKETS` says.

    Raises:
        AuthenticationError: it belongs to another job, or to none.
        ConnectionLostError: nobody answers there.
    """
    deadline = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
    wanted = unix_wanted() if unix is None else unix
    try:
        tls, instead = credentials.tls, None
        sock = _unix_socket(address, deadline) if wanted else None
        if sock is not None:
            tls = None  # Nobody listens on a host's sockets.
        else:
            patience = max(0.001, deadline - time.monotonic())
            sock = socket.create_connection(split_address(address), timeout=patience)
            if wanted and tls is None:
                instead = functools.partial(_unix_socket, address, deadline)
        sock, accepted = authenticate(
            sock,
            credentials.secret,
            credentials.signed(hello),
            deadline=deadline,
            tls=tls,
            instead=instead,
        )
        return Connection(sock, accepted, kinds, sealed=sealed)
    except OSError as error:
        if isinstance(error, AuthenticationError | ConnectionLostError):
            raise
        raise ConnectionLostError(f"{error}") from error


def _unix_socket(address: str, deadline: float) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(unix_name(address))
        if is_of_this_user(sock):  # Anybody may take a name; nobody else's process learns a proof.
            return sock
    except OSError:
        pass
    sock.close()
    return None
