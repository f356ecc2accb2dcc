"""Calls that are made at the same time, on threads that hold up nobody's end.

The pools of the standard library wait for their calls when the interpreter ends, and a call to a
server that is away may take minutes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Abreast"]

T = TypeVar("T")

_Job = tuple["Future[Any]", Callable[[], Any]]


class Abreast:
    """Make calls on threads, as many as there are calls under way; idle ones are used again.

    Args:
        name: of the threads.

    >>> abreast = Abreast("doctest")
    >>> abreast.start(lambda: 6 * 7).result(timeout=5)
    42
    >>> abreast.close(timeout=5)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
        self._threads: set[threading.Thread] = set()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Begin a call, and return what will have its result."""
        future: Future[T] = Future()
        with self._lock:
            line = self._idle.pop() if self._idle else self._started()
        line.put((future, call))
        return future

    def close(self, timeout: float) -> None:
        """End the threads; those whose calls last longer end with them."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            idle, self._idle = self._idle, []  # Whoever calls once more must not wait for them.
            for line in idle:
                line.put(None)
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _started(self) -> queue.SimpleQueue[_Job | None]:
        line: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(line,), name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()
        return line

    def _serve(self, line: queue.SimpleQueue[_Job | None]) -> None:
        while (job := line.get()) is not None:
            future, call = job
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del job, future, call  # Nothing of a call is held until the next one.
            with self._lock:
                if self._closed:
                    break
                self._idle.append(line)
        with self._lock:
            self._threads.discard(threading.current_thread())
