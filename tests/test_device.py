"""Devices: how they are spelled, which exist, and which lists of them a strategy takes."""

from __future__ import annotations

import pytest

import ndistribute as nd
from ndistribute import device as devices


@pytest.mark.parametrize(
    ("spelling", "kind", "index"),
    [
        ("cpu:0", "cpu", 0),
        ("/cpu:0", "cpu", 0),
        ("CPU:0", "cpu", 0),
        ("/CPU:3", "cpu", 3),
        ("device:CPU:1", "cpu", 1),
        ("/device:CPU:0", "cpu", 0),
        ("/device:cpu:12", "cpu", 12),
        ("gpu:0", "gpu", 0),
        ("/gpu:0", "gpu", 0),
        ("GPU:7", "gpu", 7),
        ("/device:GPU:1", "gpu", 1),
        ("/job:worker/task:1/device:GPU:0", "gpu", 0),
        ("/job:worker/replica:0/task:1/device:CPU:2", "cpu", 2),
    ],
)
def test_every_spelling_parses(spelling, kind, index):
    device = nd.Device(spelling)
    assert (device.kind, device.index) == (kind, index)


def test_a_full_name_keeps_job_and_task():
    device = nd.Device("/job:worker/task:1/device:GPU:0")
    assert (device.job, device.task) == ("worker", 1)
    assert nd.Device(str(device)) == device


@pytest.mark.parametrize("spelling", ["/cpu:1", "CPU:1", "/device:CPU:1", "device:cpu:1"])
def test_spellings_of_one_device_are_equal(spelling):
    assert nd.Device(spelling) == nd.Device("cpu:1")
    assert hash(nd.Device(spelling)) == hash(nd.Device("cpu:1"))
    assert nd.Device(spelling) != nd.Device("cpu:0")


def test_a_device_of_a_device_is_the_same():
    assert nd.Device(nd.Device("cpu:4")) == nd.Device("cpu:4")


@pytest.mark.parametrize("device", ["cpu:1", "/job:worker/task:2/device:CPU:1"])
def test_the_name_of_a_device_parses_to_it(device):
    assert nd.Device(str(nd.Device(device))) == nd.Device(device)


@pytest.mark.parametrize(
    "spelling", ["", "cpu", "cpu:", "cpu:-1", "tpu:0", "cpu:0 ", "gpu0", "cpu:0:1", 0, None]
)
def test_what_names_no_device_is_refused(spelling):
    with pytest.raises(ValueError, match="names no device"):
        nd.Device(spelling)


def test_listing_shows_a_cpu():
    assert nd.Device("cpu:0") in nd.list_devices()
    assert nd.list_devices("cpu") == [nd.Device("cpu:0")]
    assert nd.list_devices("CPU") == nd.list_devices("cpu")


def test_listing_by_kind_is_a_part_of_the_whole():
    gpus = nd.list_devices("gpu")
    assert {device.kind for device in gpus} <= {"gpu"}
    assert set(nd.list_devices()) == {*gpus, *nd.list_devices("cpu")}


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="tpu"):
        nd.list_devices("tpu")


@pytest.mark.parametrize(
    "make",
    [
        lambda: nd.OneDeviceStrategy("gpu:4096"),
        lambda: nd.MirroredStrategy(["cpu:0", "gpu:4096"]),
        lambda: nd.MirroredStrategy(["/device:GPU:4096"]),
        lambda: nd.CentralStorageStrategy(["gpu:4096"]),
        lambda: nd.CentralStorageStrategy(["cpu:0"], parameter_device="gpu:4096"),
    ],
)
def test_an_unknown_gpu_is_refused(make):
    with pytest.raises(ValueError, match=r"gpu:4096.*does not exist"):
        make()


@pytest.mark.parametrize("kind", [nd.MirroredStrategy, nd.CentralStorageStrategy])
@pytest.mark.parametrize("names", [["cpu:0", "cpu:0"], ["cpu:1", "cpu:0", "/device:CPU:1"]])
def test_a_cpu_named_twice_is_refused(kind, names):
    with pytest.raises(ValueError, match="twice"):
        kind(names)


@pytest.mark.parametrize("kind", [nd.MirroredStrategy, nd.CentralStorageStrategy])
def test_no_device_at_all_is_refused(kind):
    with pytest.raises(ValueError, match="empty"):
        kind([])


def test_any_cpu_exists():
    with nd.MirroredStrategy(["cpu:100", nd.Device("cpu:7")]) as strategy:
        assert list(strategy.devices) == [nd.Device("cpu:100"), nd.Device("cpu:7")]


def test_without_a_gpu_the_default_is_one_cpu(monkeypatch):
    monkeypatch.setattr(devices, "_gpu_count", lambda: 0)
    for kind in (nd.MirroredStrategy, nd.CentralStorageStrategy):
        with kind() as strategy:
            assert list(strategy.devices) == [nd.Device("cpu:0")]


def test_the_default_is_all_visible_gpus(monkeypatch):
    monkeypatch.setattr(devices, "_gpu_count", lambda: 2)
    assert devices.resolve_devices(None) == [nd.Device("gpu:0"), nd.Device("gpu:1")]
    assert nd.list_devices("gpu") == [nd.Device("gpu:0"), nd.Device("gpu:1")]


def test_a_gpu_may_be_named_twice(monkeypatch):
    monkeypatch.setattr(devices, "_gpu_count", lambda: 1)
    assert len(devices.resolve_devices(["gpu:0", "gpu:0"])) == 2


@pytest.mark.gpu
def test_replicas_may_share_a_gpu():
    with nd.MirroredStrategy(["gpu:0", "gpu:0"]) as strategy:

        def step():
            context = nd.get_replica_context()
            ones = context.device.namespace.ones(3)
            return context.all_reduce("sum", ones).sum()

        assert [float(total) for total in strategy.run(step).values] == [6.0, 6.0]
