"""Malformed frames by the thousand come to servers and workers of a job that trains meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.coordinator.pickling import Pickled
from ndistribute.coordinator.worker import Outcome, Run
from ndistribute.parameter_server.messages import (
    Create,
    Item,
    NewVariable,
    Read,
    Reply,
    Status,
    Transaction,
    Update,
)
from ndistribute.transport.address import unix_name
from ndistribute.transport.codec import Decoder, Record
from ndistribute.transport.connection import Connection
from ndistribute.transport.handshake import Accepted, Hello
from ndistribute.transport.secret import Credentials, credentials_of
from tests.faults.jobs import DEADLINE, commanded
from tests.processes import Tasks
from tests.transport.ends import GREETING, knock, knock_near, shake

FRAMES = int(os.environ.get("FAULTS_FRAMES", "1000"))
SEED = int(os.environ.get("FAULTS_SEED", "0"))
GROWTH_MEGABYTES = 150
ARRAY = np.arange(500.0)
# Nothing that the job uses is named in what may be understood in spite of everything.
TO_SERVERS: list[Record] = [
    Create((NewVariable("nonsense", (500,), "float64", initial=ARRAY),)),
    Transaction("nonsense#1", 1, 1, (Update("nonsense", "assign_add", ARRAY),)),
    Read((Item("nonsense"),)),
    Status("snapshot"),
]
TO_WORKERS: list[Record] = [Run("n", 1, 1, {"k": Pickled(b"x")}, Pickled(b"y"), ())]


@contextlib.contextmanager
def counting_meanwhile(strategy: Any, coordinator: Any) -> Iterator[Callable[[], int]]:
    """Let workers count all the time, and yield what says how often each number was counted."""
    with strategy.scope():
        marks = nd.Variable(np.zeros(1_000_000, np.int64))
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


def bother(
    number: int, task: str, address: str, credentials: Credentials, rng: random.Random
) -> None:
    """Send one malformed frame, on a connection of its own; every second time after a handshake."""
    to_server = task.startswith("ps")
    sock = knock_near(unix_name(address)) if number % 2 else knock(address)
    with contextlib.closing(sock), contextlib.suppress(ConnectionError):  # Shut out, as is right.
        data = GREETING
        if number % 4 > 1:
            purpose = "ps" if to_server else "coordinator"
            hello = Hello(name="evaluator:9#n", purpose=purpose, audience=task)
            _, accepted = shake(sock, credentials, hello)
            record = rng.choice(TO_SERVERS if to_server else TO_WORKERS)
            data = framed(record, accepted, sealed=not to_server)
        sock.sendall(spoilt(data, rng))


def spoilt(data: bytes, rng: random.Random) -> bytes:
    """Return data that is cut, changed, or nothing but noise."""
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            changed[rng.randrange(min(len(data), 200))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    return data[: 2 * (kind == 2)] + rng.randbytes(rng.randrange(1, 3000))


def framed(record: Record, accepted: Accepted, *, sealed: bool) -> bytes:
    """Return the bytes of a frame as the other end of a handshake makes it."""
    here, there = socket.socketpair()
    connection = Connection(here, accepted, Decoder(Reply | Outcome), sealed=sealed)
    with contextlib.closing(connection), there:
        connection.is_unix = False  # Else long arrays would go by shared memory.
        connection.send(record, 1)
        return there.recv(1 << 16)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_malformed_frames_by_the_thousand_do_not_disturb_a_job_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenth of them ended the old server's connections with others, or filled its memory."""
    with Tasks(workers=2, servers=1) as tasks:
        tasks.start_all()
        with commanded(tasks) as (strategy, coordinator):
            every = [one for job in sorted(tasks.cluster) for one in tasks.cluster[job]]
            credentials = credentials_of(every, tasks.environ)
            with counting_meanwhile(strategy, coordinator) as counted:
                names = ["ps:0", "ps:0", "worker:0", "worker:1"]
                places = [(name.split(":")[0], int(name[-1])) for name in names]
                before = {place: tasks.resident_megabytes(*place) for place in places}
                rng, seen = random.Random(SEED), counted()
                for number in range(FRAMES):
                    job, index = places[number % 4]
                    address = tasks.cluster[job][index]
                    bother(number // 4, names[number % 4], address, credentials, rng)
                assert counted() > seen
                grown = {p: tasks.resident_megabytes(*p) - before[p] for p in before}
            assert max(grown.values()) < GROWTH_MEGABYTES, grown
            assert strategy.lost_updates == 0
