"""Log messages of a process that waits for others to start: the missing ones, and why.

They are warnings, so programs without logging settings show them. The code that waits checks
regularly whether a report is due; no function here sleeps.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from ndistribute.errors import DistributeError
from ndistribute.transport.address import split_address

FIRST_SECONDS = 5.0
SHOWN = 3  # The most names in a message.
_LOOK_SECONDS = 1.0
_RETRANSMITS = 2  # The byte of `struct tcp_info` that counts them until one is acknowledged.
_log = logging.getLogger("ndistribute")


class WaitReport:
    """Warnings about a wait: the first after 5 s, and another each time the wait has doubled."""

    def __init__(self, waiter: str, begun: float | None = None) -> None:
        self._waiter = waiter
        self._begun = time.monotonic() if begun is None else begun
        self.due = self._begun + FIRST_SECONDS  # The monotonic time of the next report.

    def tell(self, missing: str) -> bool:
        """Log the missing processes, with address and reason, if a report is due; return if so.

        If `missing` is empty, log nothing: another process reports.
        """
        waited = time.monotonic() - self._begun
        due = self._begun + waited >= self.due
        if due:
            self.due = self._begun + 2 * waited
            if missing:
                _log.warning("%s has waited %.0f s for %s.", self._waiter, waited, missing)
        return due


def shortened(names: Sequence[str]) -> str:
    """Return the first names, joined by commas, and the number of the others.

    >>> shortened(["worker:0", "worker:1"]), shortened(["a", "b", "c", "d", "e"])
    ('worker:0, worker:1', 'a, b, c and 2 more')
    """
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def why_unreached(address: str, error: OSError) -> str:
    """Return a text for a failed connection to an address: why it failed, and what to check."""
    if isinstance(error, DistributeError):  # Its text has all of this.
        return str(error).rstrip(".")
    if isinstance(error, socket.gaierror):
        return f"the host name {split_address(address)[0]!r} was not found: {error.strerror}"
    host, ip = split_address(address)[0], error.filename
    found = f" ({host} is {ip} here)" if ip not in (None, host) else ""
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens there: {error.strerror}{found}"
    if isinstance(error, TimeoutError):
        return f"that host does not answer: check the address and firewalls{found}"
    return f"{error.strerror or error}".rstrip(".") + found


def is_out_of_reach(sock: Any) -> bool:
    """Return True if the peer's host does not acknowledge what this one sends."""
    # The host of a stopped process acknowledges, and that of one that died closes at once.
    with contextlib.suppress(OSError):  # A Unix socket, or one that was closed.
        return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[_RETRANSMITS])
    return False


def why_absent(addresses: Sequence[str]) -> list[str]:
    """Return why each process has not joined; try for at most 1 s to connect to them."""
    found = {address: why_unreached(address, TimeoutError()) for address in addresses}

    def look(address: str) -> None:
        try:
            socket.create_connection(split_address(address), timeout=_LOOK_SECONDS).close()
        except OSError as error:
            found[address] = why_unreached(address, error)
        else:
            found[address] = (
                "a process listens there, but has not joined: it is starting, or is another program"
            )

    threads = [
        threading.Thread(target=look, args=(address,), name="ndistribute look", daemon=True)
        for address in addresses
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _LOOK_SECONDS
    for thread in threads:  # An unreachable name server blocks a thread for longer.
        thread.join(max(0.0, deadline - time.monotonic()))
    return [found[address] for address in addresses]
