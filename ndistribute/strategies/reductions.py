"""What becomes of values that have a component for each replica: taken apart, reduced, gathered.

All processes compute the same of the same components in the same order, so it comes out bit for bit
the same; it is for losses and metrics, not for gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.objects import all_gather_object
from ndistribute.collective.reduce_op import (
    ReduceOp,
    accumulation_dtype,
    finish,
    reduce_arrays,
    result_dtype,
)
from ndistribute.collective.workers import Workers
from ndistribute.device import Array, Device, array_namespace, as_array, copy_to
from ndistribute.stream import working_on
from ndistribute.values import DistributedValues, PerReplica
from ndistribute.variables.policy import VariableSynchronization
from ndistribute.variables.variable import Variable

__all__ = ["components_of_workers", "gather_value", "local_components", "reduce_value"]


def local_components(value: Any) -> tuple[Any, ...]:
    """Return the components of a value that this process holds; see `Strategy.local_results`."""
    held = [v.values for v in tree.flatten(value) if isinstance(v, DistributedValues | Variable)]
    if not held:
        return (value,)
    size = max(map(len, held))

    def component(leaf: Any, index: int) -> Any:
        if not isinstance(leaf, DistributedValues | Variable):
            return leaf
        parts = leaf.values
        if isinstance(leaf, Variable) and len(parts) == 1:
            return parts[0]  # A central variable's one component stands for every replica's.
        if len(parts) != size:
            raise ValueError(
                f"local_results of a nest in which one leaf has {size} component(s) and another "
                f"has {len(parts)}: each needs one component for each replica."
            )
        return parts[index]

    return tuple(tree.map_leaves(lambda leaf, i=i: component(leaf, i), value) for i in range(size))


def components_of_workers(value: Any, workers: Workers) -> Any:
    """Return a nest in which each distributed leaf has the components of all processes.

    Args:
        value: a nest; plain leaves and mirrored variables stay as they are.
        workers: the processes; all of them must call this with the same structure.

    Raises:
        ValueError: on all processes, where one has another number of components than replicas.
        TypeError: on all processes, where one has components that are no arrays of plain dtypes.
    """
    leaves = [leaf for leaf in tree.flatten(value) if _differs(leaf)]
    if not leaves:
        return value
    replicas = workers.replica_counts[workers.rank]
    try:
        told: Any = [_components(leaf, replicas, "worker") for leaf in leaves]
    except ValueError as error:
        told = error
    everyone = all_gather_object(workers, told)
    joined = map(PerReplica, map(chain.from_iterable, zip(*everyone, strict=True)))
    return tree.map_leaves(lambda leaf: next(joined) if _differs(leaf) else leaf, value)


def reduce_value(op: ReduceOp, value: Any, axis: Any, device: Device, replicas: int) -> Any:
    """Return a nest reduced over replicas on a device; see `Strategy.reduce`."""
    with working_on(device):
        return tree.map_leaves(functools.partial(_reduce_leaf, op, axis, device, replicas), value)


def gather_value(value: Any, axis: int, device: Device, replicas: int) -> Any:
    """Return a nest joined over replicas on a device; see `Strategy.gather`."""

    def gather(leaf: Any) -> Array:
        parts = _components(leaf, replicas) or [_value_of(leaf)] * replicas
        for replica, array in enumerate(map(as_array, parts)):
            if not -array.ndim <= axis < array.ndim:
                raise ValueError(
                    f"gather along axis {axis}: the value of replica {replica} has shape "
                    f"{array.shape}. A number has no axis to join along: return np.reshape(x, "
                    "(1,))."
                )
        return _joined(parts, axis, device)

    with working_on(device):
        return tree.map_leaves(gather, value)


def _differs(leaf: Any) -> bool:
    """Return True if replicas may have different values."""
    if isinstance(leaf, DistributedValues):
        return True
    return isinstance(leaf, Variable) and leaf.synchronization is VariableSynchronization.ON_READ


def _components(leaf: Any, replicas: int, where: str = "strategy") -> Sequence[Any] | None:
    """Return a leaf's components, or None where every replica has the same value."""
    if not _differs(leaf):
        return None
    parts: Sequence[Any] = leaf.values
    if len(parts) != replicas:
        raise ValueError(
            f"a {type(leaf).__name__} of {len(parts)} component(s) where the {where} has "
            f"{replicas} replica(s)."
        )
    return parts


def _value_of(leaf: Any) -> Any:
    return leaf.component() if isinstance(leaf, Variable) else leaf


def _joined(parts: Sequence[Any], axis: int, device: Device) -> Array:
    arrays = [copy_to(as_array(part), device) for part in parts]
    return array_namespace(*arrays).concatenate(arrays, axis=axis)


def _reduce_leaf(op: ReduceOp, axis: Any, device: Device, replicas: int, leaf: Any) -> Any:
    """Reduce one leaf; what has no axes left is a number of its dtype."""
    parts = _components(leaf, replicas)
    if isinstance(leaf if parts is None else parts[0], IndexedSlices):
        return _reduce_rows(op, parts or [leaf] * replicas, axis, device)
    arrays = _numbers(op, [_value_of(leaf)] if parts is None else parts, device)
    if axis is not None:
        reduced = _reduce_axes(op, arrays, axis)
    elif parts is not None:
        _check_equal(op, [array.shape for array in arrays], "shapes")
        reduced = reduce_arrays(op, arrays)
    else:
        reduced = arrays[0].astype(result_dtype(op, arrays[0].dtype), copy=True)
    # What is the same on every replica is reduced without the rounding of adding it up.
    if parts is None and op is ReduceOp.SUM:
        reduced = reduced * reduced.dtype.type(replicas)
    elif parts is None and op is ReduceOp.PROD:
        reduced = (reduced**replicas).astype(reduced.dtype, copy=False)
    return reduced[()]


def _numbers(op: ReduceOp, parts: Sequence[Any], device: Device) -> list[Array]:
    """Return components as arrays of one dtype on one device."""
    arrays = [copy_to(as_array(part), device) for part in parts]
    for array, part in zip(arrays, parts, strict=True):
        if array.dtype.kind in "OSUTMm":
            raise TypeError(
                f"{op.name} of {type(part).__name__} is not defined: pass numbers, arrays of "
                "numbers, or a nest of them."
            )
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:
        # Replicas may well return 0 and 0.5; in the first one's dtype the half would be lost.
        common = np.result_type(*dtypes)
        arrays = [array.astype(common, copy=False) for array in arrays]
    return arrays


def _reduce_axes(op: ReduceOp, arrays: Sequence[Array], axis: Any) -> Array:
    """Reduce axes inside each replica, then over replicas; a mean divides by the true count."""
    axes = _normalised(axis, arrays)
    kept = [tuple(n for i, n in enumerate(array.shape) if i not in axes) for array in arrays]
    _check_equal(op, kept, f"shapes without axes {axes}")
    wide, final = accumulation_dtype(op, arrays[0].dtype), result_dtype(op, arrays[0].dtype)
    # By an array's methods, for CuPy's ufuncs reduce by sum and product alone.
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        filled = [array for array in arrays if all(array.shape[axis] for axis in axes)]
        if not filled:
            raise ValueError(f"{op.name} over replicas that are all empty along axes {axes}.")
        method = op.name.lower()
        return reduce_arrays(op, [as_array(getattr(a, method)(axis=axes)) for a in filled])
    inner, method = (ReduceOp.PROD, "prod") if op is ReduceOp.PROD else (ReduceOp.SUM, "sum")
    # The dtype is named because NumPy would widen small integers while it sums.
    parts = [as_array(getattr(array, method)(axis=axes, dtype=wide)) for array in arrays]
    total = reduce_arrays(inner, parts)
    if op is ReduceOp.MEAN:
        count = sum(int(np.prod([array.shape[axis] for axis in axes])) for array in arrays)
        with np.errstate(invalid="ignore", divide="ignore"):
            total = as_array(total / wide.type(count))
    return total.astype(final, copy=False)


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
