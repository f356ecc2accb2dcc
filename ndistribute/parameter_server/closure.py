"""Closures: functions that a coordinator sent, whose changes on servers are made once.

What a closure changes is kept back in the worker and goes out at its end, one transaction to each
server, under the closure's number: so one that is run again, here or elsewhere, changes everything
once. A closure that reads what it has changed sends that much earlier.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.parameter_server.messages import Aggregate, Apply, Change, Outcome, Report
from ndistribute.transport.codec import Array, Record

Changes = Mapping[int, Sequence[Change]]  # What to change on which server, and what became of it.
Outcomes = Mapping[int, tuple[Outcome, ...]]
Then = Callable[[Outcomes], None]

_SHIFT = 16  # A closure makes fewer than so many bits' worth of transactions.
_BUFFERED_BYTES, _BUFFERED_CHANGES = 1 << 28, 4096  # So much a closure keeps back at most.
_REUSED_BYTES = 1 << 16  # Smaller arrays the allocator keeps by itself.


class Closure:
    """Number the transactions of one closure of a series, and know what is to be done at its end.

    `low_water` is the number of the lowest closure of the series that is not over.
    """

    current: Closure | None = None  # The one that this process runs, with all its threads.

    def __init__(self, series: str, number: int, low_water: int) -> None:
        self.series = series
        self.low_water = low_water << _SHIFT
        self.in_main = threading.current_thread() is threading.main_thread()
        self.reports: dict[str, Report] = {}  # What was learned of each server on the way.
        self.at_end: list[Callable[[], None]] = []  # Called when it has ended without an error.
        self._sequences = itertools.count((number << _SHIFT) + 1)
        self._end = (number + 1) << _SHIFT

    def sequence(self) -> int:
        sequence = next(self._sequences)
        if sequence >= self._end:
            made = f"one function made {1 << _SHIFT} separate updates"
            raise RuntimeError(f"{made}: schedule smaller ones.")
        return sequence


@contextlib.contextmanager
def closure(series: str, number: int, low_water: int = 1) -> Iterator[Closure]:
    """Make the changes of a ``with`` block those of a closure.

    They are kept back until the end, or until something is read that they change. After an error
    those kept back are dropped. A worker runs one closure at a time.
    """
    if Closure.current is not None:
        raise RuntimeError("a worker runs one function at a time, and one is running.")
    running = Closure.current = Closure(series, number, low_water)
    try:
        yield running
        for do in running.at_end:
            do()
    finally:
        Closure.current = None


def current_closure() -> Closure | None:
    """Return the closure that this thread works for, if there is one.

    All threads do but the main one, unless it runs the closure itself: a process that is its own
    worker schedules there what another thread runs.
    """
    running = Closure.current
    if running is None or running.in_main:
        return running
    return None if threading.current_thread() is threading.main_thread() else running


class WriteBuffer:
    """Keep back what the closure that runs changes, until `send` makes it for the closure."""

    def __init__(self, send: Callable[[Changes, Closure | None], Outcomes]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._spare: list[Array] = []
        self._reset(None)

    def add(self, running: Closure, changes: Changes, then: Then | None) -> None:
        """Keep changes, as they are now, until the end of the closure or until they are many."""
        with self._lock:
            if self._running is not running:
                self._reset(running)
                running.at_end.append(lambda: self._flush(running))
            owned = {i: [self._owned(change) for change in some] for i, some in changes.items()}
            self._kept.append((owned, then))
            self._names.update(*(_written(change) for some in owned.values() for change in some))
            nbytes = sum(copy.nbytes for copy in self._copies)
            full = nbytes >= _BUFFERED_BYTES or len(self._kept) >= _BUFFERED_CHANGES
        if full:
            self._flush(running)

    def flush_before(self, names: Iterable[str]) -> None:
        """Send what is kept if it changes a variable that is about to be read."""
        running = self._running
        if running is None or running is not current_closure():
            return
        if not self._names.isdisjoint(names):
            self._flush(running)

    def _reset(self, running: Closure | None) -> None:
        self._running = running
        self._kept: list[tuple[Changes, Then | None]] = []
        self._names: set[str] = set()
        self._copies: list[Array] = []

    def _flush(self, running: Closure) -> None:
        with self._lock:
            if self._running is not running or not self._kept:
                return
            kept, copies = self._kept, self._copies
            self._reset(running)
        changes: dict[int, list[Change]] = {}
        for some, _ in kept:
            for i, own in some.items():
                changes.setdefault(i, []).extend(own)
        outcomes = {i: iter(made) for i, made in self._send(changes, running).items()}
        with self._lock:  # To touch new memory costs more than to copy: the next closure has it.
            self._spare = [copy for copy in copies if copy.nbytes >= _REUSED_BYTES]
        for some, then in kept:
            made = {i: tuple(itertools.islice(outcomes[i], len(own))) for i, own in some.items()}
            if then is not None:
                then(made)

    def _owned(self, part: Any) -> Any:
        """Return a change, or a part of one, with arrays that nobody else can write to."""
        if isinstance(part, np.ndarray):
            if not _writable(part):
                return part
            self._copies.append(self._copy_of(part))
            return self._copies[-1]
        if isinstance(part, tuple):
            return tuple(self._owned(item) for item in part)
        if isinstance(part, Record):
            names = part.__struct_fields__
            return type(part)(**{name: self._owned(getattr(part, name)) for name in names})
        return part

    def _copy_of(self, array: Array) -> Array:
        for index, spare in enumerate(self._spare):
            if (spare.shape, spare.dtype) == (array.shape, array.dtype):
                del self._spare[index]
                np.copyto(spare, array)
                return spare
        return array.copy(order="C")


def _written(change: Change) -> tuple[str, ...]:
    """Return the names of the variables that a change writes to."""
    if isinstance(change, Aggregate):
        return _written(change.apply)
    if isinstance(change, Apply):
        return (*change.names, *(name for some in change.slots for name in some), change.counter)
    return (change.name,)


def _writable(array: Array) -> bool:
    """Return True if an array can still change, through itself or through what it is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    return base is not None
