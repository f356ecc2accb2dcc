"""`Timer`: is it time to save, to log or to evaluate? And `Attempts` until a deadline.

A timer counts steps or seconds since the last time. Nothing here has a thread: who asks also does
the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

UNSET: Any = type("_Unset", (), {"__repr__": lambda self: "default"})()
"""Stands for an argument that was not passed, where None means never."""


class Timer:
    """Tells when so many steps or seconds have passed since the last time.

    Raises:
        ValueError: both are given, or neither, or a number of steps below 1.

    >>> timer = Timer(steps=10)
    >>> timer.is_due(3)
    True
    >>> timer.mark(3)
    >>> timer.is_due(12), timer.is_due(13)
    (False, True)
    """

    def __init__(self, steps: int | None = None, seconds: float | None = None) -> None:
        if (steps is None) == (seconds is None):
            raise ValueError("pass either a number of steps or a number of seconds, not both.")
        if steps is not None and steps < 1:
            raise ValueError(f"the number of steps must be 1 or more, got {steps}.")
        self._steps, self._seconds = steps, seconds
        self.last_step: int | None = None
        self._last_time = 0.0

    def is_due(self, step: int = 0) -> bool:
        """Return True at the first step, and when the time has come."""
        if self.last_step is None:
            return True
        if self._steps is not None:
            return step >= self.last_step + self._steps
        return self.seconds_left <= 0

    @property
    def seconds_left(self) -> float:
        """The seconds until it is due; 0 or less if it is, or if it counts steps."""
        passed = time.monotonic() - self._last_time
        return (self._seconds or 0.0) - passed if self.last_step is not None else 0.0

    def mark(self, step: int = 0) -> float | None:
        """Start again at a step; return the steps in a second since the last time, if any."""
        last, passed = self.last_step, time.monotonic() - self._last_time
        self.last_step, self._last_time = step, time.monotonic()
        return None if last is None or passed <= 0 else (step - last) / passed

    def reset(self) -> None:
        """Be due at the next step, as at the first one."""
        self.last_step = None


class Attempts:
    """Attempts until a deadline, which may be infinite; the first one is always made.

    Args:
        deadline: the monotonic time after which no attempt begins.
        pauses: the seconds between attempts; the last number repeats.
        wait: waits for some seconds; if it returns a true value, there are no more attempts.

    >>> pauses = []
    >>> for left in Attempts(float("inf"), 0.1, 0.2, wait=pauses.append):
    ...     if len(pauses) == 3:
    ...         break
    >>> pauses
    [0.1, 0.2, 0.2]
    """

    def __init__(
        self, deadline: float, *pauses: float, wait: Callable[[float], object] = time.sleep
    ) -> None:
        self._deadline, self._pauses, self._wait = deadline, pauses, wait
        self._failures = -1  # Before the first attempt.

    def __iter__(self) -> Attempts:
        return self

    def __next__(self) -> float:
        """Return the seconds that are left, after a pause unless this is the first attempt."""
        if self._failures >= 0:
            left = self._deadline - time.monotonic()
            pause = self._pauses[min(self._failures, len(self._pauses) - 1)]
            if left <= 0 or self._wait(min(pause, left)):
                raise StopIteration
        self._failures += 1
        return self._deadline - time.monotonic()

    def succeed(self) -> None:
        """Begin again with the first pause."""
        self._failures = 0


def steps_or_seconds(steps: Any, seconds: Any, default: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return two arguments, with None for 0 and `UNSET`; their defaults if both are `UNSET`."""
    if steps is UNSET and seconds is UNSET:
        return default
    return None if steps is UNSET else steps or None, None if seconds is UNSET else seconds or None
