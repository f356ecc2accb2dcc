"""`reduce` and `gather` in the cross-replica context: arithmetic on the components of a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.reduce_op import (
    ReduceOp,
    accumulation_dtype,
    finish,
    reduce_arrays,
    result_dtype,
)
from ndistribute.device import Array, Device, array_namespace, as_array, copy_to
from ndistribute.stream import working_on
from ndistribute.values import DistributedValues
from ndistribute.variables.policy import VariableSynchronization
from ndistribute.variables.variable import Variable

__all__ = ["gather_value", "reduce_value"]


def reduce_value(op: ReduceOp, value: Any, axis: Any, device: Device, replicas: int) -> Any:
    """Reduce a nest over replicas, and along axes of its own if any are named.

    Args:
        op: the reduction.
        value: a nest; each leaf a `PerReplica`, a `Mirrored`, a variable, or a plain value, which
            counts as the same on every replica.
        axis: None, an int, or a tuple or list of them.
        device: where the result shall be.
        replicas: how many components a `PerReplica` has.

    Raises:
        ValueError: shapes differ, or an axis is out of range.
        TypeError: the value is no number, array or `IndexedSlices`.
    """
    with working_on(device):
        if isinstance(value, DistributedValues):
            return _reduce_leaf(op, value, axis, device, replicas)
        return tree.map_leaves(lambda leaf: _reduce_leaf(op, leaf, axis, device, replicas), value)


def gather_value(value: Any, axis: int, device: Device, replicas: int) -> Any:
    """Concatenate the components of each leaf of a nest in replica order.

    Raises:
        ValueError: a component has no such axis, or other lengths differ.
    """
    return tree.map_leaves(lambda leaf: _gather_leaf(leaf, axis, device, replicas), value)


def _reduce_leaf(op: ReduceOp, leaf: Any, axis: Any, device: Device, replicas: int) -> Any:
    parts = _components(leaf, replicas)
    if isinstance(leaf if parts is None else parts[0], IndexedSlices):
        return _reduce_rows(op, parts or [leaf] * replicas, axis, device)
    if parts is None:
        array = _numbers(op, [_value_of(leaf)], device)[0]
        return _reduce_plain(op, array, axis, replicas)
    arrays = _numbers(op, parts, device)
    if axis is None:
        _check_equal(op, [array.shape for array in arrays], "shapes")
        return _numeric(reduce_arrays(op, arrays))
    return _reduce_axes(op, arrays, axis)


def _gather_leaf(leaf: Any, axis: int, device: Device, replicas: int) -> Array:
    parts = _components(leaf, replicas) or [_value_of(leaf)] * replicas
    for replica, array in enumerate(map(as_array, parts)):
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"gather along axis {axis}: the value of replica {replica} has shape "
                f"{array.shape}. A number has no axis to join along: return np.reshape(x, (1,))."
            )
    with working_on(device):
        return _joined(parts, axis, device)


def _joined(parts: Sequence[Any], axis: int, device: Device) -> Array:
    arrays = [copy_to(as_array(part), device) for part in parts]
    return array_namespace(*arrays).concatenate(arrays, axis=axis)


def _components(leaf: Any, replicas: int) -> Sequence[Any] | None:
    """Return a leaf's components, or None where every replica has the same value."""
    local = isinstance(leaf, Variable) and leaf.synchronization is VariableSynchronization.ON_READ
    if not local and not isinstance(leaf, DistributedValues):
        return None
    parts: Sequence[Any] = leaf.values
    if len(parts) != replicas:
        raise ValueError(
            f"a {type(leaf).__name__} of {len(parts)} component(s) where the strategy has "
            f"{replicas} replica(s)."
        )
    return parts


def _numbers(op: ReduceOp, parts: Sequence[Any], device: Device) -> list[Array]:
    """Return components as arrays of one dtype on one device."""
    arrays = [copy_to(as_array(part), device) for part in parts]
    for array, part in zip(arrays, parts, strict=True):
        if array.dtype.kind in "OSUTMm":
            raise TypeError(
                f"{op.name} of {type(part).__name__} is not defined: pass numbers, arrays of "
                "numbers, or a nest of them."
            )
    if any(array.dtype != arrays[0].dtype for array in arrays):
        # Replicas may well return 0 and 0.5; in the first one's dtype the half would be lost.
        common = np.result_type(*(array.dtype for array in arrays))
        arrays = [array.astype(common, copy=False) for array in arrays]
    return arrays


def _value_of(leaf: Any) -> Any:
    return leaf.component() if isinstance(leaf, Variable) else leaf


def _reduce_plain(op: ReduceOp, array: Array, axis: Any, replicas: int) -> Any:
    """Reduce what is the same on every replica, without the rounding of adding it up."""
    if axis is not None:
        array = as_array(_reduce_axes(op, [array], axis))
    if op is ReduceOp.SUM:
        return _numeric(array * array.dtype.type(replicas))
    if op is ReduceOp.PROD:
        return _numeric((array**replicas).astype(array.dtype, copy=False))
    return _numeric(array.astype(result_dtype(op, array.dtype), copy=True))


def _reduce_axes(op: ReduceOp, arrays: Sequence[Array], axis: Any) -> Any:
    """Reduce axes inside each replica, then over replicas; a mean divides by the true count."""
    axes = _normalised(axis, arrays)
    kept = [tuple(n for i, n in enumerate(array.shape) if i not in axes) for array in arrays]
    _check_equal(op, kept, f"shapes without axes {axes}")
    inner = ReduceOp.SUM if op is ReduceOp.MEAN else op
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        filled = [a for a in arrays if all(a.shape[axis] for axis in axes)]
        if not filled:
            raise ValueError(f"{op.name} over replicas that are all empty along axes {axes}.")
        arrays = filled
    wide = accumulation_dtype(op, arrays[0].dtype)
    total = reduce_arrays(inner, [_reduce_inside(inner, array, axes, wide) for array in arrays])
    if op is ReduceOp.MEAN:
        count = sum(int(np.prod([a.shape[axis] for axis in axes])) for a in arrays)
        with np.errstate(invalid="ignore", divide="ignore"):
            total = total / wide.type(count)
    return _numeric(total.astype(result_dtype(op, arrays[0].dtype), copy=False))


def _reduce_inside(op: ReduceOp, array: Array, axes: tuple[int, ...], wide: Any) -> Array:
    """Reduce axes of one array by its method: CuPy's ufuncs reduce by sum and product alone."""
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return as_array(array.min(axis=axes) if op is ReduceOp.MIN else array.max(axis=axes))
    # The dtype is named because NumPy would widen small integers while it sums.
    method = array.sum if op is ReduceOp.SUM else array.prod
    return as_array(method(axis=axes, dtype=wide))


def _reduce_rows(
    op: ReduceOp, parts: Sequence[IndexedSlices], axis: Any, device: Device
) -> IndexedSlices:
    """Sum rows over replicas sparsely: each row once, in rising order."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN) or axis is not None:
        raise ValueError(
            f"IndexedSlices are reduced by SUM or MEAN and without an axis, got {op.name} and axis "
            f"{axis}: call to_dense() first."
        )
    _check_equal(op, [getattr(part, "dense_shape", ()) for part in parts], "rows of shape")
    columns = [(part.values, part.indices) for part in parts]
    values, indices = (_joined(column, 0, device) for column in zip(*columns, strict=True))
    values = values.astype(result_dtype(op, values.dtype), copy=False)
    joined = IndexedSlices(values, indices, parts[0].dense_shape).summed()
    finish(op, joined.values, len(parts))
    return joined


def _normalised(axis: Any, arrays: Sequence[Array]) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    ndim = arrays[0].ndim
    _check_equal(None, [(array.ndim,) for array in arrays], "numbers of axes")
    for one in axes:
        if not isinstance(one, int | np.integer) or not -ndim <= one < ndim:
            raise ValueError(
                f"axis {one!r} is out of range for values of shape {arrays[0].shape}: it must be "
                f"an integer in [{-ndim}, {ndim})."
            )
    normal = tuple(sorted(int(one) % ndim for one in axes))
    if len(set(normal)) != len(normal):
        raise ValueError(f"axis {axis!r} names an axis twice.")
    return normal


def _check_equal(op: ReduceOp | None, shapes: Sequence[tuple[int, ...]], what: str) -> None:
    for replica, shape in enumerate(shapes):
        if shape != shapes[0]:
            name = "reduce" if op is None else f"reduce {op.name}"
            raise ValueError(
                f"{name}: replica {replica} has {what} {shape}, replica 0 has {shapes[0]}. They "
                "must agree; use gather, or reduce along the axis that differs."
            )


def _numeric(array: Any) -> Any:
    """Return an array without axes as a number of its dtype."""
    return array[()]
