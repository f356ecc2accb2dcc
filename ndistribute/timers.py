"""`Timer`: is it time to save, to log or to evaluate? Loops, hooks and callbacks ask it.

It counts steps or seconds since the last time. It has no thread: who asks also does the work.
"""

from __future__ import annotations

import time
from typing import Any

UNSET: Any = type("_Unset", (), {"__repr__": lambda self: "default"})()
"""Stands for an argument that was not passed, where None means never."""


class Timer:
    """Tells when so many steps or seconds have passed since the last time.

    Raises:
        ValueError: both are given, or neither.

    >>> timer = Timer(steps=10)
    >>> timer.is_due(3)
    True
    >>> timer.mark(3)
    >>> timer.is_due(12), timer.is_due(13)
    (False, True)
    """

    def __init__(self, steps: int | None = None, seconds: float | None = None) -> None:
        if (steps is None) == (seconds is None):
            raise ValueError("give either a number of steps or a number of seconds.")
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


def steps_or_seconds(steps: Any, seconds: Any, default: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return two arguments, with None for 0 and `UNSET`; their defaults if both are `UNSET`."""
    if steps is UNSET and seconds is UNSET:
        return default
    return None if steps is UNSET else steps or None, None if seconds is UNSET else seconds or None
