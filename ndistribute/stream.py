"""What orders the work on devices: a replica's stream, and the rules for work elsewhere.

On a GPU the host only enqueues. What one stream writes another may read after somebody waited, so
each function here says what is done when it returns. CPUs do everything at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ndistribute.device import Array, Device, copy_to, cupy_module, device_of

__all__ = ["Stream", "random_generator", "settle", "working_on", "write_to"]

_SUCCESS, _NOT_READY = 0, 600  # cudaError_t
_NOTHING = contextlib.nullcontext()


class Stream:
    """Order the work of one replica on its device: a CUDA stream on a GPU, nothing on a CPU.

    Args:
        device: where the replica computes.
    """

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
        """Wait for what other streams of the device were given before this one starts."""
        settle([self])

    def synchronize(self) -> None:
        """Wait until everything enqueued so far is done, so that other replicas may read it."""
        if self.on_gpu:
            self._cuda.synchronize()

    @property
    def is_done(self) -> bool:
        """Return True if everything enqueued so far is done.

        Raises:
            CUDARuntimeError: something that ran on the GPU before has failed.
        """
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
        """Return the CUDA stream's address, as NCCL takes it; 0 on a CPU."""
        return int(self._cuda.ptr) if self.on_gpu else 0


def settle(streams: Sequence[Stream]) -> None:
    """Wait for everything on the GPUs of some streams, whoever enqueued it there."""
    for index in {stream.device.index for stream in streams if stream.on_gpu}:
        cupy_module().cuda.Device(index).synchronize()


def working_on(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Make a device current for a ``with`` block, as CuPy needs it for arrays that lie there.

    If another one was current, what the block enqueued is done at its end.
    """
    return _NOTHING if device.kind == "cpu" else _visiting(device.index)


@contextlib.contextmanager
def _visiting(index: int) -> Iterator[None]:
    cuda = cupy_module().cuda
    away = cuda.runtime.getDevice() != index
    with cuda.Device(index):
        yield
        if away:
            cuda.get_current_stream().synchronize()


def write_to(target: Array, array: Array) -> None:
    """Write an array's values into another array, in whichever memory either is.

    If they are in different ones, it is done when this returns.
    """
    device = device_of(target)
    with working_on(device):
        target[...] = copy_to(array, device)


def random_generator(device: Device, seed: np.random.SeedSequence) -> Any:
    """Return a generator of the device's namespace."""
    if device.kind == "cpu":
        return np.random.Generator(np.random.PCG64(seed))
    cupy = cupy_module()
    with cupy.cuda.Device(device.index):
        return cupy.random.Generator(cupy.random.XORWOW(int(seed.generate_state(1)[0])))
