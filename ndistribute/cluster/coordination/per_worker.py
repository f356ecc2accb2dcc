"""Datasets of which each worker has its own; the coordinator holds their names alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NoReturn

from ndistribute.cluster.coordination import standins
from ndistribute.cluster.coordination.pickles import Pickled

__all__ = ["PerWorkerDataset", "PerWorkerIterator", "Registry"]


class Registry:
    """Number a coordinator's datasets and iterators, and tell when one is used no more.

    Args:
        forget: called with the number of one that was; at any moment and on any thread, so it
            must take no lock.
    """

    def __init__(self, forget: Callable[[int], None]) -> None:
        self._forget = forget
        self._last = 0

    def number(self, thing: object) -> int:
        """Return a number for a thing, which is forgotten with it."""
        self._last += 1
        weakref.finalize(thing, self._forget, self._last).atexit = False
        return self._last


class PerWorkerDataset:
    """Stand for a dataset that each worker makes for itself, when it first uses it.

    Among the arguments of a scheduled function its iterator becomes the worker's own one, where
    that worker left it; the dataset itself becomes the worker's dataset. A worker that is started
    again makes them anew.
    """

    def __init__(self, registry: Registry, function: Pickled) -> None:
        self._registry = registry
        self._function = function
        self._number = registry.number(self)

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._registry, self._function, self, self._number)

    def __reduce__(self) -> standins.StandIn:
        collector = standins.collector_for("A per-worker dataset")
        collector.functions.append(self._function)
        collector.kept.append(self)
        return standins.stand_in("dataset", self._function.digest, self._number)


class PerWorkerIterator:
    """Stand for the iterators of a `PerWorkerDataset`, one on each worker."""

    def __init__(
        self, registry: Registry, function: Pickled, dataset: PerWorkerDataset, number: int
    ) -> None:
        self._function = function
        self._dataset = dataset  # It must not be forgotten before this.
        self._dataset_number = number
        self._number = registry.number(self)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(
            "The iterator of a per-worker dataset has elements on the workers alone: give it to "
            "schedule, as in schedule(step, args=(iterator,)), and call next in the function."
        )

    def __reduce__(self) -> standins.StandIn:
        collector = standins.collector_for("The iterator of a per-worker dataset")
        collector.functions.append(self._function)
        collector.kept.append(self)
        numbers = (self._number, self._dataset_number)
        return standins.stand_in("iterator", self._function.digest, *numbers)
