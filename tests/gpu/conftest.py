"""GPUs for a test: an imitation of CuPy over host memory, and the real thing where there is one.

A test that takes the fixture `strategy` runs on every layout of replicas over GPUs, each on the
imitation and, with the marker `gpu`, on real GPUs. The imitation is no GPU: see README.md.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ndistribute as nd
from ndistribute import device
from ndistribute.collective import nccl
from tests.gpu.imitation.clock import set_world
from tests.gpu.imitation.module import modules

CACHES = (device.cupy_module, device._gpu_count, device._is_gpu_type, nccl._nccl)

ONE, TWICE, TWO, BACK = ["gpu:0"], ["gpu:0"] * 2, ["gpu:0", "gpu:1"], ["gpu:1", "gpu:0"]

LAYOUTS: dict[str, Callable[[], nd.Strategy]] = {
    "one-device": lambda: nd.OneDeviceStrategy("gpu:0"),
    "second-device": lambda: nd.OneDeviceStrategy("gpu:1"),
    "mirrored-one": lambda: nd.MirroredStrategy(ONE),
    "mirrored-shared": lambda: nd.MirroredStrategy(TWICE),
    "mirrored-nccl": lambda: nd.MirroredStrategy(TWO),
    "mirrored-nccl-back": lambda: nd.MirroredStrategy(BACK),
    "mirrored-ring": lambda: nd.MirroredStrategy(TWO, nd.RingAllReduce()),
    "mirrored-one-reduces": lambda: nd.MirroredStrategy(BACK, nd.ReductionToOneDevice()),
    "mirrored-three": lambda: nd.MirroredStrategy([*TWO, "gpu:0"]),
    "mirrored-with-cpu": lambda: nd.MirroredStrategy(["cpu:0", "gpu:0"]),
    "central-one": lambda: nd.CentralStorageStrategy(ONE),
    "central-shared": lambda: nd.CentralStorageStrategy(TWICE),
    "central-two": lambda: nd.CentralStorageStrategy(TWO),
    "central-on-gpu": lambda: nd.CentralStorageStrategy(TWO, parameter_device="gpu:1"),
}
TWO_GPUS = {
    name
    for name in LAYOUTS
    if name.partition("-")[2] not in ("one-device", "device", "one", "shared", "with-cpu")
} | {"second-device"}


@pytest.fixture(scope="session", params=["imitation", pytest.param("real", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """Name what is below; CUDA's own files are opened before leaks are counted."""
    if request.param == "real":
        for gpu in nd.list_devices("gpu"):
            with gpu.namespace.cuda.Device(gpu.index):
                gpu.namespace.ones(1).sum().get()
        gc.collect()
    return str(request.param)


@pytest.fixture
def cupy(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy: imitated, with two GPUs; or as it is installed."""
    if kind == "real":
        yield device.cupy_module()
        return
    world, found = modules(2)
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    set_world(world)
    _forget()
    yield found["cupy"]
    set_world(None)
    _forget()


@pytest.fixture(params=LAYOUTS)
def strategy(cupy: Any, request: pytest.FixtureRequest) -> Iterator[nd.Strategy]:
    """Each layout of replicas over GPUs in turn."""
    if request.param in TWO_GPUS:
        need(cupy, 2)
    with LAYOUTS[request.param]() as made:
        yield made


def need(cupy: Any, count: int) -> None:
    """Skip a test where there are fewer GPUs."""
    if cupy.cuda.runtime.getDeviceCount() < count:
        pytest.skip(f"needs {count} GPUs")


def _forget() -> None:
    for cached in CACHES:
        cached.cache_clear()
