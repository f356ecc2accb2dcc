"""An imitation of ``cupy.ndarray`` over host memory, strict where CuPy is.

It never turns into a NumPy array by itself, never mixes with one, and works on the current device
alone; results without axes are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tests.gpu.imitation.attributes import Attributes
from tests.gpu.imitation.clock import Memory, Pinned, current_world
from tests.gpu.imitation.cuda import Device, Stream

__all__ = ["arrays_in", "compute", "host_of", "ndarray", "upload"]

Host = Any  # a NumPy array
DTYPES = "?bhilqBHILQefdFD"
SCALARS = (bool, int, float, complex, np.generic)


class ndarray(NDArrayOperatorsMixin, Attributes):  # noqa: N801
    """Play ``cupy.ndarray``; `host` and `memory` are the imitation's own."""

    __module__ = "cupy"
    __slots__ = ()
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: Any, dtype: Any = float) -> None:
        self._hold(np.empty(shape, dtype), Memory(current_world().device), None)
        self.host.reshape(-1).view(np.uint8)[...] = 0xAB  # Memory is never clean.

    def _hold(self, host: Host, memory: Memory, base: ndarray | None) -> ndarray:
        self.host, self.memory, self.base = host, memory, base
        return self

    def view_as(self, host: Host) -> ndarray:
        """Return another view of the same memory."""
        base = self if self.base is None else self.base
        return ndarray.__new__(ndarray)._hold(host, self.memory, base)

    real = property(lambda self: compute(lambda: self.host.real, [self]))
    imag = property(lambda self: compute(lambda: self.host.imag, [self]))

    def get(
        self, stream: Any = None, order: str = "C", out: Host | None = None, blocking: bool = True
    ) -> Host:
        with Device(self.memory.device):
            current_world().launch([self], [])
            if blocking:
                (stream or Stream.current()).synchronize()
        if out is None:
            return np.array(self.host, order="C")
        if type(out) is not np.ndarray or out.dtype != self.dtype:
            raise TypeError(f"{getattr(out, 'dtype', out)} from {self.dtype}")
        if out.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, got {out.shape}")
        out[...] = self.host
        return out

    def set(self, arr: Host, stream: Any = None) -> None:
        if type(arr) is not np.ndarray or arr.dtype != self.dtype:
            raise TypeError("Only numpy.ndarray of the same dtype can be set to cupy.ndarray")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        with Device(self.memory.device):
            current_world().launch([], [self])
            _lend(arr)
        self.host[...] = arr

    def copy(self, order: str = "C") -> ndarray:
        """Copy to the current device, as CuPy does, wherever the array is."""
        made = ndarray(self.shape, self.dtype)
        made.host[...] = self.host
        across = self.memory.device != made.memory.device
        if across and not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise NotImplementedError("CuPy cannot copy non-contiguous array between devices.")
        current_world().launch([self], [made], between=across)
        return made

    def astype(
        self,
        dtype: Any,
        order: str = "K",
        casting: None = None,
        subok: None = None,
        copy: bool = True,
    ) -> ndarray:
        if casting is not None or subok is not None:
            raise TypeError("casting and subok are not supported yet")
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return compute(lambda: self.host.astype(dtype), [self])  # type: ignore[no-any-return]

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:  # noqa: A002
        return self.view_as(self.host.view() if dtype is None else self.host.view(dtype))

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        return compute(lambda: self.host.reshape(*shape, order=order), [self])  # type: ignore[no-any-return]

    def transpose(self, *axes: Any) -> ndarray:
        return self.view_as(self.host.transpose(*axes))

    def fill(self, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if not isinstance(value, (*SCALARS, np.ndarray)):
            raise TypeError(f"Unsupported type {type(value)}")
        compute(lambda: self.host.fill(value), [], [self])

    def __getitem__(self, index: Any) -> Any:
        used = arrays_in(_items(index))
        where = (*map(host_of, _items(index)), *_rest(index))
        host = self.host[where]
        return compute(lambda: host, [self.rows_of(where) if host.base is None else self, *used])

    def rows_of(self, where: tuple[Any, ...]) -> ndarray:
        """Return the rows among which an index by numbers chooses, and no others."""
        rows = where[0]
        numbers = isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and rows.size > 0
        if not numbers or rows.min() < 0:
            return self
        return self.view_as(self.host[rows.min() : rows.max() + 1])

    def __setitem__(self, index: Any, value: Any) -> None:
        items = _items(index)
        used = arrays_in(items)
        where = (*map(host_of, items), *_rest(index))
        target = self.view_as(self.host[where])
        if any(isinstance(one, ndarray | np.ndarray | list) for one in items):
            _refuse_duplicates(where, self.shape)
            value = value if isinstance(value, ndarray) else upload(np.asarray(value))
            rows = self.rows_of(where)
            compute(lambda: self.host.__setitem__(where, value.host), [value, *used], [rows])
        elif not isinstance(value, ndarray):
            target.fill(value)
        else:
            plain = (value.shape, value.strides, value.dtype)
            memcpy = plain == (target.shape, target.strides, target.dtype)
            contiguous = target.host.flags.c_contiguous
            current_world().launch([value], [target], between=memcpy and contiguous)
            self.host[where] = value.host

    def __len__(self) -> int:
        return len(self.host)

    def __iter__(self) -> Any:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[k] for k in range(len(self.host)))

    def __array__(self, dtype: Any = None) -> Host:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )


def arrays_in(value: Any) -> list[ndarray]:
    """Return the imitated arrays in an argument, lists searched."""
    if isinstance(value, list | tuple):
        return [array for item in value for array in arrays_in(item)]
    return [value] if isinstance(value, ndarray) else []


def host_of(value: Any) -> Any:
    """Replace the imitated arrays in an argument by what they hold."""
    if isinstance(value, list | tuple) and arrays_in(value):
        return type(value)(map(host_of, value))
    return value.host if isinstance(value, ndarray) else value


def upload(host: Any) -> ndarray:
    """Copy a host array to the current device."""
    if host.dtype.char not in DTYPES:
        raise ValueError(f"Unsupported dtype {host.dtype}")
    return compute(host.copy, [])  # type: ignore[no-any-return]


def compute(
    call: Callable[[], Any], reads: Iterable[ndarray], writes: Iterable[ndarray] = ()
) -> Any:
    """Run an operation on hosts; what it returns lies on the current device, or is a view."""
    reads, writes = list(reads), list(writes)
    with np.errstate(all="ignore"):  # A GPU does not warn.
        result = _wrap(call(), [*reads, *writes])
    made = arrays_in(result)
    if writes or any(all(one.memory is not array.memory for array in reads) for one in made):
        current_world().launch(reads, [*writes, *made])
    return result


def _lend(host: Host) -> None:
    while isinstance(host, np.ndarray):
        host = host.base
    memory = host.obj if isinstance(host, memoryview) else host
    if isinstance(memory, Pinned):
        memory.lend(current_world())


def _wrap(result: Any, parents: list[ndarray]) -> Any:
    if isinstance(result, list | tuple):
        return type(result)([_wrap(one, parents) for one in result])
    if not isinstance(result, np.ndarray | np.generic):
        return result
    for parent in parents:
        if result is parent.host:
            return parent
        if np.may_share_memory(result, parent.host) or _is_empty_view(result, parent.host):
            return parent.view_as(result)
    own = np.asarray(result) if getattr(result, "base", None) is None else result.copy()
    return ndarray.__new__(ndarray)._hold(own, Memory(current_world().device), None)


def _is_empty_view(result: Any, host: Host) -> bool:
    base = getattr(result, "base", None)
    return base is not None and not result.size and (base is host or base is host.base)


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _rest(index: Any) -> tuple[Any, ...]:
    """Make an index give an array also where NumPy would give a number."""
    return () if any(one is Ellipsis for one in _items(index)) else (Ellipsis,)


def _refuse_duplicates(where: Any, shape: tuple[int, ...]) -> None:
    places = np.arange(int(np.prod(shape))).reshape(shape)[where]
    if len(np.unique(places)) < places.size:
        raise AssertionError("a place is named twice: CuPy leaves open which value it gets")
