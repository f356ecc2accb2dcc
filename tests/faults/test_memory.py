"""Clients that come and go, their updates, and heartbeats leave nothing behind."""

import contextlib
import gc
import os
import threading
import tracemalloc

import numpy as np

from ndistribute.parameter_server.messages import (
    Create,
    NewVariable,
    Reply,
    Transaction,
    VariableUpdate,
)
from ndistribute.task.server import Server
from ndistribute.transport.rpc import Client
from ndistribute.transport.secret import credentials_of

CLIENTS = int(os.environ.get("FAULTS_CLIENTS", "150"))
ENVIRON = {"NDISTRIBUTE_SECRET": "f" * 32, "NDISTRIBUTE_JOB_ID": "this one"}


@contextlib.contextmanager
def growth():
    """Yield what says how many bytes are held more than at the beginning."""
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]

        def grown():
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        yield grown
    finally:
        tracemalloc.stop()


def visit(address, name, changes=3):
    """Return a client that has changed something."""
    client = Client(
        address, credentials_of([address], ENVIRON), name=name, purpose="ps", replies=Reply
    )
    client.call(Create((NewVariable("w", (1000,), "float64", fill=0.0),)))
    for number in range(1, changes + 1):
        change = VariableUpdate("w", "assign_add", np.ones(1000))
        client.call(Transaction(client.name, number, number, (change,)))
    return client


def test_clients_that_come_and_go_leave_no_more_than_their_numbers():
    """Of each connection a server kept a session, and of each update an answer."""
    with Server.create_local_server(environ=ENVIRON) as server:
        for _ in range(20):
            visit(server.target, "worker:0").close()
        files = len(os.listdir("/proc/self/fd"))
        with growth() as grown:
            for _ in range(CLIENTS):
                visit(server.target, "worker:0").close()
            visit(server.target, "worker:0", changes=1000).close()
            assert grown() < 1500 * CLIENTS + 50_000
        assert len(os.listdir("/proc/self/fd")) <= files + 4


def test_heartbeats_leave_nothing(monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_HEARTBEAT_SECONDS", "0.5")
    with (
        Server.create_local_server(environ=ENVIRON) as server,
        contextlib.closing(visit(server.target, "worker:0")) as client,
    ):
        threading.Event().wait(0.5)
        with growth() as grown:
            for _ in range(4):
                threading.Event().wait(0.5)
            assert grown() < 20_000
        assert client._idle[0].is_open
