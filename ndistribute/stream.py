"""Streams of replicas, and functions that order work on devices.

On a GPU, the host only enqueues work, and a stream must wait before it reads data that another
stream wrote. So each docstring here states which work is complete on return. CPUs complete work at
once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ndistribute.devices import Array, Device, copy_to, cupy_module, device_of

_SUCCESS, _NOT_READY = 0, 600  # cudaError_t
_NOTHING = contextlib.nullcontext()


class Stream:
    """The stream of one replica on its device: a CUDA stream on a GPU, nothing on a CPU."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.on_gpu = device.kind == "gpu"
        self._cuda: Any = None
        if self.on_gpu:
            cupy = cupy_module()
            with cupy.cuda.Device(device.index):
                self._cuda = cupy.cuda.Stream(non_blocking=True)

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """Make the device and this stream current for a ``with`` block."""
        if not self.on_gpu:
            return _NOTHING
        stack = contextlib.ExitStack()
        stack.enter_context(cupy_module().cuda.Device(self.device.index))
        stack.enter_context(self._cuda)
        return stack

    def begin(self) -> None:
        """Wait for all work on the device, also in other streams, before this stream starts."""
        settle([self])

    def synchronize(self) -> None:
        """Wait for all work in this stream, so that other replicas can read its results."""
        if self.on_gpu:
            self._cuda.synchronize()

    @property
    def is_done(self) -> bool:
        """Return True if all work in this stream is complete; raise if earlier work has failed."""
        if not self.on_gpu:
            return True
        runtime = cupy_module().cuda.runtime
        with self.use():
            status = runtime.streamQuery(self.pointer)
        if status not in (_SUCCESS, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == _SUCCESS)

    @property
    def pointer(self) -> int:
        """The CUDA stream's address, for NCCL; 0 on a CPU."""
        return int(self._cuda.ptr) if self.on_gpu else 0


def settle(streams: Sequence[Stream]) -> None:
    """Wait for all work on the GPUs of some streams, including work of other streams."""
    for index in {stream.device.index for stream in streams if stream.on_gpu}:
        cupy_module().cuda.Device(index).synchronize()


def working_on(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Make a device current for a ``with`` block, as CuPy requires for work on its arrays.

    If another GPU was current, the work that the block enqueued is complete at its end.
    """
    return _visiting(device.index) if device.kind == "gpu" else _NOTHING


@contextlib.contextmanager
def _visiting(index: int) -> Iterator[None]:
    cuda = cupy_module().cuda
    away = cuda.runtime.getDevice() != index
    with cuda.Device(index):
        yield
        if away:
            cuda.get_current_stream().synchronize()


def write_to(target: Array, array: Array) -> None:
    """Write an array's values into another array, in the same memory or another one.

    If the arrays are in different memories, the copy between them is complete on return.
    """
    device = device_of(target)
    with working_on(device):
        target[...] = copy_to(array, device)


def random_generator(device: Device, seed: np.random.SeedSequence) -> Any:
    """Return a new random generator of NumPy or CuPy for a device, seeded by `seed`."""
    if device.kind != "gpu":
        return np.random.Generator(np.random.PCG64(seed))
    cupy = cupy_module()
    with cupy.cuda.Device(device.index):
        return cupy.random.Generator(cupy.random.XORWOW(int(seed.generate_state(1)[0])))
