"""Devices of operations: their names in a cluster, and the devices of one task.

The names are TensorFlow's: ``/job:ps/task:0/device:GPU:1``. Any part may be missing. An operation
without a device computes on the GPU of its first input that is on a GPU, otherwise on the CPU. Its
inputs are moved to this device, and its results stay there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.devices import (
    Device,
    copy_to,
    device_of,
    is_device_array,
    list_devices,
    parse_device,
)
from ndistribute.errors import InvalidArgumentError
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.stream import working_on

CPU = Device("cpu:0")
DeviceFunction = Callable[[Any], str | None]
RunOnDevice = Callable[[Callable[[Sequence[Any]], Any], Sequence[Any], Sequence[Any]], Any]
"""Runs a function of inputs on a device, or where other values are."""


@functools.lru_cache(1024)
def merge_device(inner: str, outer: str) -> str:
    """Return a device's name with the parts of `inner`; parts that it lacks come from `outer`.

    >>> merge_device("/task:1", "/job:ps/task:0/device:CPU:0")
    '/job:ps/task:1/device:CPU:0'
    """
    parts = parse_device(outer) | parse_device(inner)
    keys = "job", "replica", "task", "device"
    return "".join(f"/{key}:{parts[key]}" for key in keys if key in parts)


def task_of(operation: Any, tasks: Mapping[str, str], default: str, *, soft: bool = False) -> str:
    """Return the task of an operation's device: one of `tasks`, such as ``"/job:ps/task:0"``.

    Args:
        operation: an `Operation` or its definition; any part of its device may be missing.
        tasks: the addresses of all tasks, by name.
        default: the task for a device without a job, or with this task's job but without a task.
        soft: whether the default task replaces a task that does not exist.

    Raises:
        InvalidArgumentError: no such task exists.
    """
    start = f"operation {operation.name!r} is on {operation.device}"
    try:
        parts, here = parse_device(operation.device), parse_device(default)
    except ValueError as error:
        raise InvalidArgumentError(f"{start}: {error}", op=operation.name) from error
    job = parts.get("job", here["job"])
    index = parts.get("task", here["task"] if job == here["job"] else "0")
    name = f"/job:{job}/task:{index}"
    if name in tasks:
        return name
    if soft:
        return default
    raise InvalidArgumentError(
        f"{start}: there is no {name}: the tasks are {', '.join(sorted(tasks))}. Correct the "
        "device, or set allow_soft_placement in the session's config.",
        op=operation.name,
    )


def run_on_device(name: str, soft: bool, on_cpu: bool = False) -> RunOnDevice | None:
    """Return a function that runs an operation on its device; None if all values are on the host.

    Args:
        name: a device's name; any part may be missing.
        soft: whether the CPU replaces a GPU that does not exist.
        on_cpu: whether it is on the CPU if its name has no device.

    Raises:
        InvalidArgumentError: the device does not exist here.
    """
    wanted, gpus = parse_device(name).get("device", ""), list_devices("gpu")
    if wanted.startswith("GPU"):
        device = Device(wanted.replace("*", "0"))
        if device in gpus:
            return functools.partial(_run_on, device)
        if not soft:
            raise InvalidArgumentError(
                f"there is no {wanted} in this task: its devices are "
                f"{', '.join(map(str, list_devices()))}. Check CUDA_VISIBLE_DEVICES, or set "
                "allow_soft_placement in the session's config."
            )
    if not gpus:
        return None
    return functools.partial(_run_on, CPU if wanted or on_cpu else None)


def _run_on(
    device: Device | None, compute: Callable[..., Any], inputs: Sequence[Any], near: Sequence[Any]
) -> Any:
    """Return a function's result, computed on a device; None: where the values `near` are."""
    if device is None:
        arrays = (getattr(value, "values", value) for value in near)  # Of rows, their values.
        on_gpu = [array for array in arrays if is_device_array(array)]
        device = device_of(on_gpu[0]) if on_gpu else CPU
    with working_on(device):
        result = compute([moved(value, device) for value in inputs])
        if isinstance(result, list | tuple):
            return [moved(value, device) for value in result]
        return moved(result, device)


def moved(value: Any, device: Device) -> Any:
    """Return a value of an operation in the memory of a device; text stays where it is."""
    if isinstance(value, IndexedSlices):
        return value.on(device)
    if is_device_array(value) or (isinstance(value, np.ndarray) and value.dtype.kind not in "USO"):
        return copy_to(value, device)
    return value
