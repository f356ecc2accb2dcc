"""Devices of operations in a cluster: their names, and how nested scopes are merged.

The names are TensorFlow's: ``/job:ps/task:0/device:GPU:1``, of which any part may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ndistribute.errors import InvalidArgumentError

__all__ = ["DeviceFunction", "merge_device", "parse_device", "resolve"]

DeviceFunction = Callable[[Any], str | None]

_PATTERN = re.compile(
    r"(?:/job:(?P<job>\w+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"(?:/(?:device:)?(?P<device>(?:cpu|gpu):(?:\d+|\*)))?/?",
    re.IGNORECASE,
)


def parse_device(device: str) -> dict[str, str]:
    """Return the parts of a device's name that are given: job, replica, task and device.

    Raises:
        ValueError: it is not the name of a device.

    >>> parse_device("/job:ps/task:0/gpu:1")
    {'job': 'ps', 'task': '0', 'device': 'GPU:1'}
    """
    match = _PATTERN.fullmatch(device if not device or device.startswith("/") else f"/{device}")
    if match is None:
        raise ValueError(
            f"{device!r} is not the name of a device. Write for example '/job:ps/task:0', "
            "'/gpu:1' or '/job:worker/task:1/device:CPU:0'."
        )
    parts = {key: value for key, value in match.groupdict().items() if value is not None}
    if "device" in parts:
        parts["device"] = parts["device"].upper()
    return parts


def merge_device(inner: str, outer: str) -> str:
    """Return a device's name with the parts of `inner`, and those of `outer` that it lacks.

    >>> merge_device("/task:1", "/job:ps/task:0/device:CPU:0")
    '/job:ps/task:1/device:CPU:0'
    """
    parts = parse_device(outer) | parse_device(inner)
    return "".join(
        f"/{key}:{parts[key]}" for key in ("job", "replica", "task", "device") if key in parts
    )


def resolve(device: str, tasks: Mapping[str, str], default: str, *, soft: bool = False) -> str:
    """Return the task of a device: one of `tasks`, such as ``"/job:ps/task:0"``.

    Args:
        device: a device's name, of which any part may be missing.
        tasks: the addresses of all tasks, by name.
        default: the task for a name without a job or, if it is of that job, without a task.
        soft: whether the default task replaces one that does not exist.

    Raises:
        InvalidArgumentError: no such task exists.
    """
    parts, here = parse_device(device), parse_device(default)
    job = parts.get("job", here["job"])
    index = parts.get("task", here["task"] if job == here["job"] else "0")
    name = f"/job:{job}/task:{index}"
    if name in tasks:
        return name
    if soft:
        return default
    raise InvalidArgumentError(
        f"there is no {name}: the tasks are {', '.join(sorted(tasks))}. Correct the device, or set "
        "allow_soft_placement in the session's config."
    )
