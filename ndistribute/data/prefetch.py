"""Prefetching: background threads that take elements from a source and map them.

The threads refer to the source and to a bounded buffer, but not to the consumer's iterator. So if
the consumer drops the iterator, it is garbage-collected, which stops its threads. Elements keep
their order, and an error is raised at the element that caused it. The threads and the consumer can
both close the buffer, and no thread outlives the interpreter.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Notifications end a wait; this timeout only bounds the delay until a dead thread is noticed.
_CHECK_SECONDS = 1.0

# The time for which the exit of the interpreter waits for a thread to finish its element.
_EXIT_SECONDS = 5.0


class Threads:
    """The buffers of an epoch; closing them stops all its threads.

    The traceback of an exception keeps the generators of a pipeline alive, so dropping references
    is not enough to stop their threads.
    """

    def __init__(self) -> None:
        # There is no lock, because a garbage collection may close an epoch on a thread that holds
        # the lock of a buffer. `add` and `close` each write before they read the other's value.
        self._buffers: list[weakref.ref[_Buffer]] = []
        self._closed = False

    def add(self, buffer: _Buffer) -> None:
        """Register a buffer to be closed with the others; close it now if they are closed."""
        self._buffers.append(weakref.ref(buffer, self._buffers.remove))
        if self._closed:
            buffer.close()

    def close(self, wait: bool = False) -> None:
        """Stop all threads without waiting for them; or `wait` until no thread reads an element."""
        self._closed = True
        for each in self._buffers.copy():
            if (buffer := each()) is not None:
                buffer.close(wait)


class Ahead(Iterator[T], Generic[T]):
    """An iterator over a source whose elements background threads prepare, in order.

    Args:
        source: an iterator. From now on only the threads use it, one thread at a time, and they
            close it at the end.
        depth: the maximum number of prepared elements.
        epoch: the threads' epoch, whose `close` stops them.
        fn: a function that several threads at once apply to elements; None leaves elements
            unchanged.
        threads: the number of threads.

    >>> list(Ahead(iter([-1, -2, -3]), depth=2, fn=abs, threads=2))
    [1, 2, 3]
    """

    def __init__(
        self,
        source: Iterator[Any],
        depth: int,
        epoch: Threads | None = None,
        fn: Callable[[Any], T] | None = None,
        threads: int = 1,
    ) -> None:
        self._buffer = _Buffer(source, depth, fn)
        if epoch is not None:
            epoch.add(self._buffer)
        name = "ndistribute-prefetch" if fn is None else "ndistribute-map"
        # Daemons, because the interpreter joins other threads before it runs our finalizer.
        self._threads = [
            threading.Thread(target=self._buffer.fill, name=name, daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _end, self._buffer, self._threads)

    def __next__(self) -> T:
        value, error = self._buffer.get(self._threads)
        if error is None:
            return value  # type: ignore[no-any-return]
        self.close()
        try:
            raise error
        finally:
            del error  # Its traceback refers to this frame, which would keep everything here alive.

    def close(self) -> None:
        """Stop the threads, each after its current element, without waiting for them."""
        self._buffer.close()


class _Buffer:
    """The source and the numbered outcomes of elements, which an iterator and its threads share."""

    def __init__(self, source: Iterator[Any], depth: int, fn: Callable[[Any], Any] | None) -> None:
        self._source: Iterator[Any] | None = source
        self._depth = depth
        self._fn = fn
        self._turn = threading.Lock()  # Held by the thread that reads an element from the source.
        self._taken = 0
        self._exhausted = False
        # Two conditions on one lock, so that a put wakes only the consumer. The lock is re-entrant,
        # because a garbage collection may close a buffer on the thread that holds its lock.
        lock = threading.RLock()
        self._room = threading.Condition(lock)
        self._ready = threading.Condition(lock)
        self._made: dict[int, tuple[Any, BaseException | None]] = {}
        self._given = 0
        self._over = False

    def fill(self) -> None:
        """Take elements, map them and put them in, until the source ends or the consumer closes."""
        while (taken := self._take()) is not None:
            number, value, error = taken
            if error is None and self._fn is not None:
                try:
                    value = self._fn(value)
                except BaseException as raised:  # The consumer raises it.
                    error = raised
            if not self._put(number, value, error):
                break
            del taken, value, error  # An idle thread keeps no data alive.
        with self._turn:
            source, self._source = self._source, None
        getattr(source, "close", bool)()

    def get(self, threads: list[threading.Thread]) -> tuple[Any, BaseException | None]:
        """Return the next outcome: a value, or the error that ends the iteration."""
        with self._ready:
            while not self._over:
                if self._given in self._made:
                    self._given += 1
                    self._room.notify_all()
                    return self._made.pop(self._given - 1)
                woken = self._ready.wait(_CHECK_SECONDS)
                if not woken and not any(thread.is_alive() for thread in threads):
                    return None, RuntimeError(
                        "the threads that prefetch for this iterator do not exist in this process, "
                        "perhaps because it was forked. Create a new iterator in this process."
                    )
            return None, StopIteration()

    def close(self, wait: bool = False) -> None:
        """End the iteration and wake both sides; or `wait` until no thread reads the source."""
        with self._room:
            self._over = True
            self._made.clear()
            self._room.notify_all()
            self._ready.notify_all()
        if wait:
            self._turn.acquire()
            self._turn.release()

    def _take(self) -> tuple[int, Any, BaseException | None] | None:
        """Return a number with the next element or the final exception; None after the end."""
        with self._turn:
            if self._source is None or self._exhausted or self._over:
                return None
            number, self._taken = self._taken, self._taken + 1
            try:
                return number, next(self._source), None
            except BaseException as error:  # The consumer raises it.
                self._exhausted = True
                return number, None, error

    def _put(self, number: int, value: Any, error: BaseException | None) -> bool:
        """Add an outcome once there is room; return False if the buffer is closed."""
        with self._room:
            while not self._over:
                if number < self._given + self._depth:
                    self._made[number] = (value, error)
                    if number == self._given:
                        self._ready.notify()
                    return True
                self._room.wait(_CHECK_SECONDS)
            return False


def _end(buffer: _Buffer, threads: list[threading.Thread]) -> None:
    """Stop threads when their iterator is garbage-collected, or at the interpreter's exit."""
    buffer.close()
    if not threading.main_thread().is_alive():
        # At the exit, the interpreter freezes daemon threads with the locks that they hold, so wait
        # for them first.
        deadline = time.monotonic() + _EXIT_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
