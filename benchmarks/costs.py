"""The alpha-beta-gamma model of our all-reduces, as pure functions: count, fit, predict.

An all-reduce costs ``messages * alpha + bytes * beta + added * gamma`` seconds: a latency for each
message in a row, a time for each byte that a rank sends (in shared memory: that all processes of
the host read and write, for they share its bus), and a time for each byte that a rank adds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "ALGORITHMS",
    "NETWORKS",
    "Counts",
    "Fit",
    "Point",
    "Rates",
    "counts",
    "errors",
    "fit",
    "hierarchical",
    "leave_one_out",
    "network",
    "on_network",
    "predict",
    "step_time",
]


class Counts(NamedTuple):
    """What one all-reduce does, on the rank that does most."""

    messages: float
    bytes: float
    added: float


class Rates(NamedTuple):
    """What it costs: seconds for a message, for a byte that moves, for a byte that is added."""

    alpha: float
    beta: float
    gamma: float


class Point(NamedTuple):
    """A measured all-reduce.

    Args:
        algorithm: one of `ALGORITHMS`.
        workers: how many took part.
        size: in bytes.
        seconds: that it took.
    """

    algorithm: str
    workers: int
    size: int
    seconds: float


# Latency and bandwidth in one direction, as vendors and MPI latency tests give them.
NETWORKS = {
    "10GbE": (30e-6, 1 / 1.25e9),
    "25GbE": (20e-6, 1 / 3.125e9),
    "100Gb-IB": (2e-6, 1 / 12.5e9),
    "400Gb-IB": (1.5e-6, 1 / 50e9),
}


def _shared_memory(n: int, size: int) -> Counts:
    # Two meetings; each of n processes reads what it brings and writes the total, once. What passes
    # between them stays in the cache.
    return Counts(2 * math.ceil(math.log2(n)), 2 * n * size, (n - 1) / n * size)


def _ring(n: int, size: int) -> Counts:
    return Counts(2 * (n - 1), 2 * (n - 1) / n * size, (n - 1) / n * size)


def _recursive_doubling(n: int, size: int) -> Counts:
    # Ranks beyond a power of two hand theirs over first, and are told the result last.
    doublings, beyond = math.floor(math.log2(n)), n & (n - 1) > 0
    return Counts(
        doublings + 2 * beyond, (doublings + 2 * beyond) * size, (doublings + beyond) * size
    )


def _local(n: int, size: int) -> Counts:
    return Counts(0, 0, size)


ALGORITHMS = {
    "shared_memory": _shared_memory,
    "ring": _ring,
    "recursive_doubling": _recursive_doubling,
    "local": _local,
}


def counts(algorithm: str, workers: int, size: int) -> Counts:
    """Return what an all-reduce of so many bytes does; alone, a worker does nothing.

    >>> counts("ring", 4, 1000)
    Counts(messages=6, bytes=1500.0, added=750.0)
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}.")
    if workers == 1 and algorithm != "local":
        return Counts(0, 0, 0)
    return ALGORITHMS[algorithm](workers, size)


def predict(rates: Rates, algorithm: str, workers: int, size: int) -> float:
    """Return the seconds of an all-reduce."""
    done = counts(algorithm, workers, size)
    return sum(number * rate for number, rate in zip(done, rates, strict=True))


@dataclass(frozen=True)
class Fit:
    """Rates, and what is to be said about them.

    Args:
        rates: the best.
        determined: whether the points tell all three apart. Where they do not, beta and gamma may
            stand for each other: sums of the two are right, each alone is not.
        points: that they were fitted to.
    """

    rates: Rates
    determined: bool
    points: tuple[Point, ...]


def fit(points: Sequence[Point]) -> Fit:
    """Return the rates, none below zero, with the least squared relative errors.

    Raises:
        ValueError: fewer than three points, or a time that is not above zero.
    """
    if len(points) < 3:
        raise ValueError(
            f"three rates can not be fitted to {len(points)} points: measure at least three sizes."
        )
    if any(point.seconds <= 0 for point in points):
        raise ValueError("a measured time must be above zero.")
    rows = np.array([counts(p.algorithm, p.workers, p.size) for p in points], float)
    scaled = rows / np.array([p.seconds for p in points])[:, None]
    used = [column for column in range(3) if scaled[:, column].any()]
    # Columns as different as microseconds and gigabytes: compare them at one scale.
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    even = scaled / norms
    rank = np.linalg.matrix_rank(even[:, used], tol=1e-6)
    solution = _least_squares(even) / norms
    return Fit(Rates(*map(float, solution)), bool(rank == 3), tuple(points))


def _least_squares(rows: Any) -> Any:
    """Solve ``rows @ x = 1`` for x of at least 0: the best of all choices of what is not 0."""
    best, least = np.zeros(3), math.inf
    # The fewest first, so that of equally good ones the simplest is kept.
    for number in (1, 2, 3):
        for chosen in itertools.combinations(range(3), number):
            part = rows[:, chosen]
            x = np.linalg.lstsq(part, np.ones(len(rows)), rcond=1e-9)[0]
            squares = float(np.sum((part @ x - 1) ** 2))
            if (x >= 0).all() and squares < least * (1 - 1e-9) - 1e-24:
                best, least = np.zeros(3), squares
                best[list(chosen)] = x
    return best


def errors(rates: Rates, points: Sequence[Point]) -> list[float]:
    """Return the relative error of each point."""
    return [abs(predict(rates, p.algorithm, p.workers, p.size) / p.seconds - 1) for p in points]


def leave_one_out(points: Sequence[Point]) -> list[float]:
    """Return for each point the error of the rates that were fitted to all others.

    Raises:
        ValueError: fewer than four points.
    """
    if len(points) < 4:
        raise ValueError(f"leaving one of {len(points)} points out leaves fewer than three.")
    found = []
    for index, point in enumerate(points):
        others = [*points[:index], *points[index + 1 :]]
        found += errors(fit(others).rates, [point])
    return found


def described(relative: Sequence[float]) -> dict[str, Any]:
    """Return the median and the largest of some errors, and each."""
    return {"median": median(relative), "max": max(relative), "each": list(relative)}


def network(name: str) -> tuple[float, float]:
    """Return alpha and beta of a network: a name of `NETWORKS`, or the two with a comma.

    >>> network("5e-6,1e-9")
    (5e-06, 1e-09)
    """
    if name in NETWORKS:
        return NETWORKS[name]
    try:
        alpha, beta = map(float, name.split(","))
    except ValueError:
        known = ", ".join(NETWORKS)
        raise ValueError(f"no network {name!r}: one of {known}, or ALPHA,BETA.") from None
    if alpha < 0 or beta < 0:
        raise ValueError(f"alpha and beta must not be below zero, got {name}.")
    return alpha, beta


def on_network(measured: Rates, name: str) -> Rates:
    """Return the rates of a transport on a network, from those that it has on this host.

    The transport's own work for a message comes on top of the network's latency. A byte costs what
    the slower of the two takes, since one sends while the other is busy with the next.
    """
    alpha, beta = network(name)
    return Rates(measured.alpha + alpha, max(measured.beta, beta), measured.gamma)


def hierarchical(inside: Rates, between: Rates, workers: int, per_host: int, size: int) -> float:
    """Return the seconds of an all-reduce inside each host, then a ring among the hosts."""
    here = min(workers, per_host)
    hosts = math.ceil(workers / per_host)
    ring = predict(between, "ring", hosts, size)
    # The total goes back to the other processes of the host: each reads and writes it once.
    spread = 2 * size * here * inside.beta if hosts > 1 and here > 1 else 0.0
    return predict(inside, "shared_memory", here, size) + ring + spread


def step_time(compute: float, communicate: float, overlap: float = 0.0) -> float:
    """Return the seconds of a step that hides communication behind a part of its computing."""
    return compute + max(0.0, communicate - overlap * compute)


def best(times: Mapping[str, float]) -> str:
    """Return the name of the least time."""
    return min(times, key=lambda name: times[name])
