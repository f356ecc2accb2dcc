"""Memory that a step frees, kept for the next step.

The C library of Linux returns large freed blocks to the system. Each step then requests them again,
with a page fault for each 4 KiB: a quarter of a step of a small convolutional network. The setting
applies to the whole process. A setting of the user stays unchanged.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Parameters of mallopt, and their values in bytes. Arrays above the first are not kept.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 1 << 25), (-1, 1 << 28)


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let the C library keep up to 256 MiB of freed memory; return whether it does.

    It does not if the library is not glibc, or if the environment has settings for it.
    """
    names = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(environ.get(name) for name in names):
        return False
    return all(mallopt(*setting) == 1 for setting in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
