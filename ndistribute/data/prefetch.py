"""Work done ahead of the consumer: threads that take elements from a source and map them.

The threads know the source and a bounded buffer, never the consumer's iterator, so an iterator that
is dropped half-way is collected and its threads end. Elements keep their order, and an error
arrives at the element at which it happened. Either side can close, and no thread outlives the
interpreter.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# A wait is woken by what it waits for; this only bounds how late a lost partner is noticed.
_CHECK_SECONDS = 1.0

# How long the interpreter's exit waits for the element that a thread is making.
_EXIT_SECONDS = 5.0


class Threads:
    """The buffers of an epoch, so that one call ends all their threads.

    An exception's traceback keeps the generators of a pipeline alive, so dropping references alone
    would not end their threads.
    """

    def __init__(self) -> None:
        # Without a lock, as a garbage collection may close an epoch on a thread that holds a
        # buffer's: `add` and `close` each write what the other one reads after its own write.
        self._buffers: list[weakref.ref[Buffer]] = []
        self._closed = False

    def add(self, buffer: Buffer) -> None:
        """Close a buffer with the others, at once if they are."""
        self._buffers.append(weakref.ref(buffer, self._buffers.remove))
        if self._closed:
            buffer.close()

    def close(self) -> None:
        """Tell all threads to end, without waiting for them."""
        self._closed = True
        for each in self._buffers.copy():
            if (buffer := each()) is not None:
                buffer.close()


class Ahead(Iterator[T], Generic[T]):
    """Iterate over a source whose elements background threads make ahead, in order.

    Args:
        source: only the threads touch it from now on, one at a time; they close it at the end.
        depth: how many finished elements wait at most.
        epoch: with which the threads end.
        fn: what is made of each element, on several threads at once; None leaves them as they are.
        threads: how many.

    >>> list(Ahead(iter("abc"), depth=2))
    ['a', 'b', 'c']
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
        self._buffer = Buffer(depth, epoch or Threads())
        shared = Source(source)
        # Daemons: the interpreter waits for all others before it lets us tell them to end.
        self._threads = [
            threading.Thread(
                target=_work,
                args=(shared, fn, self._buffer),
                name="ndistribute-prefetch" if fn is None else "ndistribute-map",
                daemon=True,
            )
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
            del error  # It would hold, by way of the traceback, this frame and all that it holds.

    def close(self) -> None:
        """Tell the threads to end; they do so as soon as the element at hand is made."""
        self._buffer.close()


class Buffer:
    """Outcomes by their number: threads put them as they are made, the consumer gets them in order.

    Args:
        depth: how many wait at most.
        epoch: what ends this too.
    """

    def __init__(self, depth: int, epoch: Threads) -> None:
        self._depth = depth
        # Two conditions of one lock, so that a put wakes only who can go on. Re-entrant, as a
        # garbage collection may close a buffer on the very thread that holds its lock.
        lock = threading.RLock()
        self._room = threading.Condition(lock)
        self._ready = threading.Condition(lock)
        self._made: dict[int, tuple[Any, BaseException | None]] = {}
        self._given = 0
        self._over = False
        epoch.add(self)

    def put(self, number: int, value: Any, error: BaseException | None = None) -> bool:
        """Add an outcome once there is room; False if this is closed."""
        with self._room:
            while not self._over:
                if number < self._given + self._depth:
                    self._made[number] = (value, error)
                    if number == self._given:
                        self._ready.notify()
                    return True
                self._room.wait(_CHECK_SECONDS)
            return False

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
                        "the threads that prefetch are gone, as they are after a fork. Make a new "
                        "iterator in this process."
                    )
            return None, StopIteration()

    def close(self) -> None:
        """Wake both sides; nothing goes in or out any more."""
        with self._room:
            self._over = True
            self._made.clear()
            self._room.notify_all()
            self._ready.notify_all()


class Source:
    """A source that several threads take from, one at a time."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._turn = threading.Lock()
        self._number = -1
        self._over = False

    def take(self) -> tuple[int, Any, BaseException | None] | None:
        """Return the next element or how the source ended, and its number; None after the end."""
        with self._turn:
            if self._over:
                return None
            self._number += 1
            try:
                return self._number, next(self._source), None
            except BaseException as error:  # the consumer raises it
                self._over = True
                return self._number, None, error

    def close(self) -> None:
        """End the source, unless another thread has."""
        with self._turn:
            self._over = True
            getattr(self._source, "close", bool)()


def _work(source: Source, fn: Callable[[Any], Any] | None, buffer: Buffer) -> None:
    while (taken := source.take()) is not None:
        number, value, error = taken
        if error is None and fn is not None:
            try:
                value = fn(value)
            except BaseException as raised:  # the consumer raises it
                error = raised
        if not buffer.put(number, value, error):
            break
        del taken, value, error  # An idle thread keeps no data alive.
    source.close()


def _end(buffer: Buffer, threads: list[threading.Thread]) -> None:
    """Tell threads to end when their owner is dropped, and at the interpreter's exit."""
    buffer.close()
    if not threading.main_thread().is_alive():
        # At exit a daemon is frozen where it stands, with the locks that it holds: wait for it.
        deadline = time.monotonic() + _EXIT_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
