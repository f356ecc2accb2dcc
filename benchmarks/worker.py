"""The functions that the processes of a contender run: set up work, do it, and free it.

`tests.processes.Ranks` calls them in the processes that it started. This file imports only what the
interpreters of all sides have.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Prepared(NamedTuple):
    """What a maker yields.

    Args:
        step: does the work once; None where this process only serves the others.
        check: a number on which the contenders of a group must agree.
        tell: called when all is measured; what it returns is written beside the figures.
        seconds: does the work so many times, and returns the seconds; None: `step` is timed.
    """

    step: Callable[[], Any] | None = None
    check: float | None = None
    tell: Callable[[], Any] | None = None
    seconds: Callable[[int], float] | None = None


_cases: dict[str, tuple[contextlib.ExitStack, Prepared]] = {}


def task() -> tuple[str, int]:
    """Return which task of its cluster this process is, from `TF_CONFIG`."""
    named = json.loads(os.environ["TF_CONFIG"])["task"]
    return named["type"], named["index"]


@functools.cache
def strategy_of(kind: str, **options: Any) -> Any:
    """Return this process's strategy of a kind of ours; the end of the process closes it."""
    import ndistribute as nd

    strategy = getattr(nd, kind)(**options)
    atexit.register(strategy.close)
    return strategy


@functools.cache
def coordinator() -> Any:
    """Return the coordinator of this process, which is a chief."""
    import ndistribute as nd

    made = nd.ClusterCoordinator(strategy_of("ParameterServerStrategy"))
    atexit.register(made.close)
    return made


@functools.cache
def serve() -> Any:
    """Be a server of ours from now on."""
    import ndistribute as nd

    if "NDISTRIBUTE_DURABILITY" in os.environ:  # Its folder goes when its starter ends it.
        os.environ["NDISTRIBUTE_SNAPSHOT_DIR"] = os.path.dirname(os.environ["RANKS_DOOR"])

    return nd.Server(json.loads(os.environ["TF_CONFIG"])["cluster"], *task())


def describe(rank: int, size: int, packages: list[str]) -> dict[str, Any]:
    """Return the versions of what is installed here, None for what is not, and the BLAS."""
    found: dict[str, Any] = {"python": platform.python_version(), "blas": []}
    for package in packages:
        found[package] = None
        for name in (package, f"{package}-cpu"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = found[package] or importlib.metadata.version(name)
    with contextlib.suppress(ImportError):
        import numpy as np  # noqa: F401, its BLAS is what threadpoolctl finds
        import threadpoolctl

        for pool in threadpoolctl.threadpool_info():
            found["blas"].append(f"{pool['internal_api']} {pool.get('architecture')}")
    return found


def serves() -> bool:
    """Return whether this process is a parameter server, or the worker of a chief."""
    cluster = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})
    return "ps" in cluster and task()[0] != ("chief" if "chief" in cluster else "worker")


def open_case(
    rank: int, size: int, name: str, server: str, maker: str, params: dict[str, Any]
) -> float | None:
    """Set a contender's work up, and return what checks it; a process that serves does so."""
    module, _, function = (server if serves() else maker).partition(":")
    make = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    stack = contextlib.ExitStack()
    if serves():
        make()
    _cases[name] = stack, Prepared() if serves() else stack.enter_context(make(**params))
    return _cases[name][1].check


def collect(rank: int, size: int) -> None:
    """Collect garbage, before all processes of a contender start together.

    TensorFlow's objects take up to 0.2 s of it, at the end of which its peers would have ended.
    """
    gc.collect()


def run_case(rank: int, size: int, name: str, steps: int) -> float | None:
    """Do the work so many times, and return the seconds."""
    step, seconds = _cases[name][1].step, _cases[name][1].seconds
    if seconds is not None:
        return seconds(steps)
    if step is None:
        return None
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - start


def close_case(rank: int, size: int, name: str) -> Any:
    """Let go of what the work holds."""
    stack, prepared = _cases.pop(name)
    told = prepared.tell() if prepared.tell is not None else None
    stack.close()
    gc.collect()
    return told
