"""Runs closures on a worker, one after the other, on a thread of its own.

What a closure changes on servers is kept back until it ends, or reads it, and goes out under its
number: so its changes are made once, however often and wherever it is run. Where it raises, those
that are kept back are dropped.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ndistribute.cluster.coordination import standins
from ndistribute.cluster.coordination.pickles import Pickled, TooLongError, dump, load
from ndistribute.cluster.coordination.worker_requests import Outcome, Run
from ndistribute.cluster.links import origins

__all__ = ["Executor", "Function", "Resources", "run"]

_TRACE_CHARACTERS = 8192
_UNSET = object()
_alone = threading.Lock()  # Two workers of one process, as in tests, take turns: see `origins`.


class Function:
    """Hold a function that came as bytes, and unpickle it when it is first used."""

    def __init__(self, pickled: Pickled) -> None:
        self._pickled = pickled
        self._value: Any = _UNSET

    def get(self) -> Any:
        """Return the function."""
        if self._value is _UNSET:
            self._value = load(self._pickled)
        return self._value


@dataclass
class Resources:
    """Keep what this worker made for a coordinator: its datasets, and their iterators."""

    datasets: dict[int, Any] = field(default_factory=dict)
    iterators: dict[int, Any] = field(default_factory=dict)

    def dataset(self, number: int, function: Function) -> Any:
        """Return a dataset, made when it is first asked for."""
        if number not in self.datasets:
            made = function.get()
            self.datasets[number] = made() if callable(made) else made
        return self.datasets[number]

    def iterator(self, number: int, dataset: int, function: Function) -> Any:
        """Return an iterator of a dataset, where it was left."""
        if number not in self.iterators:
            self.iterators[number] = iter(self.dataset(dataset, function))
        return self.iterators[number]

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop datasets and iterators that nobody uses any more."""
        for number in numbers:
            self.iterators.pop(number, None)
            self.datasets.pop(number, None)


class Executor:
    """Call what is given to it, in order; the thread starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Call this after what was submitted before; it must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self, timeout: float) -> None:
        """Call nothing any more; what runs now has this long to end."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout=timeout)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def run(order: Run, functions: dict[str, Function], resources: Resources, limit: int) -> Outcome:
    """Run a closure, and return what it did; this never raises.

    Args:
        order: which closure.
        functions: all that it names.
        resources: this worker's datasets.
        limit: the most bytes that the result may take.
    """

    def resolve(kind: str, *numbers: Any) -> Any:
        if kind == "value":
            return load(order.inputs[numbers[0]])
        digest, number = numbers[:2]
        if kind == "dataset":
            return resources.dataset(number, functions[digest])
        return resources.iterator(number, numbers[2], functions[digest])

    try:
        with standins.resolving(resolve):
            function = functions[order.functions[0]].get()
            args, kwargs = load(order.arguments)
        with _alone, origins.closure(order.series, order.number) as running:
            result = _pickled(function(*args, **kwargs), limit)
        reports = tuple(running.reports.values())
        return Outcome(order.number, True, result, result.nbytes, reports=reports)
    except BaseException as error:
        problem, trace = _portable(error, limit), "".join(traceback.format_exception(error))
        return Outcome(order.number, False, problem, problem.nbytes, trace[-_TRACE_CHARACTERS:])


def _pickled(result: Any, limit: int) -> Pickled:
    try:
        return dump(result, limit)
    except TooLongError as error:
        raise ValueError(
            f"The function returned {error}: at most {limit} travel. Return less, or write it to "
            "a variable or a file."
        ) from None
    except Exception as error:
        raise ValueError(
            f"The function returned a {type(result).__name__}, which can not be pickled "
            f"({error}). Return plain values or arrays."
        ) from error


def _portable(error: BaseException, limit: int) -> Pickled:
    """Return an exception such that it can be raised elsewhere."""
    if isinstance(error, Exception):
        try:
            pickled = dump(error, limit)
            if isinstance(load(pickled), Exception):
                return pickled
        except Exception:  # It can not be made from its args, or holds what can not be pickled.
            pass
    # Its own text may be what can not be made.
    text = "".join(traceback.format_exception_only(error)).strip()
    return dump(RuntimeError(text[:_TRACE_CHARACTERS]))
