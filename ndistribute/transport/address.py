"""Addresses of processes (``host:port`` or ``[v6]:port``), and the peer of a socket.

This file resolves no names, so a name server cannot change which addresses count as local.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
import struct

_PEER = struct.Struct("3i")  # Process, user, group.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of an address; a ``grpc://`` is dropped.

    >>> split_address("localhost:12345"), split_address("[::1]:80")
    (('localhost', 12345), ('::1', 80))
    """
    host, colon, port = address.removeprefix("grpc://").rpartition(":")
    if bracketed := host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    well_formed = getattr(_ip(host), "version", 0) == 6 if bracketed else _NAME.fullmatch(host)
    if not (colon and well_formed and re.fullmatch("[0-9]{1,5}", port) and int(port) < 65536):
        what = f"{address!r} is not an address: write host:port, for example 'localhost:12345',"
        raise ValueError(f"{what} or '[::1]:12345' for IPv6, with a port from 0 to 65535.")
    return host, int(port)


def address_of(host: str, port: int) -> str:
    """Return the address of a host and a port, with IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return True for ``localhost``, ``127.0.0.0/8`` and ``::1``.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("node1")
    (True, True, False)
    """
    ip = _ip(host)
    return host.lower() == "localhost" if ip is None else ip.is_loopback


def is_name(host: str) -> bool:
    """Return True for a name that may resolve to different addresses on different hosts.

    >>> is_name("node1"), is_name("localhost"), is_name("10.0.0.1")
    (True, False, False)
    """
    return _ip(host) is None and not is_loopback(host)


def unix_name(address: str) -> bytes:
    """Return the name of an address's Unix socket, for clients on the same host.

    The name is in the abstract namespace: there is no file, and each network namespace has its own.

    >>> unix_name("localhost:1234") == unix_name("127.0.0.1:1234")
    True
    """
    host, port = split_address(address)
    host = "loopback" if host.lower() in ("localhost", "127.0.0.1", "::1") else host.lower()
    place = f"{os.environ.get('NDISTRIBUTE_HOST_ID', '')} {os.geteuid()} {host}:{port}"
    return b"\0ndistribute-" + hashlib.sha256(place.encode()).hexdigest()[:32].encode()


def name_of_peer(sock: socket.socket) -> str:
    """Return the address of a connection's peer, for messages."""
    try:
        name = sock.getpeername()
    except OSError:
        return "who is gone"
    if not isinstance(name, tuple):
        return "localhost"  # A Unix socket.
    # A socket that accepts IPv4 and IPv6 shows IPv4 addresses in this form.
    return address_of(name[0].removeprefix("::ffff:"), name[1])


def is_of_this_user(sock: socket.socket) -> bool:
    """Return True if the peer of a Unix socket runs as this user."""
    peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.geteuid())


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
