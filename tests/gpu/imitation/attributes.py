"""What an imitated array tells of itself, and what it turns into on the host."""

from __future__ import annotations

from typing import Any

from tests.gpu.imitation.cuda import Device

__all__ = ["Attributes"]


class _Pointer:
    """Play ``cupy.cuda.MemoryPointer``."""

    def __init__(self, array: Attributes) -> None:
        self.ptr = array.host.ctypes.data
        self.device_id = array.memory.device


class Attributes:
    """The attributes and conversions of ``cupy.ndarray``; a subclass brings `get`."""

    __slots__ = ("__weakref__", "base", "host", "memory")

    host: Any
    memory: Any
    base: Any

    def get(self) -> Any:
        raise NotImplementedError

    def view_as(self, host: Any) -> Any:
        raise NotImplementedError

    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    dtype = property(lambda self: self.host.dtype)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    itemsize = property(lambda self: self.host.itemsize)
    nbytes = property(lambda self: self.host.nbytes)
    device = property(lambda self: Device(self.memory.device))
    data = property(_Pointer)
    T = property(lambda self: self if self.ndim < 2 else self.view_as(self.host.T))

    @property
    def flags(self) -> Any:
        known = self.host.flags
        names = {"c_contiguous": known.c_contiguous, "f_contiguous": known.f_contiguous}
        return type("Flags", (), {**names, "owndata": self.base is None})()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "version": 3, "imitated": self}

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)
