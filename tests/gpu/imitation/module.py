"""The imitated module itself: what ``import cupy`` finds while a test says so."""

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ndistribute import devices
from tests.gpu.imitation.array import Function, Ufunc, compute, ndarray, upload
from tests.gpu.imitation.nccl import FakeNccl
from tests.gpu.imitation.world import Device, Pinned, Stream, World, current_world, set_world

_CACHES = (devices.cupy_module, devices._gpu_count, devices._is_device_type, devices.nccl_module)


class _Namespace(types.ModuleType):
    """Play a module of CuPy: what NumPy has under a name, for imitated arrays."""

    def __init__(self, name, host):
        super().__init__(name)
        self._host = host

    def __getattr__(self, name):
        found = getattr(self._host, name)
        if isinstance(found, types.ModuleType):
            return _Namespace(f"{self.__name__}.{name}", found)
        if isinstance(found, np.ufunc):
            return Ufunc(name)
        if callable(found) and not isinstance(found, type):
            return Function(f"{self.__name__}.{name}".partition(".")[2])
        return found


class CUDARuntimeError(RuntimeError):
    """Play ``cupy.cuda.runtime.CUDARuntimeError``."""

    def __init__(self, status):
        super().__init__(f"cudaError {status}")


@contextlib.contextmanager
def imitated_gpus(count: int = 2, version: int = 14) -> Iterator[Any]:
    """Put fresh GPUs and an imitation of a version of CuPy in place of CuPy, and yield it."""
    world, cupy = World(count), _cupy()
    cupy.cuda.nccl = FakeNccl(version)
    with pytest.MonkeyPatch.context() as patched:
        for name, module in (
            ("cupy", cupy),
            ("cupy.cuda", cupy.cuda),
            ("cupy.cuda.nccl", cupy.cuda.nccl),
        ):
            patched.setitem(sys.modules, name, module)
        _change_world(world)
        try:
            yield cupy
        finally:
            _change_world(None)
    assert not world.faults


def _change_world(world: World | None) -> None:
    set_world(world)
    for cached in _CACHES:
        cached.cache_clear()


@functools.cache
def _cupy():
    cupy = _Namespace("cupy", np)
    cupy.ndarray = ndarray
    for maker in (array, asarray, empty, zeros, ones, full, arange):
        setattr(cupy, maker.__name__, maker)
    cupy.cuda = types.ModuleType("cupy.cuda")
    cupy.cuda.Device, cupy.cuda.Stream = Device, Stream
    cupy.cuda.get_current_stream = Stream.current
    cupy.cuda.alloc_pinned_memory = lambda nbytes: Pinned(b"\xab" * nbytes)
    cupy.cuda.runtime = types.SimpleNamespace(
        getDeviceCount=lambda: current_world().count,
        getDevice=lambda: current_world().device,
        streamQuery=lambda stream: current_world().query(stream),
        CUDARuntimeError=CUDARuntimeError,
    )
    cupy.random = types.SimpleNamespace(Generator=Generator, XORWOW=XORWOW)
    return cupy


def array(obj, dtype=None, copy=True, order="K"):
    if isinstance(obj, ndarray):
        here = obj.memory.device == current_world().device
        made = obj if here and not copy else obj.copy()
        return made if dtype is None else made.astype(dtype, copy=False)
    if isinstance(obj, list | tuple) and any(isinstance(one, ndarray) for one in obj):
        raise NotImplementedError("the imitation makes no array of a list of arrays")
    return upload(np.asarray(obj, dtype))


def asarray(a, dtype=None, order=None):
    return array(a, dtype, copy=False)


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype)


def zeros(shape, dtype=float, order="C"):
    return _filled(shape, 0, dtype)


def ones(shape, dtype=float, order="C"):
    return _filled(shape, 1, dtype)


def full(shape, fill_value, dtype=None, order="C"):
    return _filled(shape, fill_value, np.asarray(fill_value).dtype if dtype is None else dtype)


def _filled(shape, value, dtype):
    made = ndarray(shape, dtype)
    made.fill(value)
    return made


def arange(start, stop=None, step=1, dtype=None):
    function = np.arange
    return upload(function(*((0, start) if stop is None else (start, stop)), step, dtype))


class XORWOW:
    """Play ``cupy.random.XORWOW``, a source of randomness on the current device."""

    def __init__(self, seed=None):
        self.device = current_world().device
        self.host = np.random.default_rng(seed)


class Generator:
    """Play ``cupy.random.Generator``; it has no `normal`, for one."""

    def __init__(self, bit_generator):
        self._bits = bit_generator

    def random(self, size=None, dtype=np.float64, out=None):
        return self._draw(lambda: self._bits.host.random(size, dtype))

    def standard_normal(self, size=None, dtype=np.float64, out=None):
        return self._draw(lambda: self._bits.host.standard_normal(size, dtype))

    def _draw(self, draw):
        if self._bits.device != current_world().device:
            raise RuntimeError("This Generator state is allocated in a different device")
        return compute(lambda: np.asarray(draw()), [])  # type: ignore[no-any-return]
