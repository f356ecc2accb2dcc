"""What orders a replica's work on its device, and what draws its random numbers there."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from ndistribute.device import Device, cupy_module

__all__ = ["Stream", "random_generator"]


class Stream:
    """Order the work of one replica on its device: a CUDA stream on a GPU, nothing on a CPU.

    Args:
        device: where the replica computes.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._cuda: Any = None
        if device.kind == "gpu":
            cupy = cupy_module()
            with cupy.cuda.Device(device.index):
                self._cuda = cupy.cuda.Stream(non_blocking=True)

    @property
    def on_gpu(self) -> bool:
        """Return whether there is anything to order."""
        return self._cuda is not None

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """Make the device and this stream current for a ``with`` block."""
        if self._cuda is None:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        stack.enter_context(cupy_module().cuda.Device(self.device.index))
        stack.enter_context(self._cuda)
        return stack

    def begin(self) -> None:
        """Wait for what other streams of the device were given before this one starts."""
        if self._cuda is not None:
            cupy_module().cuda.Device(self.device.index).synchronize()

    def synchronize(self) -> None:
        """Wait until everything enqueued so far is done, so that other replicas may read it."""
        if self._cuda is not None:
            self._cuda.synchronize()

    @property
    def pointer(self) -> int:
        """Return the CUDA stream's address, as NCCL takes it; 0 on a CPU."""
        return 0 if self._cuda is None else int(self._cuda.ptr)


def random_generator(device: Device, seed: np.random.SeedSequence) -> Any:
    """Return a generator of the device's namespace."""
    if device.kind == "cpu":
        return np.random.Generator(np.random.PCG64(seed))
    cupy = cupy_module()
    with cupy.cuda.Device(device.index):
        return cupy.random.Generator(cupy.random.XORWOW(int(seed.generate_state(1)[0])))
