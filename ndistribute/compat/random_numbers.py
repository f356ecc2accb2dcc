"""Random numbers under TensorFlow's names, from the generator of the replica or from a seed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import graph
from ndistribute.compat.signatures import (
    unary,
)
from ndistribute.compat.tensors import as_tensor
from ndistribute.context import current_seed
from ndistribute.models import initializers


def generator() -> np.random.Generator:
    """Return the generator of the replica, or a new one outside of replicas."""
    replica = nd.get_replica_context()
    return np.random.default_rng(current_seed().spawn(1)[0]) if replica is None else replica.rng


def seeded(seed: Any) -> np.random.Generator:
    """Return a generator with a seed, or that of `generator` without one."""
    if seed is None:
        return generator()
    return seed.generator() if hasattr(seed, "generator") else np.random.default_rng(seed)


def _normal(shape: Any, mean: Any = 0, stddev: Any = 1, dtype: Any = None, seed: Any = None) -> Any:
    return seeded(seed).normal(mean, stddev, shape).astype(dtype or np.float32)


def _uniform(
    shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = None, seed: Any = None
) -> Any:
    if np.dtype(dtype or np.float32).kind in "iu":
        return seeded(seed).integers(minval, maxval, shape, dtype)
    high = 1 if maxval is None else maxval
    return seeded(seed).uniform(minval, high, shape).astype(dtype or np.float32)


def _truncated_normal(
    shape: Any, mean: Any = 0, stddev: Any = 1, dtype: Any = None, seed: Any = None
) -> Any:
    values = initializers.truncated(seeded(seed), shape)
    return (values * stddev + mean).astype(dtype or np.float32)


normal = graph.random_normal, unary(_normal, 0)
uniform = graph.random_uniform, unary(_uniform, 0)
truncated_normal = graph.truncated_normal, unary(_truncated_normal, 0)


def _shuffle(value: Any, seed: Any = None) -> Any:
    return np.take(value, seeded(seed).permutation(len(value)), 0)


def _categorical(logits: Any, num_samples: int, dtype: Any = np.int64, seed: Any = None) -> Any:
    noise = seeded(seed).gumbel(size=(len(logits), num_samples, np.shape(logits)[1]))
    return np.argmax(np.asarray(logits)[:, None] + noise, -1).astype(dtype)


def _gamma(shape: Any, alpha: Any, beta: Any = 1, dtype: Any = np.float32, seed: Any = None) -> Any:
    size = (*shape, *np.shape(np.multiply(alpha, beta)))
    return seeded(seed).gamma(alpha, 1 / np.asarray(beta), size).astype(dtype)


def _poisson(shape: Any, lam: Any, dtype: Any = np.float32, seed: Any = None) -> Any:
    return seeded(seed).poisson(lam, (*shape, *np.shape(lam))).astype(dtype)


def _stateless(draw: Any) -> Any:
    """Return a function that draws from a seed of two numbers."""
    return unary(
        lambda shape, seed, *args, **named: draw(shape, *args, **named | {"seed": seed}), 0
    )


stateless_normal, stateless_uniform = _stateless(_normal), _stateless(_uniform)
gamma, poisson = unary(_gamma, 0), unary(_poisson, 0)


class Generator:
    """`tf.random.Generator`: random numbers from a state of its own."""

    def __init__(self, rng: Any) -> None:
        self._rng = rng

    @classmethod
    def from_seed(cls, seed: Any, alg: Any = None) -> Generator:
        """Return a generator that draws the same numbers each time."""
        return cls(np.random.default_rng(seed))

    @classmethod
    def from_non_deterministic_state(cls, alg: Any = None) -> Generator:
        """Return a generator that draws other numbers each time."""
        return cls(np.random.default_rng())

    def normal(self, shape: Any, mean: Any = 0, stddev: Any = 1, dtype: Any = np.float32) -> Any:
        """Return normal numbers."""
        return as_tensor(_normal(shape, mean, stddev, dtype, self._rng))

    def uniform(self, shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = None) -> Any:
        """Return numbers between two bounds."""
        return as_tensor(_uniform(shape, minval, maxval, dtype, self._rng))

    def truncated_normal(
        self, shape: Any, mean: Any = 0, stddev: Any = 1, dtype: Any = np.float32
    ) -> Any:
        """Return normal numbers within two standard deviations."""
        return as_tensor(_truncated_normal(shape, mean, stddev, dtype, self._rng))

    def uniform_full_int(self, shape: Any, dtype: Any = np.uint64) -> Any:
        """Return any integers of a dtype."""
        bounds = np.iinfo(dtype)
        return as_tensor(self._rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as text because its integers have 128 bits."""
        return {"state": json.dumps(self._rng.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        self._rng.bit_generator.state = json.loads(state["state"])

    def split(self, count: int = 1) -> list[Generator]:
        """Return independent generators."""
        return list(map(Generator, self._rng.spawn(count)))


def get_global_generator() -> Generator:
    """Return the generator of the replica, or a new one that the seed of the program decides."""
    return Generator(generator())


shuffle, categorical = unary(_shuffle), unary(_categorical)
