"""Gives each optimizer of a process a name, the same in every process that runs the same script."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

__all__ = ["unique_name"]


class _Names:
    """Know which names were given: to optimizers made in a strategy's scope, and to the others."""

    def __init__(self) -> None:
        self._scopeless: set[str] = set()
        self._scoped: set[str] = set()
        self._of: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def next(self, name: str, strategy: Any) -> str:
        with self._lock:
            if strategy is None:  # It may be used with any strategy.
                own, others = self._scopeless, self._scoped
            else:
                own, others = self._of.setdefault(strategy, set()), self._scopeless
            numbered = (f"{name}_{number}" if number else name for number in itertools.count())
            found = next(one for one in numbered if one not in own and one not in others)
            own.add(found)
            if strategy is not None:
                self._scoped.add(found)
            return found


_names = _Names()


def unique_name(name: str, strategy: Any = None) -> str:
    """Return a name the first time it is asked for, and one with a number from then on.

    Args:
        name: what is named.
        strategy: in whose scope it is made; each strategy counts from the beginning, so that one
            that goes on with another's variables finds what its optimizers kept.

    >>> unique_name("example"), unique_name("example")
    ('example', 'example_1')
    """
    return _names.next(name, strategy)
