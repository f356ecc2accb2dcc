"""Clipping of gradients before they are applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, array_namespace, device_of
from ndistribute.dtypes import computing_dtype
from ndistribute.stream import working_on
from ndistribute.variables.write import map_values

__all__ = ["Clipping", "widened"]


@dataclass(frozen=True, slots=True)
class Clipping:
    """A bound for gradients, of at most one kind; see `Optimizer`.

    >>> import numpy as np
    >>> Clipping(None, 1.0, None).apply([np.array([3.0]), np.array([4.0])])
    [array([0.6]), array([0.8])]
    """

    norm: float | None
    global_norm: float | None
    value: float | None

    def __post_init__(self) -> None:
        given = [bound for bound in (self.norm, self.global_norm, self.value) if bound is not None]
        if len(given) > 1:
            raise ValueError("give at most one of clipnorm, global_clipnorm and clipvalue.")
        if given and (isinstance(given[0], str) or not given[0] > 0):
            raise ValueError(f"a clipping bound must be a number above 0, got {given[0]!r}.")

    def __bool__(self) -> bool:
        return any((self.norm, self.global_norm, self.value))

    def apply(self, gradients: Sequence[Any]) -> list[Any]:
        """Return clipped gradients, 16-bit ones as float32; the given ones do not change.

        Args:
            gradients: arrays or `IndexedSlices`, summed over replicas.
        """
        if not self:
            return list(gradients)
        wide = [_summed(map_values(widened, gradient)) for gradient in gradients]
        if self.value is not None:
            return [map_values(self._cut, gradient) for gradient in wide]
        norms = [_norm(gradient) for gradient in wide]
        if self.global_norm is not None:
            norms = [math.sqrt(sum(norm**2 for norm in norms))] * len(norms)
        bound = self.norm or self.global_norm or 0.0
        return [
            gradient if norm <= bound else map_values(partial(mul, bound / norm), gradient)
            for gradient, norm in zip(wide, norms, strict=True)
        ]

    def _cut(self, array: Array) -> Array:
        bound = float(self.value or 0)
        xp = array_namespace(array)
        if array.dtype.kind != "c":
            return xp.clip(array, -bound, bound)
        parts = xp.ascontiguousarray(array).view(array.real.dtype)
        return xp.clip(parts, -bound, bound).view(array.dtype).reshape(array.shape)


def widened(array: Array) -> Array:
    """Return an array in a dtype that is wide enough for sums: 16-bit floats as float32."""
    return array.astype(computing_dtype(array.dtype), copy=False)


def _summed(gradient: Any) -> Any:
    if not isinstance(gradient, IndexedSlices):
        return gradient
    with working_on(device_of(gradient.values)):
        return gradient.summed()


def _norm(gradient: Any) -> float:
    array = gradient.values if isinstance(gradient, IndexedSlices) else gradient
    with working_on(device_of(array)):
        return float(array_namespace(array).linalg.norm(array.reshape(-1)))
