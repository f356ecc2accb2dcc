"""Log messages of a process that waits for others to start: which are missing, and why.

They are warnings, so programs without logging settings show them. The code that waits checks
regularly whether a report is due; no function here sleeps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

FIRST_SECONDS = 5.0
SHOWN = 3  # The largest number of names in a message.
_log = logging.getLogger("ndistribute")


class WaitReport:
    """Warnings about a wait: the first after 5 s, then one whenever the wait has doubled."""

    def __init__(self, waiter: str, begun: float | None = None) -> None:
        self._waiter = waiter
        self._begun = time.monotonic() if begun is None else begun
        self.due = self._begun + FIRST_SECONDS  # The monotonic time of the next report.

    def tell(self, missing: str) -> bool:
        """Log the missing processes, with address and reason; return whether a report was due.

        If `missing` is empty, log nothing, because another process reports.
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
