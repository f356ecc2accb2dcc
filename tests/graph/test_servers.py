"""Sessions with a target: graphs over the servers of several tasks."""

import _thread
import contextlib
import gc
import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import errors
from ndistribute import graph as g
from ndistribute.graph import requests as m
from ndistribute.graph import service
from ndistribute.graph import session as session_module
from ndistribute.graph.definition import OperationDef, pack
from ndistribute.graph.executor import Plan
from ndistribute.numpy_functions import register
from tests.graph.conftest import PS, WORKER
from tests.processes import HANG_SECONDS, free_addresses, wait_until


@pytest.mark.parametrize("how", ["an interrupt", "closing the session"])
def test_what_ends_a_step_ends_it_on_tasks_that_wait_for_none_of_the_others(how):
    spec = free_addresses({"ps": 2, "worker": 1})
    with contextlib.ExitStack() as stack:
        tasks = [("ps", 0), ("ps", 1), ("worker", 0)]
        servers = [stack.enter_context(nd.Server(spec, *task)) for task in tasks]
        graph = stack.enter_context(g.Graph().as_default())
        ends = []
        for k in range(2):
            with graph.device(f"/job:ps/task:{k}"):
                ends += g.while_loop(lambda i: np.less(i, 1 << 40), lambda i: i + 1, [np.int64(0)])
        session = stack.enter_context(g.Session(servers[2].target))
        threads = stack.enter_context(ThreadPoolExecutor())

        def end() -> None:
            wait_until(lambda: all(one._services["graph"]._steps for one in servers[:2]))  # type: ignore[union-attr]
            (_thread.interrupt_main if how == "an interrupt" else session.close)()

        threads.submit(end)
        with pytest.raises((KeyboardInterrupt, errors.CancelledError)):
            session.run(g.group(*ends))
        wait_until(lambda: not any(one._services["graph"]._steps for one in servers))  # type: ignore[union-attr]
        if how == "an interrupt":
            assert session.run(ends[0].op.inputs[0]) == 0


def test_numbers_of_numpy_lengths_of_axes_and_text_are_sent(cluster, monkeypatch):
    monkeypatch.setattr(session_module, "service_at", lambda address: None)
    x = g.placeholder(np.float32, [None, 3, 4])
    with g.get_default_graph().device(PS):
        flat = np.reshape(x * np.float64(0.5), [-1, x.shape[1] * 4])
        drawn = g.random_uniform([x.shape[2]], maxval=np.float64(2.0))
        loop = g.while_loop(lambda i: True, lambda i: i + 1, [0], maximum_iterations=x.shape[1])
        text = g.constant(["to be", "or"])
    with g.Session(cluster["worker"].target) as session:
        found = session.run([flat, drawn, loop, text], {x: np.ones((2, 3, 4))})
    assert (found[0].shape, found[0].dtype, found[1].shape) == ((2, 12), np.float32, (4,))
    assert (found[2], found[3].tolist()) == ([3], ["to be", "or"])


def test_a_value_that_cannot_be_sent_fails_its_step_alone(cluster):
    with g.get_default_graph().device(PS):
        wide = g.constant([1.0]).astype(np.longdouble)
        mixed = np.concatenate([g.constant(["text"]), g.constant([b"bytes"])])
    with g.get_default_graph().device(WORKER):
        sent, own = wide.astype(np.float32), g.constant(2.0).astype(np.longdouble)
    with g.Session(cluster["worker"].target) as session:
        for fetched, op, task in [
            ([wide, g.constant(1.0) * 2], wide.op.name, PS),
            (sent, wide.op.name, PS),
            (own, own.op.name, WORKER),
            (mixed, mixed.op.name, PS),
        ]:
            with pytest.raises(errors.InvalidArgumentError, match="cannot be sent") as caught:
                session.run(fetched)
            assert (caught.value.op, caught.value.task) == (op, task)
        fed = {own: np.longdouble(1.0)}
        with pytest.raises(errors.InvalidArgumentError, match=f"value of {own.name!r} cannot be"):
            session.run(own, fed)
        assert session.run(g.constant(3.0)) == 3.0
    with g.Session() as session:
        assert session.run(own, fed) == 1.0


def test_a_body_that_changes_a_variable_must_run_on_its_task(cluster):
    graph = g.get_default_graph()
    with graph.device(PS):
        v = g.Variable(1.0)
        here = g.cond(v > 0, lambda: v.assign_add(1.0), lambda: v.assign_add(10.0))
    with graph.device(WORKER):
        elsewhere = g.cond(v > 0, lambda: v.assign_add(1.0), lambda: v.assign_add(10.0))
    with g.Session(cluster["worker"].target) as session:
        session.run(g.global_variables_initializer())
        assert session.run(here) == 2.0
        with pytest.raises(errors.InvalidArgumentError, match="variable on /job:ps/task:0: place"):
            session.run(elsewhere)


def test_a_server_that_is_stopped_ends_the_steps_of_its_own_process(cluster, monkeypatch):
    for pause in ("_LOOK_SECONDS", "_GIVE_UP_SECONDS"):
        monkeypatch.setattr(service, pause, 0.02)
    with g.get_default_graph().device(PS):
        zero = g.identity(g.constant(0.0))
        endless = g.while_loop(lambda x: np.equal(x, 0.0), lambda x: x * 1.0, [zero])
    with g.Session(cluster["worker"].target) as session, ThreadPoolExecutor(1) as threads:
        run = threads.submit(session.run, endless)
        wait_until(lambda: cluster["ps"]._services["graph"]._steps)
        cluster["worker"].stop()
        with pytest.raises(errors.UnavailableError, match="worker/task:0 was stopped"):
            run.result(HANG_SECONDS)


@pytest.mark.parametrize("master", ["ps", "worker"])
def test_a_step_ends_when_the_connection_breaks_on_which_it_gets_values(cluster, master):
    with g.get_default_graph().device(PS):
        zero = g.identity(g.constant(0.0))
        endless = g.while_loop(lambda x: np.equal(x, 0.0), lambda x: x * 1.0, [zero])[0]
    with g.get_default_graph().device(WORKER):
        waits = endless + 1.0
    sender, receiver = cluster["ps"]._services["graph"], cluster["worker"]._services["graph"]
    with g.Session(cluster[master].target) as session, ThreadPoolExecutor(1) as threads:
        sender.client(WORKER).send_one_way()  # Connects, if nobody has.
        run = threads.submit(session.run, waits)
        wait_until(lambda: sender._steps and receiver._steps)
        sender.client(WORKER)._one_way.abort("cut")
        with pytest.raises(errors.UnavailableError, match="connection from /job:ps/task:0 broke"):
            run.result(HANG_SECONDS)


@pytest.fixture
def silent() -> Iterator[str]:
    """Return an address where connections are taken and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_step_does_not_wait_long_for_a_stopped_task(silent, monkeypatch):
    monkeypatch.setattr(service, "_GIVE_UP_SECONDS", 0.05)
    spec = {"ps": [silent], "worker": free_addresses({"worker": 1})["worker"]}
    config = g.ConfigProto(operation_timeout_in_ms=50)
    with (
        nd.Server(spec, "worker", 0) as server,
        g.Graph().as_default() as graph,
        g.Session(server.target, config=config) as session,
        graph.device(PS),
        pytest.raises(errors.UnavailableError, match="/job:ps/task:0 at 127") as caught,
    ):
        session.run(g.constant(1.0))
    assert caught.value.task == PS


def test_a_stopped_server_connects_to_nobody(silent):
    pool = session_module._pool_to(silent)
    pool.close()
    client = pool.client(silent)
    for send in (client.send_one_way, client.start):
        with pytest.raises(errors.UnavailableError, match="has ended its connections"):
            send(m.ForgetParts("s"))


def test_a_step_does_not_wait_long_for_a_stopped_master(silent, monkeypatch):
    monkeypatch.setattr(session_module, "_CLOSE_SECONDS", 0.05)
    with g.Graph().as_default(), pytest.raises(errors.UnavailableError, match="cannot be reached"):
        g.Session(silent, config=g.ConfigProto(operation_timeout_in_ms=10)).run(g.constant(1.0))


def begun(cluster: Any, session: g.Session) -> service._MasterSession:
    """Return the master's side of a session, in which a step over two tasks has run."""
    with g.get_default_graph().device(PS):
        x = g.constant(1.0) * 2.0
    with g.get_default_graph().device(WORKER):
        session.run(x + 1.0)
    sessions: dict[str, service._MasterSession] = cluster["worker"]._services["graph"]._sessions
    return next(iter(sessions.values()))


def test_a_step_that_cannot_begin_leaves_no_values(cluster, monkeypatch):
    graphs = cluster["worker"]._services["graph"]

    def start(request: Any, *seconds: float) -> Any:
        graphs.rendezvous.deliver(request.step, {"x:0": np.ones(1)})  # By another task.
        raise errors.UnavailableError("gone", task=PS)

    with g.Session(cluster["worker"].target) as session:
        begun(cluster, session)
        monkeypatch.setattr(graphs.client(PS), "start", start)
        with pytest.raises(errors.UnavailableError, match="gone"):
            session.run("add:0")
        graphs.handle(None, 0, m.Deliver("nobody/1", {"x:0": pack(np.ones(1))}))
        assert not graphs.rendezvous._steps


def test_a_session_that_nobody_closed_leaves_nothing(cluster):
    begun(cluster, g.Session(cluster["worker"].target))
    gc.collect()
    with g.Session(cluster["worker"].target) as session:
        session.run("add:0")
        assert len(cluster["worker"]._services["graph"]._sessions) == 1
        wait_until(lambda: len(cluster["ps"]._services["graph"]._parts) == 1)


def test_a_closed_session_registers_no_more_parts(cluster):
    with g.Session(cluster["worker"].target) as session:
        master = begun(cluster, session)
    wait_until(lambda: not cluster["ps"]._services["graph"]._parts)
    request = m.RunStep(master.name, 0, (), ("add:0",), (), (), ())
    with pytest.raises(errors.CancelledError, match="closed"):
        master.run(None, request)  # type: ignore[arg-type]


def test_an_abort_meets_a_step_that_begins_at_the_same_time(cluster):
    graphs, runs = cluster["ps"]._services["graph"], []
    failure = m.Failure("CancelledError", "why", None, WORKER)
    plan = Plan([OperationDef("x", "recv", attributes={"key": "k"})], (), ("x:0",))

    class Steps(dict[str, Any]):
        def get(self, number: str, default: Any = None) -> Any:
            found = super().get(number, default)
            args = plan, number, [], lambda step: None, math.inf
            runs.append(threads.submit(graphs.run_plan, *args))
            with contextlib.suppress(TimeoutError):
                runs[0].result(0.05)  # By then it has begun, or waits for the abort.
            return found

    graphs._steps = Steps()
    with ThreadPoolExecutor(1) as threads:
        graphs.handle(None, 0, m.Abort("s/1", failure))
        with pytest.raises(errors.CancelledError, match="why"):
            runs[0].result(HANG_SECONDS)


def test_a_variable_keeps_its_dtype_and_shape_for_all_clients(cluster, tmp_path):
    target = cluster["worker"].target

    def client(value: Any) -> tuple[g.Session, g.Variable]:
        with g.Graph().as_default() as graph:
            variable = g.Variable(value, name="v")
            return g.Session(target, graph), variable

    first, v = client(np.ones(1000))
    others = [client(np.zeros((7, 7), np.float32)), client(np.zeros(1000, np.float32))]
    same, w = client(np.full(1000, 2.0))
    with first, same:
        first.run(v.initializer)
        for session, other in others:
            with session.graph.as_default(), session:
                saver = g.Saver([other])
                with g.Session(graph=session.graph) as here:
                    here.run(other.initializer)
                    path = saver.save(here, tmp_path / "v")
                for change, *args in (
                    (session.run, other.initializer),
                    (saver.restore, session, path),
                ):
                    with pytest.raises(errors.InvalidArgumentError) as caught:
                        change(*args)
                    assert "'v' is float64 of shape (1000,)" in str(caught.value)
                    assert f"float32 of shape {other.shape}" in str(caught.value)
        np.testing.assert_array_equal(first.run(v), np.ones(1000))
        same.run(w.initializer)
        assert first.run(v)[0] == 2.0
        g.Session.reset(target)
    session, other = client(np.zeros((7, 7), np.float32))
    with session:
        session.run(other.initializer)
        assert session.run(other).shape == (7, 7)


def test_long_operations_of_a_task_that_gets_values_run_at_the_same_time(cluster):
    graph = g.get_default_graph()
    with graph.device(PS):
        x = g.constant(np.eye(200)) * 2.0
    with graph.device(WORKER):
        both = [graph.add("test.long", [x]).outputs[0] for _ in range(2)]
    step = [one.op for one in both]
    with g.Session(cluster["worker"].target) as session:
        session.run(step)  # Now their durations are known.
        _together.set()
        session.run(step)


_together = threading.Event()
_meeting = threading.Barrier(2)


def _long(x: Any) -> Any:
    if _together.is_set():
        _meeting.wait(HANG_SECONDS)
    return np.linalg.inv(x)


register("test.long", _long)


def test_a_worker_serves_sessions_until_it_is_stopped(monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_START_SECONDS", "0.01")
    spec = free_addresses({"worker": 2})
    server = nd.Server(spec, "worker", 0)
    assert not server.join(timeout=0.1)
    with g.Graph().as_default(), g.Session(server.target) as session:
        assert session.run(g.constant(3.0)) == 3.0
    server.stop()
    assert server.join()


def test_a_step_that_begins_while_its_server_stops_says_so(cluster):
    with g.get_default_graph().device(PS):
        v = g.Variable(1.0, name="v")
    with g.Session(cluster["worker"].target) as session:
        session.run(v.initializer)
        assert session.run(v) == 1.0
        graphs = cluster["ps"]._services["graph"]
        graphs.end()  # As `stop` does before it ends the connections.
        with pytest.raises(errors.UnavailableError, match="/job:ps/task:0 was stopped"):
            session.run(v)
