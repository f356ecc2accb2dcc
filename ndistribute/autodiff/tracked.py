"""Arrays whose computation a gradient tape records, and the calls of NumPy's functions with them.

A `Tracked` replaces a raw array inside a tape, and has the methods of ``numpy.ndarray``. Operators
and functions compute with raw values and record their rules in the recorder of the thread's frame:
`unary` and `binary` for operators and plain ufunc calls, `apply` for all others. A tracked array of
a graph that no longer records is a constant. Two uses raise an error, because the gradient would be
lost: a tracked array whose graph records in another frame, and a conversion to a plain array while
its tape records. A call without a rule raises only if its gradient is needed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from ndistribute import ownership, tree
from ndistribute.autodiff.diagnostics import called, missing, refuse_conversion, refuse_elsewhere
from ndistribute.autodiff.rules import COMPOSED, JOINT_RULES, RULES, bound, decomposed, rules_of
from ndistribute.autodiff.rules.elementwise import special_rules
from ndistribute.autodiff.rules.placing import placed
from ndistribute.autodiff.rules.shape import Path, index_rule
from ndistribute.context import current_frame
from ndistribute.devices import as_array, is_device_array, to_host
from ndistribute.numpy_functions import CONSTANT, WRITING_OPTIONS, ArrayMethods, written_to

# Types without tracked arrays inside, so that one look-up decides the common case.
_PLAIN = frozenset({np.ndarray, float, int, bool, np.float32, np.float64, type(None), str, slice})

# The types that NumPy functions take without a conversion.
_OPERANDS = (np.ndarray, np.generic, int, float, complex)

# Functions whose first argument has a rule, except ufuncs, whose rules do not accept the keywords
# of a call, and functions that may have several results.
_FIRST_ARGUMENT = frozenset(
    function for function in RULES.keys() - JOINT_RULES.keys() if not isinstance(function, np.ufunc)
)

_REDUCTIONS = {np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min}

# The methods of arrays, which are a microsecond faster than these functions.
_METHODS = {np.sum: "sum", np.mean: "mean", np.max: "max", np.min: "min", np.prod: "prod"}

# Programs may create ufuncs, so the caches are bounded.
_UFUNCS = 512


class Tracked(ArrayMethods):
    """An array whose operations a gradient tape records.

    You get one from `GradientTape.watch`, by reading a variable inside a tape, or from an operation
    on tracked arrays. `untrack` returns its raw array.

    >>> from ndistribute.autodiff import GradientTape
    >>> with GradientTape() as tape:
    ...     x = tape.watch(np.array([1.0, 2.0]))
    ...     y = np.sum(x * x)
    >>> tape.gradient(y, x)
    array([2., 4.])
    """

    __slots__ = ("graph", "index", "value")
    __array_priority__ = 1000.0
    base = None  # Nothing writes to it, so it need not be copied.

    def __init__(self, value: Any, graph: Any, index: int) -> None:
        self.value = value
        self.graph = graph
        self.index = index  # of the entry in the graph

    shape = property(attrgetter("value.shape"), doc="The lengths of the axes.")
    dtype = property(attrgetter("value.dtype"), doc="The dtype of the elements.")
    ndim = property(attrgetter("value.ndim"), doc="The number of axes.")
    size = property(attrgetter("value.size"), doc="The number of elements.")
    nbytes = property(attrgetter("value.nbytes"), doc="The size of all elements in bytes.")
    itemsize = property(attrgetter("value.itemsize"), doc="The size of one element in bytes.")
    device = property(attrgetter("value.device"), doc="The device of the raw array.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs:
            if len(inputs) == 1:
                return unary(ufunc)(inputs[0])
            if len(inputs) == 2:
                return binary(ufunc)(*inputs)
        return ufunc_method(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if (function is np.shape or function is np.ndim) and args and args[0] is self:
            return getattr(self.value, function.__name__)
        return apply(function, args, kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the raw value if no tape records; read-only unless it is a copy."""
        value = self._plain("np.asarray")
        if is_device_array(value):
            raise TypeError("a tracked GPU array is not converted to a NumPy array: use .numpy().")
        if copy or (dtype is not None and dtype != value.dtype):
            return np.array(value, dtype=dtype)
        return read_only(value)

    def item(self, *args: Any) -> Any:
        """Return one element as a Python number, if no tape records."""
        return self._plain(".item()").item(*args)

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers, if no tape records."""
        return self._plain(".tolist()").tolist()

    def numpy(self) -> Any:
        """Return a copy of the raw array, without a gradient."""
        return np.array(to_host(self.value))

    def placed(self, *args: Any) -> Any:
        """Return zeros, with the elements of this array at an index."""
        return apply(placed, (self, *args), {})

    def raw_array(self) -> Any:
        """Return the raw array, for `ndistribute.devices.as_array`."""
        return as_array(self.value)

    def __getitem__(self, index: Any) -> Any:
        value = self.value
        result = value[index]
        graph: Any = current_frame().recorder
        if graph is not self.graph:
            refuse_detached("x[...]", self)
            return result if getattr(result, "base", None) is None else read_only(result)
        rules = (index_rule(value, index),)
        part = graph.record(result, (self.index,), rules)
        if graph.nested:  # Its rule also accepts tracked gradients.
            graph.again[part.index] = operator.getitem, lambda: rules
        return part

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            "x[i] = v on a tracked array, which is read-only. Compute a new array with "
            "np.where(mask, v, x), np.concatenate or np.stack."
        )

    def __pow__(self, other: Any) -> Any:
        if type(other) in (int, float) and other in _QUICK_POWERS:
            return unary(_QUICK_POWERS[other])(self)
        return binary(np.power)(self, other)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        if not self.value.ndim:
            raise TypeError("a 0-d tracked array cannot be iterated over.")
        return (self[i] for i in range(len(self.value)))

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self._plain("float()"))

    def __int__(self) -> int:
        return int(self._plain("int()"))

    def __complex__(self) -> complex:
        return complex(self._plain("complex()"))

    def __format__(self, spec: str) -> str:
        return format(self.value[()] if self.value.ndim == 0 else self.value, spec)

    def __copy__(self) -> Tracked:
        return self  # It is read-only.

    def __deepcopy__(self, memo: Any) -> Any:
        return np.copy(self)

    def __reduce__(self) -> Any:
        return np.copy, (self._plain("pickle"),)

    def __repr__(self) -> str:
        return f"Tracked({self.value!r})"

    def _plain(self, conversion: str) -> Any:
        """Return the raw value; raise a TypeError while the tape records."""
        if current_frame().recorder is self.graph:
            refuse_conversion(conversion)
        return self.value


def untrack(value: Any) -> Any:
    """Return a nest of the same structure with raw arrays instead of tracked arrays.

    Args:
        value: any nest; leaves that are not tracked stay unchanged.

    >>> untrack({"loss": 1.0})
    {'loss': 1.0}
    """
    if isinstance(value, Tracked):
        return value.value
    if not isinstance(value, list | tuple | dict) and not hasattr(value, "__dataclass_fields__"):
        return value
    leaves = tree.flatten(value)
    if not any(isinstance(leaf, Tracked) for leaf in leaves):
        return value
    return tree.unflatten(value, map(untrack, leaves))


def refuse_tracked(value: Any, call: str) -> None:
    """Raise a `TypeError` that names `call` if a recording tape tracks a value."""
    if isinstance(value, Tracked):
        value._plain(call)


def stop_gradient(value: Any) -> Any:
    """Return values as constants, which have no gradient.

    Args:
        value: a nest of tracked arrays, variables and plain values.

    Returns:
        The same structure with plain arrays instead of tracked arrays and variables. On the host
        they are read-only views, not copies.

    >>> from ndistribute.autodiff import GradientTape
    >>> with GradientTape() as tape:
    ...     x = tape.watch(3.0)
    ...     y = x * stop_gradient(x)
    >>> tape.gradient(y, x)
    array(3.)
    """
    return tree.map_leaves(_constant, value)


def _constant(leaf: Any) -> Any:
    if getattr(leaf, "is_distributed_variable", False):
        return read_only(leaf.raw_array())
    if hasattr(leaf, "stop_gradient"):  # A tensor of a graph.
        return leaf.stop_gradient()
    return read_only(leaf.value) if isinstance(leaf, Tracked) else leaf


@functools.lru_cache(_UFUNCS)
def unary(ufunc: Any) -> Callable[[Any], Any]:
    """Return the function that calls a ufunc of one tracked argument."""
    makers = RULES.get(ufunc) or special_rules(ufunc)
    if makers is None:
        return lambda x: apply(ufunc, (x,), {})

    def call(x: Any) -> Any:
        value = x.value
        graph: Any = current_frame().recorder
        if graph is not x.graph:
            refuse_detached(ufunc, x)
            return ufunc(value)
        if graph.nested:
            return apply(ufunc, (x,), {})
        result = ufunc(value)
        return graph.record(result, (x.index,), (makers[0](result, value),))

    return call


@functools.lru_cache(_UFUNCS)
def binary(ufunc: Any) -> Callable[[Any, Any], Any]:
    """Return the function that calls a ufunc of two arguments, at least one of them tracked."""
    makers = RULES.get(ufunc)
    if makers is None:
        return lambda x, y: apply(ufunc, (x, y), {})
    of_x, of_y = makers[0], makers[-1]

    def call(x: Any, y: Any) -> Any:
        graph: Any = current_frame().recorder
        if graph is not None and graph.nested:
            return apply(ufunc, (x, y), {})
        left = right = None
        if isinstance(x, Tracked):
            if x.graph is graph:
                left = x.index
            else:
                refuse_detached(ufunc, x)
            x = x.value
        elif type(x) not in _PLAIN:
            x, left = _converted(ufunc, x, graph)
        if isinstance(y, Tracked):
            if y.graph is graph:
                right = y.index
            else:
                refuse_detached(ufunc, y)
            y = y.value
        elif type(y) not in _PLAIN:
            y, right = _converted(ufunc, y, graph)
        result = ufunc(x, y)
        if left is None:
            rules = (of_y(result, x, y),) if right is not None else None
            return graph.record(result, (right,), rules) if rules else result
        if right is None:
            return graph.record(result, (left,), (of_x(result, x, y),))
        return graph.record(result, (left, right), (of_x(result, x, y), of_y(result, x, y)))

    return call


def apply(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a NumPy function with tracked arrays among its arguments.

    Results with a gradient are tracked; others, such as integers, stay plain.
    """
    result: Any = NotImplemented
    graph: Any = current_frame().recorder
    if graph is not None and graph.nested:
        args, kwargs = tree.map_leaves(_read, (args, kwargs))
    elif function in _FIRST_ARGUMENT and args and isinstance(args[0], Tracked):
        result = _apply_to_first(graph, function, args[0], args[1:], kwargs)
    composed = result is NotImplemented and function in COMPOSED
    result = decomposed(function, args, kwargs) if composed else result
    if result is not NotImplemented:
        return result
    if kwargs and any(_hides_array(value) for name, value in kwargs.items() if name != "out"):
        arguments = bound(function, args, kwargs)
        args, kwargs = (arguments.args, arguments.kwargs) if arguments else (args, kwargs)
    places: dict[Path, int | None] = {}
    raw_args = [strip(arg, graph, places, (k,)) for k, arg in enumerate(args)]
    raw_kwargs = {name: strip(kwargs[name], graph, places, (name,)) for name in kwargs}
    _refuse_writes(function, args, kwargs, bool(places))
    if function in RULES and max(map(len, places), default=1) > 1:
        joined = [_without_list(arg) for arg in args]
        if any(new is not old for new, old in zip(joined, args, strict=True)):
            return apply(function, joined, kwargs)
    result = function(*raw_args, **raw_kwargs)
    if not places or function in CONSTANT:
        return result
    several = isinstance(result, list | tuple)
    if any(map(is_differentiable, result)) if several else is_differentiable(result):
        if None in places.values():
            refuse_elsewhere(function)
        rules = rules_of(function, result, raw_args, raw_kwargs, list(places))
        record, index = graph.record_many if several else graph.record, len(graph.entries)
        result = record(result, tuple(places.values()), rules)
        if graph.nested:
            again = functools.partial(rules_of, function, result, args, kwargs, list(places))
            graph.again[index] = function, again
        return result
    if isinstance(result, np.ndarray) and result.dtype.kind == "O":
        raise TypeError(
            f"{called(function, ' of a tracked array')} returned an array of objects, which has no "
            "gradient: use NumPy functions, or define a derivative with nd.custom_gradient."
        )
    return result


def ufunc_method(ufunc: Any, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a ufunc method, or of a ufunc call with keywords."""
    if method == "__call__":
        return apply(ufunc, inputs, kwargs)
    if method == "reduce" and ufunc in _REDUCTIONS:
        return apply(_REDUCTIONS[ufunc], inputs, {"axis": 0, **kwargs})
    if method == "accumulate" and ufunc is np.add:
        return apply(np.cumsum, inputs, {"axis": 0, **kwargs})
    if method == "outer" and not kwargs:
        first, second = (x if hasattr(x, "dtype") else np.asarray(x) for x in inputs)
        return ufunc(np.reshape(first, first.shape + (1,) * second.ndim), second)
    return apply(getattr(ufunc, method), inputs, kwargs)


def refuse_detached(function: Any, x: Any) -> None:
    """Raise a `TypeError` if the tape of an argument records, but not in this frame."""
    if _is_detached(x):
        refuse_elsewhere(function)


def _is_detached(x: Any) -> bool:
    frame = current_frame()
    detached = isinstance(x, Tracked) and x.graph is not frame.recorder and x.graph.is_recording
    # The function of a `merge_call` computes for the waiting replicas, without a tape.
    return detached and not frame.merging


def read_only(value: Any) -> Any:
    """Return a read-only view, or a copy of a GPU array, so that the value cannot change."""
    return value.copy() if is_device_array(value) else ownership.read_only(np.asarray(value))


def is_differentiable(value: Any) -> bool:
    """Return True for arrays and NumPy scalars of a floating or complex dtype."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and (dtype.kind in "fc" or dtype.name == "bfloat16")


def operand(x: Any, graph: Any) -> tuple[Any, int | None]:
    """Return an argument's raw value and its entry in the graph; None if it has none there."""
    if not isinstance(x, Tracked):
        x = _read(x)
        if not isinstance(x, Tracked):
            return x, None
    return x.value, x.index if x.graph is graph else None


def _read(value: Any) -> Any:
    return value.tracked_value() if getattr(value, "is_distributed_variable", False) else value


def strip(value: Any, graph: Any, places: dict[Path, int | None], path: Path = ()) -> Any:
    """Return an argument with raw values instead of tracked arrays and variables.

    `places` receives the entry in the recording graph of each tracked array, also in lists, by its
    path; None for an array whose tape records in another frame. Other arrays are constants.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        items = [strip(item, graph, places, (*path, k)) for k, item in enumerate(value)]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else items if isinstance(value, list) else tuple(items)
    raw, index = operand(value, graph)
    if index is not None or _is_detached(value):
        places[path] = index
    elif type(raw) not in _PLAIN and _is_foreign(raw):
        raw = np.asarray(raw)
    return raw


def _apply_to_first(graph: Any, function: Any, x: Any, rest: Any, kwargs: Any) -> Any:
    """Return the result of a function with only its first argument tracked, such as a reduction.

    It is `NotImplemented` if the call needs the general code of `apply`.
    """
    for value in (*rest, *kwargs.values()):
        if type(value) not in _PLAIN and (_hides_array(value) or _is_foreign(value)):
            return NotImplemented
    if (kwargs and not WRITING_OPTIONS.isdisjoint(kwargs)) or (
        len(rest) > 1 and written_to(function, (x, *rest), kwargs)
    ):
        return NotImplemented
    value = x.value
    if function in _METHODS:
        result = getattr(value, _METHODS[function])(*rest, **kwargs)
    else:
        result = function(value, *rest, **kwargs)
    if not is_differentiable(result):
        return result
    if graph is not x.graph:
        refuse_detached(function, x)
        return result if getattr(result, "base", None) is None else read_only(result)
    try:
        rules: Any = (RULES[function][0](result, value, *rest, **kwargs),)
    except (TypeError, NotImplementedError) as error:
        rules = missing(function, str(error))
    return graph.record(result, (x.index,), rules)


def _converted(ufunc: Any, value: Any, graph: Any) -> tuple[Any, int | None]:
    """Return the result of `operand`, with lists and arrays of other libraries converted.

    What NumPy would convert to an array of objects is refused.
    """
    if isinstance(value, list | tuple):
        value = _without_list(value)
    value, place = operand(value, graph)
    if place is not None or isinstance(value, _OPERANDS) or is_device_array(value):
        return value, place
    array = np.asarray(value)
    if array.dtype == object:
        other = f" of a tracked array and a {type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"{called(ufunc, other)}: convert it to a NumPy array first, or wrap the operation in "
            "nd.custom_gradient."
        )
    return array, None


def _without_list(value: Any) -> Any:
    """Return a tracked array for a list with tracked arrays, and other values unchanged."""
    if not isinstance(value, list | tuple) or not _hides_array(value):
        return value
    return np.stack([_without_list(item) for item in value])


def _is_foreign(value: Any) -> bool:
    """Return True for arrays of other libraries, such as pandas, which are constants."""
    known = isinstance(value, _OPERANDS) or not hasattr(type(value), "__array__")
    return not known and not is_device_array(value)


def _hides_array(value: Any) -> bool:
    if type(value) in _PLAIN:
        return False
    if isinstance(value, list | tuple):
        return any(_hides_array(item) for item in value)
    return isinstance(value, Tracked) or getattr(value, "is_distributed_variable", False)


def _refuse_writes(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], recorded: bool
) -> None:
    """Raise a TypeError if a call with tracked arguments would write to an array."""
    targets = [array for _, array in written_to(function, args, kwargs)]
    if targets and (recorded or any(isinstance(target, Tracked) for target in targets)):
        raise TypeError(
            f"{called(function)} would write to an array, and one of its "
            "arguments is tracked: tapes do not record writes. Use the result instead, as "
            "in x = np.add(x, y) or x = x + y."
        )


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(other, self)


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: function(self.value, untrack(other))


# The functions that NumPy's ``**`` uses for these Python numbers.
_QUICK_POWERS = {-1: np.reciprocal, 0.5: np.sqrt, 1: np.positive, 2: np.square}

# In-place operators are not defined, so `x += y` creates a new array.
_ARITHMETIC: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "matmul": np.matmul,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "divmod": np.divmod,
}
# Calls through NumPy's protocol would take 0.6 us longer.
for _name, _ufunc in _ARITHMETIC.items():
    setattr(Tracked, f"__{_name}__", binary(_ufunc))
for _name, _ufunc in {"neg": np.negative, "pos": np.positive, "abs": np.absolute}.items():
    setattr(Tracked, f"__{_name}__", unary(_ufunc))
for _name, _ufunc in (_ARITHMETIC | {"pow": np.power}).items():
    setattr(Tracked, f"__r{_name}__", _reflected(binary(_ufunc)))
for _name in "lt le eq ne gt ge contains".split():
    setattr(Tracked, f"__{_name}__", _comparison(getattr(operator, _name)))
del _name, _ufunc
Tracked._call = staticmethod(apply)  # type: ignore[method-assign]
