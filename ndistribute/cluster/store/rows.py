"""Rows of an array by their indices: checks, sums of repeated rows, and changes in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ndistribute.cluster.protocol.requests import Rows
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.wire.tensors import Array

__all__ = ["change_rows", "check_indices", "check_rows", "dense_of", "summed"]

_AT: Mapping[str, Callable[..., Any]] = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


def check_indices(indices: Array, shape: tuple[int, ...], name: str) -> None:
    """Check that indices are those of rows of an array.

    Raises:
        Refused: they are not.
    """
    if not shape or indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise Refused(
            "mismatch",
            f"{name!r} has shape {shape}; rows of it need integer indices of one dimension, got "
            f"{indices.dtype} of shape {indices.shape}.",
        )
    if len(indices) and not (indices.min() >= 0 and indices.max() < shape[0]):
        raise Refused(
            "mismatch",
            f"{name!r} has {shape[0]} row(s), so an index must be 0 to {shape[0] - 1}; got "
            f"{indices.min()} to {indices.max()}.",
        )


def check_rows(indices: Array, values: Array, shape: tuple[int, ...], name: str) -> None:
    """Check that rows fit an array.

    Raises:
        Refused: they do not.
    """
    check_indices(indices, shape, name)
    if values.shape != (len(indices), *shape[1:]):
        raise Refused(
            "mismatch",
            f"{len(indices)} row(s) of {name!r}, which has shape {shape}, need values of shape "
            f"{(len(indices), *shape[1:])}, got {values.shape}.",
        )


def change_rows(target: Array, how: str, indices: Array, values: Array) -> None:
    """Change rows in place, in the order of the indices."""
    if how == "update":
        target[indices] = values
    else:
        _AT[how](target, indices, values)


def summed(rows: Rows) -> Rows:
    """Return the same rows, each once, in rising order; equal ones are added in a fixed order.

    >>> once = summed(Rows(np.array([7, 2, 7]), np.array([[1.0], [2.0], [4.0]])))
    >>> once.indices, once.values.tolist()
    (array([2, 7]), [[2.0], [5.0]])
    """
    unique, inverse = np.unique(rows.indices, return_inverse=True)
    if len(unique) == len(rows.indices):
        return Rows(unique, rows.values[np.argsort(rows.indices)])
    totals = np.zeros((len(unique), *rows.values.shape[1:]), rows.values.dtype)
    np.add.at(totals, inverse, rows.values)
    return Rows(unique, totals)


def dense_of(rows: Rows, shape: tuple[int, ...]) -> Array:
    """Return the whole array, zeros where no row was given."""
    dense = np.zeros(shape, rows.values.dtype)
    np.add.at(dense, rows.indices, rows.values)
    return dense
