"""What a figure depends on besides the code: the machine, its load, versions and BLAS kernels."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["busy_seconds", "libraries", "machine", "own_seconds"]

_BLAS_FACTS = ("internal_api", "version", "architecture", "num_threads")

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """Describe the machine and the moment; loads no library."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "commit": _commit(),
        "environment": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("OPENBLAS_", "OMP_", "MKL_", "MALLOC_", "TF_", "XLA_"))
        },
    }


def libraries(packages: list[str]) -> dict[str, Any]:
    """Describe this process: interpreter, versions, pinned threads and the BLAS in use."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ["numpy", *packages]},
        "cores": len(os.sched_getaffinity(0)),
        "blas": _blas(),
    }


def _blas() -> list[dict[str, Any]]:
    """Describe the BLAS that NumPy loaded; TensorFlow's environment may lack threadpoolctl."""
    try:
        import numpy as np  # noqa: F401, its BLAS is what threadpoolctl finds
        import threadpoolctl
    except ImportError:
        return []
    pools = threadpoolctl.threadpool_info()
    return [
        {key: pool.get(key) for key in _BLAS_FACTS}
        for pool in pools
        if pool.get("user_api") == "blas"
    ]


def busy_seconds() -> float:
    """Return how long the cores of the machine have computed since it started, all together."""
    ticks = [int(count) for count in _read("/proc/stat").partition("\n")[0].split()[1:9]]
    # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return how long this process and those that it started have computed."""
    found, waiting = time.process_time(), _children(os.getpid())
    while waiting:
        child = waiting.pop()
        fields = _read(f"/proc/{child}/stat").rpartition(")")[2].split()
        if fields:
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            waiting += _children(child)
    return found


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in _read(str(task)).split()]


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    # Run from the repository, ndistribute need not be installed.
    is_here = (ROOT / package / "__init__.py").exists()
    return str(importlib.import_module(package).__version__) if is_here else None


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _commit() -> str | None:
    """Return the commit, with a star where files have changed since; None outside a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
