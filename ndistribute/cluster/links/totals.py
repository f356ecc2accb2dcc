"""How many updates a server made in each of its lives, and how many were lost between two.

A server counts what it changes, and its snapshots hold the count. So a life that began with less
than is known of the one before has lost the difference. Nobody knows of every update: what is
counted as lost here is lost, and there may be more.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

__all__ = ["Report", "Totals"]


@dataclass(frozen=True, slots=True)
class Report:
    """What one process knows of a life of a server, for another one to know.

    Args:
        server: its title.
        life: which life.
        began: how many updates it began with, from a snapshot.
        total: how many it had made at least, those included.
    """

    server: str
    life: str
    began: int
    total: int


@dataclass(slots=True)
class _Life:
    began: int | None = None
    total: int = 0


class Totals:
    """Keep account of one server; its user has the lock.

    >>> totals = Totals()
    >>> totals.began("first", 0)
    False
    >>> totals.saw("first", 5)
    >>> totals.began("second", 3)
    True
    >>> totals.lost
    2
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}  # In the order in which they were heard of.

    def saw(self, life: str, total: int) -> None:
        """Note how many updates a life had made, the earlier ones included."""
        known = self._lives.setdefault(life, _Life())
        known.total = max(known.total, total)

    def began(self, life: str, total: int) -> bool:
        """Note with how many updates a life began; say whether that is news of a restart."""
        self.saw(life, total)
        known = self._lives[life]
        news = known.began is None and any(one.began is not None for one in self._lives.values())
        known.began = total
        return news

    def report(self, server: str, life: str) -> Report | None:
        """Return what is known of a life; None where it is not known how that began."""
        known = self._lives.get(life)
        if known is None or known.began is None:
            return None
        return Report(server, life, known.began, known.total)

    @property
    def lost(self) -> int:
        """Return how many updates are lost at least."""
        lives = [life for life in self._lives.values() if life.began is not None]
        return sum(
            max(0, before.total - (after.began or 0)) for before, after in itertools.pairwise(lives)
        )
