"""Checks what this machine offers for distributed jobs, and how to improve it.

No check raises, because the checks are for broken machines. Launchers use the BLAS settings.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ndistribute import blas
from ndistribute.devices import list_devices
from ndistribute.errors import MissingDependencyError
from ndistribute.launcher.commands import find_mpiexec
from ndistribute.mistakes import count_of

State = Literal["ok", "slow", "missing", "absent"]

_LEAST_SHARED_MEMORY = 512 << 20
# How long matrix products are timed: longer than a trial on busy cores takes.
_TRY_SECONDS = 1.0
_KERNEL_VARIABLE = "OPENBLAS_CORETYPE"
_AVX512 = frozenset(("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"))
# OpenBLAS's kernels for x86-64 without AVX-512; unknown kernels stay unchanged.
_BELOW_AVX512 = frozenset(
    "Haswell Zen Excavator Steamroller Piledriver Bulldozer Sandybridge SandyBridge Nehalem Penryn "
    "Dunnington Core2 Atom Barcelona Bobcat Prescott Katmai".split()
)
_FOR_MPI = "pip install 'ndistribute[mpi]'"
_FOR_GPUS = "with a GPU: pip install 'ndistribute[cuda12]'"
# The name, alternative packages, and how to install one.
_OPTIONAL = (
    ("mpi4py", "mpi4py", _FOR_MPI),
    ("CuPy", "cupy-cuda13x cupy-cuda12x cupy", _FOR_GPUS),
    ("NCCL", "nvidia-nccl-cu13 nvidia-nccl-cu12", _FOR_GPUS),
    ("cloudpickle", "cloudpickle", "for parameter servers: pip install 'ndistribute[ps]'"),
)


@dataclass(frozen=True)
class Finding:
    """The result of a check; ``missing``: all jobs need it; ``absent``: only some jobs do."""

    name: str
    state: State
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<8} {self.name:<17} {self.text}"
        return f"{line}\n{'':26} -> {self.remedy}" if self.remedy else line


def examine() -> list[Finding]:
    """Return the results of all checks."""
    return [*_processor(), *_packages(), *_machine(), *_network()]


def better_kernel(flags: Collection[str], architecture: str | None) -> str | None:
    """Return better OpenBLAS kernels than the chosen ones, or None."""
    # For some processors with AVX-512, OpenBLAS chooses AVX2: 100 instead of 215 GFLOP/s per core.
    wrong = architecture in _BELOW_AVX512 and frozenset(flags) >= _AVX512
    return "SkylakeX" if wrong else None


def blas_settings(environ: Mapping[str, str], parts: int) -> dict[str, str]:
    """Return environment variables for one of `parts` processes; the user's settings stay."""
    settings = {}
    if not any(environ.get(name) for name in blas.THREAD_VARIABLES):
        settings = dict.fromkeys(blas.LAUNCHER_VARIABLES, str(max(1, blas.cores() // parts)))
    kernel = better_kernel(_cpu_flags(), _architecture())
    if kernel is not None and not environ.get(_KERNEL_VARIABLE):
        settings[_KERNEL_VARIABLE] = kernel
    return settings


def _processor() -> Iterator[Finding]:
    python = f"{platform.python_version()} at {sys.executable}, NumPy {metadata.version('numpy')}"
    yield Finding("Python", "ok", python)
    widest = [name for name in ("avx512f", "avx2", "avx", "asimd") if name in _cpu_flags()]
    yield Finding("processor", "ok", f"{count_of(blas.cores(), 'core')}, {[*widest, 'no AVX'][0]}")
    pools = ["{internal_api} {version}, {num_threads} threads".format(**pool) for pool in _pools()]
    remedy = "pip install --force-reinstall numpy"
    yield _either("BLAS", "".join(pools[:1]), "slow", "none known", remedy)
    yield _threads()
    chosen = _architecture()
    better = better_kernel(_cpu_flags(), chosen)
    kernels = "" if better else chosen or "not OpenBLAS's"
    text = f"{chosen}, on a processor with AVX-512"
    remedy = f"export {_KERNEL_VARIABLE}={better}"
    remedy = f"unset {_KERNEL_VARIABLE}" if os.environ.get(_KERNEL_VARIABLE) else remedy
    remedy += " (`ndistribute run` then sets it)"
    yield _either("BLAS kernels", kernels, "slow", text, remedy)


def _threads() -> Finding:
    """Say how many BLAS threads the steps of one replica use here, and why."""
    if blas.set_by_user():
        names = filter(os.environ.get, (*blas.THREAD_VARIABLES, "MKL_NUM_THREADS"))
        text = ", ".join(f"{name}={os.environ[name]}" for name in names)
        return Finding("BLAS threads", "ok", text)
    bound = count_of(len(blas.core_numbers()), "core")
    if blas.cpu_quota() < len(blas.core_numbers()):
        bound += f", and the control group grants {blas.cpu_quota():g}"
    chosen = blas.StepThreads(blas.cores())
    factor = np.ones((512, 512), np.float32)
    end = time.perf_counter() + _TRY_SECONDS
    while (begun := time.perf_counter()) < end and blas.cores() > 1:
        with blas.limited_blas(chosen.threads):
            factor @ factor
        now = time.perf_counter()
        chosen.record(now - begun, now)
    if chosen.threads == blas.cores():
        return Finding("BLAS threads", "ok", f"{blas.cores()}: {bound}")
    text = f"{chosen.threads}: {bound}, but other programs use them, so fewer threads are faster"
    remedy = "end those programs; until then, steps find the number of threads by trying"
    return Finding("BLAS threads", "slow", text, remedy)


def _packages() -> Iterator[Finding]:
    for name, packages, remedy in _OPTIONAL:
        version = ""
        for package in packages.split():
            with contextlib.suppress(metadata.PackageNotFoundError):
                version = version or f"{package} {metadata.version(package)}"
        yield _either(name, version, "absent", "not installed", remedy)
    yield _jax()
    try:
        mpi = find_mpiexec()
        yield Finding("mpiexec", "ok", f"{mpi.family} {mpi.version} at {mpi.path}")
    except MissingDependencyError as error:
        yield Finding("mpiexec", "absent", str(error), _FOR_MPI)


def _jax() -> Finding:
    """Say which devices compiled steps can use; another process asks, then frees them."""
    ask = "import jax; print(*(d.device_kind for d in jax.devices()), sep='|')"
    options: Any = {"env": os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "timeout": 60}
    options |= {"stderr": subprocess.DEVNULL, "text": True}
    try:
        version = metadata.version("jax")
        said = subprocess.check_output([sys.executable, "-c", ask], **options)
    except metadata.PackageNotFoundError:
        remedy = "for compiled steps: pip install 'ndistribute[jax]'"
        return Finding("JAX", "absent", "not installed", remedy)
    except subprocess.SubprocessError:
        text = f"jax {version}, which cannot open a device: another program may use it"
        return Finding("JAX", "slow", text, "end that program, or set JAX_PLATFORMS=cpu")
    kinds = Counter(said.strip().split("|")).items()
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds)
    return Finding("JAX", "ok", f"jax {version}, {devices}")


def _machine() -> Iterator[Finding]:
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    usable = len(list_devices("gpu"))
    if usable or not count:
        yield Finding("GPUs", "ok" if usable else "absent", f"{usable} usable")
    else:
        remedy = "pip install 'ndistribute[cuda12]' (or cuda13, as `nvidia-smi` says)"
        yield Finding("GPUs", "slow", f"{count} in the machine, but none usable", remedy)
    free, text = 0, "there is no /dev/shm"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        text = f"/dev/shm has {free >> 20} MiB free"
    enough = text if free >= _LEAST_SHARED_MEMORY else ""
    remedy = "mount -o remount,size=2G /dev/shm (in Docker: --shm-size=2g)"
    yield _either("shared memory", enough, "slow", text, remedy)


def _network() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports, text = f"127.0.0.1 has free ports, such as {listener.getsockname()[1]}", ""
    except OSError as error:
        ports, text = "", f"no free port on 127.0.0.1: {error.strerror}"
    yield _either("loopback", ports, "missing", text, "ip link set lo up")
    name = socket.gethostname()
    # In a process of its own, because an unreachable name server blocks.
    ask = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    address, text = "", f"{name} does not resolve"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        python = [sys.executable, "-I", "-S", "-c", ask, name]
        said = subprocess.check_output(python, stderr=subprocess.DEVNULL, text=True, timeout=5)
        address = f"{name} is {said.strip()} here"
    remedy = f"add '<address> {name}' to /etc/hosts; needed for jobs on several hosts"
    yield _either("host name", address, "absent", text, remedy)
    ssh, remedy = shutil.which("ssh"), "apt-get install openssh-client"
    yield _either("ssh", ssh, "absent", "no ssh; needed for --hosts", remedy)


def _either(name: str, good: str | None, state: State, text: str, remedy: str) -> Finding:
    """Return an ``ok`` result if `good` is not None, otherwise one with `state` and `remedy`."""
    return Finding(name, "ok", good) if good else Finding(name, state, text, remedy)


def _cpu_flags() -> frozenset[str]:
    """Return the flags of the processor; empty if /proc does not list them."""
    with contextlib.suppress(OSError):
        flags = re.search(r"^(?:flags|Features)\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
        return frozenset(flags[1].split() if flags else ())
    return frozenset()


def _pools() -> list[dict[str, Any]]:
    """Return the thread pools of NumPy's BLAS in this process."""
    import threadpoolctl

    return [pool for pool in threadpoolctl.threadpool_info() if pool.get("user_api") == "blas"]


def _architecture() -> str | None:
    """Return the kernels of NumPy's OpenBLAS in this process, or None for another BLAS."""
    kinds = [pool["architecture"] for pool in _pools() if pool["internal_api"] == "openblas"]
    return kinds[0] if kinds else None
