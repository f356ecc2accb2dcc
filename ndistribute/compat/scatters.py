"""Methods of variables that change rows, with TensorFlow's arguments and rules for replicas."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ndistribute.errors import InvalidArgumentError
from ndistribute.mistakes import accepting


def _divided(array: Any, rows: Any, values: Any) -> None:
    (np.floor_divide if array.dtype.kind in "iu" else np.divide).at(array, rows, values)


SCATTERED: dict[str, Any] = {
    "div": _divided,
    "mul": np.multiply.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def inside(indices: Any, length: int, where: str = "") -> None:
    """Raise `InvalidArgumentError` if an index is outside an axis of some length."""
    array = np.asarray(indices)
    if array.size and (array.min() < 0 or array.max() >= length):
        outside = array[(array < 0) | (array >= length)]
        raise InvalidArgumentError(f"{where}index {outside[0]} is not in [0, {length}).")


def scattering(change: Any) -> Any:
    """Return a method that changes rows of a variable, once for all replicas."""

    def changed(variable: Any, rows: Any) -> Any:
        array, indices = variable.numpy(), np.asarray(rows.indices)
        inside(indices, len(array), f"scatter on variable {variable.name!r}, which is unchanged: ")
        change(array, indices, np.asarray(rows.values, array.dtype))
        return variable.assign(array)

    @accepting("name", "use_locking")
    def scatter(self: Any, sparse_delta: Any) -> Any:
        replica, how = self.replica("write"), self.aggregation.value
        if replica is None:
            return changed(self, sparse_delta)
        rows = replica.all_reduce(how, sparse_delta) if how in ("sum", "mean") else sparse_delta
        replica.merge_call(lambda _, each: changed(self, each.values[0]), (rows,))
        return self

    return scatter


def combining(scatter: Any, name: str) -> Any:
    """Return a method that changes rows, if an aggregation combines the rows of replicas."""

    @functools.wraps(scatter)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        how, adds = self.aggregation.value, name in ("scatter_add", "scatter_sub")
        ordered = name in ("scatter_min", "scatter_max", "scatter_update")
        refused = self.synchronization.value == "on_read" or (ordered and how in ("sum", "mean"))
        if (refused or (how == "none" and not adds)) and self.replica("write") is not None:
            why = f"its aggregation {how!r} does not combine replicas' rows"
            raise NotImplementedError(f"{name} of variable {self.name!r} inside run: {why}.")
        return scatter(self, *args, **options)

    return call


def writing(method: Any) -> Any:
    """Return a method that writes rows, with TensorFlow's keywords."""

    @accepting("name", "use_locking")
    def write(self: Any, *args: Any, read_value: bool = True, **options: Any) -> Any:
        renamed = {"delta": "value", "sparse_delta": "indices"}
        method(self, *args, **{renamed.get(key, key): options[key] for key in options})
        return self if read_value else None

    return write
