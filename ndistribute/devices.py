"""Devices, the array namespace of each device, and copies between devices.

CPU devices are logical: every ``cpu:i`` exists, and all share the host's memory. A GPU exists if
the driver shows it to this process. ``tpu:i`` is JAX's device i in this process, of whatever kind;
only compiled steps have arrays on it. Only this module imports CuPy and JAX, at the first use of a
device. Other modules use the namespace of their arrays, and work with any.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from ndistribute.errors import MissingDependencyError
from ndistribute.mistakes import count_of

Array = Any  # numpy.ndarray or cupy.ndarray; CuPy has no stubs and may not be installed.

_PATTERN = re.compile(
    r"(?:/job:(?P<job>\w+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"(?:/(?:device:)?(?P<device>(?:cpu|gpu|tpu):(?:\d+|\*)))?/?",
    re.IGNORECASE,
)


def parse_device(name: str) -> dict[str, str]:
    """Return the parts that a device's name contains: job, replica, task and device.

    Raises:
        ValueError: the text is not the name of a device.

    >>> parse_device("/job:ps/task:0/gpu:1")
    {'job': 'ps', 'task': '0', 'device': 'GPU:1'}
    """
    match = _PATTERN.fullmatch(name if not name or name.startswith("/") else f"/{name}")
    if match is None:
        raise _not_a_device(name)
    parts = {key: value for key, value in match.groupdict().items() if value is not None}
    if "device" in parts:
        parts["device"] = parts["device"].upper()
    return parts


def _not_a_device(name: Any) -> ValueError:
    return ValueError(
        f"{name!r} is not the name of a device. Write for example 'cpu:0', '/gpu:1' or "
        "'/job:worker/task:1/device:GPU:0'."
    )


@dataclass(init=False, repr=False, unsafe_hash=True, slots=True)
class Device:
    """A logical CPU or a GPU.

    Args:
        spec: a `Device`, or its name in any case: for example ``"cpu:1"``, ``"/gpu:0"`` or
            ``"/job:worker/task:1/device:GPU:0"``. The device need not exist.

    Raises:
        ValueError: `spec` is not the name of a device.

    >>> Device("/device:CPU:1")
    Device('cpu:1')
    >>> Device("CPU:1") == Device("/cpu:1")
    True
    """

    kind: str
    index: int
    job: str | None
    task: int | None

    def __init__(self, spec: str | Device) -> None:
        parts = parse_device(str(spec))
        kind, _, index = parts.get("device", "").lower().partition(":")
        if not index.isdigit():
            raise _not_a_device(spec)
        self.kind, self.index = kind, int(index)
        self.job = parts.get("job")
        self.task = int(parts["task"]) if "task" in parts else None

    @property
    def memory_space(self) -> str:
        """The name of the device's memory: ``"cpu"`` for all CPUs, ``"gpu:i"`` for GPU i.

        JAX's devices count as one memory, ``"tpu"``, because one program runs on all of them.
        """
        return f"gpu:{self.index}" if self.kind == "gpu" else self.kind

    @property
    def namespace(self) -> ModuleType:
        """The module for arrays on the device: ``cupy`` for a GPU, else ``numpy``."""
        return cupy_module() if self.kind == "gpu" else np

    def __str__(self) -> str:
        where = "" if self.job is None else f"/job:{self.job}"
        where += "" if self.task is None else f"/task:{self.task}"
        short = f"{self.kind}:{self.index}"
        return f"{where}/device:{short.upper()}" if where else short

    def __repr__(self) -> str:
        return f"Device({str(self)!r})"


_logical_cpus = [1]  # The number that `set_logical_cpus` sets.


def set_logical_cpus(count: int) -> None:
    """Set how many logical CPUs `list_devices` returns and strategies use by default.

    >>> set_logical_cpus(2)
    >>> list_devices("cpu")
    [Device('cpu:0'), Device('cpu:1')]
    >>> set_logical_cpus(1)
    """
    if count < 1:
        raise ValueError(f"the number of logical CPUs must be 1 or more, got {count}.")
    _logical_cpus[:] = [count]


# Called by `device_of` for every array, so it is cached.
_device_named = functools.cache(Device)


def list_devices(kind: str | None = None) -> list[Device]:
    """Return the devices of this machine: the visible GPUs, then the logical CPUs, by default one.

    Args:
        kind: ``"cpu"``, ``"gpu"``, or None for both; ``"tpu"`` for the devices of JAX.

    Raises:
        ValueError: `kind` is something else.

    >>> list_devices("cpu")
    [Device('cpu:0')]
    """
    if kind is None:
        return [*list_devices("gpu"), *list_devices("cpu")]
    name = str(kind).lower()
    if name not in ("gpu", "cpu", "tpu"):
        raise ValueError(f"kind must be 'cpu', 'gpu', 'tpu' or None, got {kind!r}.")
    count = _logical_cpus[0]
    if name != "cpu":
        count = _gpu_count() if name == "gpu" else len(jax_module().local_devices())
    return [Device(f"{name}:{index}") for index in range(count)]


def resolve_devices(specs: Sequence[str | Device] | None, what: str = "devices") -> list[Device]:
    """Return the devices of a strategy; for None all visible GPUs, or ``cpu:0`` if there are none.

    Errors name the argument, `what`.
    """
    if specs is None:
        return list_devices("gpu") or list_devices("cpu")
    if isinstance(specs, str | Device):
        specs = [specs]
    if not isinstance(specs, Iterable):
        raise ValueError(f"{what} must be a list such as ['cpu:0', 'cpu:1'], got {specs!r}.")
    devices = [Device(spec) for spec in specs]
    if not devices:
        raise ValueError(f"{what} is empty: name at least one, for example ['cpu:0', 'cpu:1'].")
    for device in devices:
        if device.kind == "gpu" and device.index >= (count := _gpu_count()):
            visible = ", ".join(f"gpu:{i}" for i in range(count)) or "none"
            raise ValueError(
                f"{what}: {device} does not exist; visible GPUs: {visible}. Check "
                "CUDA_VISIBLE_DEVICES, and that CuPy is installed: pip install "
                "'ndistribute[cuda12]' or 'ndistribute[cuda13]'."
            )
        if device.kind == "tpu" and device.index >= (count := len(jax_module().local_devices())):
            raise ValueError(
                f"{what}: {device} does not exist; JAX has {count_of(count, 'device')}."
            )
        if device.kind != "gpu" and devices.count(device) > 1:
            raise ValueError(
                f"{what}: {device} is named twice: name different devices, for example "
                f"{device.kind}:0 and {device.kind}:1. CPU devices are logical, so there may be "
                "more of them than cores."
            )
    return devices


def array_namespace(*arrays: Array) -> ModuleType:
    """Return ``cupy`` if any array is on a GPU, the namespace of compiled steps, or ``numpy``."""
    for array in arrays:
        if type(array) is not np.ndarray and is_device_array(array):
            return getattr(type(array), "namespace", None) or cupy_module()
    return np


def is_device_array(value: Any) -> bool:
    """Return True if a value is an array of CuPy or of a compiled step, without importing them."""
    kind: Any = type(value)
    return kind is not np.ndarray and _is_device_type(kind)


def device_of(array: Array) -> Device:
    """Return the device whose memory contains an array, ``cpu:0`` for host memory."""
    if not is_device_array(array):
        return _device_named("cpu:0")
    device = array.device
    return device if type(device) is Device else _device_named(f"gpu:{device.id}")


def as_array(value: Any) -> Array:
    """Return a value as a NumPy or CuPy array; an array is returned unchanged.

    Variables and tracked arrays have a method `raw_array`, which returns their array.
    """
    if type(value) is np.ndarray or is_device_array(value):
        return value
    raw_array = getattr(value, "raw_array", None)
    if raw_array is not None:
        return raw_array()
    if getattr(value, "requires_grad", False):
        raise TypeError(
            f"a {type(value).__name__} that requires a gradient was passed where an array is "
            "needed: pass tensor.detach(). To differentiate through a collective, import "
            "ndistribute.interop.torch."
        )
    return np.asarray(value)


def to_host(array: Array) -> np.ndarray[Any, Any]:
    """Return an array in host memory, without a copy if it is there already."""
    if not is_device_array(array) or hasattr(array, "on_device"):
        return np.asarray(array)  # In a compiled step, this raises.
    host = _pinned_empty(array.shape, array.dtype)
    with array.device:
        array.get(out=host)
    return host


def copy_to(array: Array, device: Device) -> Array:
    """Return an array in the memory of a device, without a copy if it is there already.

    Text and objects stay in host memory, because GPUs cannot hold them. Arrays enter and leave
    compiled steps as arguments and results, not through this function.
    """
    if device.kind == "cpu" and type(array) is np.ndarray:
        return array
    if device.kind == "tpu" or hasattr(array, "on_device"):
        return array
    if device.kind == "cpu":
        return to_host(array)
    cupy = cupy_module()
    on_gpu = is_device_array(array)
    if on_gpu:
        if array.device.id == device.index:
            return array
        with array.device:
            if not array.flags.c_contiguous:  # CuPy copies only contiguous arrays between devices.
                array = array.copy()
            cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Device(device.index):
        if on_gpu:
            target = array.copy()  # CuPy copies to the current device.
        else:
            host = np.asarray(array)
            if host.dtype.kind in "OSU":
                return host
            pinned = _pinned_empty(host.shape, host.dtype)
            pinned[...] = host
            target = cupy.empty(host.shape, host.dtype)
            target.set(pinned)
        # After the return, the caller may overwrite the source or free it to CuPy's pool.
        cupy.cuda.get_current_stream().synchronize()
    return target


@functools.lru_cache(maxsize=1024)
def _is_device_type(kind: type) -> bool:
    return hasattr(kind, "device") and (
        kind.__module__.partition(".")[0] == "cupy" or hasattr(kind, "on_device")
    )


@functools.cache
def _gpu_count() -> int:
    with contextlib.suppress(MissingDependencyError):
        runtime = cupy_module().cuda.runtime
        with contextlib.suppress(runtime.CUDARuntimeError):
            return int(runtime.getDeviceCount())
    return 0


@functools.cache
def cupy_module() -> ModuleType:
    """Return the module ``cupy``, imported at the first call."""
    try:
        import cupy
    except ImportError as error:
        raise MissingDependencyError(
            "GPU devices need CuPy: pip install 'ndistribute[cuda12]' or 'ndistribute[cuda13]', "
            "depending on the CUDA version that your driver supports."
        ) from error
    return cupy  # type: ignore[no-any-return]


@functools.cache
def jax_module() -> Any:
    """Return the module ``jax``, imported at the first call."""
    try:
        import jax
        import jax.experimental.layout
        import jax.scipy.linalg
        import jax.scipy.special
    except ImportError as error:
        raise MissingDependencyError(
            "compiled steps need JAX: pip install 'ndistribute[jax]', or jax[tpu] or jax[cuda12] "
            "for TPUs and GPUs."
        ) from error
    return jax


@functools.cache
def nccl_module() -> Any:
    """Return the module ``cupy.cuda.nccl``, imported at the first call."""
    # By default NCCL connects some GPUs at their first use, and then waits inside a kernel launch
    # that cannot be aborted. NCCL reads its variables once, so this must precede its first call.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    cupy_module()
    try:
        from cupy.cuda import nccl
    except ImportError:
        nccl = None
    if nccl is None or not nccl.available:
        raise MissingDependencyError(
            "CuPy found no NCCL library: pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, "
            "depending on the CUDA version of your CuPy."
        )
    return nccl


def nccl_available() -> bool:
    """Return True if CuPy and an NCCL library that it can load are installed."""
    try:
        nccl_module()
    except MissingDependencyError:
        return False
    return True


def device_identity(device: Device) -> str:
    """Return ``"cpu"``, or ``"gpu"`` with the GPU's PCI bus id if NCCL is installed."""
    if device.kind != "gpu" or not nccl_available():
        return device.kind
    return f"gpu {cupy_module().cuda.Device(device.index).pci_bus_id.upper()}"


def _pinned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Return a new array in page-locked host memory, for copies to and from GPUs at full speed."""
    count = int(np.prod(shape))
    dtype = np.dtype(dtype)
    memory = cupy_module().cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
    return np.frombuffer(memory, dtype, count).reshape(shape)
