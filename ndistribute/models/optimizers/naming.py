"""Gives each optimizer of a process a name, the same in every process that runs the same script."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict

__all__ = ["unique_name"]


class _Names:
    """Count how often a name was asked for."""

    def __init__(self) -> None:
        self._counts: dict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._lock = threading.Lock()

    def next(self, name: str) -> str:
        with self._lock:
            number = next(self._counts[name])
        return f"{name}_{number}" if number else name


_names = _Names()


def unique_name(name: str) -> str:
    """Return a name the first time it is asked for, and one with a number from then on.

    >>> unique_name("example"), unique_name("example")
    ('example', 'example_1')
    """
    return _names.next(name)
