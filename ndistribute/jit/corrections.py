"""JAX's functions, corrected to give NumPy's dtypes, memory orders and errors.

The functions take and return JAX's values. A function that differs from NumPy's is corrected here,
or refused with an error that names the user's line.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.diagnostics import name_of, user_line
from ndistribute.context import current_trace
from ndistribute.devices import jax_module
from ndistribute.jit.refusals import refuse
from ndistribute.numpy_functions import cast

_NUMBERS = (bool, int, float, complex)
# NumPy first converts the array arguments of these functions to one dtype; JAX has other rules.
_PROMOTING = frozenset(
    getattr(np, name)
    for name in (
        "append clip column_stack concatenate cross dot dstack einsum hstack inner kron outer "
        "select stack tensordot vdot vstack where"
    ).split()
)
_WITH_WEAK_NUMBERS = frozenset({np.clip, np.select, np.where})
_CUMULATIVE = frozenset(
    {np.cumsum, np.cumprod, np.nancumsum, np.nancumprod, np.cumulative_sum, np.cumulative_prod}
)
_DIVISIONS = frozenset({np.floor_divide, np.remainder, np.fmod, np.divmod})
_FACTORIZING = frozenset({np.linalg.cholesky, np.linalg.inv, np.linalg.solve, np.linalg.tensorinv})
_OF_VALUES = frozenset({np.linalg.eig, np.linalg.eigvals})
_ALIASES = {"fix": "trunc", "psi": "digamma"}
_IN_MEMORY = frozenset("casting copy kind order subok".split())


def computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of a NumPy function that is not a ufunc, for JAX's values."""
    options = {name: value for name, value in kwargs.items() if name not in _IN_MEMORY}
    known, args = of_jax(function), _promoted(function, args)
    if function in _OF_VALUES and np.dtype(args[0].dtype).kind != "c":
        refuse(function, "its values decide whether they are complex: use np.linalg.eigh")
    if function in _CUMULATIVE or getattr(function, "__name__", "") == "accumulate":
        args = (_widened(args[0]), *args[1:]) if options.get("dtype") is None else args
    try:
        result = known(*args, **options)
    except TypeError as error:
        if "requires ndarray or scalar arguments" not in str(error):
            raise
        args = [np.asarray(arg) if type(arg) is list else arg for arg in args]
        result = known(*args, **options)
    except NotImplementedError as error:
        refuse(function, str(error))
    if function in _FACTORIZING:
        _check_factors(function, args, result)
    return _in_dtypes_of_numpy(function, known, result, args, options)


def _in_dtypes_of_numpy(
    function: Any, known: Callable[..., Any], result: Any, args: Any, options: dict[str, Any]
) -> Any:
    """Return a result in which indices, and floats computed from integers, have 64 bits."""
    arrays = (np.ndarray, np.generic, jax_module().Array)
    dtypes = {np.dtype(leaf.dtype) for leaf in tree.flatten(args) if isinstance(leaf, arrays)}
    if options.get("dtype") is not None or not dtypes or type(result) is np.dtype:
        return result
    if all(dtype.kind in "biu" for dtype in dtypes) and any(map(_is_narrow, tree.flatten(result))):
        result = known(args[0].astype(float), *args[1:], **options)
    if function is np.histogram and options.get("weights") is None:
        result = (result[0].astype(int), result[1])
    if np.dtype(np.int32) in dtypes:
        return result
    return jax_module().tree.map(_index, result)


def _is_narrow(leaf: Any) -> bool:
    dtype = np.dtype(getattr(leaf, "dtype", bool))
    return dtype.kind in "fc" and dtype.itemsize < (8 if dtype.kind == "f" else 16)


def _index(leaf: Any) -> Any:
    return leaf.astype(np.int64) if getattr(leaf, "dtype", None) == np.int32 else leaf


def _widened(value: Any) -> Any:
    """Return integers in 64 bits, because NumPy adds them so."""
    kind = np.dtype(value.dtype).kind
    return value.astype(np.uint64 if kind == "u" else np.int64) if kind in "biu" else value


def _clip(x: Any, a_min: Any = None, a_max: Any = None, **named: Any) -> Any:
    """Return the result of `np.clip`; bounds that are numbers get the array's dtype."""
    bounds = {"min": a_min, "max": a_max}
    bounds |= {name.removeprefix("a_"): bound for name, bound in named.items()}
    dtype = np.dtype(getattr(x, "dtype", bool))
    for name, bound in bounds.items() if dtype.kind in "iu" else ():
        if type(bound) is int:
            info = np.iinfo(dtype)
            bounds[name] = min(max(bound, int(info.min)), int(info.max))
    return jax_module().numpy.clip(x, **bounds)


def _check_factors(function: Any, args: Any, result: Any) -> None:
    """Raise NumPy's error after the program has run if a matrix had no inverse or factor."""
    numpy = jax_module().numpy
    held = numpy.isfinite(result).all()
    for arg in args[:2]:
        held |= ~numpy.isfinite(numpy.asarray(arg)).all()
    what = "not positive definite" if function is np.linalg.cholesky else "singular"
    message = f"a matrix of {name_of(function)} at {user_line()} is {what}."
    current_trace().check(held, lambda: np.linalg.LinAlgError(message))


def _promoted(function: Any, args: Any) -> Any:
    """Return arguments with the dtype that NumPy converts them to."""
    if function not in _PROMOTING:
        return args
    head, rest = (args[:1], args[1:]) if function is np.where else ((), args)
    leaves = tree.flatten(rest)
    if function not in _WITH_WEAK_NUMBERS and function is not np.einsum:
        leaves = [
            np.asarray(leaf) if k < 2 and type(leaf) in _NUMBERS else leaf
            for k, leaf in enumerate(leaves)
        ]
    numeric = [leaf for leaf in leaves if hasattr(leaf, "dtype") or isinstance(leaf, _NUMBERS)]
    if len(numeric) < 2:
        return args
    kinds = [kind_of(leaf) if hasattr(leaf, "dtype") else leaf for leaf in numeric]
    try:
        dtype = np.result_type(*(0.0 if kind is float else kind for kind in kinds))
    except TypeError:
        return args
    if dtype.kind not in "fc":
        return args
    same = [leaf.astype(dtype) if hasattr(leaf, "dtype") else leaf for leaf in leaves]
    return (*head, *tree.unflatten(rest, same))


def kind_of(value: Any) -> Any:
    """Return the dtype of a value, or the type of a Python number, which adopts other dtypes."""
    if getattr(value, "weak_type", False):
        return {"f": float, "i": int, "c": complex}.get(np.dtype(value.dtype).kind, value.dtype)
    kind = type(value)
    if kind in (int, float, complex):
        return kind
    return np.dtype(bool) if kind is bool else np.dtype(value.dtype)


def divided(ufunc: Any, values: Sequence[Any], result: Any) -> Any:
    """Return a ufunc's result in which integers divided by zero are zero, as in NumPy."""
    numpy = jax_module().numpy
    if ufunc is np.modf:  # JAX gives NaN as the fraction of an infinite number.
        return numpy.where(numpy.isinf(values[0]), 0.0, result[0]), result[1]
    if ufunc not in _DIVISIONS or np.dtype(values[0].dtype).kind == "f":
        return result
    return jax_module().tree.map(lambda r: numpy.where(values[1] == 0, r.dtype.type(0), r), result)


@functools.cache
def of_jax(function: Any) -> Any:
    """Return JAX's function of the same name."""
    jax = jax_module()
    if function in _OTHER:
        return _OTHER[function]
    owner = getattr(function, "__self__", None)
    known: Any = None
    if isinstance(owner, np.ufunc):
        known = getattr(of_jax(owner), function.__name__, None)
    else:
        path = [_ALIASES.get(name, name) for name in name_of(function).split(".")]
        if path[0] in ("np", "scipy"):
            known = jax.numpy if path[0] == "np" else jax.scipy
            for name in path[1:]:
                known = getattr(known, name, None)
            if path[0] == "scipy" and known is None:  # Some of NumPy's functions are there too.
                known = getattr(jax.numpy, path[-1], None)
    if known is None:
        refuse(function, "JAX has no such function")
    return known


_OTHER: dict[Any, Any] = {
    cast: lambda x, dtype, **_: x.astype(dtype),
    np.clip: _clip,
    operator.getitem: operator.getitem,
}
