"""The table over which the contract tests of strategies and variables run: one row for each kind.

A row is there if its code path differs from those of the others. What is added to the package gets
a row here, and with it all of those tests.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import ndistribute as nd
from ndistribute import tree
from ndistribute.devices import is_device_array, to_host
from tests.gpu.imitation.module import imitated_gpus


def cpus(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def mirrored(count: int) -> nd.MirroredStrategy:
    return nd.MirroredStrategy(cpus(count))


def central(count: int) -> nd.CentralStorageStrategy:
    return nd.CentralStorageStrategy(cpus(count))


def served(count: int) -> nd.ParameterServerStrategy:
    return nd.ParameterServerStrategy(devices=cpus(count))


def tpus(count: int) -> nd.TPUStrategy:
    return nd.TPUStrategy([f"tpu:{i}" for i in range(count)])


class HostResults(nd.Strategy):
    """Hand out results in host memory, as the contract tests compare them."""

    def run(self, *args: Any, **named: Any) -> Any:
        return on_host(super().run(*args, **named))

    def reduce(self, *args: Any, **named: Any) -> Any:
        return on_host(super().reduce(*args, **named))

    def gather(self, *args: Any, **named: Any) -> Any:
        return on_host(super().gather(*args, **named))

    def local_results(self, value: Any) -> Any:
        return on_host(super().local_results(value))


def on_host(nest: Any) -> Any:
    """Return a nest with the arrays of GPUs copied to host memory, or itself without any."""
    leaves = tree.flatten(nest)
    copied = [_leaf_on_host(leaf) for leaf in leaves]
    same = all(leaf is copy for leaf, copy in zip(leaves, copied, strict=True))
    return nest if same else tree.unflatten(nest, copied)


def _leaf_on_host(leaf: Any) -> Any:
    if isinstance(leaf, nd.PerReplica):
        values = [on_host(value) for value in leaf.values]
        same = all(value is copy for value, copy in zip(leaf.values, values, strict=True))
        return leaf if same else nd.PerReplica(values)
    if isinstance(leaf, nd.IndexedSlices):
        return nd.IndexedSlices(on_host(leaf.values), on_host(leaf.indices), leaf.shape)
    return to_host(leaf) if is_device_array(leaf) else leaf


def with_host_results(kind: type[Any]) -> Any:
    """Return a kind of strategy whose results come to host memory."""
    return type(f"Gpu{kind.__name__}", (HostResults, kind), {})


def on_gpus(name: str) -> nd.Strategy:
    """Return a strategy over GPUs, whose results come to host memory."""
    kind, args, named = GPU_LAYOUTS[name]
    return with_host_results(kind)(*args, **named)


def ground(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Return what has to be entered before the strategy of a row is made."""
    imitated = kind in GPUS and not kind.startswith("real")
    return imitated_gpus() if imitated else contextlib.nullcontext()


TWO, TWICE = ["gpu:0", "gpu:1"], ["gpu:0", "gpu:0"]
GPU_LAYOUTS: dict[str, tuple[type[nd.Strategy], tuple[Any, ...], dict[str, Any]]] = {
    "gpu-2": (nd.MirroredStrategy, (TWO,), {}),
    "gpu-ring-2": (nd.MirroredStrategy, (TWO, nd.RingAllReduce()), {}),
    "gpu-shared-2": (nd.MirroredStrategy, (TWICE,), {}),
    "gpu-and-cpu": (nd.MirroredStrategy, (["cpu:0", "gpu:0"],), {}),
    "gpu-second": (nd.OneDeviceStrategy, ("gpu:1",), {}),
    "gpu-central-2": (nd.CentralStorageStrategy, (TWO,), {"parameter_device": "gpu:1"}),
    "gpu-served-2": (nd.ParameterServerStrategy, (), {"devices": TWO}),
}
# Rows with replicas on imitated GPUs, and on a real one where it is visible.
GPUS = {name: partial(on_gpus, name) for name in GPU_LAYOUTS}
if nd.list_devices("gpu"):
    GPUS |= {f"real-{name}": GPUS[name] for name in ("gpu-shared-2", "gpu-and-cpu")}

# Rows whose steps XLA compiles for its devices, which are emulated where there is only one.
TPUS: dict[str, Callable[[], nd.Strategy]] = {
    f"tpu-{count}": partial(tpus, count) for count in (1, 2, 8)
}

# Of several replicas in one process each: two replicas swap, three are an odd number.
STRATEGIES: dict[str, Callable[[], nd.Strategy]] = {
    "mirrored-2": lambda: mirrored(2),
    "mirrored-3": lambda: mirrored(3),
    "central-3": lambda: central(3),
    "served-2": lambda: served(2),
}
