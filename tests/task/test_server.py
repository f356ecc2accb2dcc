"""`Server`: tasks of a cluster that listen, and what they conclude from who came and left."""

import contextlib
import secrets
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ndistribute.cluster.spec import ClusterSpec
from ndistribute.errors import AuthenticationError, WorkerLostError
from ndistribute.parameter_server import messages as m
from ndistribute.task.server import CUT_SECONDS, ExitPolicy, PlannedExit, Server
from ndistribute.transport.rpc import Client
from ndistribute.transport.secret import credentials_of
from tests.processes import Tasks

ENVIRON = {
    "NDISTRIBUTE_SECRET": secrets.token_hex(16),
    "NDISTRIBUTE_JOB_ID": "this one",
    "NDISTRIBUTE_HEARTBEAT_SECONDS": "2",
}
ANYWHERE = {"ps": ["127.0.0.1:0"]}
ONE_WORKER = {**ANYWHERE, "worker": ["127.0.0.1:1"]}


@contextlib.contextmanager
def reach(
    server: Server, name: str = "worker:0", environ=ENVIRON, audience: str = ""
) -> Iterator[Client]:
    """Yield a client that the server has seen."""
    with contextlib.closing(client_of(server.target, name, environ, audience)) as client:
        client.call(m.Status())
        yield client


def client_of(address: str, name="worker:0", environ=ENVIRON, audience: str = "") -> Client:
    return Client(
        address,
        credentials_of([address], environ),
        name=name,
        purpose="ps",
        replies=m.Reply,
        audience=audience,
        timeout=50.0,
    )


def serving(cluster: Any = None, **environ: str) -> Server:
    return Server(cluster or ANYWHERE, "ps", 0, environ={**ENVIRON, **environ})


def create(client: Client, value: Any) -> None:
    client.call(m.Create((m.NewVariable("w", value.shape, value.dtype.name, initial=value),)))


def read(client: Client) -> Any:
    return client.call(m.Read((m.Item("w"),))).arrays[0]


def add(client: Client, number: int) -> int:
    """Add one to ``w`` under a number, and return the total."""
    change = m.VariableUpdate("w", "assign_add", np.ones(3))
    order = m.Transaction(client.name, number, number, (change,))
    total: int = client.call(order).total
    return total


@contextlib.contextmanager
def joined(server: Server) -> Iterator[Future[bool]]:
    """Join a server in a thread, and yield what will hold what `join` gives."""
    with server, ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(server.join)
        finally:
            server.stop()


def test_join_returns_once_the_server_is_stopped():
    with serving() as server:
        assert not server.join(timeout=0.05)
        waiting = threading.Thread(target=server.join)
        waiting.start()
        server.stop()
        waiting.join(timeout=50)
        assert not waiting.is_alive()
        server.stop()


def test_a_server_that_can_not_listen_leaves_nothing_behind():
    with Server.create_local_server(environ=ENVIRON) as server, reach(server):
        server.start()
        with pytest.raises(OSError, match="Another program has this port"):
            serving({"ps": [server.target]})


def test_a_worker_without_a_chief_serves_nothing():
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:0"]}
    with (
        Server(cluster, "worker", 0, environ=ENVIRON) as server,
        pytest.raises(AuthenticationError, match="this process has no service for 'ps'"),
        reach(server),
    ):
        pass


@pytest.mark.parametrize(
    ("job", "index", "message"),
    [(None, 0, "job_name"), ("ps", None, "task_index"), ("ps", 2, "No task"), ("x", 0, "No such")],
)
def test_a_task_must_be_one_of_the_cluster(job, index, message):
    cluster = {"ps": ["localhost:0", "localhost:0"], "worker": ["localhost:0"]}
    with pytest.raises(ValueError, match=message):
        Server(cluster, job, index, start=False, environ=ENVIRON)


def test_seconds_that_are_none_are_refused():
    for name in ("SNAPSHOT", "RETURN", "START"):
        with pytest.raises(ValueError, match=rf"NDISTRIBUTE_{name}_SECONDS.*'soon'"):
            serving(**{f"NDISTRIBUTE_{name}_SECONDS": "soon"})


def test_when_the_chief_leaves_its_servers_end_well(monkeypatch):
    monkeypatch.setattr("ndistribute.task.server._GRACE_SECONDS", 0.1)
    server = serving({**ONE_WORKER, "chief": ["127.0.0.1:2"]})
    with joined(server) as outcome, reach(server, "worker:0"):
        with reach(server, "chief:0"):
            pass
        assert outcome.result(timeout=50) is True


def test_a_chief_that_connected_again_is_here_although_its_old_connection_ends_later():
    """A server that had been stopped saw both at once, and took the chief for dead."""
    with serving({**ONE_WORKER, "chief": ["127.0.0.1:2"]}) as server:
        old, new = Mock(), Mock()
        old.name = new.name = "chief:0#a"
        old.patience = new.patience = 0.0
        members = server._membership
        members.connected(old)
        members.connected(new)
        members.disconnected(old, died=True)
        assert members.policy.planned_exit() is None
        members.disconnected(new, died=True)
        assert members.policy.planned_exit().lost == "the chief died"


def test_a_worker_that_dies_is_waited_for_no_longer_than_said():
    server = serving(ONE_WORKER, NDISTRIBUTE_RETURN_SECONDS="0.2")
    with joined(server) as outcome, reach(server, "worker:0") as client:
        client.closing.set()  # It does not connect again.
        client._idle[0].abort("it is killed")
        with pytest.raises(WorkerLostError, match="worker:0 died and did not come back"):
            outcome.result(timeout=50)


def test_a_server_that_is_stopped_killed_and_ended_goes_on_from_its_snapshots(tmp_path):
    """SIGTERM writes what no snapshot holds yet, and is told from other ends by the status."""
    settings = {**ENVIRON, "NDISTRIBUTE_SNAPSHOT_DIR": str(tmp_path / "kept")}
    with (
        Tasks(workers=0, chief=False, **settings) as tasks,
        contextlib.closing(client_of(tasks.cluster["ps"][0], audience="ps:0")) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        tasks.start("ps", 0)
        create(client, np.zeros(3))
        assert [add(client, number) for number in (1, 2)] == [1, 2]
        assert client.call(m.Status("snapshot")).total == 2
        tasks.stop("ps", 0)
        stopped = pool.submit(add, client, 3)
        with pytest.raises(TimeoutError):
            stopped.result(timeout=0.3)
        tasks.send("ps", 0, signal.SIGCONT)
        assert stopped.result(timeout=50) == 3
        tasks.kill("ps", 0)
        late = pool.submit(client.call, m.Status())  # Asked while nobody is there.
        tasks.start("ps", 0)
        status = late.result(timeout=50)
        assert (status.total, status.began) == (2, 2)  # One of three transactions is lost.
        assert add(client, 4) == 3
        tasks.send("ps", 0, signal.SIGTERM)
        assert tasks.code("ps", 0) == 128 + signal.SIGTERM
        tasks.start("ps", 0)
        assert client.call(m.Status()).began == 3
        np.testing.assert_array_equal(read(client), np.full(3, 3.0))
        modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "kept").rglob("*")]
        assert set(modes) <= {0o600, 0o700}
        assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


LED = {"chief": ["a:1"], "worker": ["a:2", "a:3"], "ps": ["a:4"], "evaluator": ["a:5"]}
ALONE = {"worker": ["a:2", "a:3"], "ps": ["a:4"], "evaluator": ["a:5"]}
BOTH = ["+worker:0#a", "+worker:1#a"]


def policy_of(cluster) -> ExitPolicy:
    return ExitPolicy(ClusterSpec(cluster), started=0.0, start_seconds=100.0, return_seconds=60.0)


def after(policy: ExitPolicy, *events: str) -> PlannedExit | None:
    """Return the plan after events ``+client``, ``-client`` and ``!client``, one a second."""
    for now, event in enumerate(events, start=1):
        sign, client = event[0], event[1:]
        if sign == "+":
            policy.came(client)
        else:
            policy.left(client, died=sign == "!", now=float(now))
    return policy.planned_exit()


NOBODY = PlannedExit(100.0, "chief:0 did not come within 100 s of the start")


def died(now: float) -> PlannedExit:
    return PlannedExit(now + CUT_SECONDS, "the chief died")


@pytest.mark.parametrize(
    ("events", "planned"),
    [
        ([], NOBODY),
        (["+worker:0#a", "-worker:0#a"], NOBODY),
        (["+chief:0#a", "!worker:0#a"], None),
        (["+chief:0#a", "+worker:0#a", "-chief:0#a"], PlannedExit(5.0)),
        (["+chief:0#a", "-chief:0#a", "+chief:0#b"], None),
        (["+chief:0#a", "+chief:0#b", "-chief:0#a"], None),
        (["+chief:0#a", "!chief:0#a"], died(2.0)),
        (["!chief:0#a"], died(1.0)),
        (["+chief:0#a", "+chief:0#b", "!chief:0#a"], died(3.0)),
        (["+chief:0#a", "!chief:0#a", "+chief:0#b"], died(2.0)),
        (["+chief:0#a", "!chief:0#a", "+chief:0#a"], None),
        (["+chief:0#a", "!chief:0#a", "+chief:0#a", "-chief:0#a"], PlannedExit(6.0)),
    ],
)
def test_a_cluster_with_a_chief_lives_as_long_as_the_chief(events, planned):
    assert after(policy_of(LED), *events) == planned


@pytest.mark.parametrize(
    ("events", "planned"),
    [
        (["+evaluator:0#a", "!evaluator:0#a"], 100.0),
        ([*BOTH, "-worker:0#a"], None),
        ([*BOTH, "-worker:0#a", "-worker:1#a"], 6.0),
        (["+evaluator:0#a", "+worker:0#a", "-worker:0#a", "+worker:1#a", "-worker:1#a"], 7.0),
        ([*BOTH, "-worker:0#a", "-worker:1#a", "+worker:0#b"], None),
        # A death that is noticed after the return does not count.
        ([*BOTH, "-worker:1#a", "+worker:0#b", "-worker:0#b", "!worker:0#a"], 8.0),
    ],
)
def test_without_a_chief_every_worker_comes_and_leaves_first(events, planned):
    found = after(policy_of(ALONE), *events)
    assert (found and found.at) == planned
    if planned != 100.0 and found:
        assert not found.lost


def test_a_chief_that_is_out_of_reach_is_waited_for_as_long_as_it_tries_to_come_back():
    """Its servers took it for dead 3 s after the heartbeat, and ended."""
    policy = policy_of(LED)
    lost = "the chief was out of reach and did not come back"
    for client in "chief:0#a", "chief:0#b":
        policy.came(client, now=1.0)
        policy.left(client, died=True, now=2.0, patience=600.0)
        assert policy.planned_exit() == PlannedExit(602.0, lost)
    policy.came("chief:0#a", now=10.0)
    assert policy.planned_exit() == PlannedExit(
        25.0, lost
    )  # All its connections come back, or it died.
    policy.came("chief:0#b", now=11.0)
    assert policy.planned_exit() is None
    policy.left("chief:0#a", died=True, now=20.0)
    assert policy.planned_exit() == died(20.0)


def test_a_chief_that_runs_graphs_may_come_back_after_its_death():
    policy = policy_of(LED)
    for client in "chief:0#a", "chief:0#b":
        policy.came(client, may_restart=True)
        assert policy.planned_exit() is None
        policy.left(client, died=True, now=5.0)
        planned = policy.planned_exit()
        assert planned is not None
        assert planned.at == 65.0
        assert "chief:0 died and did not come back" in planned.lost
    policy.came("chief:0#c", may_restart=True)
    policy.left("chief:0#c", died=False, now=7.0)
    assert policy.planned_exit() == PlannedExit(9.0)


def test_a_worker_that_dies_is_waited_for_once_all_others_are_gone():
    policy = policy_of(ALONE)
    assert after(policy, *BOTH, "!worker:0#a") is None
    planned = after(policy, "-worker:1#a")
    assert planned is not None
    assert planned.at == 61.0
    assert "worker:0 died and did not come back within 60 s" in planned.lost
    assert after(policy, "+worker:0#b") is None
    assert after(policy, "-worker:0#b") == PlannedExit(3.0)


def test_a_worker_that_never_came_is_named_unless_an_earlier_life_may_have_seen_it():
    policy = policy_of(ALONE)
    planned = after(policy, "+worker:0#a", "-worker:0#a")
    assert planned is not None
    assert planned.at == 62.0
    assert "worker:1 never came" in planned.lost
    policy.resumed = True
    assert policy.planned_exit() == PlannedExit(62.0)


def test_a_worker_that_was_added_is_waited_for_like_the_others():
    policy = policy_of(ALONE)
    assert after(policy, *BOTH, "+worker:7#a", "-worker:0#a", "-worker:1#a") is None
    assert after(policy, "-worker:7#a") == PlannedExit(3.0)


def test_a_cluster_of_servers_alone_is_served_for_ever():
    assert after(policy_of({"ps": ["a:1"]}), "+worker:0#a", "-worker:0#a", "!chief:0#a") is None
