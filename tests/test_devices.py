"""Devices: how they are spelled, which exist, and which lists of them a strategy takes."""

import sys

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import devices
from ndistribute.errors import MissingDependencyError

SPELLINGS = {
    "cpu:0": ("cpu", 0),
    "/CPU:3": ("cpu", 3),
    "device:CPU:1": ("cpu", 1),
    "/device:cpu:12": ("cpu", 12),
    "GPU:7": ("gpu", 7),
    "/device:GPU:1": ("gpu", 1),
    "/job:worker/task:1/device:GPU:0": ("gpu", 0),
    "/job:worker/replica:0/task:1/device:CPU:2": ("cpu", 2),
}


def test_every_spelling_parses_and_so_does_the_name_that_a_device_then_has():
    for spelling, expected in SPELLINGS.items():
        device = nd.Device(spelling)
        assert (device.kind, device.index) == expected
        assert nd.Device(str(device)) == nd.Device(device) == device
    distant = nd.Device("/job:worker/task:1/device:GPU:0")
    assert (distant.job, distant.task) == ("worker", 1)
    devices = {nd.Device(name) for name in ("/cpu:1", "CPU:1", "/device:CPU:1", "device:cpu:1")}
    assert devices == {nd.Device("cpu:1")}
    assert nd.Device("cpu:1") != nd.Device("cpu:0")


def test_what_names_no_device_is_refused():
    wrong = ("", "cpu", "cpu:", "cpu:-1", "cpu:0 ", "gpu0", "xpu:0", "cpu:0:1", 0, None)
    for spelling in wrong:
        with pytest.raises(ValueError, match="is not the name of a device"):
            nd.Device(spelling)


def test_listing_shows_a_cpu_and_refuses_an_unknown_kind():
    assert nd.Device("cpu:0") in nd.list_devices()
    assert nd.list_devices("cpu") == [nd.Device("cpu:0")]
    assert nd.list_devices("CPU") == nd.list_devices("cpu")
    with pytest.raises(ValueError, match="xpu"):
        nd.list_devices("xpu")


def test_any_cpu_exists_and_without_a_gpu_the_default_is_one(monkeypatch):
    with nd.MirroredStrategy(["cpu:100", nd.Device("cpu:7")]) as strategy:
        assert list(strategy.devices) == [nd.Device("cpu:100"), nd.Device("cpu:7")]
    monkeypatch.setattr(devices, "_gpu_count", lambda: 0)
    for kind in (nd.MirroredStrategy, nd.CentralStorageStrategy):
        with kind() as strategy:
            assert list(strategy.devices) == [nd.Device("cpu:0")]


def test_the_default_is_all_visible_gpus_and_one_may_be_named_twice(monkeypatch):
    monkeypatch.setattr(devices, "_gpu_count", lambda: 2)
    assert devices.resolve_devices(None) == [nd.Device("gpu:0"), nd.Device("gpu:1")]
    assert nd.list_devices("gpu") == [nd.Device("gpu:0"), nd.Device("gpu:1")]
    assert len(devices.resolve_devices(["gpu:0", "gpu:0"])) == 2


def test_without_jax_compiled_steps_name_what_to_install(monkeypatch):
    compiled = nd.function(np.sin)
    monkeypatch.setitem(sys.modules, "jax", None)  # As if it were not installed.
    devices.jax_module.cache_clear()
    for use in (
        nd.TPUStrategy,
        lambda: nd.TPUStrategy(["tpu:0"]),
        lambda: compiled(1.0),
        lambda: nd.list_devices("tpu"),
    ):
        with pytest.raises(MissingDependencyError, match=r"pip install 'ndistribute\[jax\]'"):
            use()


def test_the_devices_of_jax_are_listed_when_they_are_asked_for():
    listed = nd.list_devices("tpu")
    assert listed[0] == nd.Device("tpu:0")
    with pytest.raises(ValueError, match=rf"tpu:99 does not exist; JAX has {len(listed)} device"):
        nd.TPUStrategy(["tpu:99"])
