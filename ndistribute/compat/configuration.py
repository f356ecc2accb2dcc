"""Names of `tf.config`, of preemption and of file options whose arguments differ from ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ndistribute as nd
from ndistribute import models
from ndistribute.devices import set_logical_cpus


class LogicalDevice(NamedTuple):
    """A device that strategies and `tf.device` accept."""

    name: str
    device_type: str

    def __str__(self) -> str:
        return self.name


class LogicalDeviceConfiguration(NamedTuple):
    """The settings of a logical device for `set_logical_device_configuration`."""

    memory_limit: int | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


def _listing(where: str) -> Callable[..., list[LogicalDevice]]:
    """Return a function that lists the GPUs and the logical CPUs, with their full names."""

    def listed(device_type: str | None = None) -> list[LogicalDevice]:
        devices = nd.list_devices(device_type and device_type.lower())
        return [LogicalDevice(f"{where}{str(each).upper()}", each.kind.upper()) for each in devices]

    return listed


list_devices, list_logical_devices = map(_listing, ("/physical_device:", "/device:"))


def set_logical_device_configuration(
    device: Any, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Set the number of logical CPUs; a GPU stays one device, which strategies may name repeatedly.

    Raises:
        ValueError: several logical devices, or a memory limit, are requested for a GPU.
    """
    if any(any(limit is not None for limit in each) for each in logical_devices):
        raise ValueError("set_logical_device_configuration: limits have no effect: leave them out.")
    if device.device_type == "CPU":
        set_logical_cpus(len(logical_devices))
    elif len(logical_devices) != 1:
        raise ValueError(
            "set_logical_device_configuration: a GPU is one device. Name it several times: "
            "MirroredStrategy(['gpu:0', 'gpu:0'])."
        )


def preemption_handler(
    cluster_resolver: Any,
    checkpoint_or_checkpoint_manager: Any,
    checkpoint_dir: Any = None,
    termination_config: Any = None,
) -> models.PreemptionCheckpointHandler:
    """Return a handler for TensorFlow's arguments."""
    manager = checkpoint_or_checkpoint_manager
    if isinstance(manager, nd.Checkpoint):
        manager = nd.CheckpointManager(manager, checkpoint_dir, max_to_keep=1)
    return models.PreemptionCheckpointHandler(manager, termination_config=termination_config)


class PreemptionWatcher:
    """A watcher for preemption, which a SIGTERM announces here; TensorFlow asks a service."""

    def __init__(self) -> None:
        raise NotImplementedError(
            "PreemptionWatcher: a process is told of its preemption by SIGTERM: use "
            "PreemptionCheckpointHandler, with TerminationConfig(termination_watcher_fn=...) for "
            "another source."
        )


class FileOptions:
    """`CheckpointOptions`, `SaveOptions`, `LoadOptions`: this process writes and reads files."""

    def __init__(self, experimental_io_device: Any = None, **options: Any) -> None:
        wanted = sorted(name for name in options if options[name])
        if wanted:
            raise NotImplementedError(f"options of files: {wanted[0]} has no effect here.")
        self.experimental_io_device = experimental_io_device
