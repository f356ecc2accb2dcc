"""An imitation of ``cupy.ndarray`` and of CuPy's functions over host memory, strict where CuPy is.

An array never turns into a NumPy array by itself, never mixes with one, and works on the current
device alone; results without axes are arrays. Values are NumPy's.
"""

import functools
import operator

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tests.gpu.imitation.real import check_call
from tests.gpu.imitation.world import Device, Memory, Pinned, Stream, current_world

DTYPES = "?bhilqBHILQefdFD"
_NUMBERS = (bool, int, float, complex)
_SCALARS = {*_NUMBERS, *(np.dtype(char).type for char in DTYPES)}
_WORDS = (np.int32, np.uint32)
_AT = {  # the dtypes that have atomic operations in CuPy 13
    "add": (*_WORDS, np.uint64, np.float16, np.float32, np.float64),
    "subtract": _WORDS,
    "maximum": (*_WORDS, np.uint64, np.float32, np.float64),
    "minimum": (*_WORDS, np.uint64, np.float32, np.float64),
}
_COMPARISONS = {"less", "less_equal", "equal", "not_equal", "greater", "greater_equal"}
_METHODS = (
    "all any argmax argmin argsort clip conj cumprod cumsum diagonal dot flatten max mean min "
    "nonzero prod ravel repeat round searchsorted squeeze std sum swapaxes take trace var"
).split()
_FANCY = (np.ndarray, list)


class ndarray(NDArrayOperatorsMixin):  # noqa: N801
    """Play ``cupy.ndarray``; `host` and `memory` are the imitation's own."""

    __module__ = "cupy"
    __slots__ = ("__weakref__", "base", "host", "memory")
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape, dtype=float):
        self._hold(np.empty(shape, dtype), Memory(current_world().device), None)
        self.host.reshape(-1).view(np.uint8)[...] = 0xAB  # Memory is never clean.

    def _hold(self, host, memory, base):
        self.host, self.memory, self.base = host, memory, base
        return self

    def view_as(self, host):
        """Return another view of the same memory."""
        base = self if self.base is None else self.base
        return ndarray.__new__(ndarray)._hold(host, self.memory, base)

    device = property(lambda self: Device(self.memory.device))
    data = property(
        lambda self: type(
            "Pointer", (), {"ptr": self.host.ctypes.data, "device_id": self.memory.device}
        )
    )
    T = property(lambda self: self if self.ndim < 2 else self.view_as(self.host.T))
    real = property(lambda self: compute(lambda: self.host.real, [self]))
    imag = property(lambda self: compute(lambda: self.host.imag, [self]))
    __cuda_array_interface__ = property(lambda self: {"version": 3, "imitated": self})

    @property
    def flags(self):
        names = "c_contiguous", "f_contiguous"
        known = {name: getattr(self.host.flags, name) for name in names}
        return type("Flags", (), {**known, "owndata": self.base is None})

    def get(self, stream=None, order="C", out=None, blocking=True):
        with Device(self.memory.device):
            current_world().launch([self], [])
            if blocking:
                (stream or Stream.current()).synchronize()
        if out is None:
            return np.array(self.host, order="C")
        self._check_host(out)
        out[...] = self.host
        return out

    def set(self, arr, stream=None):
        self._check_host(arr)
        with Device(self.memory.device):
            current_world().launch([], [self])
            owner = arr
            while isinstance(owner, np.ndarray):
                owner = owner.base
            memory = owner.obj if isinstance(owner, memoryview) else owner
            if isinstance(memory, Pinned):
                memory.lend()
        self.host[...] = arr

    def _check_host(self, array):
        if type(array) is not np.ndarray or array.dtype != self.dtype:
            raise TypeError(f"{getattr(array, 'dtype', array)} instead of {self.dtype}")
        if array.shape != self.shape:
            raise ValueError(f"Shape mismatch: {array.shape} instead of {self.shape}")

    def copy(self, order="C"):
        """Copy to the current device, as CuPy does, wherever the array is."""
        made = ndarray(self.shape, self.dtype)
        made.host[...] = self.host
        across = self.memory.device != made.memory.device
        if across and not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise NotImplementedError("CuPy cannot copy non-contiguous array between devices.")
        current_world().launch([self], [made], between=across)
        return made

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if casting is not None or subok is not None:
            raise TypeError("casting and subok are not supported yet")
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return compute(lambda: self.host.astype(dtype), [self])

    def view(self, dtype=None, type=None):  # noqa: A002
        return self.view_as(self.host.view() if dtype is None else self.host.view(dtype))

    def reshape(self, *shape, order="C"):
        return compute(lambda: self.host.reshape(*shape, order=order), [self])

    def transpose(self, *axes):
        return self.view_as(self.host.transpose(*axes))

    def fill(self, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if not isinstance(value, (*_NUMBERS, np.generic, np.ndarray)):
            raise TypeError(f"Unsupported type {type(value)}")
        compute(lambda: self.host.fill(value), [], [self])

    def __getitem__(self, index):
        used, where = _place(index)
        host = self.host[where]
        return compute(lambda: host, [self._rows_of(where) if host.base is None else self, *used])

    def _rows_of(self, where):
        """Return the rows among which an index by numbers chooses, and no others."""
        rows = where[0]
        numbers = isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and rows.size > 0
        if not numbers or rows.min() < 0:
            return self
        return self.view_as(self.host[rows.min() : rows.max() + 1])

    def __setitem__(self, index, value):
        used, where = _place(index)
        target = self.view_as(self.host[where])
        if any(isinstance(one, _FANCY) for one in where):
            places = np.arange(self.size).reshape(self.shape)[where]
            assert len(np.unique(places)) == places.size, "CuPy leaves the value open"
            value = value if isinstance(value, ndarray) else upload(np.asarray(value))
            rows = self._rows_of(where)
            compute(lambda: self.host.__setitem__(where, value.host), [value, *used], [rows])
        elif not isinstance(value, ndarray):
            target.fill(value)
        else:
            plain = (value.shape, value.strides, value.dtype)
            memcpy = plain == (target.shape, target.strides, target.dtype)
            contiguous = target.host.flags.c_contiguous
            current_world().launch([value], [target], between=memcpy and contiguous)
            self.host[where] = value.host

    def __len__(self):
        return len(self.host)

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[k] for k in range(len(self.host)))

    def __array__(self, dtype=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc, method, *inputs, **named):
        if "out" in named:
            (named["out"],) = named["out"]
        for one in (*inputs, named.get("out", 0)):
            known = isinstance(one, ndarray | np.ndarray) or type(one) in _SCALARS
            if not known and not hasattr(one, "__cuda_array_interface__"):
                return NotImplemented
        if ufunc.__name__ in _COMPARISONS:
            scalar = lambda one: isinstance(one, np.ndarray) and one.ndim == 0  # noqa: E731
            inputs = tuple(one.item() if scalar(one) else one for one in inputs)
        function = Ufunc(ufunc.__name__)
        return (function if method == "__call__" else getattr(function, method))(*inputs, **named)

    def __array_function__(self, function, types, args, kwargs):
        if not all(issubclass(one, ndarray | np.ndarray) for one in types):
            return NotImplemented
        name = ".".join([*function.__module__.split(".")[1:], function.__name__])
        return Function(name)(*args, **kwargs)


for _name in "shape strides dtype ndim size itemsize nbytes".split():
    setattr(ndarray, _name, property(operator.attrgetter(f"host.{_name}")))


def _converted(name, self, *args):
    return getattr(self.get(), name)(*args)


def _method(name, self, *args, **kwargs):
    return _call(f"ndarray.{name}", getattr(self.host, name), [self], args, kwargs)


for _made, _names in (
    (_converted, "item tolist __bool__ __int__ __float__ __complex__ __repr__ __format__".split()),
    (_method, _METHODS),
):
    for _name in _names:
        setattr(ndarray, _name, functools.partialmethod(functools.partial(_made, _name)))


def _call(name, function, first, args, kwargs):
    """Call NumPy's function on hosts as CuPy's, with `first` as a method's array."""
    check_call(name, *first, *args, **kwargs)
    hosts = {key: host_of(value) for key, value in kwargs.items()}
    used = arrays_in([*first, *args, *kwargs.values()])
    return compute(
        lambda: function(*map(host_of, args), **hosts), used, arrays_in(kwargs.get("out"))
    )


class Ufunc:
    """Play ``cupy.ufunc``."""

    def __init__(self, name):
        self.__name__ = self.name = name
        self._function = getattr(np, name)

    def __call__(self, *args, **kwargs):
        check_call(self.name, *args, **kwargs)
        out, dtype = kwargs.pop("out", None), kwargs.pop("dtype", None)
        casting = kwargs.pop("casting", "same_kind")
        if kwargs:
            raise TypeError(f"Wrong arguments {kwargs}")
        args, rest = args[: self._function.nin], args[self._function.nin :]
        out = rest[0] if rest else out[0] if isinstance(out, tuple) else out
        inputs = [_operand(one) for one in args]
        if not isinstance(out, ndarray | None):
            raise TypeError(f"Unsupported type {type(out)}")
        named = {} if out is None else {"out": out.host, "casting": casting}
        if dtype is not None:
            named |= {"dtype": dtype, "casting": "unsafe"}  # Inputs are cast without a question.
        hosts = map(host_of, inputs)
        result = compute(lambda: self._function(*hosts, **named), arrays_in(inputs), arrays_in(out))
        return result if out is None else out

    def at(self, a, indices, b=None):
        if self.name not in _AT:
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        items = indices if isinstance(indices, tuple) else (indices,)
        if any(isinstance(i, (ndarray, *_FANCY)) for i in items) and (
            a.dtype.type not in _AT[self.name]
        ):
            raise TypeError(f"cupy.{self.name}.at does not support {a.dtype}")
        value = b if isinstance(b, ndarray) else upload(np.asarray(b))
        where = tuple(map(host_of, items))
        at = lambda: self._function.at(a.host, where, value.host)  # noqa: E731
        compute(at, [value, *arrays_in(items)], [a])

    def reduce(self, array, *args, **kwargs):
        methods = {"add": "sum", "multiply": "prod"}
        if self.name not in methods:
            raise NotImplementedError(f"`cupy_{self.name}.reduce` is not supported yet")
        return getattr(array, methods[self.name])(*args, **{"axis": 0, **kwargs})


class Function:
    """Play a function of CuPy, which takes no array of the host."""

    def __init__(self, name):
        self.__name__ = name
        self._function = operator.attrgetter(name)(np)

    def __call__(self, *args, **kwargs):
        if self.__name__ != "take":  # It carries indices over.
            _refuse_host(self.__name__, [*args, *kwargs.values()])
        if self.__name__ == "where" and not isinstance(args[0], ndarray):
            raise AttributeError(f"{type(args[0]).__name__!r} object has no attribute 'astype'")
        if self.__name__.endswith("_like"):
            kwargs["shape"] = kwargs.get("shape") or args[0].shape  # As CuPy does for ().
        return _call(self.__name__, self._function, [], args, kwargs)


def _refuse_host(name, args):
    for arg in args:
        if isinstance(arg, list | tuple):
            _refuse_host(name, arg)
        elif isinstance(arg, np.ndarray):
            raise TypeError(f"Unsupported type {type(arg)} for cupy.{name}")


def _operand(value):
    if isinstance(value, ndarray) or type(value) in _SCALARS:
        return value
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"Unsupported type {type(value)}")
    return interface["imitated"]


def arrays_in(value):
    """Return the imitated arrays in an argument, lists searched."""
    if isinstance(value, list | tuple):
        return [array for item in value for array in arrays_in(item)]
    return [value] if isinstance(value, ndarray) else []


def host_of(value):
    """Replace the imitated arrays in an argument by what they hold."""
    if isinstance(value, list | tuple) and arrays_in(value):
        return type(value)(map(host_of, value))
    return value.host if isinstance(value, ndarray) else value


def _place(index):
    """Return the arrays in an index, and the index on the host, which always gives an array."""
    items = index if isinstance(index, tuple) else (index,)
    rest = () if any(one is Ellipsis for one in items) else (Ellipsis,)
    return arrays_in(items), (*map(host_of, items), *rest)


def upload(host):
    """Copy a host array to the current device."""
    if host.dtype.char not in DTYPES:
        raise ValueError(f"Unsupported dtype {host.dtype}")
    return compute(host.copy, [])


def compute(call, reads, writes=()):
    """Run an operation on hosts; what it returns lies on the current device, or is a view."""
    reads, writes = list(reads), list(writes)
    with np.errstate(all="ignore"):  # A GPU does not warn.
        result = _wrap(call(), [*reads, *writes])
    made = arrays_in(result)
    if writes or any(all(one.memory is not array.memory for array in reads) for one in made):
        current_world().launch(reads, [*writes, *made])
    return result


def _wrap(result, parents):
    if isinstance(result, list | tuple):
        wrap = functools.partial(_wrap, parents=parents)
        return [*map(wrap, result)] if isinstance(result, list) else tuple(map(wrap, result))
    if not isinstance(result, np.ndarray | np.generic):
        return result
    base = getattr(result, "base", None)
    for parent in parents:
        if result is parent.host:
            return parent
        empty = base is not None and not result.size
        empty_view = empty and (base is parent.host or base is parent.host.base)
        if np.may_share_memory(result, parent.host) or empty_view:
            return parent.view_as(result)
    own = np.asarray(result) if base is None else result.copy()
    return ndarray.__new__(ndarray)._hold(own, Memory(current_world().device), None)
