"""Whoever knows the port of a running job but not its secret disturbs nothing."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from pathlib import Path

import pytest

from tests.faults import steps
from tests.faults.jobs import WIRES
from tests.processes import Ranks

FRAMES = int(os.environ.get("FAULTS_FRAMES", "2000"))
GROWTH_BYTES = 64 * 1024 * 1024


def malformed(number: int, rng: random.Random) -> bytes:
    """Return the bytes of one of five kinds of frames that nobody should send."""
    return [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">Q", 2**63) + b"x",  # A huge length.
        b"\x01" + struct.pack(">I", 2**32 - 1),  # A control message, never begun properly.
        b"N",  # A short read.
        rng.randbytes(rng.randrange(1, 3000)),
    ][number % 5]


def bother(port: int, count: int, seed: int, problems: list[Exception]) -> None:
    rng = random.Random(seed)
    held: list[socket.socket] = []
    try:
        for number in range(count):
            sock = socket.create_connection(("127.0.0.1", port), timeout=30.0)
            sock.sendall(malformed(number, rng))
            held.append(sock)
            if len(held) > 50:  # Many stay open and silent for a while.
                held.pop(rng.randrange(len(held))).close()
    except ConnectionError:
        pass  # It was shut out, as is right.
    except Exception as error:
        problems.append(error)
    finally:
        for sock in held:
            sock.close()


def memory_of(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ports_of(rank: int, size: int) -> int:
    return int(steps.peers()._info.listener.getsockname()[1])


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_a_job_goes_on_while_thousands_of_malformed_frames_come(wire: str) -> None:
    with WIRES[wire]() as job:
        _warm(job)
        ports = [outcome.result() for outcome in job.run(ports_of)]
        before = [memory_of(pid) for pid in job.pids]
        problems: list[Exception] = []
        strangers = [
            threading.Thread(
                target=_bother_all, args=(port, FRAMES // job.size, seed, problems), daemon=True
            )
            for seed, port in enumerate(ports)
        ]
        for stranger in strangers:
            stranger.start()
        while any(stranger.is_alive() for stranger in strangers):
            assert [o.result() for o in job.run(steps.worked, 10)] == [True] * job.size
        for stranger in strangers:
            stranger.join(30.0)
        assert not problems, problems
        growth = [memory_of(pid) - old for pid, old in zip(job.pids, before, strict=True)]
        assert max(growth) < GROWTH_BYTES, growth


def _bother_all(port: int, count: int, seed: int, problems: list[Exception]) -> None:
    for start in range(0, count, 100):
        bother(port, min(100, count - start), seed * 10_000 + start, problems)


def _warm(job: Ranks) -> None:
    for outcome in job.run(steps.worked, 3):
        outcome.result()
