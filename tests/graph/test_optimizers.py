"""Optimizers make the same steps in graphs and in strategies, under the names of both."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import errors
from ndistribute import graph as g
from ndistribute.graph import optimizers
from ndistribute.graph.kernels import _Collected
from ndistribute.optimizers import SGD, Adagrad, Adam, RMSprop
from ndistribute.optimizers.schedules import CosineDecay
from tests.optimizers.formulas import MAKERS
from tests.processes import wait_until

# What makes steps in a graph, and the optimizer of strategies that makes the same ones.
PAIRS: dict[str, Callable[[], tuple[Any, nd.optimizers.Optimizer]]] = {
    **{name: lambda make=make: (make(), make()) for name, make in MAKERS.items()},
    "clipped": lambda: (Adam(0.1, clipnorm=0.5), Adam(0.1, clipnorm=0.5)),
    "clipped together": lambda: (SGD(0.1, global_clipnorm=0.5), SGD(0.1, global_clipnorm=0.5)),
    "scheduled": lambda: (SGD(CosineDecay(0.1, 4)), SGD(CosineDecay(0.1, 4))),
    "GradientDescent": lambda: (optimizers.GradientDescentOptimizer(0.1), SGD(0.1)),
    "Momentum": lambda: (
        optimizers.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
        SGD(0.1, momentum=0.9, nesterov=True),
    ),
    "Adagrad": lambda: (optimizers.AdagradOptimizer(0.1), Adagrad(0.1, epsilon=0.0)),
    "RMSProp": lambda: (
        optimizers.RMSPropOptimizer(0.1, momentum=0.5, centered=True),
        RMSprop(0.1, momentum=0.5, centered=True, epsilon=1e-10),
    ),
    "Adam": lambda: (optimizers.AdamOptimizer(0.1), Adam(0.1, epsilon=1e-8)),
}
START = np.random.default_rng(0).standard_normal((5, 3))
ROWS = np.array([1, 3, 1])


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_steps_are_those_of_the_optimizers_of_strategies(session, kind, sparse):
    optimizer, like = PAIRS[kind]()

    def loss(w: Any) -> Any:
        part = w[ROWS] if sparse else w
        return np.sum(part * part * part)

    theirs = nd.Variable(START)
    ours = g.Variable(START)
    step = optimizer.minimize(loss(ours), g.get_or_create_global_step())
    session.run(g.global_variables_initializer())
    if kind == "RMSProp":  # Its mean begins at 1 in graphs.
        like.build([theirs])
        like.slots[theirs]["square"].assign(np.ones_like(START))
    for _ in range(3):
        session.run(step)
        with nd.GradientTape() as tape:
            value = loss(theirs)
        like.apply_gradients([(tape.gradient(value, theirs), theirs)])
    np.testing.assert_allclose(session.run(ours), theirs.numpy(), atol=1e-12)
    assert session.run(g.get_or_create_global_step()) == 3


def test_an_optimizer_of_strategies_makes_operations_of_a_graph_with_one_set_of_slots(session):
    w, count = g.Variable(np.array([1.0, -2.0]), name="w"), g.get_or_create_global_step()
    optimizer = SGD(1.0, momentum=0.5, name="own")
    steps: Any = [optimizer.minimize(np.sum(w * 2.0), global_step=count)]
    optimizer.learning_rate = 2.0
    steps += [optimizer.apply_gradients([(np.ones(2), w)], count, name="again")]
    slots = [v.name for v in g.global_variables() if "/" in v.name]
    assert (slots, steps[1].name) == (["w/own/momentum:0"], "again/assign_add")
    session.run(g.global_variables_initializer())
    for step in steps:
        session.run(step)
    assert session.run([w, count])[0].tolist() == [-4.0, -7.0]


def test_both_parts_of_a_complex_slot_begin_alike(session):
    w = g.Variable(np.ones(2, complex))
    step = optimizers.AdagradOptimizer(1.0, 9.0).apply_gradients([(np.array([4, 4j]), w)])
    session.run(g.global_variables_initializer())
    session.run(step)
    np.testing.assert_allclose(session.run(w), [1 - 0.8, 1 - 0.8j])


def test_slots_are_variables_beside_theirs_and_the_rate_may_be_a_tensor():
    graph = g.Graph()
    with graph.as_default(), g.Session() as session:
        rate = g.placeholder(np.float32, [])
        with graph.device("/job:localhost/task:0/device:CPU:0"):
            w = g.Variable([1.0], name="w")
        optimizer = optimizers.MomentumOptimizer(rate, 0.5)
        step = optimizer.minimize(np.sum(w * 2.0))
        slot = optimizer.get_slot(w, "momentum")
        assert slot is not None
        assert (slot.name, slot.device) == ("w/Momentum/momentum:0", w.device)
        assert optimizer.get_slot(w, "other") is None
        session.run(g.global_variables_initializer())
        session.run(step, {rate: 0.25})
        assert session.run([w, slot]) == [0.5, 2.0]


@pytest.mark.parametrize("kind", ["Momentum", "RMSProp", "Adam"])
def test_rows_that_were_not_read_stay_but_for_adam(session, kind):
    w, rows = g.Variable(np.ones((3, 2))), g.placeholder(np.int64, [None])
    step = PAIRS[kind]()[0].minimize(np.sum(w[rows] ** 2))
    session.run(g.global_variables_initializer())
    session.run(step, {rows: [0]})
    before = session.run(w)
    session.run(step, {rows: [1, 1]})
    moved = np.any(session.run(w) != before, axis=1).tolist()
    assert moved == [kind == "Adam", True, False]


def test_the_gradient_of_the_loss_may_be_given_and_a_rate_may_fall_again_and_again(session):
    w, step = g.Variable(np.float64(3.0)), g.placeholder(np.int64)
    descent = optimizers.GradientDescentOptimizer(1.0)
    train = descent.minimize(w * 2.0, grad_loss=np.float64(0.25))
    session.run(g.global_variables_initializer())
    session.run(train)
    assert session.run(w) == 2.5
    rate = optimizers.polynomial_decay(1.0, step, 10, 0.0, cycle=True)
    found = [float(session.run(rate, {step: k})) for k in (0, 5, 10, 15, 20)]
    assert found == [1.0, 0.5, 0.0, 0.25, 0.0]


def test_an_update_of_another_shape_or_before_the_initializer_says_what_to_do(session):
    other = g.Variable([1.0, 2.0], name="other")
    descent = optimizers.GradientDescentOptimizer(0.1)
    step = descent.apply_gradients([(g.constant([1.0]), other)])
    with pytest.raises(errors.FailedPreconditionError, match="'other' has no value"):
        session.run(step)
    session.run(g.global_variables_initializer())
    with pytest.raises(errors.InvalidArgumentError, match=r"'other' has shape \(2,\).* got \(1,"):
        session.run(step)


@pytest.fixture
def server() -> Iterator[nd.Server]:
    with nd.Server.create_local_server() as server:
        yield server


def program(needed: int, total: int | None = None, gradient: float = 1.0) -> tuple[Any, ...]:
    """Return a variable, the step count, and an optimizer of several workers with its operation."""
    w, count = g.Variable(np.float64(0.0), name="w"), g.get_or_create_global_step()
    optimizer = g.SyncReplicasOptimizer(optimizers.GradientDescentOptimizer(0.1), needed, total)
    return w, count, optimizer, optimizer.apply_gradients([(np.float64(gradient), w)], count)


def test_workers_make_each_step_together_by_the_mean_of_their_gradients(server):
    results = train_together(server.target, workers=2, needed=2, steps=3)
    # Each step subtracts 0.1 times the mean of 1 and 3.
    assert results == [(3, pytest.approx(-0.6)), (3, pytest.approx(-0.6))]


def test_fewer_workers_than_gradients_of_a_step_contribute_several_each(server):
    results = train_together(server.target, workers=2, needed=4, steps=6, total=2)
    # Three steps by the mean of 1, 1, 3 and 3.
    assert results == [(3, pytest.approx(-0.6)), (3, pytest.approx(-0.6))]
    with pytest.raises(ValueError, match="or a multiple of it"):
        g.SyncReplicasOptimizer(optimizers.GradientDescentOptimizer(0.1), 3, 2)


def test_a_backup_worker_is_not_waited_for_and_its_late_gradients_are_dropped(server):
    results = train_together(server.target, workers=1, needed=1, steps=3, total=2)
    late = train_together(server.target, workers=1, needed=1, steps=1, total=2, stale=True)
    assert results == [(3, pytest.approx(-0.3))]
    assert late == [(3, pytest.approx(-0.3))]


def test_workers_go_on_together_from_a_step_that_the_chief_restores(server):
    initialized, trained = threading.Event(), threading.Barrier(2)

    def work(is_chief: bool) -> tuple[int, float]:
        with g.Graph().as_default(), g.Session(server.target) as session:
            w, count, optimizer, step = program(2, gradient=2.0)
            if is_chief:
                session.run(g.global_variables_initializer())
                initialized.set()
            assert initialized.wait(30)
            for _ in range(3):
                session.run(step)
            trained.wait(30)
            if is_chief:
                wait_until(lambda: gradients_for(server))  # The other one waits in its fourth step.
                w.load(10.0, session)
                count.load(1, session)
                optimizer.make_session_run_hook(is_chief=True).after_create_session(session, None)
            while session.run(count) < 5:
                session.run(step)
            return int(session.run(count)), float(session.run(w))

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, [True, False]))
    assert results == [(5, pytest.approx(10.0 - 4 * 0.2))] * 2


def test_a_restarted_chief_without_its_hook_gets_an_error(server):
    for hook in (True, False, True):
        with g.Graph().as_default(), g.Session(server.target) as session:
            w, count, optimizer, step = program(1)
            session.run(g.global_variables_initializer())
            if hook:
                optimizer.make_session_run_hook(is_chief=True).after_create_session(session, None)
                for _ in range(2):
                    session.run(step)
                assert session.run([count, w]) == [2, pytest.approx(-0.2)]
            else:
                with pytest.raises(errors.AbortedError, match="make_session_run_hook"):
                    session.run(step)
                assert session.run([count, w]) == [0, 0.0]


def gradients_for(server: nd.Server) -> list[Any]:
    """Return the gradients of variable w that wait for others."""
    graphs: Any = server._services["graph"]
    kept: list[Any] = sorted(graphs.resources.get("aggregate", "w", _Collected).contributors)
    return kept


def test_a_late_worker_does_not_begin_a_step_after_the_last_one_of_the_others(server):
    train_together(server.target, workers=1, needed=1, steps=1, total=2)
    with g.Graph().as_default():
        w, count, _, step = program(1, 2)
        stop = g.StopAtStepHook(last_step=4)
        with g.MonitoredTrainingSession(server.target, is_chief=False, hooks=[stop]) as session:
            train_together(server.target, 1, 1, steps=4, total=2)
            assert not session.should_stop()
            session.run(step)
            assert session.should_stop()
        # As after a recovery, in the middle of the program's loop.
        with g.MonitoredTrainingSession(server.target, is_chief=False, hooks=[stop]) as session:
            assert session.should_stop()
            session.run(step)
            assert session.run([w, count]) == [pytest.approx(-0.3), 4]


def train_together(
    target: str, workers: int, needed: int, steps: int, total: int | None = None, **how: bool
) -> list[Any]:
    """Let threads with graphs of their own train one variable; return its steps and value."""

    def work(worker: int) -> tuple[int, float]:
        with g.Graph().as_default(), g.Session(target) as session:
            w, count, _, step = program(needed, total, 1.0 + 2 * worker)
            if not how and not worker:
                session.run(g.global_variables_initializer())
                started.set()
            assert how or started.wait(30)
            feeds = {count.value(): np.int64(0)} if how else {}
            for _ in range(steps):
                session.run(step, feeds)
            return int(session.run(count)), float(session.run(w))

    started = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(workers)))
