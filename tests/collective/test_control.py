"""Processes of a group: who is there, who was lost, and that everyone learns it in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ndistribute.collective.backend import Call
from ndistribute.collective.options import CommunicationOptions
from ndistribute.collective.shared_memory import SharedMemoryBackend
from ndistribute.collective.step_tracker import BEFORE_ALL
from ndistribute.collective.workers import Workers
from ndistribute.device import Device
from ndistribute.errors import DistributeError, WorkerLostError
from tests.collective.joined import joined_peers
from tests.processes import AT_ONCE, Ranks

CPU = [Device("cpu:0")]
FAST = {"NDISTRIBUTE_HEARTBEAT_SECONDS": "1"}


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def nothing() -> None:
    """Have nothing to reset in a recovery."""


def exchanged(rank: int, size: int) -> list[bytes]:
    return joined_peers().exchange("names", f"rank {rank}".encode(), timeout=50.0)


def test_an_exchange_gives_everyone_all_blobs_in_rank_order(three: Ranks) -> None:
    outcomes = three.run(exchanged)
    assert [o.result() for o in outcomes] == [[b"rank 0", b"rank 1", b"rank 2"]] * 3


def described(rank: int, size: int) -> tuple[list[str], tuple[str, ...]]:
    peers = joined_peers()
    return list(map(peers.name_of, range(size))), peers.hosts


def test_everyone_knows_the_processes_and_hosts_of_all(three: Ranks) -> None:
    outcomes = [o.result() for o in three.run(described)]
    node = os.uname().nodename
    names = [f"worker {rank} ({node}, pid {pid})" for rank, pid in enumerate(three.pids)]
    assert [o[0] for o in outcomes] == [names] * 3
    assert len({host for o in outcomes for host in o[1]}) == 1


def waited(rank: int, size: int, failing: int, error: str | None) -> None:
    """Wait for rank `failing`, which fails instead."""
    peers = joined_peers()
    peers.enter(nothing, 50.0)
    if rank == failing and error is not None:
        failure = ValueError(error)
        peers.abort(failure)
        raise failure
    wait_for(failing)


def wait_for(missing: int) -> None:
    """Wait in a call for a rank that does not come."""
    patience = joined_peers().patience(Call(1, "all_reduce", "SUM"), 30.0)
    while True:
        patience.check(lambda: [missing])
        time.sleep(0.001)


def recovered(rank: int, size: int) -> int:
    peers = joined_peers()
    peers.recover(nothing, timeout=50.0)
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
    peers.enter(nothing, 50.0)
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
    peers.enter(nothing, 50.0)


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
        raised = [outcome.result() for outcome in ranks.run(broken_before_a_step)]
    assert raised == [[], ["WorkerLostError"]]


def timed_out(rank: int, size: int, late: int) -> None:
    peers = joined_peers()
    peers.enter(nothing, 50.0)
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
        assert "may have been stopped" in ranks.run(lingering, ranks=[1])[0].result()[0]


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
        for outcome in ranks.run(exchanged):
            outcome.result()
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
            found.append([outcome.result() for outcome in ranks.run(held)])
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


def test_who_is_late_for_an_exchange_is_named_to_all() -> None:
    with Ranks(3) as ranks:
        for outcome in ranks.run(exchanged):
            outcome.result()
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
