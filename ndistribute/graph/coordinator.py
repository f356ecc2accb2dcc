"""`Coordinator`: the threads of a program that stop together."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ndistribute.errors import OutOfRangeError


class Coordinator:
    """Lets threads stop together: when one asks for it, or fails.

    Args:
        clean_stop_exception_types: exceptions that end the work, but are no failures; None: the
            end of the input, `OutOfRangeError` and `StopIteration`.

    >>> coordinator = Coordinator()
    >>> with coordinator.stop_on_exception():
    ...     coordinator.request_stop()
    >>> coordinator.should_stop()
    True
    """

    def __init__(self, clean_stop_exception_types: Sequence[type] | None = None) -> None:
        clean = clean_stop_exception_types
        self._clean = (OutOfRangeError, StopIteration) if clean is None else tuple(clean)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def joined(self) -> bool:
        """Whether all registered threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def should_stop(self) -> bool:
        """Return True once a thread has asked to stop."""
        return self._stop.is_set()

    def request_stop(self, ex: Any = None) -> None:
        """Ask all threads to stop; `join` raises the first exception that was given here.

        It may also be given as the result of `sys.exc_info`.
        """
        ex = ex[1] if isinstance(ex, tuple) else ex
        with self._lock:
            if ex is not None and self._error is None and not isinstance(ex, self._clean):
                self._error = ex
        self._stop.set()

    def clear_stop(self) -> None:
        """Let threads start again."""
        self._stop.clear()
        self._error = None

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a thread has asked to stop; return False after the timeout."""
        return self._stop.wait(timeout)

    @contextlib.contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Return a context manager that passes an exception to `request_stop`."""
        try:
            yield
        except Exception as error:
            self.request_stop(error)

    def register_thread(self, thread: threading.Thread) -> None:
        """Make `join` wait for a thread."""
        self._threads.append(thread)

    def join(
        self,
        threads: Sequence[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120.0,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait until a stop is asked for or all threads have ended, and for the threads then.

        Args:
            threads: threads to wait for, beside those that were registered.
            stop_grace_period_secs: the time for them to end after the request.
            ignore_live_threads: whether threads that are still alive then are no error.

        Raises:
            RuntimeError: a thread did not end in time.
            Exception: what a thread passed to `request_stop`.
        """
        waited = [*self._threads, *(threads or [])]
        while any(thread.is_alive() for thread in waited) and not self._stop.wait(0.1):
            pass
        deadline = time.monotonic() + stop_grace_period_secs
        for thread in waited:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        alive = [thread.name for thread in waited if thread.is_alive()]
        if alive and not ignore_live_threads:
            why = f"{', '.join(alive)}. They should end when should_stop() is True."
            raise RuntimeError(f"threads did not stop within {stop_grace_period_secs:g} s: {why}")
