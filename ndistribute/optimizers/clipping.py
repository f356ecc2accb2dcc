"""Clipping: gradients are scaled, or their elements cut, so that they keep a bound.

The gradients are those that update variables: summed over replicas, and of a shard the replica's
own, of whose norm the other replicas have the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ndistribute.context import current_trace, get_replica_context
from ndistribute.devices import Array, array_namespace, device_of
from ndistribute.dtypes import computing_dtype
from ndistribute.indexed_slices import IndexedSlices, map_values
from ndistribute.stream import working_on
from ndistribute.variables.mirrored import divided


def one_bound(**bounds: float | None) -> tuple[str, float] | None:
    """Return the kind and the size of the one bound of gradients that is given, if any."""
    limits = [(kind, bound) for kind, bound in bounds.items() if bound is not None]
    if len(limits) > 1:
        raise ValueError("give at most one of clipnorm, global_clipnorm and clipvalue.")
    if limits and (isinstance(limits[0][1], str) or not limits[0][1] > 0):
        raise ValueError(f"a clipping bound must be a number above 0, got {limits[0][1]!r}.")
    return limits[0] if limits else None


def clipped(
    kind: str, bound: float, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Return clipped gradients, 16-bit ones as float32; the given ones do not change."""
    wide = [_summed(map_values(widened, gradient)) for gradient in gradients]
    if kind == "clipvalue":
        return [map_values(partial(_cut, float(bound)), gradient) for gradient in wide]
    norms = [_norm(gradient) for gradient in wide]
    shards = divided(variables)
    if shards:  # Of which each replica has a part of the norm.
        replica: Any = get_replica_context()
        squares = replica.all_reduce("sum", np.stack([norms[index] ** 2 for index in shards]))
        for index, square in zip(shards, squares, strict=True):
            norms[index] = np.sqrt(square)
    if kind == "global_clipnorm":
        norms = [np.sqrt(sum(norm**2 for norm in norms))] * len(norms)
    pairs = zip(wide, norms, strict=True)
    return [map_values(partial(_scaled, bound, norm), gradient) for gradient, norm in pairs]


def _scaled(bound: float, norm: Any, array: Array) -> Array:
    if current_trace() is None:
        return array if norm <= bound else array * float(bound / norm)
    return array * np.where(norm <= bound, 1, bound / norm).astype(array.dtype)


def _cut(bound: float, array: Array) -> Array:
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


def _norm(gradient: Any) -> Any:
    array = gradient.values if isinstance(gradient, IndexedSlices) else gradient
    with working_on(device_of(array)):
        norm = array_namespace(array).linalg.norm(array.reshape(-1)).astype(np.float64)
        return norm if current_trace() is not None else float(norm)
