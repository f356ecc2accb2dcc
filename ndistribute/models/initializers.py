"""Initializers: functions that return the first value of a variable for a shape and a dtype.

Random initializers have their own generators, seeded by `nd.set_seed`, or by the seed of the
default graph if it has one, and the number of initializations so far. So a program that sets the
seed creates the same model in every run, under every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ndistribute.context import weight_seed
from ndistribute.exports import export as _export
from ndistribute.names import named, table_of

Shape = Sequence[int]


@dataclass(frozen=True)
class Initializer:
    """The base class of initializers: dataclasses that are called with a shape and a dtype."""

    def __call__(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        """Return a new array of a shape and a dtype."""
        return self._values(tuple(shape)).astype(dtype)

    def _values(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        raise NotImplementedError(f"{type(self).__name__} defines no __call__.")


@dataclass(frozen=True)
class Constant(Initializer):
    """An initializer with one value for all elements.

    >>> Constant(2.0)((2,))
    array([2., 2.], dtype=float32)
    """

    value: float = 0.0

    def _values(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        value = np.asarray(self.value)
        same = value.ndim and value.size == np.prod(shape, dtype=int)  # Their shape may differ.
        return value.reshape(shape).copy() if same else np.full(shape, value)


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
        return np.random.default_rng(weight_seed().spawn(1)[0].spawn(1)[0].spawn(1)[0])


@dataclass(frozen=True)
class RandomNormal(_Random):
    """An initializer with a normal distribution."""

    mean: float = 0.0
    stddev: float = 0.05

    def _values(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return self._generator().normal(self.mean, self.stddev, shape)


@dataclass(frozen=True)
class TruncatedNormal(RandomNormal):
    """An initializer with a normal distribution that is cut at two standard deviations."""

    def _values(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return self.mean + self.stddev * truncated(self._generator(), shape)


def truncated(rng: np.random.Generator, shape: Shape) -> np.ndarray[Any, Any]:
    """Return normal numbers between -2 and 2; numbers outside are drawn again."""
    values = rng.normal(size=shape)
    while (outside := np.abs(values) > 2).any():
        values[outside] = rng.normal(size=np.count_nonzero(outside))
    return values


@dataclass(frozen=True)
class RandomUniform(_Random):
    """An initializer with a uniform distribution between two bounds."""

    minval: float = -0.05
    maxval: float = 0.05

    def _values(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return self._generator().uniform(self.minval, self.maxval, shape)


class _Scaled(_Random):
    """The base class of initializers whose variance is 1 over the mean of some fans."""

    _is_normal: ClassVar[bool] = False
    _shares: ClassVar[tuple[int, int]] = (1, 1)
    """How often the inputs and the outputs count in the variance ``2 / total``."""

    def _values(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        deviation = math.sqrt(2.0 / max(1.0, np.dot(_fans(shape), self._shares)))
        if self._is_normal:
            return self._generator().normal(0.0, deviation, shape)
        bound = math.sqrt(3.0) * deviation
        return self._generator().uniform(-bound, bound, shape)


class GlorotUniform(_Scaled):
    """A uniform initializer with the variance ``2 / (inputs + outputs)``.

    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
    networks", 2010.

    >>> bool(abs(GlorotUniform(seed=1)((100, 200))).max() <= (6 / 300) ** 0.5)
    True
    """


class GlorotNormal(_Scaled):
    """A normal initializer with the variance ``2 / (inputs + outputs)``."""

    _is_normal = True


class HeUniform(_Scaled):
    """A uniform initializer with the variance ``2 / inputs``, for layers with a ReLU.

    Source: He et al., "Delving Deep into Rectifiers", 2015.
    """

    _shares = (1, 0)


class HeNormal(HeUniform):
    """A normal initializer with the variance ``2 / inputs``, for layers with a ReLU."""

    _is_normal = True


class LecunUniform(_Scaled):
    """A uniform initializer with the variance ``1 / inputs``, for layers with a SELU.

    Source: LeCun et al., "Efficient BackProp", 1998.
    """

    _shares = (2, 0)


class LecunNormal(LecunUniform):
    """A normal initializer with the variance ``1 / inputs``, for layers with a SELU."""

    _is_normal = True


@dataclass(frozen=True)
class Orthogonal(_Random):
    """An initializer of matrices with orthonormal rows or columns, whichever are fewer.

    All axes except the last count as rows. A shape with fewer than two axes raises a `ValueError`.
    Source: Saxe et al., "Exact solutions to the nonlinear dynamics of learning in deep linear
    neural networks", 2014.

    >>> q = Orthogonal(seed=1)((3, 2))
    >>> bool(np.allclose(q.T @ q, np.eye(2), atol=1e-6))
    True
    """

    gain: float = 1.0

    def _values(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if len(shape) < 2:
            raise ValueError(f"Orthogonal needs a shape of two axes or more, got {shape}.")
        rows, columns = math.prod(shape[:-1]), shape[-1]
        normal = self._generator().normal(size=(max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(normal)
        q *= np.where(np.diag(r) < 0, -1.0, 1.0)  # Otherwise the distribution would not be uniform.
        return (self.gain * (q if rows >= columns else q.T)).reshape(shape)


def _fans(shape: Shape) -> tuple[float, float]:
    """Return the numbers of inputs and outputs of a unit of a layer.

    >>> _fans((3, 3, 8, 16)), _fans((10,))
    ((72.0, 144.0), (10.0, 10.0))
    """
    if len(shape) < 2:
        return float(math.prod(shape)), float(math.prod(shape))
    window = math.prod(shape[:-2])
    return float(window * shape[-2]), float(window * shape[-1])


NAMED: dict[str, type[Initializer]] = table_of(
    *(Constant, Zeros, Ones, RandomNormal, RandomUniform, TruncatedNormal, Orthogonal),
    *(GlorotNormal, GlorotUniform, HeNormal, HeUniform, LecunNormal, LecunUniform),
)
NAMED |= {"normal": RandomNormal, "one": Ones, "uniform": RandomUniform, "zero": Zeros}


def get(initializer: str | Callable[..., Any] | None) -> Callable[..., Any]:
    """Return an initializer for a name; None means `GlorotUniform`; return others unchanged.

    Raises:
        ValueError: the name is unknown.

    >>> get("ones")
    Ones(value=1.0)
    """
    name = "glorot_uniform" if initializer is None else initializer
    return named(NAMED, name, "initializer")  # type: ignore[no-any-return]


_export(vars())
