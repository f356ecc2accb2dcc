"""The strategies that a contract test runs over, and small helpers for steps on CPUs.

A test that takes the fixture `strategy` runs for every kind and number of replicas; one that needs
replicas which can disagree takes `several`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.collective.threads import SMALL_BYTES

__all__ = [
    "ALL",
    "DEADLINE",
    "LARGE",
    "central",
    "closing",
    "context",
    "cpus",
    "in_thread",
    "meet",
    "mirrored",
    "parts",
    "pool_threads",
    "rank",
    "several",
    "strategy",
    "wait_until_in",
    "works",
]

# No wait of a test may take longer, in seconds.
DEADLINE = 20.0

# So many float64 are reduced by slice owners, not whole by the last replica to arrive.
LARGE = SMALL_BYTES // 8 + 100


def cpus(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def mirrored(count: int) -> nd.MirroredStrategy:
    return nd.MirroredStrategy(cpus(count))


def central(count: int) -> nd.CentralStorageStrategy:
    return nd.CentralStorageStrategy(cpus(count))


SEVERAL: dict[str, Callable[[], nd.Strategy]] = {
    f"{make.__name__}-{count}": lambda make=make, count=count: make(count)  # type: ignore[misc]
    for make in (mirrored, central)
    for count in (2, 3, 4)
}

ALL: dict[str, Callable[[], nd.Strategy]] = {
    "default": nd.get_strategy,
    "one-device": lambda: nd.OneDeviceStrategy("cpu:0"),
    "mirrored-1": lambda: mirrored(1),
    "central-1": lambda: central(1),
    **SEVERAL,
}


@pytest.fixture(params=ALL)
def strategy(request: pytest.FixtureRequest) -> Iterator[nd.Strategy]:
    """Each strategy in turn, the default one among them."""
    with closing(ALL[request.param]()) as made:
        yield made


@pytest.fixture(params=SEVERAL)
def several(request: pytest.FixtureRequest) -> Iterator[nd.Strategy]:
    """Each strategy of two replicas or more in turn."""
    with closing(SEVERAL[request.param]()) as made:
        yield made


@contextmanager
def closing(made: nd.Strategy) -> Iterator[nd.Strategy]:
    """Close a strategy, but for the default one, which belongs to the process."""
    try:
        yield made
    finally:
        if not made.is_default:
            made.close()


def context() -> nd.ReplicaContext:
    """Return this thread's replica; a test that has none fails here."""
    found = nd.get_replica_context()
    assert found is not None
    return found


def rank() -> int:
    return context().replica_id_in_sync_group


def meet() -> float:
    """Make the simplest collective call."""
    return float(context().all_reduce("sum", 1.0))


def parts(strategy: nd.Strategy, make: Callable[[int], Any] | Sequence[Any]) -> nd.PerReplica:
    """Return one component for each replica, made from its number or taken from a list."""
    get = make if callable(make) else make.__getitem__
    return nd.PerReplica([get(i) for i in range(strategy.num_replicas_in_sync)])


def works(strategy: nd.Strategy) -> bool:
    """Say whether a correct step of small and large collectives gives the right values."""
    size = strategy.num_replicas_in_sync

    def step() -> bool:
        total = context().all_reduce("sum", {"small": rank(), "large": np.ones(LARGE)})
        rows = context().all_gather(np.full(rank(), rank()), axis=0)
        everyone = context().merge_call(lambda _, i: i, args=(rank(),))
        return (
            total["small"] == size * (size - 1) // 2
            and bool((total["large"] == size).all())
            and len(rows) == size * (size - 1) // 2
            and everyone == rank()
        )

    return strategy.local_results(strategy.run(step)) == (True,) * size


@contextmanager
def in_thread(fn: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Run a function on another thread beside a ``with`` block; it ends with the block."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(fn)


def wait_until_in(function: str, idents: Iterable[int | None]) -> None:
    """Wait until each of these threads executes a function of this name, seen in its stack."""
    wanted = list(idents)
    deadline = time.monotonic() + DEADLINE
    pause = threading.Event()
    while time.monotonic() < deadline:
        frames = sys._current_frames()
        current = [frames.get(ident or 0) for ident in wanted]
        if all(frame is not None and frame.f_code.co_name == function for frame in current):
            return
        pause.wait(0.001)
    raise TimeoutError(f"threads {wanted} never came to {function}")


def pool_threads() -> list[threading.Thread]:
    """Return the replica threads that are alive."""
    return [thread for thread in threading.enumerate() if "Strategy(" in thread.name]
