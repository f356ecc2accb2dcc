"""The wire over sockets: what is lost, cut off or stopped, and messages of any size."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ndistribute.collective.header import encode
from ndistribute.collective.reduce_op import ReduceOp
from tests.collective import ring_calls
from tests.collective.joined import joined_peers
from tests.processes import AT_ONCE, Outcome, Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def recover(ranks: Ranks) -> None:
    sums = [outcome.result() for outcome in ranks.run(ring_calls.recovered_sum)]
    assert sums == [sum(range(ranks.size))] * ranks.size


def sum_more_than_is_buffered(rank: int, size: int) -> None:
    """Send in both directions at once what no system buffers."""
    array = np.full(6_000_000, rank + 1.0)
    (total,) = ring_calls.all_reduced(ring_calls.ring(), [array], ReduceOp.SUM)
    assert total.min() == total.max() == sum(range(1, size + 1))


def test_messages_may_be_larger_than_what_the_system_buffers(two: Ranks) -> None:
    for outcome in two.run(sum_more_than_is_buffered):
        outcome.result()


def reduce_for_ever(rank: int, size: int, ready: str, length: int) -> None:
    """Call until something ends it; tell the test once the calls go on."""
    array = np.ones(length, np.float32)
    calls = 0
    while True:
        ring_calls.all_reduced(ring_calls.ring(), [array], ReduceOp.SUM)
        calls += 1
        if calls == 20:
            with open(f"{ready}.{rank}", "w"):
                pass


def wait_for_files(*paths: str) -> None:
    deadline = time.monotonic() + 50.0
    while not all(os.path.exists(path) for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        time.sleep(0.005)


@pytest.mark.parametrize("length", [10, 2_000_000], ids=["small", "large"])
def test_a_killed_rank_is_named_to_all_others_at_once(tmp_path, length: int) -> None:
    with Ranks(3) as ranks:
        ready = str(tmp_path / "ready")
        ranks.start(reduce_for_ever, ready, length)
        wait_for_files(*(f"{ready}.{rank}" for rank in range(3)))
        ranks.signal(1, signal.SIGKILL)
        killed = time.monotonic()
        outcomes = ranks.collect(timeout=50.0)
        assert time.monotonic() - killed < AT_ONCE
    assert outcomes[1].error == "Lost"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "WorkerLostError", outcome
        assert "worker 1" in outcome.text
        assert outcome.attributes["rank"] == 1


def connections(rank: int, size: int, length: int) -> list[int]:
    ring_calls.all_reduced(ring_calls.ring(), [np.ones(length)], ReduceOp.SUM)
    return sorted(joined_peers()._data._sockets)


def test_data_connections_are_made_to_those_who_need_each_other() -> None:
    with Ranks(6) as ranks:
        found = [outcome.result() for outcome in ranks.run(connections, 300_000)]
        assert found == [sorted({(rank - 1) % 6, (rank + 1) % 6}) for rank in range(6)]
        # The partners of small sums are at most one for each bit of the size.
        for outcome in ranks.run(connections, 3):
            assert len(outcome.result()) <= 2 + 3


def cut_off(rank: int, size: int, odd: int, how: str) -> None:
    """End the data connection of one rank while the others communicate."""
    array = np.ones(3_000_000, np.float32)
    if rank == odd:
        peers = joined_peers()
        data = peers.data_socket((odd + 1) % size, peers.check)
        if how == "truncated":
            # A header, and the beginning of what should follow.
            data.setblocking(True)
            call = ring_calls.call_of("all_reduce", "SUM", [array])
            generation = joined_peers().generation
            header = encode(call, ring_calls.ring().count + 1, generation=generation)
            data.sendall(header + b"\0" * 1001)
        elif how == "garbage":
            data.setblocking(True)
            data.sendall(b"\xff" * 4096)
        if how != "garbage":
            data.shutdown(socket.SHUT_RDWR)
        return
    ring_calls.all_reduced(ring_calls.ring(), [array], ReduceOp.SUM)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("closed", "WorkerLostError", "closed its data connection"),
        ("truncated", "WorkerLostError", "closed its data connection"),
        ("garbage", "CollectiveMismatchError", "sent no collective's header"),
    ],
)
def test_a_stream_that_is_cut_off_or_broken_is_an_error(
    two: Ranks, how: str, error: str, text: str
) -> None:
    for odd in range(2):
        outcomes = two.run(cut_off, odd, how)
        other: Outcome = outcomes[1 - odd]
        assert other.error == error, other
        assert text in other.text
        assert other.attributes["rank"] == odd
        assert other.seconds < AT_ONCE
        recover(two)


def test_a_short_stop_does_no_harm(two: Ranks, tmp_path) -> None:
    two.start(sum_while_stopped, str(tmp_path / "ready"))
    wait_for_files(*(str(tmp_path / f"ready.{rank}") for rank in range(2)))
    for rank in range(2):
        two.signal(rank, signal.SIGSTOP)
        time.sleep(0.3)  # The length of the stop.
        two.signal(rank, signal.SIGCONT)
    (tmp_path / "ready.go").touch()
    for outcome in two.collect(timeout=50.0):
        outcome.result()


def sum_while_stopped(rank: int, size: int, ready: str) -> None:
    array = np.full(200_000, rank + 1.0)
    go = 0.0
    with open(f"{ready}.{rank}", "w"):
        pass
    while not go:
        own = np.array([float(os.path.exists(f"{ready}.go"))])
        (total, seen) = ring_calls.all_reduced(ring_calls.ring(), [array, own], ReduceOp.SUM)
        assert total.min() == total.max() == 3.0
        go = float(seen[0])


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program, which makes the certificates, is not here")
    folder = tmp_path_factory.mktemp("authority")
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=all"
    command = ["openssl", *make.split(), "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    environ = {
        "NDISTRIBUTE_TLS_CERT": cert,
        "NDISTRIBUTE_TLS_KEY": key,
        "NDISTRIBUTE_TLS_CA": cert,
    }
    with Ranks(2, environ=environ) as ranks:
        yield ranks


def is_encrypted(rank: int, size: int) -> bool:
    peers = joined_peers()
    return isinstance(peers.data_socket(1 - rank, peers.check), ssl.SSLSocket)


def test_the_wire_is_the_same_with_tls(encrypted: Ranks) -> None:
    assert [outcome.result() for outcome in encrypted.run(is_encrypted)] == [True, True]
    digests = [o.result() for o in encrypted.run(ring_calls.every_op_and_size, "float32")]
    assert len(set(digests)) == 1
    for outcome in encrypted.run(sum_more_than_is_buffered):
        outcome.result()


def test_with_tls_a_mismatch_or_a_cut_is_an_error_too(encrypted: Ranks) -> None:
    outcomes = encrypted.run(ring_calls.differing_call, 1, "dtype", 1000)
    assert [outcome.error for outcome in outcomes] == ["CollectiveMismatchError"] * 2
    recover(encrypted)
    outcome = encrypted.run(cut_off, 1, "closed")[0]
    assert outcome.error == "WorkerLostError"
    recover(encrypted)
