"""Tensors and variables with TensorFlow's methods, and the tape that watches them.

A tensor is a NumPy array that does not change in place. Operators convert the other operand to its
dtype, as TensorFlow does; NumPy's own functions follow NumPy's rules.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute import graph, tree
from ndistribute.autodiff import Tracked
from ndistribute.compat import programs
from ndistribute.compat.scatters import SCATTERED, combining, scattering, writing
from ndistribute.devices import as_array
from ndistribute.errors import InvalidArgumentError
from ndistribute.graph.graph import Symbolic
from ndistribute.graph.shapes import Shape, narrowed
from ndistribute.mistakes import accepting
from ndistribute.models.masks import detach_mask, mask_of
from ndistribute.models.symbolic import SymbolicArray
from ndistribute.numpy_functions import ArrayMethods
from ndistribute.values import DistributedValues
from ndistribute.variables.variable import ArrayLike

_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul".split()
_COMPARISONS = "lt le gt ge eq ne".split()
_log = logging.getLogger("ndistribute")
_TASK = "/job:localhost/replica:0/task:0"
_here = threading.local()
_lengths = vars(np.ndarray)["shape"].__get__


class Reference:
    """A key that identifies a tensor or variable in dicts and sets; `deref` returns the object."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def deref(self) -> Any:
        """Return the tensor or variable."""
        return self._thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and self._thing is other._thing

    def __hash__(self) -> int:
        return id(self._thing)


class _Shaped:
    """The reference and the shape of tensors and variables."""

    __slots__ = ()

    def ref(self) -> Reference:
        """Return a reference, which can be a key in dicts and sets."""
        return Reference(self)

    def get_shape(self) -> Shape:
        """Return the shape."""
        return Shape(self.shape)  # type: ignore[attr-defined]

    def set_shape(self, shape: Any) -> None:
        """Raise ValueError if the shape is another one; None stands for any length."""
        self.get_shape().merged(Shape(shape))

    @property
    def _keras_mask(self) -> Any:
        mask = mask_of(self)
        if mask is None:
            raise AttributeError("the tensor has no mask.")
        return mask

    @_keras_mask.deleter
    def _keras_mask(self) -> None:
        detach_mask(self)


class Tensor(_Shaped, np.ndarray[Any, Any]):
    """A NumPy array with the methods of TensorFlow's tensors."""

    __array_priority__ = 100.0
    shape = property(
        lambda self: tuple.__new__(Shape, _lengths(self)), vars(np.ndarray)["shape"].__set__
    )
    device = property(lambda self: f"{_TASK}/device:CPU:0")

    def numpy(self) -> Any:
        """Return a copy as a NumPy array or a number; text becomes bytes."""
        array = self.view(np.ndarray)
        return (np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array.copy())[()]

    def __getitem__(self, index: Any) -> Any:
        return as_tensor(super().__getitem__(tuple(index) if type(index) is list else index))

    def __iter__(self) -> Any:
        return map(self.__getitem__, range(len(self)))

    def __float__(self) -> float:
        return float(self.item())

    def __hash__(self) -> int:  # type: ignore[override]
        """Return the hash of the number, so that elements of a tensor can be in a set."""
        if self.ndim:
            raise TypeError("a tensor with axes is not hashable: use x.ref() as the key.")
        return hash(self.item())

    def __str__(self) -> str:
        return str(self.view(np.ndarray))

    def __repr__(self) -> str:
        array = self.view(np.ndarray)
        shown = repr(array) if array.ndim else repr(array.item())
        return f"<tf.Tensor: shape={self.shape}, dtype={self.dtype}, numpy={shown}>"


def as_tensor(value: Any) -> Any:
    """Return NumPy arrays and numbers as tensors; other values unchanged."""
    if isinstance(value, Tensor) or not isinstance(value, (np.ndarray, np.generic)):
        return value
    return np.asarray(value).view(Tensor)


def plain(value: Any) -> Any:
    """Return a tensor as a NumPy array, tracked if it is watched; other values unchanged."""
    value = value.tracked_value() if isinstance(value, WatchedTensor) else value
    return value.view(np.ndarray) if isinstance(value, Tensor) else value


def matched(tensor: Any, other: Any) -> Any:
    """Return the other operand of a tensor; an array or list gets the tensor's dtype if it fits.

    Raises:
        InvalidArgumentError: it is a tensor of another dtype.
    """
    if isinstance(other, _NUMBERS) and not isinstance(other, np.generic):
        return other
    if not isinstance(other, _TENSORS):
        if isinstance(other, (list, tuple)):
            return convert_to_tensor(other, tensor.dtype)
        array = as_array(other)
        kinds = tensor.dtype.kind, array.dtype.kind
        fits = kinds[0] == kinds[1] or (kinds[0] in "fciu" and kinds[1] in "fiu")
        narrower = array.dtype.kind == "f" and array.dtype.itemsize < 8  # As in mixed precision.
        return array.astype(tensor.dtype) if fits and not narrower else array
    if other.dtype != tensor.dtype and not getattr(_here, "differentiates", False):
        dtypes = f"{tensor.dtype} and {other.dtype}"
        raise InvalidArgumentError(f"the operands are tensors of {dtypes}: tf.cast one of them.")
    return other


def _operator(base: type, name: str) -> Any:
    """Return an operator of a base class that gives both operands one dtype."""
    method = getattr(base, f"__{name}__")
    divides, rounds = name in ("truediv", "rtruediv"), name in ("floordiv", "mod")
    compares = name in ("eq", "ne")

    def call(self: Any, other: Any) -> Any:
        if other is None and compares:
            return name == "ne"
        is_whole, narrow = self.dtype.kind in "iu", self.dtype.itemsize < 4
        if rounds and is_whole and isinstance(other, int | Tensor) and not np.all(other):
            raise InvalidArgumentError("an integer is divided by zero.")
        if is_whole and (isinstance(other, float) or (divides and narrow)):
            self, other = self.astype(np.float32), np.float32(other)
        other = matched(self, other)
        return as_tensor(method(self, plain(other) if base is Tracked else other))

    return call


def _ufunc(base: Any) -> Any:
    """Return the method that NumPy's functions call; arrays of floats get the tensor's dtype."""

    def call(self: Any, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        inputs = tuple(x if isinstance(x, ArrayLike) else plain(x) for x in inputs)
        if (dtype := self.dtype).kind == "f":
            inputs = tuple(
                x.astype(dtype, copy=False) if type(x) is np.ndarray and x.dtype.kind == "f" else x
                for x in inputs
            )
        return base.__array_ufunc__(self, ufunc, method, *inputs, **options)

    return call


class WatchedTensor(ArrayLike, Tensor):  # type: ignore[misc]
    """A tensor that a tape watches, as it watches a variable; it was a `Tensor` before."""

    is_distributed_variable = True
    trainable = False  # Other tapes do not watch it.
    __getitem__, __iter__ = ArrayLike.__getitem__, ArrayLike.__iter__

    def component(self) -> Any:
        return self.view(np.ndarray)

    def tracked_value(self) -> Any:
        return as_tensor(super().tracked_value())

    def numpy(self) -> Any:
        return Tensor.numpy(self)


def _tracked(name: str) -> Any:
    """Return a method or property that uses the tracked array of a watched tensor."""
    if isinstance(vars(ArrayMethods)[name], property):
        return property(lambda self: getattr(self.tracked_value(), name))
    return lambda self, *args, **options: getattr(self.tracked_value(), name)(*args, **options)


for _name in [name for name in vars(ArrayMethods) if name[0] != "_"]:
    setattr(WatchedTensor, _name, _tracked(_name))


class TrackedTensor(_Shaped, Tracked):
    """A tensor that is computed while a tape records."""

    __slots__ = ()
    shape = property(lambda self: tuple.__new__(Shape, self.value.shape))

    __array_ufunc__ = _ufunc(Tracked)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(tuple(index) if type(index) is list else index)

    def numpy(self) -> Any:
        return Tracked.numpy(self)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the values without a gradient, as TensorFlow does."""
        return np.array(self.numpy(), dtype)


_TENSORS = Tensor, Tracked, ArrayLike
_NUMBERS = int, float, complex, type(None), Symbolic, DistributedValues, slice
for _kind, _base in ((Tensor, np.ndarray), (TrackedTensor, Tracked)):
    for _name in _ARITHMETIC:
        for _each in (_name, f"r{_name}"):
            setattr(_kind, f"__{_each}__", _operator(_base, _each))
        setattr(_kind, f"__i{_name}__", getattr(_kind, f"__{_name}__"))
    for _name in _COMPARISONS:
        setattr(_kind, f"__{_name}__", _operator(_base, _name))


class WatchingTape(nd.GradientTape):
    """A tape that watches tensors in place, and whose gradients are tensors."""

    def __enter__(self) -> WatchingTape:
        super().__enter__()
        self._recorded()[0].kind = TrackedTensor
        self._replaced: list[Any] = []  # The objects that were watched, but not in place.
        return self

    def watch(self, tensor: Any) -> Any:
        """Watch tensors and variables; return them, with arrays replaced by tracked arrays."""

        def watched(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                result = super(WatchingTape, self).watch(leaf)
                self._replaced += [] if result is leaf else [leaf]
                return result
            if leaf.dtype.kind not in "fc":
                _log.warning("GradientTape.watch: a tensor of %s has no gradient.", leaf.dtype)
                return leaf
            leaf.__class__ = WatchedTensor
            return super(WatchingTape, self).watch(leaf)

        return tree.map_leaves(watched, tensor)

    def reset(self) -> None:
        """Forget all that was recorded and watched, and start over."""
        self.__exit__(None, None, None)
        self.__init__(self._persistent, self._watch_accessed)  # type: ignore[misc]
        self.__enter__()

    def gradient(  # type: ignore[override]
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = "none",
    ) -> Any:
        """Return gradients; None, or zeros, for sources that the tape does not watch."""
        find = functools.partial(super().gradient, output_gradients=output_gradients)
        return self._of_watched(find, target, sources, unconnected_gradients)

    @accepting("experimental_use_pfor", "parallel_iterations")
    def jacobian(self, target: Any, sources: Any, unconnected_gradients: Any = "none") -> Any:
        """Return the derivatives of each element of a target; see `gradient`."""
        return self._of_watched(super().jacobian, target, sources, unconnected_gradients)

    @accepting("experimental_use_pfor", "parallel_iterations")
    def batch_jacobian(self, target: Any, source: Any, unconnected_gradients: Any = "none") -> Any:
        """Return the derivatives of each example of a batch; see `gradient`."""
        return as_tensor(super().batch_jacobian(target, source, unconnected_gradients))

    def _of_watched(self, find: Any, target: Any, sources: Any, unconnected: Any) -> Any:
        leaves = tree.flatten(sources)
        if any(leaf is each for leaf in leaves for each in self._replaced):
            raise ValueError(
                "GradientTape: a source is an array that a tape cannot watch in place, of NumPy or "
                "of a compiled step: write x = tape.watch(x), and compute with the result."
            )
        known = [leaf for leaf in leaves if isinstance(leaf, (Tracked, ArrayLike))]
        _here.differentiates = True  # Rules multiply gradients by booleans and counts.
        try:
            results = iter(find(target, known, unconnected_gradients=unconnected) if known else ())
        finally:
            _here.differentiates = False
        zero = str(getattr(unconnected, "value", unconnected)).lower() == "zero"
        other: Any = np.zeros_like if zero else lambda leaf: None
        made = [next(results) if isinstance(x, (Tracked, ArrayLike)) else other(x) for x in leaves]
        return tree.unflatten(sources, map(as_tensor, made))


class Assignable(Tensor):
    """A tensor that was read from an assignable place, such as a part of a variable."""

    def __array_finalize__(self, whole: Any) -> None:
        self._set: Any = None  # This is for results that are computed from it.

    def assign(self, value: Any) -> Any:
        """Assign to the place from which this tensor was read."""
        return self._set(value)


def assignable(value: Any, how: Any) -> Any:
    """Return a tensor whose `assign` calls a function."""
    tensor: Any = as_tensor(np.float32(value) if isinstance(value, float) else value)
    tensor = tensor.view(Assignable)
    tensor._set = how
    return tensor


def _assign_part(variable: Any, index: Any, value: Any) -> Any:
    array = np.array(variable.numpy())
    array[index] = value
    return variable.assign(array)


def device_name(device: Any) -> str:
    """Return TensorFlow's name of a device."""
    return f"{_TASK}/device:{str(device).upper()}"


def _named(kind: type, base: type) -> Any:
    """Return a kind of variable with the name of the kind from which it is made."""
    return functools.update_wrapper(kind, base, ["__module__", "__name__", "__qualname__"], [])


def _sparse_read(variable: Any, indices: Any, name: Any = None) -> Any:
    """Return the rows at some indices."""
    return as_tensor(variable.tracked_value()[np.asarray(indices)])


def _gather_nd(variable: Any, indices: Any, name: Any = None) -> Any:
    """Return the parts at some positions; each position is a row of indices."""
    return as_tensor(variable.tracked_value()[tuple(np.moveaxis(np.asarray(indices), -1, 0))])


@functools.cache
def weight(kind: Any) -> Any:
    """Return a kind of variable with TensorFlow's methods; layers compute with its array."""
    if hasattr(kind, "constraint"):  # Each replica's call gets the same variable.
        return kind

    class Weight(kind):  # type: ignore[misc]
        constraint: Any = None
        """A function of the value that optimizers apply after an update; or None."""
        shape = property(lambda self: Shape(kind.shape.fget(self)))
        ref, get_shape, set_shape = _Shaped.ref, _Shaped.get_shape, _Shaped.set_shape
        device = property(lambda self: device_name(self.distribute_strategy.devices[0]))

        def read_value(self) -> Any:
            return as_tensor(kind.read_value(self))

        value = read_value
        sparse_read, gather_nd = _sparse_read, _gather_nd

        def numpy(self) -> Any:
            return kind.numpy(self)[()]

        def __getitem__(self, index: Any) -> Any:
            return as_tensor(kind.__getitem__(self, index))

        def __deepcopy__(self, memo: Any) -> Any:
            with self.distribute_strategy.scope():
                kinds = self.synchronization, self.aggregation
                copied = eager_variable(self.numpy(), self.trainable, None, None, None, *kinds)
            return memo.setdefault(id(self), copied)

    for name in ("assign", "assign_add", "assign_sub"):
        setattr(Weight, name, _assign(getattr(kind, name)))
    for name in ("scatter_add", "scatter_sub", "scatter_update"):
        setattr(Weight, name, combining(writing(getattr(kind, name)), name))
    for name, change in SCATTERED.items():
        setattr(Weight, f"scatter_{name}", combining(scattering(change), f"scatter_{name}"))
    return _named(Weight, kind)


@functools.cache
def flavored(kind: Any) -> Any:
    """Return a kind of variable that computes as a tensor does; its parts can be assigned."""
    if "__array_ufunc__" in vars(kind):
        return kind
    base: Any = weight(kind)

    class Flavored(base):  # type: ignore[misc]
        name = property(lambda self: f"{kind.name.fget(self)}:0")
        __array_ufunc__ = _ufunc(kind)

        def tracked_value(self) -> Any:
            return as_tensor(kind.tracked_value(self))

        def __getitem__(self, index: Any) -> Any:
            # TensorFlow reads lists like this.
            index = tuple(index) if type(index) is list else index
            part = kind.__getitem__(self, index)
            assign = functools.partial(_assign_part, self, index)
            return assignable(part, assign) if isinstance(part, Tensor) else part

    return _named(Flavored, kind)


_ASSIGNED = "value", "use_locking", "name", "read_value"


def _assign(method: Any) -> Any:
    """Return a method that sets the whole value, with TensorFlow's order of arguments."""
    write = writing(method)

    def assign(self: Any, *args: Any, **options: Any) -> Any:
        value = args[0] if args else options.get("value", options.get("delta"))
        if isinstance(value, (Tensor, Tracked)) and value.dtype != self.dtype:
            dtypes = f"of {self.dtype} cannot be set to a tensor of {value.dtype}"
            raise InvalidArgumentError(f"variable {self.name!r} {dtypes}: tf.cast it.")
        return write(self, **dict(zip(_ASSIGNED[: len(args)], args, strict=True)), **options)

    return assign


def eager_variable(
    initial_value: Any,
    trainable: bool | None = None,
    name: str | None = None,
    dtype: Any = None,
    constraint: Any = None,
    synchronization: Any = "auto",
    aggregation: Any = "none",
    shape: Any = None,
) -> Any:
    """Return a variable; see `nd.Variable`. A variable that is combined on read is not trained."""

    def made() -> Any:
        value = initial_value() if callable(initial_value) else initial_value
        return plain(convert_to_tensor(value, dtype))

    kind = str(getattr(synchronization, "value", synchronization)).lower()
    trains = kind != "on_read" if trainable is None else trainable
    variable: Any = nd.Variable(made, trains, name, None, synchronization, aggregation)
    variable.__class__ = flavored(type(variable))  # type: ignore[arg-type]
    if constraint is not None:
        variable.constraint = constraint
    if shape is not None:
        variable.set_shape(shape)
    return variable


def variable_type(meanings: Any, program: programs.Program) -> type:
    """Return the class `tf.Variable` of a program."""
    make = programs.either(meanings, program)
    new = lambda cls, *args, **options: make(*args, **options)  # noqa: E731
    native = nd.Variable, graph.GraphVariable
    return programs.StandIn("Variable", (), {"__new__": new, "native": native})


def convert_to_tensor(
    value: Any, dtype: Any = None, dtype_hint: Any = None, name: Any = None
) -> Any:
    """Return a tensor; floats and integers of Python become float32 and int32.

    Raises:
        InvalidArgumentError: it is a tensor of another dtype.
        TypeError: Python numbers do not fit the dtype; for example, a fraction does not fit
            integers.
    """
    if type(value) is np.ndarray:
        return as_tensor(value if dtype is None else value.astype(dtype, copy=False))
    if type(value) is Tensor or (isinstance(value, Tensor) and not isinstance(value, ArrayLike)):
        if dtype is None or value.dtype == dtype:
            return value
        raise InvalidArgumentError(
            f"expected {np.dtype(dtype)}, got a tensor of {value.dtype}: tf.cast it."
        )
    if dtype is None and dtype_hint is not None:
        with contextlib.suppress(TypeError, ValueError):
            return convert_to_tensor(value, dtype_hint)
    if isinstance(value, (Symbolic, SymbolicArray)):
        return value if dtype is None else value.astype(dtype)
    if isinstance(value, (Tracked, ArrayLike)):  # This includes a tensor that is watched.
        value = value if isinstance(value, Tracked) else as_tensor(value.tracked_value())
        return value if dtype is None else value.astype(dtype)
    if isinstance(value, nd.IndexedSlices):
        return as_tensor(value.to_dense())
    several = isinstance(value, (list, tuple))
    if several and any(isinstance(x, _DIFFERENTIABLE) for x in value):
        return np.stack([convert_to_tensor(each, dtype) for each in value])
    parts = value if several else [value]
    has_dtype = any(hasattr(part, "dtype") for part in parts)
    array = as_array(narrowed(value) if dtype is None and not has_dtype else value)
    if dtype is None:
        is_flat = several and has_dtype and not any(isinstance(x, (list, tuple)) for x in parts)
        if is_flat:  # Python numbers do not widen values that have a dtype.
            array = array.astype(np.result_type(*parts), copy=False)
        is_text = array.dtype.kind == "O" and all(isinstance(each, str) for each in array.flat)
        return as_tensor(array.astype(str) if is_text and array.size else array)
    kinds = array.dtype.kind, np.dtype(dtype).kind
    if not has_dtype and array.size and kinds[1] not in _FITTING.get(kinds[0], kinds[0]):
        raise TypeError(
            f"{value!r} cannot become a tensor of {np.dtype(dtype)}: convert it, or tf.cast the "
            "tensor."
        )
    return as_tensor(array.astype(dtype, copy=False) if has_dtype else np.asarray(value, dtype))


_DIFFERENTIABLE = Tracked, ArrayLike, Symbolic, SymbolicArray
# The kinds of the dtypes that Python numbers become.
_FITTING = {"b": "biufc", "i": "iufc", "u": "iufc", "f": "fc"}
