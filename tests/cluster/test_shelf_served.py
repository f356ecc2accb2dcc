"""The shelf of a server that listens, read by its clients on the same host."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys

import numpy as np
import pytest

from ndistribute.cluster.protocol.replies import Failure, Located
from ndistribute.cluster.protocol.requests import Add, Create, Locate, Origin, Transaction
from ndistribute.cluster.serving.server import Server
from ndistribute.cluster.shelf.layout import Place
from ndistribute.cluster.shelf.reader import ShelfReader
from ndistribute.cluster.wire.client import Client, connect

pytest.importorskip("grpc")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are Linux's")

ENVIRON = {"NDISTRIBUTE_SECRET": secrets.token_hex(16)}


def reader_of(client: Client) -> ShelfReader:
    file = client.shared_file()
    try:
        return ShelfReader(file)
    finally:
        os.close(file)


def places_of(client: Client, *names: str) -> list[Place]:
    found = client.request(Locate(names))
    assert isinstance(found, Located)
    return [Place(*where) for where in zip(found.slots, found.offsets, found.nbytes, strict=True)]


def test_a_client_sees_what_the_server_did_until_the_server_stops():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server.create_local_server(environ=ENVIRON))
        client = stack.enter_context(connect(server.address, "worker:0", environ=ENVIRON))
        client.request(Create("v", np.zeros(3)))
        reader = stack.enter_context(contextlib.closing(reader_of(client)))
        client.request(Create("w", np.zeros((), np.float32)))
        places, outs = places_of(client, "v", "w"), [np.empty(3), np.empty((), np.float32)]
        known = reader.read(places, [lambda out=out: out for out in outs])
        changes = Add("v", np.ones(3)), Add("w", np.array(2, np.float32))
        client.request(Transaction(Origin(client.name, 1), changes))
        versions = reader.read(places, [lambda out=out: out for out in outs], known)
        assert versions == tuple(version + 1 for version in known)
        assert [out.tolist() for out in outs] == [[1.0] * 3, 2.0]
        server.stop()
        assert reader.versions([place.slot for place in places], timeout=20.0) is None


def test_a_server_restores_its_variables_onto_a_shelf(tmp_path):
    cluster, versions = {"ps": ["localhost:0"]}, []
    for _ in range(2):
        with (
            Server(cluster, "ps", 0, environ=ENVIRON, snapshot_directory=tmp_path) as server,
            connect(server.address, "worker:0", environ=ENVIRON) as client,
        ):
            client.request(Create("v", np.zeros(3)))
            if not versions:
                add = Add("v", np.ones(3))
                client.request(Transaction(Origin(client.name, 1), (add,)))
            out = np.empty(3)
            with contextlib.closing(reader_of(client)) as reader:
                versions += reader.read(places_of(client, "v"), [lambda out=out: out])
            assert out.tolist() == [1.0] * 3
    assert versions[0] < versions[1]


def test_a_server_that_is_reached_by_the_network_alone_shares_nothing():
    environ = {**ENVIRON, "NDISTRIBUTE_NEAR": "0"}
    with (
        Server.create_local_server(environ=environ) as server,
        connect(server.address, "worker:0", environ=environ) as client,
    ):
        client.request(Create("v", np.zeros(3)))
        assert client.shared_file() is None
        found = client.request(Locate(("v",)))
        assert isinstance(found, Failure)
        assert found.kind == "unknown"
