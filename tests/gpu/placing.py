"""Small helpers for tests of replicas on GPUs: where arrays are, and how to put them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.device import Device, copy_to, is_gpu_array, to_host

__all__ = ["REAL", "components", "here", "hosts", "need", "on", "place_of", "rank", "replica"]

# What a test runs over besides the imitation: nothing where no GPU is visible.
REAL = [pytest.param("real", marks=pytest.mark.gpu)] if nd.list_devices("gpu") else []


def replica() -> nd.ReplicaContext:
    """Return this thread's replica."""
    found = nd.get_replica_context()
    assert found is not None
    return found


def rank() -> int:
    return replica().replica_id_in_sync_group


def here(value: Any) -> Any:
    """Return a host array on this replica's device."""
    return copy_to(np.asarray(value), replica().device)


def on(array: Any, device: Device) -> bool:
    """Say whether an array lies in the memory of a device."""
    return place_of(array) == device.memory_space


def place_of(array: Any) -> str:
    """Return the memory space in which an array lies."""
    return f"gpu:{array.device.id}" if is_gpu_array(array) else "cpu"


def components(strategy: nd.Strategy, make: Callable[[int], Any]) -> nd.PerReplica:
    """Return one array for each replica, on its device."""
    return nd.PerReplica(
        [copy_to(np.asarray(make(i)), device) for i, device in enumerate(strategy.devices)]
    )


def hosts(values: Sequence[Any]) -> list[Any]:
    """Return arrays of any device as NumPy arrays."""
    return [to_host(value) for value in values]


def need(cupy: Any, count: int) -> None:
    """Skip a test where there are fewer GPUs."""
    if cupy.cuda.runtime.getDeviceCount() < count:
        pytest.skip(f"needs {count} GPUs")
