"""Whose changes this process makes: its own, or those of the closure that it runs.

A worker runs one closure at a time, and all its threads work for it, so the closure is known to the
whole process. A closure that is run again, here or elsewhere, gives its changes the same origins;
so each is made once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from ndistribute.cluster.links.totals import Report
from ndistribute.cluster.protocol.requests import Origin
from ndistribute.cluster.protocol.spans import Span

__all__ = ["Closure", "Numbers", "closure", "current_closure", "numbers_of"]

_SHIFT = 16  # A closure makes fewer than so many bits' worth of transactions on one server.


class Closure:
    """Number the transactions of one closure, and know what is to be done at its end.

    Args:
        series: of the coordinator that sent it.
        number: of the closure in the series, from 1.

    >>> Closure("chief", 3).origin("ps:0")
    Origin(series='chief', number=196609)
    """

    def __init__(self, series: str, number: int) -> None:
        self._series = series
        self._number = number
        self.reports: dict[str, Report] = {}
        """What was learned of each server on the way."""
        self._made: Counter[str] = Counter()
        self._endings: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def origin(self, server: str) -> Origin:
        """Return the origin of the closure's next transaction on a server.

        Raises:
            RuntimeError: it has made too many.
        """
        with self._lock:
            self._made[server] += 1
            if self._made[server] >= 1 << _SHIFT:
                raise RuntimeError(
                    f"one function made {1 << _SHIFT} separate updates: schedule smaller ones."
                )
            return Origin(self._series, (self._number << _SHIFT) + self._made[server])

    def at_end(self, do: Callable[[], None]) -> None:
        """Call a function when the closure has ended without an error."""
        with self._lock:
            self._endings.append(do)

    def end(self) -> None:
        """Do what is to be done at the end."""
        for do in self._endings:
            do()


class _Process:
    """What all threads share: the closure that this process runs."""

    def __init__(self) -> None:
        self.current: Closure | None = None
        self.in_main = False  # Whether the main thread runs it.


_process = _Process()


@contextlib.contextmanager
def closure(series: str, number: int) -> Iterator[Closure]:
    """Make the changes of a ``with`` block those of a closure.

    They are kept back until the end, or until something is read that they change. After an error
    those kept back are dropped.

    Args:
        series: of the coordinator that sent it.
        number: the closure's, from 1.

    Raises:
        RuntimeError: this process runs another one.

    >>> with closure("chief", 1) as running:
    ...     current_closure() is running
    True
    """
    if _process.current is not None:
        raise RuntimeError("a worker runs one function at a time, and one is running.")
    running = Closure(series, number)
    _process.in_main = threading.current_thread() is threading.main_thread()
    _process.current = running
    try:
        yield running
        running.end()
    finally:
        _process.current = None


def current_closure() -> Closure | None:
    """Return the closure that this thread works for, if there is one.

    All threads do but the main one, unless it runs the closure itself: a process that is its own
    worker schedules there what another thread runs.
    """
    running = _process.current
    if running is None or _process.in_main:
        return running
    return None if threading.current_thread() is threading.main_thread() else running


def numbers_of(closures: Span) -> Span:
    """Return the numbers that the transactions of some closures can have.

    >>> Closure("chief", 3).origin("ps:0").number - numbers_of(Span(3, 4)).first
    1
    """
    return Span(closures.first << _SHIFT, ((closures.last + 1) << _SHIFT) - 1)


class Numbers:
    """Number the requests of a series, and know up to which all are over.

    >>> numbers = Numbers()
    >>> first, second = numbers.take(), numbers.take()
    >>> numbers.give_back(second)
    >>> numbers.settled
    0
    """

    def __init__(self) -> None:
        self._last = 0
        self._open: set[int] = set()
        self._lock = threading.Lock()

    def take(self) -> int:
        """Return the next number, for a request that begins."""
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last

    def give_back(self, number: int) -> None:
        """Say that the request of a number is over."""
        with self._lock:
            self._open.discard(number)

    @property
    def settled(self) -> int:
        """Return the number up to which all are over."""
        with self._lock:
            return min(self._open, default=self._last + 1) - 1
