"""`Strategy.reduce`, `gather` and `local_results`, for values with a component per replica.

All processes reduce the same components in the same order, so their results are equal bit for bit.
This is for losses and metrics, not for gradients.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.tracked import refuse_tracked
from ndistribute.collective import reduce_op
from ndistribute.collective.objects import all_gather_object
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.workers import Workers
from ndistribute.devices import Array, Device, array_namespace, as_array, copy_to
from ndistribute.indexed_slices import IndexedSlices, refuse_rows
from ndistribute.mistakes import count_of
from ndistribute.stream import working_on
from ndistribute.values import DistributedValues, PerReplica
from ndistribute.variables.policy import VariableSynchronization
from ndistribute.variables.variable import Variable


def local_components(value: Any) -> tuple[Any, ...]:
    """Return this process's components of a value; see `Strategy.local_results`."""
    leaves = tree.flatten(value)
    held = [leaf.values for leaf in leaves if isinstance(leaf, DistributedValues | Variable)]
    if not held:
        return (value,)
    size = max(map(len, held))
    columns = []
    for leaf in leaves:
        parts = leaf.values if isinstance(leaf, DistributedValues | Variable) else (leaf,)
        if len(parts) == 1 and not isinstance(leaf, DistributedValues):
            parts *= size  # All replicas share a central variable's component.
        if len(parts) != size:
            raise ValueError(
                f"local_results got a nest in which one leaf has {count_of(size, 'component')} "
                f"and another has {len(parts)}: every leaf needs one component for each replica."
            )
        columns.append(parts)
    return tuple(tree.unflatten(value, [parts[i] for parts in columns]) for i in range(size))


def components_of_workers(value: Any, workers: Workers) -> Any:
    """Return a nest in which each distributed leaf has the components of all processes."""
    leaves = [leaf for leaf in tree.flatten(value) if _differs(leaf)]
    if not leaves:
        return value
    replicas = workers.replica_counts[workers.rank]
    try:
        components: Any = [_components(leaf, replicas, "worker") for leaf in leaves]
    except ValueError as error:
        components = error
    everyone = all_gather_object(workers, components)
    joined = map(PerReplica, map(chain.from_iterable, zip(*everyone, strict=True)))
    return tree.map_leaves(lambda leaf: next(joined) if _differs(leaf) else leaf, value)


def reduce_value(op: ReduceOp, value: Any, axis: Any, device: Device, replicas: int) -> Any:
    """Return a nest reduced over replicas, computed on a device; see `Strategy.reduce`."""
    with working_on(device):
        return tree.map_leaves(functools.partial(_reduce_leaf, op, axis, device, replicas), value)


def gather_value(value: Any, axis: int, device: Device, replicas: int) -> Any:
    """Return a nest concatenated over replicas on a device; see `Strategy.gather`."""

    def gather(leaf: Any) -> Array:
        parts = _components(leaf, replicas)
        refuse_rows("gather", [leaf, *(parts or ())])
        arrays = [as_array(leaf)] * replicas if parts is None else list(map(as_array, parts))
        try:  # With axis=None, NumPy would flatten and concatenate.
            return _joined(arrays, operator.index(axis), device)
        except (TypeError, ValueError) as error:
            shapes = ", ".join(f"{array.shape} of replica {i}" for i, array in enumerate(arrays))
            hint = "To gather numbers, return np.reshape(x, (1,)) from each replica."
            if all(array.ndim for array in arrays):
                hint = "The axis must be an integer; only the lengths along it may differ."
            raise ValueError(f"gather along axis {axis!r} of {shapes}: {error}. {hint}") from error

    with working_on(device):
        return tree.map_leaves(gather, value)


def _differs(leaf: Any) -> bool:
    """Return True if a leaf may have different values on the replicas."""
    if isinstance(leaf, Variable):
        return leaf.synchronization is VariableSynchronization.ON_READ
    return isinstance(leaf, DistributedValues)


def _components(leaf: Any, replicas: int, where: str = "strategy") -> Sequence[Any] | None:
    """Return a leaf's components, or None if every replica has the same value."""
    if not _differs(leaf):
        refuse_tracked(leaf, f"reduce or gather of a {where}")
        return None
    parts: Sequence[Any] = leaf.values
    if len(parts) != replicas:
        raise ValueError(
            f"a {type(leaf).__name__} has {count_of(len(parts), 'component')}, but the {where} "
            f"has {count_of(replicas, 'replica')}: pass one component for each replica."
        )
    return parts


def _joined(arrays: Sequence[Array], axis: int, device: Device) -> Array:
    placed = [copy_to(array, device) for array in arrays]
    return array_namespace(*placed).concatenate(placed, axis=axis)


def _reduce_leaf(op: ReduceOp, axis: Any, device: Device, replicas: int, leaf: Any) -> Any:
    """Return one leaf reduced over replicas; a NumPy result without axes is a scalar."""
    parts = _components(leaf, replicas)
    if isinstance(leaf if parts is None else parts[0], IndexedSlices):
        return _reduce_rows(op, parts or [leaf] * replicas, axis, device)
    arrays = _numbers(op, [leaf] if parts is None else parts, device)
    if axis is not None:
        reduced = _reduce_axes(op, arrays, axis)
    elif parts is not None:
        _check_equal(op, [array.shape for array in arrays], "shape")
        reduced = reduce_op.reduce_arrays(op, arrays)
    else:
        reduced = arrays[0].astype(reduce_op.result_dtype(op, arrays[0].dtype), copy=True)
    # One multiplication or power rounds less than combining equal values replica by replica.
    if parts is None and op is ReduceOp.SUM:
        reduced = reduced * reduced.dtype.type(replicas)
    elif parts is None and op is ReduceOp.PROD:
        reduced = (reduced**replicas).astype(reduced.dtype, copy=False)
    return reduced[()]


def _numbers(op: ReduceOp, parts: Sequence[Any], device: Device) -> list[Array]:
    """Return components as arrays of one common dtype on one device."""
    arrays = [copy_to(as_array(part), device) for part in parts]
    for array, part in zip(arrays, parts, strict=True):
        if array.dtype.kind in "OSUTMm":
            what = f"{op.name} of {type(part).__name__} is undefined:"
            raise TypeError(f"{what} pass numbers, arrays of numbers, or a nest of them.")
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:
        # Replicas may return 0 and 0.5; in the dtype of the first, the half would be lost.
        common = np.result_type(*dtypes)
        arrays = [array.astype(common, copy=False) for array in arrays]
    return arrays


def _reduce_axes(op: ReduceOp, arrays: Sequence[Array], axis: Any) -> Array:
    """Return arrays reduced over axes, then over replicas; MEAN divides by the total count."""
    axes = _normalised(op, axis, arrays)
    kept = [tuple(n for i, n in enumerate(array.shape) if i not in axes) for array in arrays]
    _check_equal(op, kept, f"without axes {axes} the shape")
    counts = [math.prod([array.shape[axis] for axis in axes]) for array in arrays]
    wide, options = reduce_op.accumulation_dtype(op, arrays[0].dtype), {}
    inner = ReduceOp.SUM if op is ReduceOp.MEAN else op
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        arrays = [array for array, count in zip(arrays, counts, strict=True) if count]
        if not arrays:
            raise ValueError(f"{op.name} is undefined: all replicas are empty along axes {axes}.")
    else:  # NumPy would widen small integers while it sums.
        options = {"dtype": wide}
    # These are array methods, because only CuPy's ufuncs for sum and product have `reduce`.
    method = inner.name.lower()
    parts = [as_array(getattr(array, method)(axis=axes, **options)) for array in arrays]
    total = reduce_op.reduce_arrays(inner, parts)
    if op is ReduceOp.MEAN:
        with np.errstate(invalid="ignore", divide="ignore"):
            total = as_array(total / wide.type(sum(counts)))
    return total.astype(reduce_op.result_dtype(op, arrays[0].dtype), copy=False)


def _reduce_rows(
    op: ReduceOp, parts: Sequence[IndexedSlices], axis: Any, device: Device
) -> IndexedSlices:
    """Return the sum or mean of sparse rows over replicas: each row once, in rising order."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN) or axis is not None:
        what = "IndexedSlices can be reduced by SUM or MEAN, without an axis;"
        raise ValueError(f"{what} got {op.name} and axis {axis}: call to_dense() first.")
    _check_equal(op, [getattr(part, "dense_shape", ()) for part in parts], "rows of shape")
    values, indices = (
        _joined([as_array(getattr(part, name)) for part in parts], 0, device)
        for name in ("values", "indices")
    )
    joined = IndexedSlices(values, indices, parts[0].dense_shape)
    # These are the rows of all replicas already.
    return reduce_op.reduce_rows(joined, op, len(parts), lambda nest: nest)


def _normalised(op: ReduceOp, axis: Any, arrays: Sequence[Array]) -> tuple[int, ...]:
    """Return axes as sorted numbers, 0 or more, after a check that all arrays have them."""
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    ndim = arrays[0].ndim
    _check_equal(op, [(array.ndim,) for array in arrays], "numbers of axes")
    for number in axes:
        if not isinstance(number, int | np.integer) or not -ndim <= number < ndim:
            raise ValueError(
                f"reduce {op.name}: axis {number!r} is out of range for values of shape "
                f"{arrays[0].shape}: it must be an integer in [{-ndim}, {ndim})."
            )
    normal = tuple(sorted(int(number) % ndim for number in axes))
    if len(set(normal)) < len(normal):
        raise ValueError(f"axis {axis!r} names an axis twice.")
    return normal


def _check_equal(op: ReduceOp, shapes: Sequence[tuple[int, ...]], what: str) -> None:
    for replica, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"reduce {op.name}: replica {replica} has {what} {shape}, replica 0 has "
                f"{shapes[0]}. They must agree; use gather, or reduce along the axis that differs."
            )
