"""Strangers send nonsense by the thousand to servers and workers of a job that trains meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.cluster.wire.client import connect
from ndistribute.cluster.wire.tensors import MalformedError
from tests.faults.commands import DEADLINE, commanded
from tests.faults.tasks import Tasks, Zygote

grpc = pytest.importorskip("grpc")

NONSENSE = [os.urandom(200), b"", bytes(64), os.urandom(5000)]
TOO_LARGE = bytes(16 << 20)


@contextlib.contextmanager
def counting_meanwhile(strategy: Any, coordinator: Any) -> Iterator[Callable[[], int]]:
    """Let workers count all the time, and yield what says how often each number was counted."""
    with strategy.scope():
        marks = nd.Variable(np.zeros(100_000, np.int64))
    enough = threading.Event()

    def count(number: int) -> None:
        marks.scatter_add([number], [1])

    def work() -> int:
        done = 0
        while not enough.is_set():
            for number in range(done, done + 20):
                coordinator.schedule(count, args=(number,))
            coordinator.join(timeout=DEADLINE)
            done += 20
        return done

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield lambda: int(np.sum(marks))
        finally:
            enough.set()
            done = working.result(DEADLINE)
    assert marks.numpy()[:done].tolist() == [1] * done
    assert int(np.sum(marks)) == done


def send_by_the_network(address: str) -> None:
    """Make thousands of calls that belong to no session, and some that are far too long."""
    options = [("grpc.max_send_message_length", -1)]
    with contextlib.closing(grpc.insecure_channel(address, options)) as channel:
        for method in ("Call", "Part", "Fetch", "Greet", "Prove"):
            call = channel.unary_unary(f"/ndistribute/{method}")
            for _ in range(6):
                futures = [call.future(NONSENSE[k % 4], timeout=20) for k in range(100)]
                assert all(future.code() is not grpc.StatusCode.OK for future in futures)
        huge = channel.unary_unary("/ndistribute/Part")
        for _ in range(5):
            assert huge.future(TOO_LARGE, timeout=20).code() is not grpc.StatusCode.OK
    host, _, port = address.rpartition(":")
    for _ in range(50):
        with (
            socket.create_connection((host, int(port)), timeout=5) as sock,
            contextlib.suppress(OSError),
        ):
            sock.sendall(os.urandom(2000))


def send_near(name: bytes) -> None:
    """Open hundreds of connections on the host that say nothing of sense, or far too much."""
    head = struct.pack("<4sBB2xdQ", b"NDN1", 4, 56, 1.0, 1 << 62)
    for k in range(600):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(10)
            with contextlib.suppress(OSError):
                sock.connect(name)
                sock.sendall([os.urandom(1 + k % 5000), head + b"Call" + bytes(56), b""][k % 3])


def send_from_within(address: str, audience: str) -> bytes:
    """Send nonsense in a session, and return where the server listens on this host."""
    with connect(address, "evaluator:9", audience=audience, timeout=20) as client:
        for k in range(1000):
            with pytest.raises(MalformedError):
                client.call([os.urandom(1 + k % 500)])
        opened = client._connection.opened(1e9)
        assert opened.near is not None
        return opened.near._name


def test_nonsense_by_the_thousand_does_not_disturb_a_job_that_trains(zygote: Zygote) -> None:
    with Tasks(zygote, workers=1, servers=1) as tasks:
        tasks.start_all()
        with commanded(tasks) as (strategy, coordinator):
            with counting_meanwhile(strategy, coordinator) as counted:
                before = {job: tasks.resident_megabytes(job, 0) for job in ("ps", "worker")}
                for job in ("ps", "worker"):
                    address = tasks.cluster[job][0]
                    send_by_the_network(address)
                    send_near(send_from_within(address, f"{job}:0"))
                    assert counted()
                for job, megabytes in before.items():
                    assert tasks.resident_megabytes(job, 0) - megabytes < 150
            assert strategy.lost_updates == 0
