"""Addresses of processes, as ``host:port`` or ``[v6]:port``.

Pure text: no name is looked up, so that whether an address stays on this host does not depend on
what a name server answers.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
import struct

__all__ = ["is_loopback", "is_of_this_user", "name_of_peer", "split_address", "unix_name"]

_PEER = struct.Struct("3i")  # Process, user, group.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    Args:
        address: ``host:port``, where an IPv6 host stands in brackets, or ``grpc://host:port``,
            which is read as the same. Port 0 means any free port.

    Returns:
        The host, without brackets, and the port.

    Raises:
        ValueError: when it is not such an address.

    >>> split_address("localhost:12345"), split_address("[::1]:80")
    (('localhost', 12345), ('::1', 80))
    """
    host, colon, port = address.removeprefix("grpc://").rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    well_formed = _is_version_6(host) if bracketed else bool(_NAME.fullmatch(host))
    if not (colon and well_formed and re.fullmatch("[0-9]{1,5}", port) and int(port) < 65536):
        raise ValueError(
            f"{address!r} is not an address: write host:port, for example 'localhost:12345', "
            "or '[::1]:12345' for IPv6, with a port from 0 to 65535."
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Say whether a host is this one whatever a name server says.

    Args:
        host: a name or an IP address, as ``split_address`` returns it.

    Returns:
        True for ``localhost``, ``127.0.0.0/8`` and ``::1``.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("node1")
    (True, True, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def unix_name(address: str) -> bytes:
    """Return the name of the Unix socket beside an address, for clients of the same host.

    It is in the system's abstract space: no file has it, and each network namespace has its own.

    >>> unix_name("localhost:1234") == unix_name("127.0.0.1:1234")
    True
    """
    host, port = split_address(address)
    host = "loopback" if host.lower() in ("localhost", "127.0.0.1", "::1") else host.lower()
    place = f"{os.environ.get('NDISTRIBUTE_HOST_ID', '')} {os.geteuid()} {host}:{port}"
    return b"\0ndistribute-" + hashlib.sha256(place.encode()).hexdigest()[:32].encode()


def name_of_peer(sock: socket.socket) -> str:
    """Return the address of a connection's other end, for messages about it.

    Args:
        sock: a socket that was connected once.
    """
    try:
        name = sock.getpeername()
    except OSError:
        return "who is gone"
    if not isinstance(name, tuple):
        return "without an address"  # A pair of sockets within this host.
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


def is_of_this_user(sock: socket.socket) -> bool:
    """Return True if the process at the other end of a Unix socket is this user's."""
    peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.geteuid())


def _is_version_6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
