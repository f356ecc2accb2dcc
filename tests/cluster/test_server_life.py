"""How servers end, and come back: real processes, real signals, snapshots on disk."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from ndistribute.cluster.protocol.replies import Changed, Failure, Saved, Total
from ndistribute.cluster.protocol.requests import (
    Add,
    Barrier,
    Batch,
    Create,
    Join,
    Origin,
    Quorum,
    Read,
    ReadTotal,
    SaveSnapshot,
    Transaction,
)
from ndistribute.cluster.serving.saving import SavingDesk
from ndistribute.cluster.serving.server import Server
from ndistribute.cluster.serving.snapshots import Snapshots
from ndistribute.cluster.store import Store
from ndistribute.cluster.wire.client import Client, connect
from ndistribute.errors import CheckpointCorruptError, WorkerLostError
from tests.cluster.desks import free_port, start_python

pytest.importorskip("grpc")

ENVIRON = {"NDISTRIBUTE_SECRET": secrets.token_hex(16), "NDISTRIBUTE_HEARTBEAT_SECONDS": "2"}
SERVER = """
import json, os, sys
os.dup2(1, 2)
from ndistribute.cluster.serving.saving import SavingDesk
from ndistribute.cluster.serving.server import Server
server = Server(json.loads(sys.argv[1]), sys.argv[2], 0)
print("up", flush=True)
server.join()
"""
CLIENT = """
import sys
from ndistribute.cluster.wire import records
from ndistribute.cluster.wire.client import connect
from ndistribute.cluster.protocol.requests import ReadTotal
from ndistribute.cluster.coordination.worker_requests import Hello
for address, request in zip(sys.argv[2:], (ReadTotal(), Hello())):
    connect(address, sys.argv[1], timeout=20).call(records.encode(request))
print("here", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def started(program: str, *args: str, first: str, **environ: str):
    """Start a process, and wait for a line of its own; before it may come what it logs."""
    process = start_python(program, *args, environ={**ENVIRON, **environ}, stdin=True)
    try:
        while (line := process.stdout.readline()) != f"{first}\n":
            assert line, "it ended before it was up"
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdin.close()
        process.stdout.close()


def ps_process(address: str, **environ: str):
    return started(SERVER, json.dumps({"ps": [address]}), "ps", first="up", **environ)


def client_process(name: str, *addresses: str):
    return started(CLIENT, name, *addresses, first="here")


def ended(process, seconds: float = 5.0) -> tuple[int, str]:
    """Return how a process ended, and its last line."""
    code = process.wait(timeout=seconds)
    lines = process.stdout.read().splitlines()
    return code, lines[-1] if lines else ""


def serving(cluster: dict[str, list[str]], **environ: str) -> Server:
    return Server({"ps": ["127.0.0.1:0"], **cluster}, "ps", 0, environ={**ENVIRON, **environ})


def reach(server: Server, name: str, **options) -> Client:
    options.setdefault("timeout", 20.0)
    client = connect(server.address, name, environ=ENVIRON, **options)
    client.request(ReadTotal())
    return client


@contextlib.contextmanager
def joining(server: Server):
    """Join a server in a thread, and yield what will hold what `join` gives."""
    with server, ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(server.join)
        finally:
            server.stop()


def add(client: Client, number: int) -> int:
    """Add one to ``w`` under a number, and return the total."""
    change = Transaction(Origin(client.name, number), (Add("w", np.ones(3)),))
    reply = client.request(change)
    assert isinstance(reply, Changed)
    return reply.total


@pytest.fixture
def soon(monkeypatch) -> None:
    """Let nobody wait long for clients that left cleanly."""
    monkeypatch.setattr("ndistribute.cluster.serving.server.GRACE_SECONDS", 0.05)


def test_when_the_chief_is_killed_servers_and_workers_end_at_once():
    ports = [free_port() for _ in range(2)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = json.dumps(
        {"chief": ["127.0.0.1:1"], "ps": addresses[:1], "worker": addresses[1:]},
    )
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(started(SERVER, cluster, job, first="up"))
            for job in ("ps", "worker")
        ]
        chief = stack.enter_context(client_process("chief:0", *addresses))
        start = time.monotonic()
        chief.send_signal(signal.SIGKILL)
        for server, name in zip(servers, ("ps:0", "worker:0"), strict=True):
            code, line = ended(server)
            assert code == 1
            assert line.endswith(f"WorkerLostError: {name} ends: the chief died.")
        assert time.monotonic() - start < 5


def test_when_the_chief_leaves_its_servers_end_well(soon):
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    server = serving(cluster)
    with joining(server) as outcome, reach(server, "worker:0"):
        reach(server, "chief:0").close()
        assert outcome.result(timeout=5) is True


def test_servers_end_once_all_workers_have_left_whoever_else_is_there(soon):
    server = serving({"worker": ["127.0.0.1:1", "127.0.0.1:2"], "evaluator": ["127.0.0.1:3"]})
    with joining(server) as outcome, reach(server, "evaluator:0"):
        with reach(server, "worker:1"):
            reach(server, "worker:0").close()
            assert not server.join(timeout=0.2)
        assert outcome.result(timeout=5) is True


def test_a_worker_that_dies_is_waited_for_and_no_longer_than_said(soon):
    cluster = {"worker": ["127.0.0.1:1"]}
    patient = serving(cluster)
    hasty = serving(cluster, NDISTRIBUTE_RETURN_SECONDS="0.2")
    with joining(patient) as good, joining(hasty) as bad:
        with client_process("worker:0", patient.address) as worker:
            other = client_process("worker:0", hasty.address)
            with other as second:
                for process in (worker, second):
                    process.send_signal(signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="worker:0 died and did not come back"):
            bad.result(timeout=10)
        assert not good.done()
        reach(patient, "worker:0").close()
        assert good.result(timeout=5) is True


def test_a_server_that_is_stopped_killed_and_ended_goes_on_from_its_snapshots(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    environ = {"NDISTRIBUTE_SNAPSHOT_DIR": str(tmp_path)}
    with (
        connect(address, "worker:0", audience="ps:0", timeout=20, environ=ENVIRON) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with ps_process(address, **environ) as process:
            client.request(Create("w", np.zeros(3)))
            assert [add(client, number) for number in (1, 2)] == [1, 2]
            assert client.request(SaveSnapshot()) == Saved(2)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # It stops a moment after the signal.
            stopped = pool.submit(add, client, 3)
            with pytest.raises(TimeoutError):
                stopped.result(timeout=0.3)
            process.send_signal(signal.SIGCONT)
            assert stopped.result(timeout=10) == 3
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)
            late = pool.submit(client.request, ReadTotal())  # Asked while nobody is there.
        with ps_process(address, **environ) as process:
            assert late.result(timeout=20) == Total(2, 2)  # One of three transactions is lost.
            assert add(client, 4) == 3
            np.testing.assert_array_equal(client.request(Read("w")).array, np.full(3, 3.0))
            process.send_signal(signal.SIGTERM)
            code, line = ended(process, 10)
        assert code == 128 + signal.SIGTERM
        assert "Traceback" not in line
    with serving({}, **environ) as server, reach(server, "evaluator:0") as client:
        assert client.request(ReadTotal()) == Total(3, 3)


def test_snapshots_are_written_by_and_by_while_something_changes(tmp_path):
    with (
        Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON, **saving(tmp_path, 0.02)) as server,
        reach(server, "worker:0") as client,
    ):
        client.request(Create("w", np.zeros(3)))
        add(client, 1)
        deadline = time.monotonic() + 10
        while not (files := written(tmp_path)) and time.monotonic() < deadline:
            client.request(Batch((Read("w"), ReadTotal())))
        assert files
        assert client.request(SaveSnapshot()) == Saved(1)
        files = written(tmp_path)
        for _ in range(50):
            client.request(Batch((Read("w"), ReadTotal())))
        threading.Event().wait(timeout=0.1)
        assert written(tmp_path) == files  # Whoever only reads causes none.


def saving(directory, seconds: float) -> dict:
    return {"snapshot_directory": directory, "snapshot_seconds": seconds}


def written(directory) -> list[str]:
    return sorted(path.name for path in directory.glob("*.snapshot"))


@pytest.fixture
def slowly(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Let snapshots be written once the second event is set; the first says that one is begun."""
    began, go_on, write = threading.Event(), threading.Event(), Snapshots.write

    def wait(files: Snapshots, head, tensors):
        began.set()
        assert go_on.wait(timeout=20)
        return write(files, head, tensors)

    monkeypatch.setattr(Snapshots, "write", wait)
    return began, go_on


def test_a_server_answers_while_it_writes_what_was_before(tmp_path, slowly, monkeypatch):
    monkeypatch.setattr("ndistribute.cluster.wire.service.HOLD_SECONDS", 0.05)
    began, go_on = slowly
    with (
        Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON, **saving(tmp_path, 3600)) as server,
        reach(server, "worker:0") as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.request(Create("w", np.zeros(3)))
        add(client, 1)
        asked = pool.submit(client.request, SaveSnapshot())
        assert began.wait(timeout=10)
        assert add(client, 2) == 2
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.2)  # The client has asked again meanwhile.
        go_on.set()
        assert asked.result(timeout=10) == Saved(1)
        began.clear()
    assert began.is_set()  # At the end, what came after it.
    again = Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON, **saving(tmp_path, 3600))
    with again, reach(again, "worker:0") as client:
        assert client.request(ReadTotal()) == Total(2, 2)


def test_a_snapshot_that_can_not_be_written_is_no_end(tmp_path, monkeypatch):
    def full(*args) -> None:
        raise OSError(28, "No space left on device")

    with (
        Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON, **saving(tmp_path, 3600)) as server,
        reach(server, "worker:0") as client,
    ):
        client.request(Create("w", np.zeros(3)))
        with monkeypatch.context() as patched:
            patched.setattr(Snapshots, "write", full)
            reply = client.request(SaveSnapshot())
        assert isinstance(reply, Failure)
        assert "ps:0 could not write a snapshot" in reply.message
        assert "No space left" in reply.message
        assert client.request(SaveSnapshot()) == Saved(0)


def test_memory_that_is_short_for_one_snapshot_ends_none_of_the_next(tmp_path, monkeypatch):
    def short(self: Store) -> None:
        raise MemoryError("no room for copies")

    with (
        Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON, **saving(tmp_path, 3600)) as server,
        reach(server, "worker:0") as client,
    ):
        client.request(Create("w", np.zeros(3)))
        with monkeypatch.context() as patched:
            patched.setattr(Store, "snapshot", short)
            reply = client.request(SaveSnapshot())
        assert isinstance(reply, Failure)
        assert "no room for copies" in reply.message
        assert client.request(SaveSnapshot()) == Saved(0)


def test_who_died_while_a_server_was_away_is_waited_for_no_longer(tmp_path):
    with contextlib.closing(SavingDesk(tmp_path, "ps:0")) as desk:
        for client in ("worker:0#a", "worker:1#b"):
            desk.handle(client, 1, Join("workers"))
    answered: SimpleQueue[Any] = SimpleQueue()
    barrier = Barrier(Origin("worker:0#a", 1), "start", 2, Quorum("workers", 2))
    again = SavingDesk(tmp_path, "ps:0", is_here="worker:0#a".__eq__, return_seconds=0.05)
    with contextlib.closing(again):
        again.bind(answered.put)
        answered.put(again.handle("worker:0#a", 7, barrier))
        while 7 not in (replies := dict(answered.get(timeout=10))):
            pass
    reply = replies[7]
    assert isinstance(reply, Failure)
    assert reply.kind == "left"
    assert "worker:1#b" in reply.message


def test_a_server_without_a_directory_says_so():
    with serving({}) as server, reach(server, "worker:0") as client:
        reply = client.request(SaveSnapshot())
        assert isinstance(reply, Failure)
        assert reply.kind == "unknown"


def test_a_server_with_broken_snapshots_alone_does_not_start(tmp_path):
    (tmp_path / "ps-0.000001.snapshot").write_bytes(b"nonsense")
    with pytest.raises(CheckpointCorruptError, match="start anew"):
        Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON, **saving(tmp_path, 3600))
    with Snapshots(tmp_path, "ps:0", claim_seconds=0.0) as files:
        files.write({"not": "a store"}, [])
        (tmp_path / "ps-0.000001.snapshot").unlink()
    with pytest.raises(CheckpointCorruptError, match="not of this version"):
        Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON, **saving(tmp_path, 3600))


@pytest.mark.parametrize("name", ["SNAPSHOT", "RETURN"])
def test_seconds_that_are_none_are_refused(name):
    environ = {f"NDISTRIBUTE_{name}_SECONDS": "soon"}
    with pytest.raises(ValueError, match=rf"NDISTRIBUTE_{name}_SECONDS.*'soon'"):
        serving({}, **environ)
