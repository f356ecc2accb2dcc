"""Connects a process to another over TCP, or tells why it cannot.

Every attempt ends by a deadline, even if a name server does not answer. The kernel knows whether a
peer's host still answers.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ndistribute.errors import DistributeError
from ndistribute.transport.address import is_loopback, split_address

_LOOK_SECONDS = 1.0
_RESET = 7  # TCP_CLOSE
# Of the kernel's `struct tcp_info`: the state, retransmissions and probes without an answer, their
# backoff, and the milliseconds since the last data and the last acknowledgement came.
_TCP_INFO = struct.Struct("=BxBBB47xII")


def tcp_socket(address: str, deadline: float) -> socket.socket:
    """Return a connected socket; the deadline also limits the look-up of the name."""
    failure: OSError = socket.gaierror(socket.EAI_AGAIN, "the name server does not answer")
    places = _looked_up(address, deadline)
    for number, (family, kind, protocol, _, place) in enumerate(places):
        sock = socket.socket(family, kind, protocol)
        try:
            # If an address does not answer, time remains for the next ones.
            sock.settimeout(max(0.001, (deadline - time.monotonic()) / (len(places) - number)))
            sock.connect(place)
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure, error.filename = error, place[0]  # For `why_unreached`.
    raise failure


def refuses(address: str, seconds: float) -> bool:
    """Return True if nothing listens at an address of a host that answers."""
    try:
        tcp_socket(address, time.monotonic() + seconds).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _looked_up(address: str, deadline: float) -> list[Any]:
    """Return the socket addresses of an address; none after the deadline."""
    place = split_address(address)
    if is_loopback(place[0]):
        return socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    places: Future[list[Any]] = Future()

    def look() -> None:
        try:
            places.set_result(socket.getaddrinfo(*place, type=socket.SOCK_STREAM))
        except Exception as error:
            places.set_exception(error)

    # `getaddrinfo` has no timeout, and cannot be interrupted.
    threading.Thread(target=look, name="ndistribute look", daemon=True).start()
    try:
        return places.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return []


def why_unreached(address: str, error: OSError) -> str:
    """Return a text for a failed connection to an address: why it failed, and what to check."""
    if isinstance(error, DistributeError):  # Its text already says all this.
        return str(error).rstrip(".")
    if isinstance(error, socket.gaierror):
        return f"the host name {split_address(address)[0]!r} was not found: {error.strerror}"
    host, ip = split_address(address)[0], error.filename
    resolved = f" ({host} is {ip} here)" if ip not in (None, host) else ""
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens there: {error.strerror}{resolved}"
    if isinstance(error, TimeoutError):
        return f"that host does not answer: check the address and firewalls{resolved}"
    return f"{error.strerror or error}".rstrip(".") + resolved


def look_for(address: str) -> str:
    """Return why no connection to an address can be made within 1 s; empty if one can."""
    try:
        tcp_socket(address, time.monotonic() + _LOOK_SECONDS).close()
    except OSError as error:
        return why_unreached(address, error)
    return ""


def why_absent(addresses: Sequence[str]) -> list[str]:
    """Return why each process has not joined; trying to connect takes at most 1 s."""
    listens = "a process listens there, but has not joined: it is starting, or is another program"
    with ThreadPoolExecutor(len(addresses)) as pool:
        return [why or listens for why in pool.map(look_for, addresses)]


def is_out_of_reach(sock: Any) -> bool:
    """Return True if the peer's host does not acknowledge what this one sends."""
    # A stopped process's host still acknowledges; a dead process's host closes at once.
    with contextlib.suppress(OSError):  # A Unix socket, or one that was closed.
        return bool(_tcp_info(sock)[1])
    return False


def unanswered_seconds(sock: Any) -> float:
    """Return the seconds since the peer's host last answered; 0 if no answer is due.

    TCP_USER_TIMEOUT cannot serve here: it would end the connection to a process that computes and
    does not read.
    """
    state, retransmits, probes, backoff, data, answer = _tcp_info(sock)
    # Probes of a full window, which back off, may be minutes apart. Its receiver probes as well.
    if state == _RESET or not (retransmits or (probes and not backoff)):
        return 0.0
    return float(min(data, answer)) / 1000


def _tcp_info(sock: Any) -> tuple[int, ...]:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return _TCP_INFO.unpack(info)
