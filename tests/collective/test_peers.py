"""Processes of a group: who is there, who was lost, and that everyone learns it in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from ndistribute.collective.backend import Call
from ndistribute.errors import DistributeError
from tests.collective.joined import joined_peers
from tests.processes import AT_ONCE, Ranks

FAST = {"NDISTRIBUTE_HEARTBEAT_SECONDS": "1"}


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def exchanged(rank: int, size: int) -> list[bytes]:
    return joined_peers().exchange("names", f"rank {rank}".encode(), timeout=50.0)


def test_an_exchange_gives_everyone_all_blobs_in_rank_order(three: Ranks) -> None:
    outcomes = three.run(exchanged)
    assert [o.result() for o in outcomes] == [[b"rank 0", b"rank 1", b"rank 2"]] * 3


def described(rank: int, size: int) -> tuple[tuple[int, ...], tuple[str, ...], int]:
    peers = joined_peers()
    return peers.pids, peers.hosts, os.getpid()


def test_everyone_knows_the_processes_and_hosts_of_all(three: Ranks) -> None:
    outcomes = [o.result() for o in three.run(described)]
    assert {o[0] for o in outcomes} == {tuple(three.pids)}
    assert len({host for o in outcomes for host in o[1]}) == 1


def waited(rank: int, size: int, failing: int, error: str | None) -> None:
    """Wait for rank `failing`, which fails instead."""
    peers = joined_peers()
    peers.enter()
    if rank == failing and error is not None:
        failure = ValueError(error)
        peers.abort(failure)
        raise failure
    patience = peers.patience(Call(1, "all_reduce", "SUM"), 30.0)
    while True:
        patience.check(lambda: [failing])
        time.sleep(0.001)


def recovered(rank: int, size: int) -> int:
    peers = joined_peers()
    peers.recover(lambda: None, timeout=50.0)
    return peers.generation


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_on_one_rank_reaches_all_and_the_group_recovers(
    three: Ranks, failing: int
) -> None:
    outcomes = three.run(waited, failing, "boom")
    for rank, outcome in enumerate(outcomes):
        if rank == failing:
            assert (outcome.error, outcome.text) == ("ValueError", "boom")
        else:
            assert outcome.error == "WorkerLostError"
            assert f"worker {failing} failed: ValueError: boom" in outcome.text
            assert outcome.attributes["rank"] == failing
            assert outcome.seconds < AT_ONCE
    generations = {o.result() for o in three.run(recovered)}
    assert len(generations) == 1
    assert [o.result()[2] for o in three.run(exchanged)] == [b"rank 2"] * 3


def skipped(rank: int, size: int, skipping: int) -> None:
    peers = joined_peers()
    peers.enter()
    if rank == skipping:
        peers.leave()
        return
    patience = peers.patience(Call(3, "all_gather", "axis=0"), 30.0)
    while True:
        patience.check(lambda: [skipping])
        time.sleep(0.001)


def test_a_skipped_call_is_a_mismatch_on_those_who_wait(three: Ranks) -> None:
    outcomes = three.run(skipped, 1)
    assert outcomes[1].error is None
    for rank in (0, 2):
        assert outcomes[rank].error == "CollectiveMismatchError"
        assert "all_gather #3: worker 1" in outcomes[rank].text
        assert outcomes[rank].seconds < AT_ONCE
    late = three.run(told, ranks=[1])[0]
    assert late.error == "CollectiveMismatchError"
    assert {o.error for o in three.run(recovered)} == {None}


def told(rank: int, size: int) -> None:
    """Enter a step when the others' failure has come here."""
    peers = joined_peers()
    deadline = time.monotonic() + 50.0
    while peers.cause is None and time.monotonic() < deadline:
        time.sleep(0.001)
    peers.enter()


def timed_out(rank: int, size: int, late: int) -> None:
    peers = joined_peers()
    peers.enter()
    deadline = time.monotonic() + 30.0
    patience = peers.patience(Call(2, "broadcast", "root=0"), 0.5 if rank != late else 30.0)
    try:
        while time.monotonic() < deadline:
            if rank == late:
                peers.check()
            else:
                patience.check(lambda: [late])
            time.sleep(0.001)
    except DistributeError as error:
        peers.abort(error)
        raise


def test_a_late_rank_is_named(three: Ranks) -> None:
    outcomes = three.run(timed_out, 2)
    assert {o.error for o in outcomes} == {"CollectiveTimeoutError"}
    assert all("waited 0.5 s for worker(s) 2" in o.text for o in outcomes)


def lingering(rank: int, size: int) -> tuple[str, float]:
    """Wait until the group breaks, and say how and when."""
    peers = joined_peers()
    deadline = time.monotonic() + 50.0
    while time.monotonic() < deadline:
        try:
            peers.check()
        except DistributeError as error:
            return str(error), time.monotonic()
        time.sleep(0.001)
    raise TimeoutError("nobody told this rank anything")


def test_a_killed_process_is_known_to_all_at_once() -> None:
    with Ranks(3) as ranks:
        for outcome in ranks.run(exchanged):
            outcome.result()
        ranks.start(lingering)
        killed = time.monotonic()
        ranks.signal(1, signal.SIGKILL)
        outcomes = ranks.collect()
        assert outcomes[1].error == "Lost"
        for rank in (0, 2):
            text, when = outcomes[rank].result()
            assert f"worker 1 ({os.uname().nodename}, pid {ranks.pids[1]}) was lost" in text
            assert when - killed < AT_ONCE


def test_a_stopped_process_is_lost_after_the_heartbeat_timeout_and_not_before() -> None:
    with Ranks(2, environ=FAST) as ranks:
        for outcome in ranks.run(exchanged):
            outcome.result()
        ranks.signal(1, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            text, when = ranks.run(lingering, ranks=[0])[0].result()
        finally:
            ranks.signal(1, signal.SIGCONT)
        assert "nothing was heard of it for" in text
        assert 0.8 < when - stopped < AT_ONCE
        # The one that was stopped learns that the others went on without it.
        assert ranks.run(lingering, ranks=[1])[0].result()[0]


def finished(rank: int, size: int) -> None:
    joined_peers().close()


def test_waiting_for_a_process_that_has_finished_says_so() -> None:
    with Ranks(2) as ranks:
        for outcome in ranks.run(exchanged):
            outcome.result()
        ranks.start(finished, ranks=[1])
        outcome = ranks.run(waited, 1, None, ranks=[0])[0]
        assert outcome.error == "WorkerLostError"
        assert "has finished" in outcome.text
        ranks.collect(ranks=[1])[0].result()
