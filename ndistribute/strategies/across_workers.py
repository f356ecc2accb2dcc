"""How a value of this process's replicas becomes a value of all replicas of the job.

Every process tells its components to all others, so that what is computed of them is computed by
all in the same order and comes out bit for bit the same. It is for losses and metrics, not for
gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.workers import Workers
from ndistribute.device import Array, as_array, to_host
from ndistribute.values import DistributedValues, PerReplica
from ndistribute.variables.policy import VariableSynchronization
from ndistribute.variables.variable import Variable

__all__ = ["gather_components"]


def gather_components(value: Any, workers: Workers) -> Any:
    """Return a nest in which each distributed leaf has the components of all processes.

    Args:
        value: a nest; plain leaves and mirrored variables stay as they are.
        workers: the processes; all of them must call this with the same structure.

    Raises:
        ValueError: on all processes, where one has another number of components than replicas.
        TypeError: on all processes, where one has components that are no arrays of plain dtypes.
    """
    leaves = [value] if isinstance(value, DistributedValues) else tree.flatten(value)
    parts = [_parts(leaf) for leaf in leaves]
    own = [column for column in parts if column is not None]
    if not own:
        return value
    told = np.frombuffer(_told(own, workers.replica_counts[workers.rank]), np.uint8)
    with workers.meeting() as communicator:
        sizes, joined = communicator.all_gather((np.array([told.size]), told), axis=0)
    ends = np.cumsum(sizes)
    spans = zip(range(workers.size), ends, sizes, strict=True)
    everyone = [_heard(rank, joined[end - size : end].tobytes()) for rank, end, size in spans]
    columns = (PerReplica([p for c in column for p in c]) for column in zip(*everyone, strict=True))
    whole = [
        leaf if part is None else next(columns) for leaf, part in zip(leaves, parts, strict=True)
    ]
    return whole[0] if isinstance(value, DistributedValues) else tree.unflatten(value, whole)


def _parts(leaf: Any) -> Sequence[Any] | None:
    """Return this process's components of a leaf, or None where all replicas have the same."""
    local = isinstance(leaf, Variable) and leaf.synchronization is VariableSynchronization.ON_READ
    return leaf.values if local or isinstance(leaf, DistributedValues) else None


def _told(columns: Sequence[Sequence[Any]], replicas: int) -> bytes:
    """Return what this process tells: a description of components and their bytes, or an error.

    An error is told as well, so that the others raise it too and wait for nothing.
    """
    raw: list[bytes] = []
    try:
        for column in columns:
            if len(column) != replicas:
                raise ValueError(
                    f"a value of {len(column)} component(s) where the worker has {replicas} "
                    "replica(s)."
                )
        told: Any = [[_describe(part, raw) for part in column] for column in columns]
    except (TypeError, ValueError) as error:
        told, raw = {type(error).__name__: str(error)}, []
    head = json.dumps(told).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *raw])


def _describe(part: Any, raw: list[bytes]) -> dict[str, Any]:
    """Return what one component is, and add its bytes to those that travel."""
    rows = isinstance(part, IndexedSlices)
    arrays = [as_array(a) for a in ((part.values, part.indices) if rows else (part,))]
    for array in arrays:
        if array.dtype.hasobject or array.dtype.names:
            raise TypeError(
                f"a {type(part).__name__} of dtype {array.dtype} can not travel between processes: "
                "return numbers or arrays of numbers from the step."
            )
        raw.append(np.ascontiguousarray(to_host(array)).tobytes())
    return {
        "arrays": [[_name(array.dtype), array.shape] for array in arrays],
        "rows": list(part.dense_shape) if rows else None,
    }


def _name(dtype: np.dtype[Any]) -> str:
    """Return what `np.dtype` takes: it knows bfloat16 by name alone, and texts by their codes."""
    return dtype.name if dtype.kind == "V" else dtype.str


def _heard(rank: int, told: bytes) -> list[list[Any]]:
    """Return the components that a process told.

    Raises:
        ValueError: it told of one.
        TypeError: likewise.
    """
    start = 8 + int.from_bytes(told[:8], "little")
    content = json.loads(told[8:start])
    if isinstance(content, dict):
        ((kind, text),) = content.items()
        raise (TypeError if kind == "TypeError" else ValueError)(f"worker {rank}: {text}")
    columns = []
    for described in content:
        column: list[Any] = []
        for item in described:
            arrays: list[Array] = []
            for name, shape in item["arrays"]:
                dtype = np.dtype(name)
                flat = np.frombuffer(told, dtype, math.prod(shape), start)
                start += flat.nbytes
                arrays.append(flat.reshape(shape)[()])
            rows = item["rows"]
            if rows is None:
                column.append(arrays[0])
            else:
                column.append(IndexedSlices(arrays[0], arrays[1], tuple(rows)))
        columns.append(column)
    return columns
