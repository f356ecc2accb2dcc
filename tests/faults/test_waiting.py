"""What a process that waits for others writes: who is missing, at which address, and why."""

import re
import socket
import threading
import time

import pytest

import ndistribute as nd
from ndistribute.transport import reach
from ndistribute.transport.connection import ConnectionLostError, connect
from ndistribute.transport.handshake import Hello
from tests.jobs.clusters import Scripts
from tests.processes import tf_config
from tests.transport.ends import CREDENTIALS, NOTES

FIRST = 0.1
IDENTITY = {"NDISTRIBUTE_JOB_ID": "waiting", "NDISTRIBUTE_START_SECONDS": "1"}
BODY = f"""
    import ndistribute as nd
    from ndistribute.transport import waiting
    waiting.FIRST_SECONDS = {FIRST}
    options = nd.CommunicationOptions(timeout_seconds=1)
    nd.MultiWorkerMirroredStrategy(communication_options=options)
"""
SERVERS = f"""
    import ndistribute as nd
    from ndistribute.transport import waiting
    waiting.FIRST_SECONDS = {FIRST}
    me = nd.TFConfigClusterResolver()
    if me.task_type == "chief":
        strategy = nd.ParameterServerStrategy(timeout_seconds=1)
        with strategy, nd.ClusterCoordinator(strategy, timeout_seconds=1) as coordinator:
            coordinator.schedule(lambda: None)
            coordinator.join()
    else:
        nd.Server(me.cluster_spec(), me.task_type, me.task_id).join()
"""


@pytest.fixture
def free():
    """Return an address where nothing listens, and nothing else will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def said(folder, addresses, rank):
    """Return what one worker of a cluster writes that nobody else joins."""
    environ = {"TF_CONFIG": tf_config({"worker": addresses}, "worker", rank)}
    with Scripts(folder, BODY, [environ]) as started:
        (ended,) = started.ended()
    assert ended.code == 1
    assert "CollectiveTimeoutError" in ended.output
    return ended.output


ABSENT = {
    "nothing": ["(nothing listens there: Connection ref"] * 2,
    "a name that nobody knows": ["(the host name 'no-such-host.invalid' was not f"] * 2,
    "another program": [
        "(a process listens there, but has not joined: it is st",
        "It may be stopped, it",
    ],
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ABSENT)
def test_a_worker_that_is_not_there_is_named_with_its_address_and_the_reason(
    tmp_path, free, rank, what
):
    address = "no-such-host.invalid:1234" if "name" in what else free
    with socket.socket() as mute:
        if what == "another program":
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            address = f"127.0.0.1:{mute.getsockname()[1]}"
        output = said(tmp_path, ["127.0.0.1:0", address][:: -1 if rank else 1], rank)
    assert f"worker {1 - rank} at {address} " in output, output
    assert ABSENT[what][rank] in output, output
    assert 1 <= output.count(f"worker {rank} has waited") <= 6  # At growing intervals.


def test_of_many_that_are_missing_the_first_ones_are_named(tmp_path):
    addresses = ["127.0.0.1:0", *(f"127.0.0.1:{port}" for port in range(1, 9))]
    output = said(tmp_path, addresses, 0)
    assert (
        "worker 3 at 127.0.0.1:3 (nothing listens there: Connection refused) and 5 more" in output
    )


def test_only_the_first_worker_reports_who_is_missing(tmp_path):
    ends = """
    import sys
    from ndistribute import TFConfigClusterResolver
    if TFConfigClusterResolver().task_id == 2:
        sys.exit()
    """
    body = ends + BODY.replace("timeout_seconds=1", "timeout_seconds=3")
    with Scripts(tmp_path, body, [{}] * 3) as started:
        first, second, _ = (ended.output for ended in started.ended())
    assert "worker 2 at 127.0.0.1:" in first.partition("Traceback")[0]
    assert "worker 2 at" not in second.partition("Traceback")[0]
    for output in (first, second):
        assert "for worker 2 at" in output.rpartition("CollectiveTimeoutError")[2]


def test_a_name_server_that_does_not_answer_holds_nobody(monkeypatch):
    over, answered = threading.Event(), []
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: answered.append(over.wait(60)) or []
    )
    try:
        told = reach.why_absent(["one.invalid:1", "two.invalid:1"])
        with pytest.raises(ConnectionLostError, match="the name server does not answer"):
            connect("one.invalid:1", CREDENTIALS, Hello(), NOTES, deadline=time.monotonic() + 0.5)
        assert not answered
    finally:
        over.set()
    assert all("does not answer" in why for why in told)


def task_said(folder, cluster, job):
    """Return what the only task of a job writes."""
    environ = {"TF_CONFIG": tf_config(cluster, job, 0), **IDENTITY}
    with Scripts(folder, SERVERS, [environ]) as started:
        (ended,) = started.ended()
    assert "WorkerLostError" in ended.output, ended.output
    return ended.output


def test_a_server_that_is_not_there_is_named(tmp_path, free):
    output = task_said(tmp_path, {"chief": ["127.0.0.1:0"], "ps": [free]}, "chief")
    assert f"chief:0 has waited 0 s for ps:0 at {free} (nothing listens there" in output


def test_a_worker_that_a_coordinator_misses_is_named(tmp_path, free):
    cluster = {"chief": ["127.0.0.1:0"], "ps": ["127.0.0.1:0"], "worker": [free]}
    environ = {"NDISTRIBUTE_SECRET": "the secret of this test", **IDENTITY}
    with nd.Server(cluster, "ps", 0, environ=environ) as server:
        output = task_said(tmp_path, {**cluster, "ps": [server.target]}, "chief")
    assert f"coordinator has waited 0 s for worker:0 ({free}: nothing listens there" in output


@pytest.mark.parametrize("who", ["ps", "worker"])
def test_who_serves_a_chief_that_does_not_come_says_so(tmp_path, who):
    cluster = {"chief": ["127.0.0.1:0"], "ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0"]}
    output = task_said(tmp_path, cluster, who)
    who_waits = re.escape(f"{who}:0 at {cluster[who][0]}")
    assert re.search(rf"{who_waits} has waited [01] s for a connection from chief:0\.", output)
