"""What the processes of a job should set for their BLAS before NumPy loads.

OpenBLAS picks its kernels by the processor's family, and takes the AVX2 ones for some families that
have AVX-512: a product then ran at 100 GFLOP/s a core where 215 were possible. And each process
that is left to itself starts as many threads as there are cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

__all__ = [
    "THREAD_VARIABLES",
    "better_kernel",
    "blas_architecture",
    "blas_settings",
    "cpu_flags",
    "gemm_rate",
    "usable_cores",
]

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
_KERNEL_VARIABLE = "OPENBLAS_CORETYPE"
_MEASURE_SECONDS = 30.0
_MEASURE = """
import time
import numpy as np
a = np.ones((512, 512), np.float32)
best = 1.0
for _ in range(20):
    start = time.perf_counter()
    a @ a
    best = min(best, time.perf_counter() - start)
print(2 * 512**3 / best / 1e9)
"""
_AVX512 = frozenset(("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"))
# Those that OpenBLAS has for x86-64 processors without AVX-512; an unknown one is left alone.
_BELOW_AVX512 = frozenset(
    "Haswell Zen Excavator Steamroller Piledriver Bulldozer Sandybridge SandyBridge Nehalem Penryn "
    "Dunnington Core2 Atom Barcelona Bobcat Prescott Katmai".split()
)


def better_kernel(flags: Collection[str], architecture: str | None) -> str | None:
    """Return the OpenBLAS kernels to ask for, or None where it chose well or is not in use.

    Args:
        flags: what the processor can do, as in /proc/cpuinfo.
        architecture: the kernels that OpenBLAS chose by itself.

    >>> better_kernel({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}, "Haswell")
    'SkylakeX'
    """
    wrong = architecture in _BELOW_AVX512 and frozenset(flags) >= _AVX512
    return "SkylakeX" if wrong else None


def blas_settings(environ: Mapping[str, str], local_ranks: int) -> dict[str, str]:
    """Return the variables to add for each of several processes of this machine.

    What the user has set stays: threads where neither variable is set, kernels where none are.

    Args:
        environ: the environment that the processes get otherwise.
        local_ranks: how many processes share this machine's cores.
    """
    settings = {}
    if not any(environ.get(name) for name in THREAD_VARIABLES):
        threads = max(1, usable_cores() // local_ranks)
        settings = dict.fromkeys(THREAD_VARIABLES, str(threads))
    if not environ.get(_KERNEL_VARIABLE):
        kernel = better_kernel(cpu_flags(), blas_architecture())
        if kernel is not None:
            settings[_KERNEL_VARIABLE] = kernel
    return settings


def cpu_flags() -> frozenset[str]:
    """Return what the processor can do; nothing where /proc does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def blas_architecture() -> str | None:
    """Return the kernels that NumPy's OpenBLAS uses in this process, or None if it uses another."""
    import numpy as np  # noqa: F401, its BLAS is what threadpoolctl finds
    import threadpoolctl

    for pool in threadpoolctl.threadpool_info():
        if pool.get("internal_api") == "openblas":
            architecture = pool.get("architecture")
            return None if architecture is None else str(architecture)
    return None


def gemm_rate(kernel: str | None) -> float | None:
    """Measure one core's matrix products with some of OpenBLAS's kernels, in a fresh process.

    Args:
        kernel: what to set ``OPENBLAS_CORETYPE`` to, or None to leave it unset.

    Returns:
        GFLOP/s for float32, or None where it could not be measured.
    """
    environ = {name: value for name, value in os.environ.items() if name != _KERNEL_VARIABLE}
    environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    if kernel is not None:
        environ[_KERNEL_VARIABLE] = kernel
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE],
            env=environ,
            capture_output=True,
            timeout=_MEASURE_SECONDS,
            check=True,
        )
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
