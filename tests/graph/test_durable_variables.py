"""Variables of graphs whose server keeps them on a disk, and is killed or stopped.

FAULTS_KILLS says how often a server is killed.
"""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import errors
from ndistribute import graph as g
from tests.graph.conftest import PS, reaches
from tests.processes import HANG_SECONDS, Tasks, free_addresses, wait_until

KILLS = int(os.environ.get("FAULTS_KILLS", "3"))
MARKS = 20000


class Updates:
    """Updates of a variable, each of one element, and which of them were acknowledged."""

    def __init__(self, target: str, graph: g.Graph, step: Any, number: Any) -> None:
        self._target, self._graph, self._step, self._number = target, graph, step, number
        self.acknowledged: list[int] = []
        self.begun = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        """Make updates, none twice, in a new session after each failure."""
        while not self.is_over.is_set():
            with g.Session(self._target, self._graph) as session:
                try:
                    while not self.is_over.is_set() and self.begun < MARKS:
                        self.begun += 1
                        session.run(self._step, {self._number: self.begun - 1})
                        self.acknowledged.append(self.begun - 1)
                except (errors.UnavailableError, errors.AbortedError):
                    self.is_over.wait(0.01)  # Until it is tried again.


def one_hot(number: Any) -> Any:
    return np.equal(np.arange(MARKS), number).astype(np.float32)


def kill_in_the_middle(tasks: Tasks, clients: list[Updates]) -> None:
    """Kill the server and start it again, each time in the middle of the clients' updates."""
    for kill in range(KILLS):
        wanted = [len(client.acknowledged) + 3 + kill % 5 for client in clients]
        wait_until(lambda wanted=wanted: all(map(has_made, clients, wanted)))
        tasks.kill("ps", 0)
        tasks.start("ps", 0)


def has_made(client: Updates, updates: int) -> bool:
    return len(client.acknowledged) >= updates


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tasks]:
    """Start a server that keeps each change, and one for a worker; use a new graph."""
    kept = {"NDISTRIBUTE_SNAPSHOT_DIR": str(tmp_path), "NDISTRIBUTE_SNAPSHOT_SECONDS": "0.3"}
    with Tasks(1, 1, chief=False, **kept, NDISTRIBUTE_DURABILITY="log") as tasks:
        monkeypatch.setenv("NDISTRIBUTE_SECRET", tasks.environ["NDISTRIBUTE_SECRET"])
        tasks.start_all()
        with g.Graph().as_default():
            yield tasks


@pytest.mark.slow
def test_a_server_that_is_killed_loses_no_acknowledged_update(tasks):
    with g.device(PS):
        number = g.placeholder(np.int64, [])
        added = g.Variable(np.zeros(MARKS, np.float32), name="added")
        descended = g.Variable(np.zeros(MARKS, np.float32), name="descended")
        steps = g.Variable(np.int64(0), trainable=False, name="steps")
        add = added.assign_add(one_hot(number)).op
    optimizer = g.MomentumOptimizer(-1.0, 0.0)
    descend = optimizer.apply_gradients([(one_hot(number), descended)], steps)
    initialize = g.global_variables_initializer()
    targets = {job: f"grpc://{tasks.cluster[job][0]}" for job in ("ps", "worker")}
    with g.Session(targets["worker"]) as session:
        wait_until(lambda: reaches(session, initialize))
    clients = [
        Updates(targets["ps"], number.graph, add, number),
        Updates(targets["worker"], number.graph, descend, number),
    ]
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(client.run) for client in clients]
        try:
            kill_in_the_middle(tasks, clients)
        finally:
            for client in clients:
                client.is_over.set()
        for run in runs:
            run.result(HANG_SECONDS)
    with g.Session(targets["ps"]) as session:
        wait_until(lambda: reaches(session, steps.value().op))
    with g.Session(targets["ps"]) as session:
        count = session.run(steps)
        for client, variable in zip(clients, (added, descended), strict=True):
            marks = session.run(variable)
            lost = [k for k in client.acknowledged if marks[k] != 1]
            if "FAULTS_KILLS" in os.environ:
                made = f"{len(client.acknowledged)} of {client.begun} updates"
                sys.stdout.write(f"{KILLS} kills, {made} acknowledged, {len(lost)} lost\n")
            assert not lost
            assert marks.max() == 1
            assert not marks[client.begun :].any()
        assert len(clients[1].acknowledged) <= count <= clients[1].begun


@pytest.mark.slow
def test_a_training_goes_on_with_the_variables_of_a_killed_server(tasks):
    with g.device(PS):
        w = g.Variable(np.random.default_rng().standard_normal(3), name="w")
        steps = g.get_or_create_global_step()
        count = g.AdamOptimizer(0.1).minimize(np.sum(w * w), steps)
    with g.MonitoredTrainingSession(f"grpc://{tasks.cluster['worker'][0]}") as session:
        for made in range(1, 13):
            session.run(count)
            reached = session.run(steps)
            assert reached >= made
            if made % 5 == 0:
                before = session.run(w)
                tasks.kill("ps", 0)
                tasks.start("ps", 0)
                np.testing.assert_array_equal(session.run(w), before)
                assert session.run(steps) == reached


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a server of variables, of which there is one at a time."""
    running: list[nd.Server] = []
    spec = free_addresses({"ps": 1})

    def start_server(folder: Any, durability: Any = "log") -> nd.Server:
        for server in running:
            server.stop()
        options = {"snapshot_directory": folder, "durability": durability}
        running[:] = [nd.Server(spec, "ps", 0, **options)]  # type: ignore[arg-type]
        return running[0]

    yield start_server
    for server in running:
        server.stop()


@pytest.mark.parametrize("durability", ["log", "snapshot"])
def test_every_kind_of_variable_is_there_after_a_restart(start, tmp_path, durability):
    folder, copied = tmp_path / "kept", tmp_path / "copied"
    server = start(folder, durability)
    with g.Graph().as_default():
        x = g.placeholder(np.float32)
        random = g.Variable(g.random_normal([3]), name="random")
        table = g.Variable(np.ones((4, 2), np.float32), name="table")
        any_shape = g.Variable(x * 2, name="any_shape")
        kept = [random, table, any_shape, g.Variable(np.int64(3), False, name="count")]
        kept += [g.Variable(["a", "ÄÖ"], False, name="text"), g.Variable(True, False, name="flag")]
        rows = table[np.array([1, 1, 3])]
        optimizer = g.AdamOptimizer(0.1)
        step = optimizer.minimize(np.sum(rows * rows) + np.sum(random**2))
        less = kept[3].assign_sub(1)
        never = g.Variable(1.0, name="never")
        kept += optimizer.variables()
        initialize = g.variables_initializer(kept)
        with g.Session(server.target) as session:
            session.run(initialize, {x: np.ones(2, np.float32)})
            session.run([step, less])
            session.run(any_shape.assign(x), {x: np.ones((2, 2), np.float32)})
            before = session.run(kept)
            if durability == "log":
                shutil.copytree(folder, copied)  # What a killed server would leave.
        server = start(copied if durability == "log" else folder, durability)
        with g.Session(server.target) as session:
            for variable, value, old in zip(kept, session.run(kept), before, strict=True):
                np.testing.assert_array_equal(value, old, variable.name)
                assert value.dtype == old.dtype
            names = session.run(g.report_uninitialized_variables())
            assert names.tolist() == [never.op.name]
            session.run(any_shape.assign(x), {x: np.ones(5, np.float32)})
            session.run([step, less])
            assert session.run(kept[3]) == 1
        with g.Graph().as_default(), g.Session(server.target) as session:
            other = g.Variable(np.zeros(3, np.float32), name="table")
            with pytest.raises(errors.InvalidArgumentError, match="keeps its dtype and shape"):
                session.run(other.initializer)


def test_a_reset_takes_the_variables_from_the_disk_too(start, tmp_path):
    server = start(tmp_path)
    with g.Graph().as_default():
        v = g.Variable(1.0, name="v")
        with g.Session(server.target) as session:
            session.run(v.initializer)
        g.Session.reset(server.target)
        server = start(tmp_path)
        with g.Session(server.target) as session:
            assert not session.run(v.is_initialized())


def test_a_change_that_fails_leaves_a_log_that_can_be_read(
    start: Callable[..., nd.Server], tmp_path: Path
) -> None:
    server = start(tmp_path / "kept")
    with g.Graph().as_default():
        v, w = g.Variable(1.0, name="v"), g.Variable([1.0, 2.0], name="w")
        failing = [
            v.assign_add(g.constant("text")),
            g.AdamOptimizer(0.1).apply_gradients([(g.constant([1.0]), w)]),
        ]
        whole = g.GradientDescentOptimizer(1.0).apply_gradients([(g.constant([1, 0]), w)])
        with g.Session(server.target) as session:
            session.run(g.global_variables_initializer())
            for operation in failing:
                with pytest.raises(errors.InvalidArgumentError):
                    session.run(operation)
            session.run(whole)
            shutil.copytree(tmp_path / "kept", tmp_path / "copied")
        with g.Session(start(tmp_path / "copied").target) as session:
            assert [float(session.run(v)), *session.run(w)] == [1.0, 0.0, 2.0]
