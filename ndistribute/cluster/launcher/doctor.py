"""Says what this machine has for distributed jobs, and what is missing or slow with its remedy.

Every check is a function that returns one finding and raises nothing: a broken machine is what it
is for. Optional packages are looked up, never loaded.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ndistribute.cluster.launcher.blas_kernel import (
    better_kernel,
    blas_architecture,
    cpu_flags,
    gemm_rate,
    usable_cores,
)
from ndistribute.cluster.launcher.mpiexec import find_mpiexec, require_mpi4py
from ndistribute.device import list_devices
from ndistribute.errors import MissingDependencyError

__all__ = ["Finding", "State", "examine"]

State = Literal["ok", "slow", "missing", "absent"]

_LEAST_SHARED_MEMORY = 512 << 20
_DNS_SECONDS = 5.0
# A kernel has to be worth the setting; less is within what a measurement moves by.
_WORTH = 1.1
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_FOR_GPUS = "with a GPU: pip install 'ndistribute[cuda12]'"
_FOR_SERVERS = "for parameter servers: pip install 'ndistribute[ps]'"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Args:
        name: what was looked at.
        state: ``ok``; ``slow``: works, but could be faster; ``missing``: needed by every job;
            ``absent``: needed by some jobs only.
        text: what is there.
        remedy: the command or setting that mends it.

    >>> print(Finding("ssh", "absent", "no ssh command", "apt-get install openssh-client"))
    absent   ssh               no ssh command
                               -> apt-get install openssh-client
    """

    name: str
    state: State
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<8} {self.name:<17} {self.text}"
        return f"{line}\n{'':26} -> {self.remedy}" if self.remedy else line


def examine(measure: bool = True) -> list[Finding]:
    """Look at everything.

    Args:
        measure: run matrix products for a second where another BLAS kernel may be faster.
    """
    checks: list[Callable[[], Finding]] = [
        _python,
        _processor,
        _blas,
        lambda: _kernel(measure),
        _threads,
        _mpi4py,
        _mpiexec,
        _gpus,
        lambda: _optional("CuPy", _CUPY, _FOR_GPUS),
        lambda: _optional("NCCL", _NCCL, _FOR_GPUS),
        lambda: _optional("gRPC", ["grpcio"], _FOR_SERVERS),
        lambda: _optional("cloudpickle", ["cloudpickle"], _FOR_SERVERS),
        _shared_memory,
        _loopback,
        _hostname,
        _ssh,
    ]
    return [check() for check in checks]


def _python() -> Finding:
    numpy = _version_of("numpy")
    return Finding(
        "Python", "ok", f"{platform.python_version()} at {sys.executable}, NumPy {numpy}"
    )


def _processor() -> Finding:
    flags = cpu_flags()
    widest = [name for name in ("avx512f", "avx2", "avx", "asimd") if name in flags]
    cores = usable_cores()
    return Finding("processor", "ok", f"{cores} cores, {widest[0] if widest else 'no AVX'}")


def _blas() -> Finding:
    import numpy as np  # noqa: F401, its BLAS is what threadpoolctl finds
    import threadpoolctl

    pools = [pool for pool in threadpoolctl.threadpool_info() if pool.get("user_api") == "blas"]
    if not pools:
        return Finding(
            "BLAS", "slow", "none that threadpoolctl knows", "pip install --force-reinstall numpy"
        )
    pool = pools[0]
    text = f"{pool['internal_api']} {pool.get('version') or ''}, {pool['num_threads']} threads"
    return Finding("BLAS", "ok", text)


def _kernel(measure: bool) -> Finding:
    chosen = blas_architecture()
    better = better_kernel(cpu_flags(), chosen)
    if better is None:
        return Finding("BLAS kernels", "ok", chosen or "not OpenBLAS's")
    text = f"{chosen}, on a processor with AVX-512"
    if measure:
        now, then = gemm_rate(chosen), gemm_rate(better)
        if now is not None and then is not None:
            text += f": {now:.0f} GFLOP/s a core, {then:.0f} with {better}"
            if then < _WORTH * now:
                return Finding("BLAS kernels", "ok", text)
    mine = os.environ.get("OPENBLAS_CORETYPE")
    remedy = "unset OPENBLAS_CORETYPE" if mine else f"export OPENBLAS_CORETYPE={better}"
    return Finding("BLAS kernels", "slow", text, f"{remedy} (`ndistribute run` then sets it)")


def _threads() -> Finding:
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    found = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    text = " ".join(found) or "not set: `ndistribute run` shares the cores among its processes"
    return Finding("BLAS threads", "ok", text)


def _mpi4py() -> Finding:
    try:
        require_mpi4py()
    except MissingDependencyError:
        return Finding("mpi4py", "absent", "not installed", "pip install 'ndistribute[mpi]'")
    return Finding("mpi4py", "ok", _version_of("mpi4py") or "of unknown version")


def _mpiexec() -> Finding:
    try:
        mpi = find_mpiexec()
    except MissingDependencyError as error:
        return Finding("mpiexec", "absent", str(error), "pip install 'ndistribute[mpi]'")
    name = {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi.family]
    return Finding("mpiexec", "ok", f"{name} {mpi.version} at {mpi.path}")


def _gpus() -> Finding:
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    usable = len(list_devices("gpu"))
    if usable or not count:
        return Finding("GPUs", "ok" if usable else "absent", f"{usable} usable")
    return Finding(
        "GPUs",
        "slow",
        f"{count} in the machine, but none usable",
        "pip install 'ndistribute[cuda12]' (or cuda13, as `nvidia-smi` says)",
    )


def _optional(name: str, packages: Iterable[str], remedy: str) -> Finding:
    for package in packages:
        version = _version_of(package)
        if version is not None:
            return Finding(name, "ok", f"{package} {version}")
    return Finding(name, "absent", "not installed", remedy)


def _shared_memory() -> Finding:
    remedy = "mount -o remount,size=2G /dev/shm (in Docker: --shm-size=2g)"
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("shared memory", "slow", f"/dev/shm: {error.strerror}", remedy)
    free = status.f_bavail * status.f_frsize
    text = f"/dev/shm has {free >> 20} MiB free"
    if free < _LEAST_SHARED_MEMORY:
        return Finding("shared memory", "slow", text, remedy)
    return Finding("shared memory", "ok", text)


def _loopback() -> Finding:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    except OSError as error:
        text = f"no free port on 127.0.0.1: {error.strerror}"
        return Finding("loopback", "missing", text, "ip link set lo up")
    return Finding("loopback", "ok", f"127.0.0.1 gives free ports, {port} for example")


def _hostname() -> Finding:
    name = socket.gethostname()
    remedy = f"add '<address> {name}' to /etc/hosts; needed for jobs on several hosts"
    ask = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    try:
        # In a process of its own: a name server that is gone would keep this one waiting.
        found = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ask, name],
            capture_output=True,
            text=True,
            timeout=_DNS_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return Finding("host name", "absent", f"{name} does not resolve", remedy)
    address = found.stdout.strip()
    if address.startswith("127."):
        text = f"{name} is {address} here, which no other host can reach"
        return Finding("host name", "absent", text, remedy)
    return Finding("host name", "ok", f"{name} is {address}")


def _ssh() -> Finding:
    path = shutil.which("ssh")
    if path is None:
        text, remedy = "no ssh; needed for --hosts", "apt-get install openssh-client"
        return Finding("ssh", "absent", text, remedy)
    return Finding("ssh", "ok", path)


def _version_of(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
