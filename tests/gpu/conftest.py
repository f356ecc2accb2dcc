"""GPUs for a test: an imitation of CuPy over host memory, and the real thing where there is one.

A test that takes the fixture `strategy` runs on each layout of replicas over GPUs whose code path
differs, on the imitation and, where GPUs are visible, on those with the marker `gpu`. The imitation
is no GPU: see README.md.
"""

from __future__ import annotations

import gc
import sys

import pytest

import ndistribute as nd
from ndistribute import devices
from tests.gpu.imitation.module import modules
from tests.gpu.imitation.world import set_world
from tests.gpu.placing import REAL, need
from tests.kinds import closing

CACHES = (devices.cupy_module, devices._gpu_count, devices._is_gpu_type, devices.nccl_module)

TWICE, TWO = ["gpu:0"] * 2, ["gpu:0", "gpu:1"]

LAYOUTS = {
    "second-device": lambda: nd.OneDeviceStrategy("gpu:1"),
    "mirrored-shared": lambda: nd.MirroredStrategy(TWICE),
    "mirrored-nccl": lambda: nd.MirroredStrategy(TWO),
    "mirrored-ring": lambda: nd.MirroredStrategy(TWO, nd.RingAllReduce()),
    "mirrored-with-cpu": lambda: nd.MirroredStrategy(["cpu:0", "gpu:0"]),
    "central-on-gpu": lambda: nd.CentralStorageStrategy(TWO, parameter_device="gpu:1"),
    "served": lambda: nd.ParameterServerStrategy(devices=TWO),
}
ON_ONE_GPU = {"mirrored-shared", "mirrored-with-cpu"}


@pytest.fixture(scope="session", params=["imitation", *REAL])
def kind(request):
    """Name what is below; CUDA's own files are opened before leaks are counted."""
    if request.param == "real":
        for gpu in nd.list_devices("gpu"):
            with gpu.namespace.cuda.Device(gpu.index):
                gpu.namespace.ones(1).sum().get()
        gc.collect()
    return str(request.param)


@pytest.fixture
def cupy(kind, monkeypatch):
    """CuPy: imitated, with two GPUs; or as it is installed."""
    if kind == "real":
        yield devices.cupy_module()
        return
    world, found = modules(2)
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    set_world(world)
    _forget()
    yield found["cupy"]
    set_world(None)
    _forget()
    assert not world.faults


@pytest.fixture(params=LAYOUTS)
def strategy(cupy, request):
    """Each layout of replicas over GPUs in turn."""
    need(cupy, 1 if request.param in ON_ONE_GPU else 2)
    with closing(LAYOUTS[request.param]()) as made:
        yield made


def _forget():
    for cached in CACHES:
        cached.cache_clear()
