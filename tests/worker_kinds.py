"""The kinds of `MultiWorkerMirroredStrategy` that contract tests run over inside a worker.

A worker's environment says, in `CONTRACT_KINDS`, how the workers meet and how many devices each of
them has: ``auto 1,1 2,1`` are two kinds, the second with two devices on the first worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import ndistribute as nd
from ndistribute.cluster import resolve

__all__ = ["TIMEOUT_SECONDS", "inside_worker", "join", "worker_kinds"]

VARIABLE = "CONTRACT_KINDS"

# A worker that fails must not keep the others waiting.
TIMEOUT_SECONDS = 40.0


def inside_worker() -> bool:
    """Say whether this process is a worker that runs the contract tests."""
    return VARIABLE in os.environ


def worker_kinds(environ: Mapping[str, str] = os.environ) -> dict[str, Callable[[], nd.Strategy]]:
    """Return makers of the strategies that this worker's environment names."""
    how, *layouts = environ[VARIABLE].split()
    return {
        f"{how}-{layout.replace(',', '-')}": lambda layout=layout: join(  # type: ignore[misc]
            how, tuple(map(int, layout.split(",")))
        )
        for layout in layouts
    }


def join(how: str, counts: tuple[int, ...]) -> nd.MultiWorkerMirroredStrategy:
    """Meet the other workers, each with so many devices.

    Args:
        how: the implementation.
        counts: how many devices each worker has.
    """
    resolver = resolve()
    assert resolver is not None
    assert resolver.worker_index is not None
    return nd.MultiWorkerMirroredStrategy(
        resolver,
        nd.CommunicationOptions(timeout_seconds=TIMEOUT_SECONDS, implementation=how),
        devices=[f"cpu:{i}" for i in range(counts[resolver.worker_index])],
    )
