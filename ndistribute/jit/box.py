"""`Box`: an array of a compiled step, which behaves as a NumPy array that can be written.

JAX's arrays cannot change. A box holds one, and replaces it when the box is written, so that code
for NumPy's arrays runs while a step is traced: operators in place, ``out=``, ``ufunc.at``, and
views that write through to the array they are part of. Results have NumPy's dtypes. A box has no
values before the compiled step runs, so whatever needs them raises an error that names the user's
line.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ndistribute import tree
from ndistribute.autodiff.diagnostics import name_of, user_line
from ndistribute.context import current_trace
from ndistribute.devices import Device, jax_module
from ndistribute.errors import TracingError
from ndistribute.jit.strided import placed
from ndistribute.numpy_functions import ArrayMethods, cast, written_to

_PYTHON = (bool, int, float, complex)
# Functions whose result is a view of their first argument, if that is contiguous.
_VIEWS = frozenset(
    {np.reshape, np.ravel, np.transpose, np.swapaxes, np.moveaxis, np.squeeze, np.expand_dims}
    | {np.atleast_1d, np.atleast_2d, np.atleast_3d, np.rollaxis}
)
# Functions whose array arguments NumPy converts to one dtype first; JAX has other rules.
_PROMOTING = frozenset(
    getattr(np, name)
    for name in (
        "append clip column_stack concatenate cross dot dstack einsum hstack inner kron outer "
        "select stack tensordot vdot vstack where"
    ).split()
)
_IN_PLACE = {
    np.fill_diagonal: "fill_diagonal",
    np.put: "put",
    np.put_along_axis: "put_along_axis",
}
_AT = {np.add: "add", np.subtract: "subtract", np.multiply: "multiply", np.divide: "divide"} | {
    np.maximum: "max",
    np.minimum: "min",
}
# What the values of an array decide: the shape of the result, which a program must know before.
_SHAPED_BY_VALUES = frozenset(
    getattr(np, name)
    for name in (
        "argwhere compress extract flatnonzero intersect1d nonzero setdiff1d setxor1d trim_zeros "
        "union1d unique unique_all unique_counts unique_inverse unique_values"
    ).split()
)


class Box(ArrayMethods, NDArrayOperatorsMixin):
    """An array of a step that is being traced; see the module.

    Args:
        value: JAX's value.
        base: the box of which this one is a view; None: it holds the value itself.
        view: how it is a part of its base.
        refusal: why it cannot be written; None: it can.
    """

    __slots__ = ("_seen", "_trace", "_value", "_view", "base", "is_checked", "level", "refusal")
    __array_priority__ = 500.0
    on_device = True  # For `ndistribute.devices`.

    def __init__(
        self, value: Any, base: Box | None = None, view: Any = None, refusal: str | None = None
    ) -> None:
        self._value, self.base, self._view, self.refusal = value, base, view, refusal
        self._seen: Any = None if base is None else base.value  # The base that gave the value.
        self._trace = trace = current_trace()
        self.level = None if trace is None else trace.level  # The branch or loop that made it.
        self.is_checked = False  # Whether its values are known to be valid indices.

    @property
    def value(self) -> Any:
        """JAX's value."""
        trace = current_trace()
        if self._trace is not trace:
            refuse_leak(self._trace)
        if self.base is not None and self.base.value is not self._seen:
            self._seen = self.base.value
            self._value = self._view.read(self._seen)
        return self._value

    @value.setter
    def value(self, new: Any) -> None:
        if self.refusal is not None:
            raise ValueError(f"the array written at {user_line()} {self.refusal}.")
        trace = current_trace()
        if self._trace is not trace:
            refuse_leak(self._trace)
        if self.base is None:
            trace.check_level(self, "an array")
            self._value = new
        else:
            self.base.value = self._view.write(self.base.value, new)

    shape = property(lambda self: self._value.shape, doc="The lengths of the axes.")
    ndim = property(lambda self: self._value.ndim, doc="The number of axes.")
    dtype = property(lambda self: np.dtype(self._value.dtype), doc="The dtype of the elements.")
    size = property(lambda self: math.prod(self.shape), doc="The number of elements.")
    itemsize = property(lambda self: self.dtype.itemsize, doc="The bytes of one element.")
    nbytes = property(lambda self: self.size * self.itemsize, doc="The bytes of all elements.")
    device = property(lambda self: Device("tpu:0"), doc="The first of JAX's devices.")

    @property
    def flat(self) -> Box:
        """The elements along one axis, a view."""
        return self._call(np.ravel, (self,), {})  # type: ignore[no-any-return]

    @staticmethod
    def _call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function is cast:
            return _cast(*args, **kwargs)
        return call(function, args, dict(kwargs))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(hasattr(type(value), "raw_array") for value in inputs):
            return NotImplemented  # A tracked array or a variable, which takes the call.
        if method == "at":
            return _at(ufunc, *inputs)
        if method != "__call__":
            return call(getattr(ufunc, method), inputs, kwargs)
        return call(ufunc, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(hasattr(kind, "raw_array") for kind in types):
            return NotImplemented
        return call(function, args, kwargs)

    def __getitem__(self, index: Any) -> Any:
        raw = _raw_index(index, self)
        if _is_mask(raw) and not isinstance(raw, np.ndarray):
            _refuse_shape("x[mask]")
        view = SlicedView(raw)
        if _is_basic(raw):
            part = Box(self.value[raw], self, view, self.refusal)
            part.is_checked = self.is_checked
            return part
        return Box(view.read(self.value))

    def __setitem__(self, index: Any, value: Any) -> None:
        raw, new = _raw_index(index, self), _raw(value)
        _check_cast(new, self.dtype, "=")
        mask = raw if _is_mask(raw) else None
        if mask is None:
            new = jax_module().numpy.asarray(new).astype(self.dtype)
            self.value = placed(self.value, raw, new)
            return
        if np.ndim(new) and np.shape(new) != self.shape[np.ndim(mask) :]:
            _refuse_shape(f"x[mask] = values of shape {np.shape(new)}")
        mask = mask.reshape(*mask.shape, *[1] * (self.ndim - mask.ndim))
        self.value = jax_module().numpy.where(mask, new, self.value).astype(self.dtype)

    def astype(self, dtype: Any, **kwargs: Any) -> Any:
        """Return the array cast to a dtype."""
        return _cast(self, dtype, **kwargs)

    def fill(self, value: Any) -> None:
        """Set all elements to one value."""
        self[...] = value

    def sort(self, axis: int = -1) -> None:
        """Sort in place."""
        self.value = jax_module().numpy.sort(self.value, axis=axis)

    def view(self, *args: Any) -> Box:
        """Return a view of the same shape and dtype."""
        if args and np.dtype(args[0]) != self.dtype:
            raise TypeError(f"x.view(dtype) at {user_line()} is not possible in a compiled step.")
        return self[...]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of an array without axes")
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[k] for k in range(len(self)))

    def __copy__(self) -> Box:
        return Box(self.value)

    def __deepcopy__(self, memo: Any) -> Box:
        return Box(self.value)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<array of a compiled step, {self.dtype.name}{self.shape}>"

    def __format__(self, spec: str) -> str:
        return repr(self)


def _refusing(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_value(what, instead)

    return refuse


_KEEP = "Compute with the array itself, by NumPy's functions, or return it from the step."
for _name, _what, _instead in (
    ("__bool__", "a condition", "Write np.where, nd.cond or nd.while_loop."),
    ("__float__", "float()", _KEEP),
    ("__int__", "int()", _KEEP),
    ("__complex__", "complex()", _KEEP),
    ("__index__", "an index or a range", "Write np.where, np.take or nd.while_loop."),
    ("__array__", "np.asarray", _KEEP),
    ("item", ".item()", _KEEP),
    ("tolist", ".tolist()", _KEEP),
    ("numpy", ".numpy()", _KEEP),
    ("__reduce__", "pickle", _KEEP),
):
    setattr(Box, _name, _refusing(_what, _instead))
del _name, _what, _instead


def refuse_value(what: str, instead: str) -> NoReturn:
    """Raise the error for code that needs the values of an array while a step is traced."""
    raise TracingError(
        f"{what} at {user_line()} needs the values of an array in a compiled step, which has none "
        f"before it runs. {instead} Or run this function plainly."
    )


def _refuse_shape(what: str) -> NoReturn:
    raise TracingError(
        f"{what} at {user_line()}: the values of an array decide the shape of the result, which a "
        "compiled step must know before it runs. Write np.where(mask, x, 0) in place of x[mask], "
        "or run this function plainly."
    )


def refuse_leak(trace: Any) -> NoReturn:
    """Raise the error for a box that is used outside the step in which it was made."""
    raise TracingError(
        f"a value that a compiled step computed is used at {user_line()}, outside of that step: it "
        "has no value. Return it from the step, or assign it to a variable."
    )


class SlicedView:
    """The view of the elements at a basic index, which has no arrays."""

    __slots__ = ("_index",)

    def __init__(self, index: Any) -> None:
        self._index = index

    def read(self, value: Any) -> Any:
        return value[self._index]

    def write(self, value: Any, new: Any) -> Any:
        return placed(value, self._index, new)


class RearrangedView:
    """The view of all elements in another shape or order, as a function of NumPy returns it."""

    __slots__ = ("_args", "_function", "_kwargs")

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs

    def read(self, value: Any) -> Any:
        return _of_jax(self._function)(value, *self._args, **self._kwargs)

    def write(self, value: Any, new: Any) -> Any:
        places = np.arange(value.size).reshape(value.shape)
        places = self._function(places, *self._args, **self._kwargs).ravel()
        flat = new.reshape(-1)
        if not np.array_equal(places, np.arange(value.size)):
            flat = flat[np.argsort(places)]
        return flat.reshape(value.shape)


def call(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function of NumPy with boxes among its arguments."""
    written = written_to(function, args, kwargs)
    if written and not kwargs.get("out"):
        _write(function, args, kwargs)
        return None
    out = kwargs.pop("out", None) if "out" in kwargs else None
    result = _result(function, args, kwargs)
    if out is None:
        return result
    outputs = out if isinstance(out, tuple) else (out,)
    for target, value in zip(outputs, (result,) if len(outputs) == 1 else result, strict=True):
        _output(target, value)
    return outputs[0] if len(outputs) == 1 else outputs


def _output(target: Any, value: Any) -> None:
    if target is None:
        return
    if not isinstance(target, Box):
        refuse_outside(target)
    _check_cast(value, target.dtype, "out=")
    target.value = jax_module().numpy.broadcast_to(value.value, target.shape).astype(target.dtype)


def refuse_outside(target: Any) -> NoReturn:
    """Raise the error for a write to an array outside of the step that is traced."""
    raise TracingError(
        f"a compiled step writes to a {type(target).__name__} that was made outside of it, at "
        f"{user_line()}: such a write would happen once, while the step is traced. Make it a "
        "variable, nd.Variable(array), and assign to it, or return the value."
    )


def _check_cast(value: Any, dtype: np.dtype[Any], what: str) -> None:
    if isinstance(value, _PYTHON) and not isinstance(value, complex):
        return
    source = getattr(value, "dtype", None)
    if source is not None and what != "=" and not np.can_cast(source, dtype, "same_kind"):
        raise TypeError(
            f"Cannot cast output from {source} to {dtype} with casting rule 'same_kind'"
        )
    if np.dtype(source or complex).kind == "c" and dtype.kind != "c":
        raise TypeError(f"a complex value cannot be written to an array of {dtype}.")


def _result(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(function, np.ufunc):
        return _ufunc(function, args, kwargs)
    if function in _SHAPED_BY_VALUES or (function is np.where and len(args) == 1):
        _refuse_shape(name_of(function))
    if function in _VIEWS and isinstance(args[0], Box) and "order" not in kwargs:
        source, *rest = args
        if function is np.reshape and len(rest) > 1:
            rest = _in_c_order(function, rest)
        view = RearrangedView(function, rest, kwargs)
        return Box(view.read(source.value), source, view, source.refusal)
    plain = functools.partial(_plain_options, function)
    raw_args, raw_kwargs = tree.map_leaves(_raw, tuple(args)), tree.map_leaves(_raw, plain(kwargs))
    if function in _PROMOTING:
        raw_args = _promoted(function, raw_args)
    try:
        result = _of_jax(function)(*raw_args, **raw_kwargs)
    except jax_module().errors.ConcretizationTypeError:
        _refuse_shape(name_of(function))
    return boxed(result)


def _in_c_order(function: Any, rest: Sequence[Any]) -> list[Any]:
    if rest[1] not in ("C", "A", "K"):
        raise TypeError(f"{name_of(function)} with order={rest[1]!r} is not possible here.")
    return list(rest[:1])


def _plain_options(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return options without those that only concern memory, or which sort: JAX's is stable."""
    without = ("order", "subok", "copy", "casting", "kind")
    return {n: v for n, v in kwargs.items() if n not in without}


def _promoted(function: Any, args: Any) -> Any:
    """Return arguments with the dtype that NumPy converts them to."""
    head, rest = (args[:1], args[1:]) if function is np.where else ((), args)
    leaves = tree.flatten(rest)
    numeric = [leaf for leaf in leaves if hasattr(leaf, "dtype") or isinstance(leaf, _PYTHON)]
    if len(numeric) < 2:
        return args
    kinds = [_kind(leaf) if hasattr(leaf, "dtype") else leaf for leaf in numeric]
    try:
        dtype = np.result_type(*(0.0 if kind is float else kind for kind in kinds))
    except TypeError:
        return args
    if dtype.kind not in "fc":
        return args
    same = [leaf.astype(dtype) if hasattr(leaf, "dtype") else leaf for leaf in leaves]
    return (*head, *tree.unflatten(rest, same))


def _ufunc(ufunc: Any, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    where, dtype = kwargs.pop("where", True), kwargs.pop("dtype", None)
    numpy = jax_module().numpy
    raw = [_raw(value) for value in inputs]
    raw = [value if _is_number(value) else numpy.asarray(value) for value in raw]
    kinds = tuple(map(_kind, raw))
    loop = _dtypes(ufunc, kinds, None if dtype is None else np.dtype(dtype))
    cast_in = [numpy.asarray(v, d) for v, d in zip(raw, loop[: ufunc.nin], strict=True)]
    options = _plain_options(ufunc, kwargs)
    result = _of_jax(ufunc)(*cast_in, **options)
    if where is not True:
        refuse_value("where= of a ufunc without out=", "Write np.where.")
    weak = all(kind in _PYTHON for kind in kinds)
    results = result if isinstance(result, tuple) else (result,)
    made = tuple(
        Box(value if weak and value.dtype == d else _strong(value, d))
        for value, d in zip(results, loop[ufunc.nin :], strict=True)
    )
    return made if isinstance(result, tuple) else made[0]


def _kind(value: Any) -> Any:
    """Return the dtype of a value, or Python's type for a number that takes that of the others."""
    if getattr(value, "weak_type", False):
        return {"f": float, "i": int, "c": complex}.get(np.dtype(value.dtype).kind, value.dtype)
    kind = type(value)
    if kind in (int, float, complex):
        return kind
    return np.dtype(bool) if kind is bool else np.dtype(value.dtype)


@functools.lru_cache(4096)
def _dtypes(ufunc: Any, kinds: tuple[Any, ...], dtype: Any) -> tuple[np.dtype[Any], ...]:
    """Return the dtypes in which NumPy computes, of the inputs and of the results."""
    options: Any = {"casting": "same_kind"}
    if dtype is not None:
        options["signature"] = (None,) * ufunc.nin + (dtype,) * ufunc.nout
    known: tuple[np.dtype[Any], ...]
    known = ufunc.resolve_dtypes((*kinds, *[None] * ufunc.nout), **options)
    return known


def _at(ufunc: Any, target: Any, index: Any, value: Any = None) -> None:
    if not isinstance(target, Box):
        refuse_outside(target)
    if ufunc not in _AT or value is None:
        raise TracingError(f"np.{ufunc.__name__}.at at {user_line()} cannot be compiled.")
    place = target.value.at[_raw_index(index, target)]
    new = jax_module().numpy.asarray(_raw(value)).astype(target.dtype)
    target.value = getattr(place, _AT[ufunc])(new)


def _write(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Carry out a function that writes to its first argument."""
    target, *rest = args or kwargs.values()
    if not isinstance(target, Box):
        refuse_outside(target)
    numpy, raw = jax_module().numpy, [_raw(value) for value in rest]
    named = {name: _raw(value) for name, value in kwargs.items()}
    if function is np.copyto:
        where = named.pop("where", True)
        source = numpy.asarray(raw[0]).astype(target.dtype)
        target.value = numpy.where(where, source, target.value)
    elif function in _IN_PLACE:
        new = getattr(numpy, _IN_PLACE[function])(target.value, *raw, inplace=False, **named)
        target.value = new
    else:
        raise TracingError(
            f"{name_of(function)} at {user_line()} cannot be compiled: use np.where."
        )


def _cast(x: Any, dtype: Any, copy: bool = True, casting: str = "unsafe", **kwargs: Any) -> Any:
    dtype = np.dtype(dtype)
    if x.dtype == dtype and not copy and not x.value.weak_type:
        return x
    if not np.can_cast(x.dtype, dtype, casting):  # type: ignore[arg-type]
        raise TypeError(f"Cannot cast array data from {x.dtype} to {dtype} by the rule {casting!r}")
    value = x.value.real if x.dtype.kind == "c" and dtype.kind not in "cb" else x.value
    return Box(_strong(value, dtype))


def _strong(value: Any, dtype: np.dtype[Any]) -> Any:
    return jax_module().lax.convert_element_type(value, dtype)


def boxed(result: Any) -> Any:
    """Return a nest of JAX's values as boxes with dtypes of their own."""
    jax = jax_module()

    def box(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return Box(_strong(leaf, leaf.dtype) if leaf.weak_type else leaf)

    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*map(box, result))
    return type(result)(map(box, result)) if isinstance(result, tuple | list) else box(result)


def _raw(value: Any) -> Any:
    """Return a value as JAX takes it."""
    if isinstance(value, Box):
        return value.value
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, complex) or getattr(value, "weak_type", False)


def _is_mask(index: Any) -> bool:
    return getattr(index, "dtype", None) == np.dtype(bool)


def _is_basic(index: Any) -> bool:
    """Return True if NumPy returns a view for an index."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or isinstance(part, int | slice | type(Ellipsis)) for part in parts)


def _raw_index(index: Any, box: Box) -> Any:
    """Return an index as JAX takes it; indices that are computed are checked when the step runs."""
    parts = list(index) if isinstance(index, tuple) else [index]
    axis = 0
    for k, part in enumerate(parts):
        if part is Ellipsis:
            axis = box.ndim - sum(p is not None for p in parts[k + 1 :])
        elif isinstance(part, Box) and part.dtype == bool:
            if len(parts) > 1:
                _refuse_shape("x[mask, ...]")
            return part.value
        elif isinstance(part, Box):
            current_trace().check_index(part, box.shape[axis])
            parts[k] = part.value
            axis += 1
        elif isinstance(part, list | np.ndarray) and np.asarray(part).dtype != bool:
            parts[k] = np.asarray(part, None if np.size(part) else np.intp)
            _check_bounds(parts[k], box.shape, axis)
            axis += 1
        elif part is not None:
            parts[k] = operator.index(part) if isinstance(part, np.integer) else part
            if isinstance(parts[k], int):
                _check_bounds(np.asarray(parts[k]), box.shape, axis)
            axis += 1
    return tuple(parts) if isinstance(index, tuple) else parts[0]


def _check_bounds(part: Any, shape: tuple[int, ...], axis: int) -> None:
    """Raise an `IndexError` for an index that is known now, and not in range; JAX would clip it."""
    if axis >= len(shape):
        raise IndexError(f"too many indices for an array of shape {shape}.")
    outside = part[(part < -shape[axis]) | (part >= shape[axis])] if part.size else part
    if outside.size:
        bad = np.ravel(outside)[0]
        raise IndexError(f"index {bad} is out of bounds for axis {axis} with size {shape[axis]}")


@functools.cache
def _of_jax(function: Any) -> Any:
    """Return JAX's function of the same name."""
    jax = jax_module()
    if function is cast:
        return lambda x, dtype, **_: x.astype(dtype)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, np.ufunc):
        return getattr(_of_jax(owner), function.__name__)
    path = name_of(function).split(".")
    if path[0] in ("np", "scipy"):
        known = jax.numpy if path[0] == "np" else jax.scipy
        for name in path[1:]:
            known = getattr(known, name, None)
        if known is not None:
            return known
    raise TracingError(
        f"{name_of(function)} at {user_line()} cannot be compiled, because JAX has no such "
        "function: write it by other functions of NumPy, or run this function plainly."
    )


class _Namespace:
    """NumPy's functions, of which those that make arrays make boxes."""

    _MAKERS = frozenset(
        "arange array asarray ascontiguousarray empty eye full identity linspace".split()
        + "ones tri zeros".split()
    )

    def __getattr__(self, name: str) -> Any:
        if name not in self._MAKERS:
            return getattr(np, name)
        return functools.partial(_make, name)


def _make(name: str, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], Box):
        made = args[0]
        dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        made = made if dtype is None else made.astype(dtype, copy=False)
        return Box(made.value) if name == "array" and kwargs.get("copy", True) else made
    if args and isinstance(args[0], list | tuple) and name in ("array", "asarray"):
        leaves = tree.flatten(list(args[0]))
        if any(isinstance(leaf, Box) for leaf in leaves):
            return np.stack([_make(name, item, **kwargs) for item in args[0]])
    return Box(
        jax_module().numpy.asarray(
            getattr(np, "zeros" if name == "empty" else name)(*args, **kwargs)
        )
    )


namespace = _Namespace()
Box.namespace = namespace  # type: ignore[attr-defined]
