"""What CuPy's functions and methods take, as data: the signatures that CuPy 13.6 and 14.2 share.

Written down from `inspect.signature` and the methods' docstrings; test_fidelity.py compares
them with the CuPy that is installed, if one is. That needs no GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["FUNCTIONS", "METHODS", "NCCL", "UFUNCS", "binder"]

_REDUCTION = "a, axis=None, dtype=None, out=None, keepdims=False"
_EXTREME = "a, axis=None, out=None, keepdims=False"
_LIKE = "a, dtype=None, order='K', subok=None, shape=None"

FUNCTIONS: dict[str, str] = {
    "all": _EXTREME,
    "any": _EXTREME,
    "amax": _EXTREME,
    "amin": _EXTREME,
    "max": _EXTREME,
    "min": _EXTREME,
    "ptp": _EXTREME,
    "sum": _REDUCTION,
    "prod": _REDUCTION,
    "mean": _REDUCTION,
    "var": "a, axis=None, dtype=None, out=None, ddof=0, keepdims=False",
    "std": "a, axis=None, dtype=None, out=None, ddof=0, keepdims=False",
    "append": "arr, values, axis=None",
    "argmax": "a, axis=None, dtype=None, out=None, keepdims=False",
    "argmin": "a, axis=None, dtype=None, out=None, keepdims=False",
    "argsort": "a, axis=-1, kind=None",
    "around": "a, decimals=0, out=None",
    "array_split": "ary, indices_or_sections, axis=0",
    "ascontiguousarray": "a, dtype=None",
    "atleast_1d": "*arys",
    "atleast_2d": "*arys",
    "atleast_3d": "*arys",
    "broadcast_arrays": "*args",
    "broadcast_to": "array, shape",
    "clip": "a, a_min, a_max, out=None",
    "concatenate": "tup, axis=0, out=None, *, dtype=None, casting='same_kind'",
    "copy": "a, order='K'",
    "count_nonzero": "a, axis=None",
    "cumprod": "a, axis=None, dtype=None, out=None",
    "cumsum": "a, axis=None, dtype=None, out=None",
    "diag": "v, k=0",
    "diagonal": "a, offset=0, axis1=0, axis2=1",
    "dot": "a, b, out=None",
    "einsum": "*operands, **kwargs",
    "empty_like": _LIKE.replace("a,", "prototype,", 1),
    "expand_dims": "a, axis",
    "flatnonzero": "a",
    "flip": "a, axis=None",
    "fliplr": "a",
    "flipud": "a",
    "full_like": _LIKE.replace("a,", "a, fill_value,", 1),
    "hstack": "tup, *, dtype=None, casting='same_kind'",
    "isclose": "a, b, rtol=1e-05, atol=1e-08, equal_nan=False",
    "ix_": "*args",
    "matmul": "*args, **kwargs",
    "moveaxis": "a, source, destination",
    "ndim": "a",
    "nonzero": "a",
    "ones_like": _LIKE,
    "pad": "array, pad_width, mode='constant', **kwargs",
    "ravel": "a, order='C'",
    "repeat": "a, repeats, axis=None",
    "reshape": "a, newshape, order='C'",
    "roll": "a, shift, axis=None",
    "rot90": "a, k=1, axes=(0, 1)",
    "round": "a, decimals=0, out=None",
    "shape": "a",
    "size": "a, axis=None",
    "sort": "a, axis=-1, kind=None",
    "split": "ary, indices_or_sections, axis=0",
    "squeeze": "a, axis=None",
    "stack": "tup, axis=0, out=None, *, dtype=None, casting='same_kind'",
    "swapaxes": "a, axis1, axis2",
    "take": "a, indices, axis=None, out=None",
    "take_along_axis": "a, indices, axis",
    "tensordot": "a, b, axes=2",
    "tile": "A, reps",
    "trace": "a, offset=0, axis1=0, axis2=1, dtype=None, out=None",
    "transpose": "a, axes=None",
    "tril": "m, k=0",
    "triu": "m, k=0",
    "unique": "ar, return_index=False, return_inverse=False, return_counts=False, axis=None, *, "
    "equal_nan=True",
    "vstack": "tup, *, dtype=None, casting='same_kind'",
    "where": "condition, x=None, y=None",
    "zeros_like": _LIKE,
    "linalg.norm": "x, ord=None, axis=None, keepdims=False",
}

_SELF_REDUCTION = "self, axis=None, dtype=None, out=None, keepdims=False"
_SELF_EXTREME = "self, axis=None, out=None, keepdims=False"

METHODS: dict[str, str] = {
    "all": _SELF_EXTREME,
    "any": _SELF_EXTREME,
    "max": _SELF_EXTREME,
    "min": _SELF_EXTREME,
    "sum": _SELF_REDUCTION,
    "mean": _SELF_REDUCTION,
    "prod": "self, axis=None, dtype=None, out=None, keepdims=None",
    "var": "self, axis=None, dtype=None, out=None, ddof=0, keepdims=False",
    "std": "self, axis=None, dtype=None, out=None, ddof=0, keepdims=False",
    "argmax": "self, axis=None, out=None, dtype=None, keepdims=False",
    "argmin": "self, axis=None, out=None, dtype=None, keepdims=False",
    "argsort": "self, axis=-1",
    "clip": "self, min=None, max=None, out=None",
    "conj": "self",
    "cumprod": "self, axis=None, dtype=None, out=None",
    "cumsum": "self, axis=None, dtype=None, out=None",
    "diagonal": "self, offset=0, axis1=0, axis2=1",
    "dot": "self, b, out=None",
    "flatten": "self, order='C'",
    "nonzero": "self",
    "ravel": "self, order='C'",
    "repeat": "self, repeats, axis=None",
    "round": "self, decimals=0, out=None",
    "searchsorted": "self, v, side='left', sorter=None",
    "squeeze": "self, axis=None",
    "swapaxes": "self, axis1, axis2",
    "take": "self, indices, axis=None, out=None",
    "trace": "self, offset=0, axis1=0, axis2=1, dtype=None, out=None",
}

UFUNCS = (
    "absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_or "
    "bitwise_xor cbrt ceil conjugate copysign cos cosh deg2rad divide equal exp exp2 expm1 fabs "
    "fix floor floor_divide fmax fmin fmod greater greater_equal heaviside hypot invert isfinite "
    "isinf isnan left_shift less less_equal log log10 log1p log2 logaddexp logaddexp2 logical_and "
    "logical_not logical_or logical_xor maximum minimum multiply negative nextafter not_equal "
    "positive power rad2deg reciprocal remainder right_shift rint sign signbit sin sinh sqrt "
    "square subtract tan tanh trunc"
).split()

# Of ``cupy.cuda.nccl``. The unique id is bytes for CuPy 14, and a tuple of chars for CuPy 13.
NCCL: dict[str, str] = {
    "get_unique_id": "",
    "groupStart": "",
    "groupEnd": "",
    "NcclCommunicator.allReduce": "self, sendbuf, recvbuf, count, datatype, op, stream",
    "NcclCommunicator.allGather": "self, sendbuf, recvbuf, count, datatype, stream",
    "NcclCommunicator.broadcast": "self, sendbuff, recvbuff, count, datatype, root, stream",
    "NcclCommunicator.check_async_error": "self",
    "NcclCommunicator.abort": "self",
    "NcclCommunicator.destroy": "self",
}


@functools.cache
def binder(signature: str) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a function that takes a call, or refuses it, as CuPy does.

    It returns what was given: by position as far as it goes, the rest by name.
    """
    taken = inspect.signature(eval(f"lambda {signature}: None"))

    def bind(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = taken.bind(*args, **kwargs)
        return bound.args, bound.kwargs

    return bind
