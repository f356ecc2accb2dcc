"""Processes of a group: who is there, who was lost, and that everyone learns it in time."""

from __future__ import annotations

import os
import threading
import time

import pytest

from ndistribute.collective.backend import Call
from ndistribute.collective.communicator import CommunicationOptions
from ndistribute.collective.control import BEFORE_ALL
from ndistribute.collective.shared_memory import SharedMemoryBackend
from ndistribute.collective.workers import Workers
from ndistribute.device import Device
from ndistribute.errors import DistributeError, WorkerLostError
from tests.collective.joined import joined_peers
from tests.processes import AT_ONCE, Ranks

CPU = [Device("cpu:0")]


def nothing() -> None:
    """Have nothing to reset in a recovery."""


def exchanged(rank: int, size: int) -> list[bytes]:
    return joined_peers().exchange("names", f"rank {rank}".encode(), timeout=50.0)


def wait_for(missing: int) -> None:
    """Wait in a call for a rank that does not come."""
    patience = joined_peers().patience(Call(1, "all_reduce", "SUM"), 30.0)
    while True:
        patience.check(lambda: [missing])
        time.sleep(0.001)


def broken_before_a_step(rank: int, size: int) -> list[str]:
    """Break a group in which one process has not begun a step yet, and say how each goes on."""
    peers = joined_peers()
    workers = Workers(peers, SharedMemoryBackend(peers), CPU, CommunicationOptions())
    if rank == 0:
        workers.enter()
        cause = WorkerLostError("broken")
        peers.abort(cause, after=BEFORE_ALL)
        workers.peers.fail(cause)
        workers.peers.leave()
    else:
        deadline = time.monotonic() + 50.0
        while peers.cause is None and time.monotonic() < deadline:
            time.sleep(0.001)
    told = []
    for _ in range(2):
        try:
            workers.enter()
            workers.peers.leave()
        except DistributeError as error:
            told.append(type(error).__name__)
    workers.close()
    return told


def test_who_has_begun_no_step_yet_takes_part_in_a_recovery() -> None:
    with Ranks(2) as ranks:
        raised = ranks.results(broken_before_a_step)
    assert raised == [[], ["WorkerLostError"]]


def left_behind(rank: int, size: int) -> str:
    """Wait for rank 1, which waits for nobody, in a call that rank 0 has left without."""
    peers = joined_peers()
    peers.enter(nothing, 50.0)
    if rank == 0:
        peers.close()
        return ""
    deadline = time.monotonic() + 50.0
    while peers.cut_off_at > time.monotonic() and time.monotonic() < deadline:
        time.sleep(0.001)
    if rank == 1:
        return ""
    patience = peers.patience(Call(1, "all_reduce", "SUM"), 50.0)
    try:
        while True:
            patience.check(lambda: [1])
            time.sleep(0.001)
    except DistributeError as error:
        return f"{type(error).__name__}: {error}"


def test_without_rank_0_nobody_waits_in_a_call_that_it_did_not_make() -> None:
    with Ranks(3) as ranks:
        ranks.results(exchanged)
        outcomes = ranks.run(left_behind)
        assert "worker 0 " in outcomes[2].result()
        assert "has finished, and worker 2 waits for it" in outcomes[2].result()
        assert all(outcome.seconds < AT_ONCE for outcome in outcomes)
        for outcome in ranks.run(exchanged, ranks=[1, 2]):
            assert outcome.error == "WorkerLostError"
            assert "has finished" in outcome.text


def held(rank: int, size: int) -> tuple[int, int]:
    """Return how many descriptors and threads this process has more than before it joined."""
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    joined_peers()
    return len(os.listdir("/proc/self/fd")) - before[0], threading.active_count() - before[1]


def test_connections_and_threads_grow_with_the_group_at_rank_0_alone() -> None:
    found = []
    for size in (2, 6):
        with Ranks(size) as ranks:
            found.append(ranks.results(held))
    (_, few), (first, *many) = found
    assert set(many) == {few}
    assert few[1] <= 4
    assert first[0] > few[0]


def missed(rank: int, size: int) -> str:
    peers = joined_peers()
    if rank == 1:
        return ""
    try:
        peers.exchange("names", b"", timeout=0.5)
    except DistributeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_exchange_gives_everyone_all_blobs_in_rank_order_and_names_who_is_late() -> None:
    with Ranks(3) as ranks:
        blobs = ranks.results(exchanged)
        assert blobs == [[b"rank 0", b"rank 1", b"rank 2"]] * 3
        for rank, outcome in enumerate(ranks.run(missed)):
            waited = f"CollectiveTimeoutError: names: worker {rank} waited 0.5 s for worker(s) 1."
            assert outcome.result() == ("" if rank == 1 else waited)


def aborted_twice(rank: int, size: int) -> list[str]:
    """Cut an abort short on rank 0, as an interrupt does, and abort again."""
    peers = joined_peers()
    peers.enter(nothing, 50.0)
    if rank == 0:
        post, told = peers._star.post, []

        def interrupted(message: object) -> None:
            if not told:
                told.append(message)
                raise KeyboardInterrupt
            post(message)

        peers._star.post = interrupted
        with pytest.raises(KeyboardInterrupt):
            peers.abort(ValueError("first"))
        peers.abort(ValueError("second"))
    with pytest.raises(WorkerLostError) as caught:
        wait_for(1 - rank)
    peers.leave()
    peers.close()
    with pytest.raises(WorkerLostError, match="has left its group"):
        peers.enter(nothing, 50.0)
    return [str(caught.value)]


def test_an_abort_that_was_cut_short_is_made_up_for_and_who_has_left_never_waits() -> None:
    with Ranks(2) as ranks:
        for outcome in ranks.run(aborted_twice):
            assert "ValueError: second" in outcome.result()[0]
            assert outcome.seconds < AT_ONCE
