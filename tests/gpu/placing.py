"""Small helpers for tests of replicas on GPUs: where arrays are, and how to put them there."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.devices import copy_to, is_device_array, to_host

# What a test runs over besides the imitation: nothing where no GPU is visible.
REAL = [pytest.param("real", marks=pytest.mark.gpu)] if nd.list_devices("gpu") else []


def on(array, device):
    """Say whether an array lies in the memory of a device."""
    return place_of(array) == device.memory_space


def place_of(array):
    """Return the memory space in which an array lies."""
    return f"gpu:{array.device.id}" if is_device_array(array) else "cpu"


def components(strategy, make):
    """Return one array for each replica, on its device."""
    return nd.PerReplica(
        [copy_to(np.asarray(make(i)), device) for i, device in enumerate(strategy.devices)]
    )


def hosts(values):
    """Return arrays of any device as NumPy arrays."""
    return [to_host(value) for value in values]


def need(cupy, count):
    """Skip a test where there are fewer GPUs."""
    if cupy.cuda.runtime.getDeviceCount() < count:
        pytest.skip(f"needs {count} GPUs")
