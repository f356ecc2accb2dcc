"""What stands in pickled arguments for what only the worker can put there.

The result of another function, and a dataset of the worker's own, are not pickled with the
arguments that hold them: a number is. While arguments are pickled, a `Collector` writes down what
was numbered; while they are unpickled, the worker says what each number is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Collector", "StandIn", "collecting", "collector_for", "resolving", "stand_in"]

Resolve = Callable[..., Any]
StandIn = tuple[Callable[..., Any], tuple[Any, ...]]
"""What `__reduce__` returns."""


class _Here(threading.local):
    collector: Collector | None = None
    resolve: Resolve | None = None


_here = _Here()


class Collector:
    """Write down what arguments refer to.

    `values` are the results that they wait for, `functions` those that make their datasets, and
    `kept` is what must live until the arguments have been used.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.functions: list[Any] = []
        self.kept: list[Any] = []


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Pickle arguments inside of this, on this thread."""
    before, _here.collector = _here.collector, Collector()
    try:
        yield _here.collector
    finally:
        _here.collector = before


@contextlib.contextmanager
def resolving(resolve: Resolve) -> Iterator[None]:
    """Unpickle arguments inside of this, on this thread."""
    before, _here.resolve = _here.resolve, resolve
    try:
        yield
    finally:
        _here.resolve = before


def collector_for(thing: str) -> Collector:
    """Return where to write down what is pickled.

    Raises:
        TypeError: no arguments are pickled now.
    """
    if _here.collector is None:
        raise TypeError(
            f"{thing} can be sent to a worker only among the args or kwargs of schedule, not in "
            "what a function refers to; and it can not be pickled otherwise."
        )
    return _here.collector


def stand_in(kind: str, *numbers: Any) -> StandIn:
    """Return what is pickled in a thing's place."""
    return _resolved, (kind, *numbers)


def _resolved(kind: str, *numbers: Any) -> Any:
    if _here.resolve is None:
        raise TypeError(f"A {kind} was unpickled outside of a worker.")
    return _here.resolve(kind, *numbers)
