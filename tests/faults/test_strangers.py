"""Whoever knows the port of a running job but not its secret disturbs nothing."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults import steps
from tests.faults.jobs import WIRES
from tests.transport.ends import malformed

FRAMES = int(os.environ.get("FAULTS_FRAMES", "1000"))


def port_of(rank: int, size: int) -> int:
    return int(steps.peers()._info.listener.getsockname()[1])


def bother(port: int) -> None:
    """Send malformed frames, each on a connection of its own; many stay open for a while."""
    with contextlib.ExitStack() as held:
        for number, frame in zip(range(FRAMES), malformed(random.Random(port)), strict=False):
            sock = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30.0))
            with contextlib.suppress(ConnectionError):  # It was shut out, as is right.
                sock.sendall(frame)
            if number % 50 == 49:
                held.pop_all().close()


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_a_job_goes_on_while_malformed_frames_come(wire: str) -> None:
    with WIRES[wire]() as job, ThreadPoolExecutor(job.size) as pool:
        ports = job.results(port_of)
        bothering = [pool.submit(bother, port) for port in ports]
        while not all(one.done() for one in bothering):
            assert job.results(steps.worked, 10) == [True] * job.size
        for one in bothering:
            one.result()
