"""How arrays are presented to NCCL, so that its results are NumPy's values.

NCCL knows neither booleans, 16-bit integers nor complex numbers, and some of its reductions differ
from NumPy's. What it is asked to do is decided here, as plain data that names its constants, and
`nccl.py` launches it; so this file imports no CuPy and its decisions are tested without a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish, reduce_arrays
from ndistribute.device import Array, array_namespace

__all__ = [
    "Launch",
    "Leaf",
    "Wire",
    "address",
    "broadcast_launches",
    "gather_launches",
    "reduction_wire",
    "rows_launches",
    "stage",
]

_ELEMENTS = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}
_WIDER = {"int16": "int32", "uint16": "uint32"}
_PARTS = {"complex64": "NCCL_FLOAT32", "complex128": "NCCL_FLOAT64"}
_OPS = {
    ReduceOp.SUM: "NCCL_SUM",
    ReduceOp.MEAN: "NCCL_SUM",
    ReduceOp.MIN: "NCCL_MIN",
    ReduceOp.MAX: "NCCL_MAX",
    ReduceOp.PROD: "NCCL_PROD",
}
# What NumPy means by the sum and the product of booleans is `or` and `and`.
_BOOLEAN_OPS = {**_OPS, ReduceOp.SUM: "NCCL_MAX", ReduceOp.PROD: "NCCL_MIN"}


class Wire(NamedTuple):
    """Say how NCCL reduces an array: cast to `dtype`, seen as `words` `elements` for each item."""

    dtype: np.dtype[Any]
    elements: str
    words: int
    op: str


class Launch(NamedTuple):
    """Name a method of an NCCL communicator and its arguments but for the stream.

    A string among the arguments stands for the constant of that name.
    """

    method: str
    args: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Follow one array through a reduction: what NCCL is to do, where that lands, where it goes."""

    op: ReduceOp
    source: Array  # Kept alive until NCCL is launched: a launch holds only its address.
    landed: Array
    output: Array
    launches: Sequence[Launch]

    def complete(self, size: int) -> None:
        """Turn what NCCL left into the result, on the current stream."""
        if self.landed.ndim > 1:
            reduce_arrays(self.op, list(self.landed), out=self.output)
            return
        finish(self.op, self.landed, size)
        if self.landed is not self.output:
            self.output[...] = self.landed


def stage(op: ReduceOp, inputs: Sequence[Array], outputs: Sequence[Array], size: int) -> list[Leaf]:
    """Cast and allocate for the reduction of flat arrays over `size` replicas.

    Whatever needs memory is done here, before the replicas meet, so that no replica can fail
    between the meeting and the launch.
    """
    return [_stage(op, *pair, size) for pair in zip(inputs, outputs, strict=True)]


def _stage(op: ReduceOp, source: Array, output: Array, size: int) -> Leaf:
    wire = reduction_wire(op, source.dtype)
    if wire is None:
        landed = array_namespace(source).empty((size, source.size), source.dtype)
        sizes = [source.nbytes] * size
        launches = gather_launches(sizes, 0, address(source), address(landed))
        return Leaf(op, source, landed, output, launches)
    cast = source.astype(wire.dtype, copy=False)
    landed = output if output.dtype == wire.dtype else cast
    args = (address(cast), address(landed), cast.size * wire.words, wire.elements, wire.op)
    return Leaf(op, cast, landed, output, [Launch("allReduce", args)] if cast.size else [])


def reduction_wire(op: ReduceOp, dtype: Any) -> Wire | None:
    """Choose the type and the operation with which NCCL computes what NumPy would.

    16-bit floats travel as float32, which is their accumulation dtype; 16-bit integers, which NCCL
    does not know, as 32-bit ones, which wrap alike; booleans as bytes; complex numbers as pairs.

    Args:
        op: the reduction.
        dtype: of the array to reduce.

    Returns:
        None where NCCL has no such reduction, so that each replica must gather and reduce by
        itself: products and extremes of complex numbers, and extremes of floats, in which NCCL
        drops a NaN (it takes CUDA's ``fmin`` and ``fmax``) that NumPy keeps.

    >>> reduction_wire(ReduceOp.SUM, np.float16)
    Wire(dtype=dtype('float32'), elements='NCCL_FLOAT32', words=1, op='NCCL_SUM')
    >>> reduction_wire(ReduceOp.PROD, np.bool_)
    Wire(dtype=dtype('bool'), elements='NCCL_UINT8', words=1, op='NCCL_MIN')
    """
    wide = accumulation_dtype(op, dtype)
    if wide.kind == "b":
        return Wire(wide, "NCCL_UINT8", 1, _BOOLEAN_OPS[op])
    if wide.kind == "c" and _OPS[op] == "NCCL_SUM" and wide.name in _PARTS:
        return Wire(wide, _PARTS[wide.name], 2, _OPS[op])
    wide = np.dtype(_WIDER.get(wide.name, wide))
    if wide.name not in _ELEMENTS or (wide.kind == "f" and op in (ReduceOp.MIN, ReduceOp.MAX)):
        return None
    return Wire(wide, _ELEMENTS[wide.name], 1, _OPS[op])


def gather_launches(nbytes: Sequence[int], rank: int, source: int, target: int) -> list[Launch]:
    """Plan one rank's part of an all-gather: in one operation, or a broadcast each where ragged.

    Args:
        nbytes: how much each rank contributes.
        rank: which rank this is.
        source: the address of what it contributes.
        target: the address at which everything arrives, in rank order.

    >>> gather_launches([8, 0, 4], rank=2, source=500, target=100)
    [Launch(method='broadcast', args=(100, 100, 8, 'NCCL_UINT8', 0)), \
Launch(method='broadcast', args=(500, 108, 4, 'NCCL_UINT8', 2))]
    """
    if not any(nbytes):
        return []
    if len(set(nbytes)) == 1:
        return [Launch("allGather", (source, target, nbytes[0], "NCCL_UINT8"))]
    starts = itertools.accumulate(nbytes, initial=target)
    return [
        Launch("broadcast", (source if root == rank else start, start, count, "NCCL_UINT8", root))
        for root, (start, count) in enumerate(zip(starts, nbytes, strict=False))
        if count
    ]


def rows_launches(own: Array, whole: Array, rows: Sequence[int], rank: int) -> list[Launch]:
    """Plan one rank's part of an all-gather of matrices, of which each rank has some rows."""
    row_bytes = own.dtype.itemsize * math.prod(own.shape[1:])
    sizes = [count * row_bytes for count in rows]
    return gather_launches(sizes, rank, address(own), address(whole))


def broadcast_launches(buffers: Sequence[Array], root: int) -> list[Launch]:
    """Plan one rank's part of copying buffers from the root's, in place."""
    return [
        Launch("broadcast", (address(b), address(b), b.nbytes, "NCCL_UINT8", root))
        for b in buffers
        if b.size
    ]


def address(array: Array) -> int:
    """Return where a GPU array's first element is in the GPU's memory."""
    return int(array.data.ptr)
