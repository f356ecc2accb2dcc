"""The random generators of a strategy's replicas.

Each replica draws from a stream of its own, which the seed and the replica's number decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.context import current_seed
from ndistribute.device import Device
from ndistribute.stream import random_generator

__all__ = ["ReplicaGenerators"]


class ReplicaGenerators:
    """Keep one generator per replica, until another seed is set.

    Args:
        devices: one for each replica.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._made: dict[int, tuple[np.random.SeedSequence, Any]] = {}

    def of(self, index: int, replica: int) -> Any:
        """Return a replica's generator.

        Args:
            index: which of the replicas of this process it is.
            replica: which of all replicas.
        """
        seed = current_seed()
        known, generator = self._made.get(index, (None, None))
        if known is not seed:
            own = np.random.SeedSequence(seed.entropy, spawn_key=(replica,))
            generator = random_generator(self._devices[index], own)
            self._made[index] = (seed, generator)
        return generator
