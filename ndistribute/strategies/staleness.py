"""Counts how stale the updates of this process were."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ndistribute.cluster.links.copy import Version
from ndistribute.cluster.links.servers import Outcomes
from ndistribute.cluster.protocol.replies import Accumulated, Done

__all__ = ["StalenessCounts"]


class StalenessCounts:
    """Count how many updates of others each update of this process did not know of.

    >>> counts = StalenessCounts()
    >>> counts.add_update({0: [(0, 4)]}, {0: (Done((7,)),)}, lambda server: 0)
    >>> counts.as_dict()
    {2: 1}
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def add_update(
        self,
        seen: Mapping[int, Sequence[Version | None]],
        outcomes: Outcomes,
        restarts: Callable[[int], int],
    ) -> None:
        """Count one update, by the variable that had changed most.

        Args:
            seen: on which server, the versions that the update was computed from.
            outcomes: what the servers answered.
            restarts: how often a server was started again; versions from before say nothing.
        """
        found = []
        for server, (outcome, *_) in outcomes.items():
            if isinstance(outcome, Accumulated):
                found.append(0 if outcome.accepted else 1)
            elif isinstance(outcome, Done):
                known = restarts(server)
                for then, now in zip(seen[server], outcome.versions, strict=True):
                    if then is not None and then[0] == known:
                        found.append(now - 1 - then[1])
        if found:
            with self._lock:
                self._counts[max(found)] += 1

    def as_dict(self) -> dict[int, int]:
        """Return how many updates there were of each staleness."""
        with self._lock:
            return dict(sorted(self._counts.items()))
