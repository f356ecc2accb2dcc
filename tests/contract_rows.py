"""The table over which the contract tests of strategies and variables run: one row for each kind.

A row is there if its code path differs from those of the others. What is added to the package gets
a row here, and with it all of those tests.
"""

from __future__ import annotations

from collections.abc import Callable

import ndistribute as nd

__all__ = ["STRATEGIES", "central", "cpus", "mirrored", "served"]


def cpus(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def mirrored(count: int) -> nd.MirroredStrategy:
    return nd.MirroredStrategy(cpus(count))


def central(count: int) -> nd.CentralStorageStrategy:
    return nd.CentralStorageStrategy(cpus(count))


def served(count: int) -> nd.ParameterServerStrategy:
    return nd.ParameterServerStrategy(devices=cpus(count))


# Of several replicas in one process each: two replicas swap, three are an odd number.
STRATEGIES: dict[str, Callable[[], nd.Strategy]] = {
    "mirrored-2": lambda: mirrored(2),
    "mirrored-3": lambda: mirrored(3),
    "central-3": lambda: central(3),
    "served-2": lambda: served(2),
}
