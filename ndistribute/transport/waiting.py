"""What a process logs while it waits for others to start: who is missing, where, and why.

It is a warning, so that a program which set no logging up shows it. Nobody sleeps here: whoever
waits asks now and then whether a report is due.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence

from ndistribute.errors import DistributeError
from ndistribute.transport.address import split_address

FIRST_SECONDS = 5.0
SHOWN = 3  # Of those that are missing.
_LOOK_SECONDS = 1.0
_log = logging.getLogger("ndistribute")


class WaitReport:
    """Log who is waited for: first after 5 s, and again each time the wait has doubled."""

    def __init__(self, waiter: str, begun: float | None = None) -> None:
        self._waiter = waiter
        self._begun = time.monotonic() if begun is None else begun
        self.due = self._begun + FIRST_SECONDS  # When the next one is, by the monotonic clock.

    def tell(self, missing: str) -> None:
        """Log who is missing, with the address and the reason, if a report is due.

        If `missing` is empty, another process logs it, and only the next report is made due.
        """
        waited = time.monotonic() - self._begun
        if self._begun + waited >= self.due:
            self.due = self._begun + 2 * waited
            if missing:
                _log.warning("%s has waited %.0f s for %s.", self._waiter, waited, missing)


def shortened(names: Sequence[str]) -> str:
    """Return names in a row, the first few of many.

    >>> shortened(["worker:0", "worker:1"]), shortened(["a", "b", "c", "d", "e"])
    ('worker:0, worker:1', 'a, b, c and 2 more')
    """
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def why_unreached(address: str, error: OSError) -> str:
    """Return why nobody was reached at an address, in words that say what to look at."""
    if isinstance(error, DistributeError):  # It says so itself.
        return str(error).rstrip(".")
    if isinstance(error, socket.gaierror):
        return f"the name {split_address(address)[0]!r} is not found: {error.strerror}"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens there: {error.strerror}"
    if isinstance(error, TimeoutError):
        return "that host does not answer: is the address right, and no firewall between?"
    return str(error).rstrip(".")


def why_absent(addresses: Sequence[str]) -> list[str]:
    """Look for 1 s what listens at the addresses of processes that have not joined."""
    found = {address: why_unreached(address, TimeoutError()) for address in addresses}

    def look(address: str) -> None:
        try:
            socket.create_connection(split_address(address), timeout=_LOOK_SECONDS).close()
        except OSError as error:
            found[address] = why_unreached(address, error)
        else:
            found[address] = (
                "something listens there, but has not joined: it is still starting, or another "
                "program"
            )

    threads = [
        threading.Thread(target=look, args=(address,), name="ndistribute look", daemon=True)
        for address in addresses
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _LOOK_SECONDS
    for thread in threads:  # A name server that does not answer holds it for longer.
        thread.join(max(0.0, deadline - time.monotonic()))
    return [found[address] for address in addresses]
