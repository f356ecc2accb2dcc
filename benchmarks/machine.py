"""The machine, its load, and the processor time of other processes, on which figures depend."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.processes import ROOT

_MEMORY = {"resident": "VmRSS", "shared": "RssShmem", "peak": "VmHWM"}


def machine() -> dict[str, Any]:
    """Describe the machine and the moment."""
    models = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    git = ["git", "describe", "--always", "--dirty=*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "commit": commit.stdout.strip() or None,
    }


def busy_seconds() -> float:
    """Return how long the cores of the machine have computed since it started, all together."""
    ticks = [int(count) for count in _read("/proc/stat").partition("\n")[0].split()[1:9]]
    # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


def seconds_of(processes: Sequence[int]) -> float:
    """Return how long some processes have computed, all together."""
    found = 0.0
    for process in processes:
        fields = _read(f"/proc/{process}/stat").rpartition(")")[2].split()
        found += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


def facts(process: int) -> dict[str, float]:
    """Return how many threads and sockets a process has, and its memory in MB."""
    links = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:  # Closed meanwhile.
            continue
    lines = _read(f"/proc/{process}/status").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        **{name: int(status[key].split()[0]) / 1e3 for name, key in _MEMORY.items()},
        "threads": int(status["Threads"]),
        "sockets": sum(link.startswith("socket:") for link in links),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
