"""Work done ahead of the consumer: a thread that fills a bounded queue, and a map over threads.

The thread knows the queue and the source, never the consumer's iterator, so an iterator that is
dropped half-way is collected and its thread ends. An error arrives at the element at which it
happened. Either side can close a queue, and no thread outlives the interpreter.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["BoundedQueue", "OpenThreads", "Prefetched", "Workers", "map_ahead"]

T = TypeVar("T")

# A wait is woken by what it waits for; this only bounds how late a lost partner is noticed.
_CHECK_SECONDS = 1.0

# How long the interpreter's exit waits for the element that a thread is making.
_EXIT_SECONDS = 5.0


class Prefetched(Iterator[T], Generic[T]):
    """Iterate over a source whose elements a background thread makes ahead.

    Args:
        source: only the thread touches it from now on, and closes it at the end.
        depth: how many elements wait in the queue at most.

    >>> list(Prefetched(iter("abc"), depth=2))
    ['a', 'b', 'c']
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self._queue = BoundedQueue(depth)
        self._thread = _start("prefetch", _fill, source, self._queue)
        weakref.finalize(self, _end, self._queue, [self._thread])

    @property
    def queue(self) -> BoundedQueue:
        """Return what can be closed to end the thread."""
        return self._queue

    def __next__(self) -> T:
        item = self._queue.get(self._thread)
        if not isinstance(item, _End):
            return item  # type: ignore[no-any-return]
        self.close()
        if item.error is None:
            raise StopIteration
        try:
            raise item.error
        finally:
            del item  # It would hold, by way of the traceback, this frame and all that it holds.

    def close(self) -> None:
        """Tell the thread to end; it does so as soon as the element at hand is made."""
        self._queue.close()


class Workers:
    """Threads that compute what is submitted, in that order.

    A `ThreadPoolExecutor` would not do: to shut it down takes a lock that is not re-entrant, and a
    garbage collection may do so on the thread that is just submitting.

    Args:
        count: how many threads, and how many tasks wait for them at most.
    """

    def __init__(self, count: int) -> None:
        self._tasks = BoundedQueue(count)
        threads = [_start("map", _work, self._tasks) for _ in range(count)]
        weakref.finalize(self, _end, self._tasks, threads)

    def submit(self, fn: Callable[[Any], T], element: Any) -> Future[T]:
        """Return the future result of ``fn(element)``."""
        future: Future[T] = Future()
        if not self._tasks.put((future, fn, element)):
            future.cancel()
        return future

    def close(self) -> None:
        """Cancel what has not begun; the threads end with what they are at."""
        for future, *_ in self._tasks.close():
            future.cancel()


def map_ahead(
    fn: Callable[[Any], T], source: Iterator[Any], workers: Workers, ahead: int
) -> Iterator[T]:
    """Yield ``fn(element)`` in order, computed by workers on at most `ahead` elements at a time.

    >>> list(map_ahead(abs, iter([-1, -2, -3]), Workers(2), ahead=2))
    [1, 2, 3]
    """
    pending: deque[Future[T]] = deque()
    try:
        for future in _submitted(fn, source, workers):
            pending.append(future)
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        workers.close()


def _submitted(
    fn: Callable[[Any], T], source: Iterator[Any], workers: Workers
) -> Iterator[Future[T]]:
    """Submit element after element; the source's own error takes its turn as the last of them."""
    try:
        for element in source:
            yield workers.submit(fn, element)
    except Exception as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        yield failed


class Closable(Protocol):
    """What has threads."""

    def close(self) -> object:
        """Tell the threads to end, without waiting for them."""


class OpenThreads:
    """Remember what has threads, weakly, and close all of it at once.

    An exception's traceback keeps the generators of a pipeline alive, so dropping references alone
    would not end their threads.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._closed = False

    def add(self, closable: Closable) -> None:
        """Remember it; close it at once if this is closed, as a prefetching thread may be late."""
        with self._lock:
            self._open.add(closable)
            closed = self._closed
        if closed:
            closable.close()

    def close(self) -> None:
        """Close everything that is still alive."""
        with self._lock:
            self._closed = True
            remaining = list(self._open)
        for closable in remaining:
            closable.close()


class BoundedQueue:
    """A bounded queue that either side can close.

    Args:
        depth: how many items wait at most.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[Any] = deque()
        # Re-entrant, as a garbage collection may close the queue on the very thread that holds it.
        self._changed = threading.Condition(threading.RLock())
        self._closed = False

    def put(self, item: Any) -> bool:
        """Add an item once there is room; False if the queue is closed."""
        with self._changed:
            while len(self._items) >= self._depth and not self._closed:
                self._changed.wait(_CHECK_SECONDS)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self, producer: threading.Thread | None = None) -> Any:
        """Return the next item, or an end if there is none to come."""
        with self._changed:
            while not self._items and not self._closed:
                woken = self._changed.wait(_CHECK_SECONDS)
                if not woken and producer is not None and not producer.is_alive():
                    return _End(
                        RuntimeError(
                            "the thread that prefetches is gone, as it is after a fork. Make a new "
                            "iterator in this process."
                        )
                    )
            if self._closed:
                return _End(None)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> list[Any]:
        """Wake both sides; nothing goes in or out any more.

        Returns:
            The items that nobody got.
        """
        with self._changed:
            self._closed = True
            dropped, self._items = list(self._items), deque()
            self._changed.notify_all()
        return dropped


class _End:
    """The last item of a queue."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _start(name: str, work: Callable[..., None], *args: Any) -> threading.Thread:
    # A daemon: the interpreter waits for all others before it lets us tell them to end.
    thread = threading.Thread(target=work, args=args, name=f"ndistribute-{name}", daemon=True)
    thread.start()
    return thread


def _end(queue: BoundedQueue, threads: list[threading.Thread]) -> None:
    """Tell threads to end when their owner is dropped, and at the interpreter's exit."""
    queue.close()
    if not threading.main_thread().is_alive():
        # At exit a daemon is frozen where it stands, with the locks that it holds: wait for it.
        deadline = time.monotonic() + _EXIT_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _fill(source: Iterator[Any], queue: BoundedQueue) -> None:
    try:
        for item in source:
            if not queue.put(item):
                break
        else:
            queue.put(_End(None))
    except BaseException as error:  # the consumer raises it
        queue.put(_End(error))
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


def _work(tasks: BoundedQueue) -> None:
    while not isinstance(task := tasks.get(), _End):
        future, fn, element = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(fn(element))
            except BaseException as error:  # the consumer raises it
                future.set_exception(error)
        del task, future, fn, element  # An idle thread keeps no data alive.
