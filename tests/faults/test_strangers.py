"""Whoever knows the ports of a running job but not its secret disturbs nothing."""

import contextlib
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.jobs import steps
from tests.jobs.clusters import DEADLINE, WIRES, marked, schedule_all, training
from tests.processes import wait_until
from tests.transport.ends import malformed

FRAMES = int(os.environ.get("FAULTS_FRAMES", "1000"))


def port_of(rank, size):
    return int(steps.peers()._info.listener.getsockname()[1])


def listens(port):
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30.0).close()
        return True
    return False


def bother(port):
    """Send malformed frames, each on a connection of its own; many stay open for a while."""
    wait_until(lambda: listens(port))
    with contextlib.ExitStack() as held:
        for number, frame in zip(range(FRAMES), malformed(random.Random(port)), strict=False):
            sock = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30.0))
            with contextlib.suppress(ConnectionError):  # It was shut out, as is right.
                sock.sendall(frame)
            if number % 50 == 49:
                held.pop_all().close()


def bothered(ports, work):
    """Let a job work again and again while strangers come to all its ports."""
    with ThreadPoolExecutor(len(ports)) as pool:
        bothering = [pool.submit(bother, port) for port in ports]
        while not all(one.done() for one in bothering):
            work()
        for one in bothering:
            one.result()


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_workers_go_on_while_malformed_frames_come(wire):
    with WIRES[wire]() as job:
        bothered(job.results(port_of), lambda: job.results(steps.worked, 10))


def resident_megabytes(pid):
    """Return how much memory a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def test_a_cluster_of_servers_goes_on_while_malformed_frames_come():
    """A tenth of them ended an earlier server's connections with others, or filled its memory."""
    with training(workers=2, servers=1) as (tasks, strategy, coordinator):
        marks, mark = marked(strategy, 1 << 20)
        done = 0

        def work():
            nonlocal done
            schedule_all(coordinator, mark, range(done, done + 20))
            coordinator.join(timeout=DEADLINE)
            done += 20

        places = [("ps", 0), ("worker", 0), ("worker", 1)]
        pids = [tasks.pid(*place) for place in places]
        before = [resident_megabytes(pid) for pid in pids]
        addresses = [tasks.cluster[job][index] for job, index in places]
        bothered([int(address.rpartition(":")[2]) for address in addresses], work)
        after = [resident_megabytes(pid) for pid in pids]
        np.testing.assert_array_equal(marks.numpy(), np.arange(1 << 20) < done)
        assert all(b - a < 150 for a, b in zip(before, after, strict=True)), (before, after)
        assert strategy.lost_updates == 0
