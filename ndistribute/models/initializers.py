"""Initializers: functions from a shape and a dtype to the first value of a variable.

They draw from generators of their own, seeded by `nd.set_seed` and the number of initializations so
far. So a program that sets the seed makes the same model in every run, under every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ndistribute.context import current_seed

__all__ = [
    "Constant",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "Ones",
    "Orthogonal",
    "RandomNormal",
    "RandomUniform",
    "Zeros",
    "get",
]

Shape = Sequence[int]


@dataclass(frozen=True)
class Initializer:
    """The base class of initializers: dataclasses that are called with a shape and a dtype."""

    def __call__(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """Return a new array of a shape and a dtype."""
        raise NotImplementedError(f"{type(self).__name__} defines no __call__.")


@dataclass(frozen=True)
class Constant(Initializer):
    """An initializer with one value for all elements.

    >>> Constant(2.0)((2,))
    array([2., 2.], dtype=float32)
    """

    value: float = 0.0

    def __call__(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """Return a new array of the value."""
        return np.full(shape, self.value, dtype)


@dataclass(frozen=True)
class Zeros(Constant):
    """An initializer of zeros."""


@dataclass(frozen=True)
class Ones(Constant):
    """An initializer of ones."""

    value: float = 1.0


@dataclass(frozen=True)
class _Random(Initializer):
    """The base class of random initializers; a `seed` makes each call return the same values."""

    seed: int | None = field(default=None, kw_only=True)

    def _generator(self) -> np.random.Generator:
        if self.seed is not None:
            return np.random.default_rng(self.seed)
        # Replicas have keys of one number, and shuffles of two.
        return np.random.default_rng(current_seed().spawn(1)[0].spawn(1)[0].spawn(1)[0])


@dataclass(frozen=True)
class RandomNormal(_Random):
    """An initializer with a normal distribution."""

    mean: float = 0.0
    stddev: float = 0.05

    def __call__(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """Return a new array of independent normal values."""
        return self._generator().normal(self.mean, self.stddev, shape).astype(dtype)


@dataclass(frozen=True)
class RandomUniform(_Random):
    """An initializer with a uniform distribution between two bounds."""

    minval: float = -0.05
    maxval: float = 0.05

    def __call__(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """Return a new array of independent uniform values."""
        return self._generator().uniform(self.minval, self.maxval, shape).astype(dtype)


@dataclass(frozen=True)
class _Uniform(_Random):
    """The base class of uniform initializers with a variance by the shape."""

    def __call__(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """Return a new array of independent uniform values."""
        bound = math.sqrt(3.0 * self._variance(*fans(shape)))
        return self._generator().uniform(-bound, bound, shape).astype(dtype)

    def _variance(self, inputs: float, outputs: float) -> float:
        raise NotImplementedError(f"{type(self).__name__} defines no variance.")


@dataclass(frozen=True)
class _Normal(_Uniform):
    """The base class of normal initializers with a variance by the shape."""

    def __call__(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """Return a new array of independent normal values."""
        deviation = math.sqrt(self._variance(*fans(shape)))
        return self._generator().normal(0.0, deviation, shape).astype(dtype)


class _Glorot(_Uniform):
    def _variance(self, inputs: float, outputs: float) -> float:
        return 2.0 / max(1.0, inputs + outputs)


class _He(_Uniform):
    def _variance(self, inputs: float, outputs: float) -> float:
        return 2.0 / max(1.0, inputs)


class GlorotUniform(_Glorot):
    """A uniform initializer with the variance ``2 / (inputs + outputs)``.

    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
    networks", 2010.

    >>> bool(abs(GlorotUniform(seed=1)((100, 200))).max() <= (6 / 300) ** 0.5)
    True
    """


class GlorotNormal(_Glorot, _Normal):
    """A normal initializer with the variance ``2 / (inputs + outputs)``."""


class HeUniform(_He):
    """A uniform initializer with the variance ``2 / inputs``, for layers with a ReLU.

    Source: He et al., "Delving Deep into Rectifiers", 2015.
    """


class HeNormal(_He, _Normal):
    """A normal initializer with the variance ``2 / inputs``, for layers with a ReLU."""


@dataclass(frozen=True)
class Orthogonal(_Random):
    """An initializer of matrices with orthonormal rows or columns, whichever are fewer.

    Axes but the last count as rows. Source: Saxe et al., "Exact solutions to the nonlinear dynamics
    of learning in deep linear neural networks", 2014.

    >>> q = Orthogonal(seed=1)((3, 2))
    >>> bool(np.allclose(q.T @ q, np.eye(2), atol=1e-6))
    True
    """

    gain: float = 1.0

    def __call__(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """Return a new array whose matrix is orthogonal, times the gain.

        Raises:
            ValueError: the shape has fewer than two axes.
        """
        if len(shape) < 2:
            raise ValueError(f"Orthogonal needs a shape of two axes or more, got {tuple(shape)}.")
        rows, columns = math.prod(shape[:-1]), shape[-1]
        normal = self._generator().normal(size=(max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(normal)
        q *= np.where(np.diag(r) < 0, -1.0, 1.0)  # Else the distribution would not be uniform.
        return (self.gain * (q if rows >= columns else q.T)).reshape(shape).astype(dtype)


def fans(shape: Shape) -> tuple[float, float]:
    """Return the numbers of inputs and outputs of a unit of a layer.

    >>> fans((3, 3, 8, 16)), fans((10,))
    ((72.0, 144.0), (10.0, 10.0))
    """
    if len(shape) < 2:
        return float(math.prod(shape)), float(math.prod(shape))
    window = math.prod(shape[:-2])
    return float(window * shape[-2]), float(window * shape[-1])


NAMED: dict[str, type[Initializer]] = {
    "constant": Constant,
    "glorot_normal": GlorotNormal,
    "glorot_uniform": GlorotUniform,
    "he_normal": HeNormal,
    "he_uniform": HeUniform,
    "ones": Ones,
    "orthogonal": Orthogonal,
    "random_normal": RandomNormal,
    "random_uniform": RandomUniform,
    "zeros": Zeros,
}


def get(initializer: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return an initializer for its name; other callables are returned unchanged.

    Raises:
        ValueError: the name is unknown.

    >>> get("ones")
    Ones(value=1.0)
    """
    if callable(initializer):
        return initializer
    try:
        return NAMED[initializer]()
    except (KeyError, TypeError):
        names = ", ".join(NAMED)
        raise ValueError(f"unknown initializer {initializer!r}: use one of {names}.") from None
