"""Workers of a job, imitated by threads: each has a communicator, as processes would."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ndistribute import data
from ndistribute.collective.select import make_group
from ndistribute.devices import Device

DEADLINE_SECONDS = 20


def cpus(count: int) -> list[Device]:
    return [Device(f"cpu:{i}") for i in range(count)]


def all_threads_end() -> bool:
    """Return True if the threads of the package end before the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    ours = [each for each in threading.enumerate() if each.name.startswith("ndistribute-")]
    for thread in ours:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in ours)


def place_of(
    devices: Sequence[Device],
    num_workers: int = 1,
    worker_index: int = 0,
    workers: Any = None,
    replica_counts: Sequence[int] | None = None,
) -> data.Topology:
    """Return the place of a worker among others that have as many devices, or as many as is said.

    Communicators that are given as `workers` say how many there are, and which one this is.
    """
    if workers is not None:
        num_workers, worker_index = workers.size, workers.rank
    counts = tuple(replica_counts or (len(devices),) * num_workers)
    return data.Topology(tuple(devices), counts, worker_index, workers if len(counts) > 1 else None)


def distribute(
    dataset: Any, devices: Sequence[Device], options: Any = None, *place: Any, **places: Any
) -> Any:
    return data.distribute(dataset, place_of(devices, *place, **places), options)


def distribute_from_function(
    make: Any, devices: Sequence[Device], options: Any = None, *place: Any, **places: Any
) -> Any:
    return data.distribute_from_function(make, place_of(devices, *place, **places), options)


def on_workers(count: int, work: Callable[[Any], Any]) -> list[Any]:
    """Return what each worker's ``work(communicator)`` returned, or the exception it raised."""
    group = make_group(cpus(count))
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(group.communicators[rank])
        except Exception as error:
            results[rank] = error
        finally:
            group.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results


def raised(results: Sequence[Any]) -> list[Any]:
    """Return the results, once it is sure that none of them is an exception."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def shared(count: int, build: Callable[[int], Any], options: Any = None) -> list[Any]:
    """Return the steps that each worker gets of ``build(rank)``, or the exception it raised."""
    return on_workers(
        count, lambda one: list(distribute(build(one.rank), cpus(1), options, workers=one))
    )


def all_raise(results: Sequence[Any], kind: type[Exception], match: str) -> None:
    for result in results:
        with pytest.raises(kind, match=match):
            raised([result])


def pieces_of(steps: Any) -> list[list[list[Any]]]:
    return [[piece.tolist() for piece in step.values] for step in steps]


def rows_of(shares: Sequence[list[list[list[Any]]]]) -> list[Any]:
    """Return the rows of all replicas of all workers, step after step."""
    return [
        row
        for joint in zip(*shares, strict=True)
        for step in joint
        for piece in step
        for row in piece
    ]
