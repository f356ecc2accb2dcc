"""The devices of one task: where its operations compute, and the copies to there.

An operation without a device computes on the GPU of its first input that is on one, else on the
CPU. An operation gets its inputs where it computes, and leaves its results there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.devices import Device, copy_to, device_of, is_gpu_array, list_devices
from ndistribute.errors import InvalidArgumentError
from ndistribute.graph.placement import parse_device
from ndistribute.stream import working_on

__all__ = ["CPU", "Place", "moved", "place_of"]

CPU = Device("cpu:0")


class Place:
    """Where one operation computes.

    Args:
        device: None for that of the inputs.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device

    def run(
        self, compute: Callable[[Sequence[Any]], Any], inputs: Sequence[Any], near: Sequence[Any]
    ) -> Any:
        """Return what a function of inputs computes here, or where the values `near` are."""
        device = self._device
        if device is None:
            on_gpu = [one for one in map(_array_of, near) if is_gpu_array(one)]
            device = device_of(on_gpu[0]) if on_gpu else CPU
        with working_on(device):
            result = compute([moved(one, device) for one in inputs])
            if isinstance(result, list | tuple):
                return [moved(one, device) for one in result]
            return moved(result, device)


def place_of(name: str, soft: bool, on_cpu: bool = False) -> Place | None:
    """Return where an operation of this task computes; None if all values are in host memory.

    Args:
        name: a device's name, of which any part may be missing.
        soft: whether the CPU replaces a GPU that does not exist.
        on_cpu: whether it is on the CPU if its name does not say.

    Raises:
        InvalidArgumentError: the device does not exist here.
    """
    wanted, gpus = parse_device(name).get("device", ""), list_devices("gpu")
    if wanted.startswith("GPU"):
        device = Device(wanted.replace("*", "0"))
        if device in gpus:
            return Place(device)
        if not soft:
            raise InvalidArgumentError(
                f"there is no {wanted} in this task: its devices are "
                f"{', '.join(map(str, list_devices()))}. Check CUDA_VISIBLE_DEVICES, or set "
                "allow_soft_placement in the session's config."
            )
    if not gpus:
        return None
    return Place(CPU if wanted or on_cpu else None)


def moved(value: Any, device: Device) -> Any:
    """Return a value of an operation in the memory of a device; text stays where it is."""
    if isinstance(value, IndexedSlices):
        values, indices = moved(value.values, device), moved(value.indices, device)
        return IndexedSlices(values, indices, value.dense_shape)
    if is_gpu_array(value) or (isinstance(value, np.ndarray) and value.dtype.kind not in "USO"):
        return copy_to(value, device)
    return value


def _array_of(value: Any) -> Any:
    return value.values if isinstance(value, IndexedSlices) else value
