"""How a process waits for counters in shared memory: first by looking, then by sleeping.

What comes within microseconds is seen within microseconds; whoever waits longer leaves the
processor and the interpreter's lock to others, and listens for failures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ndistribute.collective.backend import Call
from ndistribute.timeline import span

if TYPE_CHECKING:
    from ndistribute.collective.control import ControlPlane

__all__ = ["Spin"]

# About 40 ns each in CPython: a while in which a process that does the same work will come.
_LOOKS = 1000
# Until then a process that waits stays on its core but lets others have it; a sleep, even of no
# length, costs 60 to 100 us, which is what a small call in a small step would feel.
_YIELD_SECONDS = 300e-6
_SLEEPS = (50e-6, 1e-3)
_CHECK_SECONDS = 1e-3


class Spin:
    """Wait for the counters of other processes.

    Args:
        peers: all processes.
        ranks: those that share this host.
    """

    def __init__(self, peers: ControlPlane, ranks: Sequence[int]) -> None:
        self._peers = peers
        self._ranks = ranks
        # With fewer cores than processes, whoever looks takes the core from whom it waits for.
        self._looks = _LOOKS if len(ranks) <= len(os.sched_getaffinity(0)) else 0

    def until(
        self, counters: Sequence[memoryview[int]], least: int, call: Call, timeout: float
    ) -> None:
        """Return when every counter is at least so large.

        Args:
            counters: one for each rank that shares this host.
            least: what they must reach.
            call: what is waited for.
            timeout: how long to wait, in seconds.
        """
        looks = self._looks
        for counter in counters:
            while counter[0] < least:
                looks -= 1
                if looks < 0:
                    with span("wait", call.title):
                        self._patiently(counters, least, call, timeout)
                    return

    def _patiently(
        self, counters: Sequence[memoryview[int]], least: int, call: Call, timeout: float
    ) -> None:
        def missing() -> list[int]:
            return [
                rank
                for rank, counter in zip(self._ranks, counters, strict=True)
                if counter[0] < least
            ]

        patience = self._peers.patience(call, timeout)
        start = checked = time.monotonic()
        for counter in counters:
            while counter[0] < least:
                now = time.monotonic()
                if now - checked >= _CHECK_SECONDS:
                    checked = now
                    patience.check(missing)
                if now - start < _YIELD_SECONDS:
                    os.sched_yield()
                else:
                    # In proportion, so that waking late never adds much to the wait.
                    shortest, longest = _SLEEPS
                    time.sleep(min(max(shortest, (now - start) / 20), longest))
