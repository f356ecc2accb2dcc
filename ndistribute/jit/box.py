"""`Box`: an array of a compiled step that behaves like a writable NumPy array.

JAX's arrays cannot change. A box holds a JAX array, and replaces it when the box is written. So
code for NumPy's arrays runs while a step is traced: operators in place, ``out=``, ``ufunc.at``, and
views that write through to their base. Results have NumPy's dtypes. A box has no values before the
compiled step runs, so code that needs them raises an error that names the user's line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ndistribute import tree
from ndistribute.autodiff.diagnostics import name_of, user_line
from ndistribute.context import current_trace
from ndistribute.devices import Device, as_array, jax_module
from ndistribute.jit.corrections import computed, divided, kind_of, of_jax
from ndistribute.jit.refusals import refuse, refuse_leak, refuse_outside, refuse_shape, refuse_value
from ndistribute.jit.views import READ_ONLY, VIEWING, View, placed, sliced
from ndistribute.numpy_functions import ArrayMethods, cast, written_to

_PYTHON = (bool, int, float, complex)
_SPLITTING = frozenset({np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit, np.unstack})
_ANY = np.int8(0)
_IN_PLACE = (np.fill_diagonal, np.put, np.put_along_axis)
_NO_IMAG = "is the imaginary part of real numbers, which is always zero"
_IN_C_ORDER = (np.dot, np.inner, np.tensordot)
_AT_LEAST = (np.atleast_1d, np.atleast_2d, np.atleast_3d)
_MAKERS = (np.arange, np.asarray, np.ascontiguousarray, np.empty, np.full, np.ones, np.zeros)
_TAKING = (np.take, np.take_along_axis)
_AT = {np.add: "add", np.subtract: "subtract", np.multiply: "multiply", np.divide: "divide"} | {
    np.maximum: "max",
    np.minimum: "min",
}


def _assignable(read: Callable[[Any], Any], doc: str) -> Any:
    return property(read, lambda self, new: read(self).__setitem__(..., new), doc=doc)


class Box(ArrayMethods, NDArrayOperatorsMixin):
    """An array of a step that is being traced; see the module.

    Args:
        value: JAX's value.
        base: the box of which this box is a view; None means that this box holds the value.
        view: the part of the base that this box is.
        refusal: why the box cannot be written; None means that it can.
    """

    __slots__ = (
        *"_order _seen _trace _value _view base is_checked level refusal".split(),
        "__weakref__",
    )
    __array_priority__ = 500.0
    on_device = True  # `ndistribute.devices` reads this.

    def __init__(
        self, value: Any, base: Box | None = None, view: Any = None, refusal: str | None = None
    ) -> None:
        self._value, self.base, self._view, self.refusal = value, base, view, refusal
        # The value of the base from which this value was read.
        self._seen: Any = None if base is None else base.value
        self._trace = trace = current_trace()
        # The branch or loop that made this box.
        self.level = None if trace is None else trace.level
        self.is_checked = False  # Whether the values are known to be valid indices.
        self._order: Any = ()  # The `layout` that NumPy derives from an operand; () means C order.

    @property
    def value(self) -> Any:
        """JAX's value."""
        trace = current_trace()
        if self._trace is not trace:
            refuse_leak()
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
            refuse_leak()
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
    def layout(self) -> Any:
        """An array without values that has the memory order of NumPy's array, if it is known."""
        if self.base is not None:
            layout = self.base.layout
            return None if layout is None else self._view.layout(layout)
        if isinstance(self._order, tuple):
            return np.empty(self.shape, "F" if self.dtype.kind == "c" else "b")
        return self._order

    def follow_order(self, layout: Any) -> None:
        """Use the memory order of an operand; None means that the order is not known."""
        self._order = None if layout is None else np.empty_like(layout)

    flat = _assignable(lambda self: self._part(View(np.ravel, (), {})), "The elements, a view.")
    real = _assignable(np.real, "The real part, a view.")
    imag = _assignable(np.imag, "The imaginary part, a view.")

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
        if method == "outer":
            first, second = (x if isinstance(x, Box) else np.asarray(x) for x in inputs)
            first = self._call(np.reshape, (first, (*first.shape, *[1] * second.ndim)), {})
            return call(ufunc, (first, second), kwargs)
        if method != "__call__":
            return call(getattr(ufunc, method), inputs, kwargs)
        return call(ufunc, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(hasattr(kind, "raw_array") for kind in types):
            return NotImplemented
        return call(function, args, kwargs)

    def __getitem__(self, index: Any) -> Any:
        raw = _raw_index(index, self.shape)
        if isinstance(index, Box) and _is_mask(raw):
            refuse_shape("x[mask]")
        if not _is_basic(raw):
            return Box(self.value[raw])
        part = self._part(sliced(raw))
        part.is_checked = self.is_checked
        return part

    def _part(self, view: View) -> Box:
        return Box(view.read(self.value), self, view, self.refusal)

    def __setitem__(self, index: Any, value: Any) -> None:
        raw, old = _raw_index(index, self.shape), self.value
        if not isinstance(value, Box):
            # This raises an error if it does not fit.
            value = Box(np.asarray(_raw(value), self.dtype))
        elif value.dtype.kind == "c" and self.dtype.kind != "c":
            raise TypeError(f"a complex value cannot be written to an array of {self.dtype}.")
        new = jax_module().numpy.asarray(value.value).astype(self.dtype)
        if not _is_mask(raw):
            self.value = placed(old, raw, new)
        elif new.ndim and new.shape != self.shape[np.ndim(raw) :]:
            refuse_shape(f"x[mask] = values of shape {new.shape}")
        else:
            _store(self, new, raw.reshape(*raw.shape, *[1] * (self.ndim - raw.ndim)))

    def flatten(self, order: str = "C") -> Box:
        """Return a copy of the elements along one axis."""
        return Box(np.ravel(self, order).value)  # type: ignore[call-overload]

    def copy(self, order: str = "C") -> Box:
        """Return a copy."""
        return Box(self.value)

    __copy__ = copy

    def __pow__(self, other: Any) -> Any:
        if type(other) is int and other == 2:  # NumPy does the same; its squares of bool differ.
            return self._call(np.square, (self,), {})
        return self._call(np.power, (self, other), {})

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

    def __deepcopy__(self, memo: Any) -> Box:
        return self.copy()

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
    ("__array__", "np.asarray, which NumPy has called,", ""),
    ("item", ".item()", _KEEP),
    ("tolist", ".tolist()", _KEEP),
    ("numpy", ".numpy()", _KEEP),
    ("__reduce__", "pickle", _KEEP),
):
    setattr(Box, _name, _refusing(_what, _instead))
del _name, _what, _instead


def call(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function of NumPy with boxes among its arguments."""
    written = written_to(function, args, kwargs)
    if written and kwargs.get("out") is None:
        _write(function, args, kwargs)
        return None
    out = kwargs.pop("out", None)
    outputs = out if isinstance(out, tuple) else (out,)
    where = kwargs.pop("where", True) if isinstance(function, np.ufunc) else True
    if where is not True and outputs[0] is None:
        refuse(function, "where= without out= leaves elements without a value: use np.where")
    result = _result(function, args, kwargs)
    if all(target is None for target in outputs):
        return result
    for target, value in zip(outputs, (result,) if len(outputs) == 1 else result, strict=True):
        if target is not None:
            _store(target, value.value, _raw(where))
    return outputs[0] if len(outputs) == 1 else outputs


def _store(target: Any, new: Any, where: Any = True, casting: str = "same_kind") -> None:
    """Write a JAX value to an array where a condition holds."""
    if not isinstance(target, Box):
        refuse_outside(target)
    _check_cast(new.dtype, target.dtype, casting)
    numpy = jax_module().numpy
    new = numpy.broadcast_to(new, target.shape).astype(target.dtype)
    target.value = new if where is True else numpy.where(where, new, target.value)


def _check_cast(source: Any, dtype: np.dtype[Any], casting: str) -> None:
    if not np.can_cast(source, dtype, casting):  # type: ignore[arg-type]
        raise TypeError(f"Cannot cast {source} to {dtype} by the rule {casting!r} at {user_line()}")


def _result(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(function, np.ufunc):
        return _ufunc(function, args, kwargs)
    if function in _SPLITTING:
        return function._implementation(*args, **kwargs)  # The function slices its argument.
    if function in VIEWING and isinstance(args[0], Box):
        if len(args) > 1 and function in _AT_LEAST:
            return tuple(function(arg) for arg in args)
        return _rearranged(function, args[0], args[1:], kwargs)
    raw_args, raw_kwargs = tree.map_leaves(_raw, tuple(args)), tree.map_leaves(_raw, kwargs)
    if function in _TAKING:
        _check_taken(*args, **kwargs)
    try:
        result = computed(function, raw_args, raw_kwargs)
    except jax_module().errors.ConcretizationTypeError:
        refuse_value(name_of(function), f"{_KEEP} If they decide a shape, use np.where.")
    return _like_operands(boxed(result), args, function in _IN_C_ORDER)


def _rearranged(function: Any, source: Box, args: Sequence[Any], kwargs: dict[str, Any]) -> Box:
    """Return the result of a function that returns a view or a copy of its argument."""
    kwargs = {name: v for name, v in kwargs.items() if name not in ("copy", "subok")}
    if source.ndim > 1 and not {"A", "K"}.isdisjoint(map(str, (*args, *kwargs.values()))):
        refuse(function, "the order in memory decides its result: pass order='C' or 'F'")
    view, layout, refusal = View(function, args, kwargs), source.layout, source.refusal
    value = view.read(source.value)
    if function in READ_ONLY:
        refusal = "is read-only: copy it first, as x.copy()"
    if layout is None:
        refusal = "is a copy or a view, as its order in memory decides: copy it first, as x.copy()"
    elif not np.may_share_memory(view.layout(layout), layout):
        return Box(value, refusal=_NO_IMAG if function is np.imag else None)
    return Box(value, source, view, refusal)


def _like_operands(result: Any, operands: Sequence[Any], elementwise: bool = True) -> Any:
    """Return results in the memory order of their operands, where NumPy keeps that order."""
    results = [box for box in _boxes(result) if box.ndim > 1]
    sources = [(x.shape, x.layout) for x in _boxes(operands) if x.ndim > 1] if results else []
    for box in results:
        same = [layout for shape, layout in sources if shape == box.shape]
        if same and all(map(_is_reordered, same)):
            box.follow_order(same[0])
        elif not elementwise and any(_is_reordered(layout) for _, layout in sources):
            box.follow_order(None)
    return result


def _boxes(nest: Any) -> list[Box]:
    return [leaf for leaf in tree.flatten(nest) if isinstance(leaf, Box)]


def _is_reordered(layout: Any) -> bool:
    return layout is None or not np.empty_like(layout).flags.c_contiguous


def _check_taken(x: Any, indices: Any, axis: Any = None, out: Any = None, mode: Any = None) -> None:
    """Check the indices of `np.take` and `np.take_along_axis`: for wrong ones, JAX returns NaN."""
    if mode not in ("clip", "wrap"):
        _raw_index(indices, (np.shape(x)[axis] if isinstance(axis, int) else np.size(x),))


def _ufunc(ufunc: Any, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    dtype, numpy = kwargs.pop("dtype", None), jax_module().numpy
    if not kwargs.keys() <= {"casting", "order", "subok"}:
        refuse(ufunc, f"of the keywords {', '.join(kwargs)}")
    raw = [_raw(value) for value in inputs]
    raw = [value if _is_number(value) else numpy.asarray(value) for value in raw]
    kinds = tuple(map(kind_of, raw))
    loop = _dtypes(ufunc, kinds, None if dtype is None else np.dtype(dtype))
    cast_in = [numpy.asarray(v, d) for v, d in zip(raw, loop[: ufunc.nin], strict=True)]
    result = divided(ufunc, cast_in, of_jax(ufunc)(*cast_in))
    weak = all(isinstance(kind, type) for kind in kinds)
    results = result if isinstance(result, tuple) else (result,)
    made = tuple(
        Box(value if weak and value.dtype == d else _strong(value, d))
        for value, d in zip(results, loop[ufunc.nin :], strict=True)
    )
    return _like_operands(made if isinstance(result, tuple) else made[0], inputs)


@functools.lru_cache(4096)
def _dtypes(ufunc: Any, kinds: tuple[Any, ...], dtype: Any) -> tuple[np.dtype[Any], ...]:
    """Return the dtypes that NumPy uses for the inputs and the results."""
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
        refuse(ufunc.at, "it has no such form in JAX")
    place = target.value.at[_raw_index(index, target.shape)]
    new = value if isinstance(value, Box) or type(value) in _PYTHON else np.asarray(value)
    loop = _dtypes(ufunc, (target.dtype, kind_of(_raw(new))), None)
    if not np.can_cast(loop[-1], target.dtype, "same_kind"):
        refuse(ufunc.at, f"it would cast {loop[-1]} to {target.dtype}")
    target.value = getattr(place, _AT[ufunc])(value_of(new).astype(target.dtype))


def _write(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Carry out a function that writes to its first argument."""
    target, *rest = args or kwargs.values()
    if not isinstance(target, Box):
        refuse_outside(target)
    numpy = jax_module().numpy
    raw = [np.asarray(v) if type(v) is list else _raw(v) for v in rest]
    named = {name: _raw(value) for name, value in kwargs.items()}
    if function is np.copyto:
        _store(target, numpy.asarray(raw[0]), **named)
    elif function is np.putmask:
        _store(target, numpy.resize(raw[1], target.shape), raw[0], "unsafe")
    elif function in _IN_PLACE:
        if function is np.put:
            _check_taken(target, rest[0], mode=named.get("mode"))
        elif function is np.put_along_axis:
            _check_taken(target, rest[0], named.get("axis", [*rest, None, None][2]))
        known = getattr(numpy, function.__name__)
        target.value = known(target.value, *raw, inplace=False, **named)
    else:
        refuse(function, "it has no such form in JAX: use np.where")


def _cast(x: Any, dtype: Any, copy: bool = True, casting: str = "unsafe", **kwargs: Any) -> Any:
    dtype = np.dtype(dtype)
    if x.dtype == dtype and not copy and not x.value.weak_type:
        return x
    _check_cast(x.dtype, dtype, casting)
    value = x.value.real if x.dtype.kind == "c" and dtype.kind not in "cb" else x.value
    if x.dtype.kind == "f" and dtype.kind in "iu" and dtype.itemsize < 4:
        value = _strong(value, np.dtype(np.int32))  # The cast wraps around, as in NumPy.
    made = Box(_strong(value, dtype))
    if x.dtype.kind in "iu" and np.can_cast(x.dtype, dtype) and dtype.kind in "iu":
        current_trace().follow(x.value, made.value)
    return _like_operands(made, (x,))


def _strong(value: Any, dtype: np.dtype[Any]) -> Any:
    return jax_module().lax.convert_element_type(value, dtype)


def value_of(value: Any) -> Any:
    """Return JAX's value of a box, of an object whose array is a box, or of a constant."""
    jax = jax_module()
    is_raw = isinstance(value, (jax.Array, *_PYTHON))
    return jax.numpy.asarray(value if is_raw else _raw(as_array(value)))


def boxed(result: Any) -> Any:
    """Return a nest of JAX's values as boxes with the values' dtypes."""
    jax = jax_module()

    def box(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return Box(_strong(leaf, leaf.dtype) if leaf.weak_type else leaf)

    return tree.map_leaves(box, result)


def _raw(value: Any) -> Any:
    """Return a value as JAX takes it."""
    if isinstance(value, Box):
        return value.value
    if isinstance(value, np.ndarray) and value.ndim:
        current_trace().use_outside(value)
        return value.copy()  # JAX would keep the array alive.
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, complex) or getattr(value, "weak_type", False)


def _is_mask(index: Any) -> bool:
    return getattr(index, "dtype", None) == np.dtype(bool)


def _is_basic(index: Any) -> bool:
    """Return True if NumPy returns a view for an index."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or isinstance(part, int | slice | type(Ellipsis)) for part in parts)


def _raw_index(index: Any, shape: tuple[int, ...]) -> Any:
    """Return an index for JAX; computed indices are checked when the step runs."""
    parts = list(index) if isinstance(index, tuple) else [index]
    axis, known = 0, list(parts)
    for k, part in enumerate(parts):
        if isinstance(part, bool | np.bool_):
            refuse_shape("x[True]")
        if isinstance(part, Box) and _is_mask(part) and len(parts) > 1:
            refuse_shape("x[mask, ...]")
        if isinstance(part, list | range):
            parts[k] = known[k] = np.asarray(part, None if len(part) else np.intp)
        elif isinstance(part, np.integer):
            parts[k] = int(part)
        elif isinstance(part, Box):
            if not _is_mask(part) and axis < len(shape):
                current_trace().check_index(part, shape[axis])
            parts[k], known[k] = part.value, np.zeros(part.shape, part.dtype)
        if part is Ellipsis:
            axis = len(shape) - sum(p is not None for p in parts[k + 1 :])
        elif part is not None:
            axis += np.ndim(parts[k]) if _is_mask(parts[k]) else 1
    np.broadcast_to(_ANY, shape)[tuple(known)]  # NumPy raises its errors here; JAX has none.
    return tuple(parts) if isinstance(index, tuple) else parts[0]


class _Namespace:
    """NumPy's functions; those that create arrays create boxes."""

    def __getattr__(self, name: str) -> Any:
        known = getattr(np, name)
        return functools.partial(_make, known) if known in _MAKERS else known


def _make(function: Any, first: Any, *args: Any, **kwargs: Any) -> Box:
    if isinstance(first, Box):  # In `asarray` and `ascontiguousarray`.
        dtype = args[0] if args else kwargs.get("dtype", first.dtype)
        return first.astype(dtype, copy=False)  # type: ignore[no-any-return]
    function = np.zeros if function is np.empty else function
    return Box(jax_module().numpy.asarray(function(first, *args, **kwargs)))


namespace = _Namespace()
Box.namespace = namespace  # type: ignore[attr-defined]
