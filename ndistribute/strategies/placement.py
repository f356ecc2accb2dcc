"""Where the variables of a strategy go: names and servers by the order of their creation.

All workers that create the same variables in the same order agree on both without a word.
"""

from __future__ import annotations

import threading
from collections import Counter

from ndistribute.cluster.links.origins import current_closure

__all__ = ["Placement"]


class Placement:
    """Name variables and deal them to servers in turn.

    >>> placement = Placement()
    >>> placement.name("w"), placement.name("w"), placement.turn(2), placement.turn(2)
    ('w', 'w_1', 0, 1)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self._given: set[str] = set()
        self._placed = 0

    def name(self, wanted: str) -> str:
        """Return a name that no other variable of this strategy has.

        Raises:
            RuntimeError: a function that a chief sent creates a variable.
        """
        if current_closure() is not None:
            raise RuntimeError(
                f"variable {wanted!r} was created in a function that the chief sent, which may run "
                "on any worker, and again: create variables on the chief."
            )
        with self._lock:
            name = wanted
            while name in self._given:
                self._asked[wanted] += 1
                name = f"{wanted}_{self._asked[wanted]}"
            self._given.add(name)
            return name

    def turn(self, servers: int) -> int:
        """Return the server whose turn it is."""
        with self._lock:
            server, self._placed = self._placed % servers, self._placed + 1
            return server
