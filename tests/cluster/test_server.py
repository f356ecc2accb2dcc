"""`Server`: tasks of a cluster as processes that listen, with a store behind those of ``ps``."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ndistribute.cluster.protocol.replies import (
    Changed,
    Created,
    Failure,
    Released,
    Step,
    Token,
    Value,
)
from ndistribute.cluster.protocol.requests import (
    Add,
    Barrier,
    Create,
    Dequeue,
    Enqueue,
    IncrementStep,
    Origin,
    Read,
    ReadStep,
    Transaction,
)
from ndistribute.cluster.serving.local import LocalServer, connect_local
from ndistribute.cluster.serving.server import Server
from ndistribute.cluster.spec import ClusterSpec
from ndistribute.cluster.wire.client import Client, connect
from ndistribute.cluster.wire.rpc import GrpcTransport
from ndistribute.cluster.wire.transport import UnreachableError
from ndistribute.errors import AuthenticationError, CollectiveTimeoutError, WorkerLostError
from tests.cluster.desks import free_port, start_python

grpc = pytest.importorskip("grpc")

SECRET = secrets.token_hex(16)
ENVIRON = {"NDISTRIBUTE_SECRET": SECRET, "NDISTRIBUTE_HEARTBEAT_SECONDS": "4"}
KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes".split()
PS = """
import sys
from ndistribute.cluster.serving.server import Server
server = Server({"ps": [sys.argv[1]]}, "ps", 0)
print(server.target, flush=True)
server.join()
"""


def change(client, number, *changes):
    """Return a transaction of a client."""
    return Transaction(Origin(client.name, number), changes)


@pytest.fixture(scope="module", autouse=True)
def _grpc_is_up() -> Iterator[None]:
    """Let gRPC open, before any test counts them, the files that it keeps."""
    with contextlib.closing(grpc.insecure_channel("127.0.0.1:1")):
        with local_server() as server, reach(server) as client:
            client.request(ReadStep())
        yield


def local_server() -> Server:
    return Server.create_local_server(environ=ENVIRON)


def reach(server: Server, name: str = "worker:0", timeout: float = 20.0, **options) -> Client:
    return connect(server.address, name, timeout=timeout, environ=ENVIRON, **options)


@contextlib.contextmanager
def ps_process(address: str):
    process = start_python(PS, address, environ=ENVIRON)
    try:
        assert process.stdout.readline() == f"grpc://{address}\n"
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()


def test_a_local_server_holds_variables():
    with local_server() as server, reach(server) as client:
        assert server.target == f"grpc://{server.address}"
        value = np.arange(6.0).reshape(2, 3)
        created = client.request(Create("w", value))
        assert isinstance(created, Created)
        assert created.new
        assert isinstance(client.request(change(client, 1, Add("w", value))), Changed)
        read = client.request(Read("w"))
        assert isinstance(read, Value)
        np.testing.assert_array_equal(read.array, 2 * value)


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128", "bool"])
def test_a_large_variable_is_the_same_afterwards(dtype):
    value = (np.arange(3_000_000) % 7).astype(dtype)
    with local_server() as server, reach(server) as client:
        client.request(Create("w", value))
        np.testing.assert_array_equal(client.request(Read("w")).array, value)


def test_clients_meet_at_a_server():
    with (
        local_server() as server,
        reach(server) as one,
        reach(server) as two,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(one.request, Barrier(Origin(one.name, 1), "start", 2))
        token = pool.submit(two.request, Dequeue(Origin(two.name, 1), "tokens"))
        assert isinstance(two.request(Barrier(Origin(two.name, 2), "start", 2)), Released)
        assert isinstance(first.result(timeout=10), Released)
        one.request(change(one, 2, Enqueue("tokens", (7,))))
        assert token.result(timeout=10) == Token(7)


def test_a_wait_that_outlasts_a_hold_is_asked_for_again(monkeypatch):
    monkeypatch.setattr("ndistribute.cluster.wire.service.HOLD_SECONDS", 0.05)
    with local_server() as server, reach(server) as client, ThreadPoolExecutor(1) as pool:
        token = pool.submit(client.request, Dequeue(Origin(client.name, 1), "tokens"))
        with pytest.raises(CollectiveTimeoutError):
            client.request(Dequeue(Origin(client.name, 2), "others"), timeout=0.5)
        client.request(change(client, 3, Enqueue("tokens", (7, 8))))
        assert token.result(timeout=10) == Token(7)


class Lossy(GrpcTransport):
    """Lose the answers to the first few calls after the server has made them."""

    def __init__(self, address: str, losses: int) -> None:
        super().__init__(address)
        self.losses = losses

    def call(self, method, token, body, timeout):
        answer = super().call(method, token, body, timeout)
        if method == "Call" and self.losses:
            self.losses -= 1
            raise UnreachableError("lost on the way back.")
        return answer


def test_an_update_whose_answer_is_lost_is_made_once():
    with local_server() as server:
        lossy = Lossy(server.address, 0)
        with Client(lossy, SECRET.encode(), "lossy", timeout=10) as client:
            client.request(Create("w", np.zeros(3)))
            for number in range(1, 11):
                lossy.losses = number % 4
                reply = client.request(change(client, number, Add("w", np.ones(3))))
                assert isinstance(reply, Changed)
            lossy.losses = 2
            reply = client.request(change(client, 11, IncrementStep()))
            assert reply == Changed((Step(1),), 11)
            np.testing.assert_array_equal(client.request(Read("w")).array, np.full(3, 10.0))


def test_a_server_that_is_killed_and_started_again_is_found_again():
    address = f"127.0.0.1:{free_port()}"
    with (
        connect(address, "worker:0", audience="ps:0", timeout=30, environ=ENVIRON) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        early = pool.submit(client.request, ReadStep())  # Before the server is there.
        with ps_process(address) as process:
            assert early.result(timeout=20) == Step(0)
            client.request(change(client, 1, IncrementStep()))
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)
            with pytest.raises((WorkerLostError, CollectiveTimeoutError), match="ps:0"):
                client.request(ReadStep(), timeout=0.5)
            late = pool.submit(client.request, change(client, 2, IncrementStep()))
        with ps_process(address):
            # What was in memory alone is lost.
            assert late.result(timeout=20) == Changed((Step(1),), 1)


def test_join_returns_once_the_server_is_stopped():
    with local_server() as server:
        assert not server.join(timeout=0.05)
        waiting = threading.Thread(target=server.join)
        waiting.start()
        server.stop()
        waiting.join(timeout=5)
        assert not waiting.is_alive()
        server.stop()


def test_a_stopped_server_gives_its_port_back_at_once():
    address = f"127.0.0.1:{free_port()}"
    for _ in range(3):
        with Server({"ps": [address]}, environ=ENVIRON) as server, reach(server) as client:
            assert server.address == address
            client.request(ReadStep())


def test_a_port_in_use_is_named_and_nothing_is_left_behind():
    with local_server() as server:
        port = server.address.rpartition(":")[2]
        with pytest.raises(OSError, match=rf"port {port}.*Another program has this port"):
            Server({"ps": [f"127.0.0.1:{port}"]}, environ=ENVIRON)


def test_two_jobs_on_one_host_do_not_meet():
    other = {**ENVIRON, "NDISTRIBUTE_SECRET": secrets.token_hex(16)}
    with (
        Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON) as ours,
        Server({"ps": ["127.0.0.1:0"]}, environ=other) as theirs,
        reach(ours) as client,
        reach(theirs) as lost,
        connect(theirs.address, "worker:0", environ=other, timeout=20) as neighbour,
    ):
        client.request(Create("w", np.zeros(2)))
        with pytest.raises(AuthenticationError, match="another secret"):
            lost.request(Create("w", np.zeros(3)))
        assert neighbour.request(Create("w", np.ones(3))).new
        assert client.request(Read("w")).array.shape == (2,)


def test_a_server_of_another_task_is_told_apart():
    with (
        Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON) as server,
        reach(server, audience="ps:1") as client,
        pytest.raises(AuthenticationError, match=r"'ps:1'.*'ps:0'"),
    ):
        client.request(ReadStep())


def test_a_worker_says_that_it_holds_nothing():
    cluster = ClusterSpec({"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:0"]})
    with Server(cluster, "worker", 0, environ=ENVIRON) as server, reach(server) as client:
        reply = client.request(Read("w"))
        assert isinstance(reply, Failure)
        assert "worker:0 holds no variables" in reply.message


@pytest.mark.parametrize(
    ("job", "index", "message"),
    [(None, 0, "job_name"), ("ps", None, "task_index"), ("ps", 2, "No task"), ("x", 0, "No such")],
)
def test_a_task_must_be_one_of_the_cluster(job, index, message):
    cluster = {"ps": ["localhost:0", "localhost:0"], "worker": ["localhost:0"]}
    with pytest.raises(ValueError, match=message):
        Server(cluster, job, index, start=False, environ=ENVIRON)


def test_beyond_this_host_a_secret_is_needed():
    with pytest.raises(AuthenticationError, match="NDISTRIBUTE_SECRET"):
        Server({"ps": ["localhost:0"], "worker": ["node1:2222"]}, "ps", 0, environ={})


def test_a_server_listens_at_its_own_address_alone():
    with Server({"ps": ["127.0.0.1:0"]}, environ=ENVIRON) as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_socket_that_a_launcher_left_open_makes_way():
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    environ = {**ENVIRON, "NDISTRIBUTE_LISTEN_FD": str(listener.detach())}
    with Server({"ps": [address]}, environ=environ) as server, reach(server) as client:
        assert client.request(ReadStep()) == Step(0)


def test_many_starts_and_stops_leave_no_thread_and_no_file():
    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    threads, files = held()
    for _ in range(10):
        with local_server() as server, reach(server) as client:
            client.request(ReadStep())
    deadline = time.monotonic() + 5
    while held() != (threads, files) and time.monotonic() < deadline:
        threading.Event().wait(timeout=0.01)
    assert held()[0] <= threads
    assert held()[1] <= files


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> list[dict[str, str]]:
    """Environments with certificates of two authorities that know nothing of each other."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program, which makes the certificates, is not here")
    return [_authority(tmp_path_factory.mktemp(name)) for name in ("ours", "theirs")]


def _authority(folder) -> dict[str, str]:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=30)

    openssl("req", "-x509", *KEY, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    openssl("req", *KEY, "-keyout", "key.pem", "-out", "request", "-subj", "/CN=worker")
    openssl(*"x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem".split())
    files = {"CERT": "cert.pem", "KEY": "key.pem", "CA": "ca.pem"}
    return {
        **ENVIRON,
        **{f"NDISTRIBUTE_TLS_{name}": str(folder / file) for name, file in files.items()},
    }


def tls_outcome(server_environ, client_environ):
    with (
        Server({"ps": ["localhost:0"]}, environ=server_environ) as server,
        connect(server.address, "worker:0", environ=client_environ, timeout=2) as client,
    ):
        client.request(Create("w", np.zeros(1_000_000)))
        return client.request(Read("w")).array.shape


def test_with_certificates_of_one_authority_both_speak_tls(authorities):
    assert tls_outcome(authorities[0], authorities[0]) == (1_000_000,)


@pytest.mark.parametrize(("server", "client"), [(0, 1), (0, None), (None, 0)])
def test_a_certificate_of_another_authority_or_none_is_refused(authorities, server, client):
    environs = [ENVIRON if who is None else authorities[who] for who in (server, client)]
    with pytest.raises((AuthenticationError, WorkerLostError), match="TLS"):
        tls_outcome(*environs)


def test_a_certificate_does_not_replace_the_secret(authorities):
    other = {**authorities[0], "NDISTRIBUTE_SECRET": secrets.token_hex(16)}
    with pytest.raises(AuthenticationError, match="another secret"):
        tls_outcome(authorities[0], other)


def test_the_same_requests_are_answered_without_sockets():
    with LocalServer() as server, server.connect("one") as one, server.connect("two") as two:
        one.request(Create("w", np.zeros(1_000_000)))
        one.request(Transaction(Origin("one", 1), (Add("w", np.ones(1_000_000)),)))
        two.request(Transaction(Origin("two", 1), (Add("w", np.ones(1_000_000)),)))
        np.testing.assert_array_equal(two.request(Read("w")).array, np.full(1_000_000, 2.0))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(one.request, Dequeue(Origin("one", 2), "q"))
            two.request(Transaction(Origin("two", 2), (Enqueue("q", (3,)),)))
            assert waiting.result(timeout=10) == Token(3)
    with connect_local() as alone:
        assert alone.request(ReadStep()) == Step(0)


def test_the_cluster_of_an_environment_serves_as_it_is():
    config = json.loads('{"cluster": {"ps": {"3": "127.0.0.1:0"}}}')
    cluster = {"ps": {int(k): v for k, v in config["cluster"]["ps"].items()}}
    with Server(cluster, "ps", environ=ENVIRON) as server:
        assert server.name == "ps:3"
