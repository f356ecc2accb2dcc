"""Graphs in one process: what NumPy code makes of tensors, and what sessions make of graphs."""

import builtins
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import errors
from ndistribute import graph as g
from ndistribute.autodiff import GradientTape
from ndistribute.graph import executor
from ndistribute.graph.optimizers import in_graph
from ndistribute.graph.step import Resources, Step
from ndistribute.numpy_functions import register
from tests.processes import HANG_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("session")


def test_numpy_code_on_tensors_computes_what_it_computes_on_arrays(session):
    data = np.random.default_rng(0).standard_normal((4, 3))

    def model(x: object) -> object:
        y = np.concatenate([np.tanh(x @ data.T), x[:, 1:]], axis=1)  # type: ignore[operator,index]
        left, right = np.split(np.where(y > 0, y, 0.1 * y), np.int64(2), axis=1)
        first, middle, rest = np.split(left, [1, 2], axis=1)
        left = np.concatenate([first, rest, middle], axis=1)
        return np.einsum("ij,ij->i", left, right) + np.add.reduce(y, axis=1) / y.mean(axis=1)

    x = g.placeholder(np.float64, [None, 3])
    np.testing.assert_array_equal(session.run(model(x), {x: data}), model(data))


def test_a_read_is_a_snapshot_and_updates_run_after_what_controls_them(session):
    v = g.Variable(1.0)
    with v.graph.control_dependencies([v.assign_add(1.0)]):
        after = v.read_value() * 10
    session.run(g.global_variables_initializer())
    before, later = session.run([v.value(), after])
    assert (before in (1.0, 2.0), later) == (True, 20.0)


@pytest.fixture(params=["here", "a server"])
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "here":
        yield ""
    else:
        with nd.Server.create_local_server() as server:
            yield server.target


def test_what_a_program_feeds_and_fetches_is_its_own(target):
    session = g.Session(target)
    fed = np.zeros(2)
    own = np.ones(2)
    v, c, product = g.Variable(own), g.constant(own), own * g.constant(1.0)
    own += 5
    np.testing.assert_array_equal(session.run([c, product]), np.ones((2, 2)))
    x = g.placeholder(np.float64, [2])
    session.run([v.initializer, v.assign(x).op], {x: fed})
    v.load(fed)
    for same in (x, np.reshape(x, [2, 1]), v.assign(x), v.assign_add(x)):
        result = session.run(same, {x: fed})
        assert not np.shares_memory(result, fed)
        result += 100
    np.testing.assert_array_equal(session.run(v), [0.0, 0.0])
    table, rows, at = g.Variable(np.ones((3, 2))), g.placeholder(np.int64, [None]), np.array([0, 2])
    session.run(table.initializer)
    slope = session.run(g.gradients(np.sum(table[rows]), table)[0], {rows: at})
    assert not np.shares_memory(slope.indices, at)
    fed += 5
    for tensor, expected in ((v.value(), 0.0), (c, 1.0)):
        session.run(tensor)[:] = 7.0
        np.testing.assert_array_equal(session.run(tensor), [expected, expected])
    session.close()


def test_random_numbers_repeat_with_the_seed_and_differ_from_run_to_run():
    x = g.random_normal([3], seed=5)
    with g.Session() as one, g.Session() as other:
        first, second = one.run(x), one.run(x)
        assert (first != second).all()
        np.testing.assert_array_equal(other.run(x), first)


def test_a_use_of_a_variable_reads_it_once(session):
    v, graph = g.Variable(1.0), session.graph
    with graph.control_dependencies([v.assign_add(1.0)]):
        before = graph.version
        total = np.add(v, v.value())
    added = [op.type for op in graph.get_operations()[before:]]
    assert added == ["read", "read", "numpy.add"]
    session.run(g.global_variables_initializer())
    assert session.run(total) == 4.0


def test_a_branch_or_a_body_changes_variables_only_when_it_is_run(session):
    v, p = g.Variable(0.0), g.placeholder(np.bool_)
    either = g.cond(p, lambda: v.assign_add(1.0), lambda: v.assign_add(10.0))
    thrice = g.while_loop(lambda i: i < 3, lambda i: i + 1 + 0 * v.assign_add(i * 100.0), [0.0])[0]
    session.run(g.global_variables_initializer())
    assert [session.run(either, {p: taken}) for taken in (True, False)] == [1.0, 11.0]
    assert (session.run(thrice), session.run(v)) == (3.0, 311.0)


def slow_chain(threads: int) -> Any:
    """Return the result of ten long operations, run by one thread or by several."""
    x = g.constant(1.0) if threads == 1 else g.py_function(lambda: 1.0, [])
    for _ in range(10):
        x = _slow(x)
    return x


made: list[float] = []
_slow = register("test.slow", lambda x: (made.append(x), time.sleep(0.03), x)[-1])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_of_many_operations_ends_after_its_timeout(threads):
    session = g.Session(config=g.ConfigProto(operation_timeout_in_ms=20))
    made.clear()
    with session, pytest.raises(errors.DeadlineExceededError, match="longer than its timeout"):
        session.run(slow_chain(threads))
    assert len(made) < 10


def test_an_interrupt_ends_the_threads_of_a_step(monkeypatch):
    going, marked = threading.Event(), threading.Event()
    waits = register("test.waits", lambda x: going.wait(HANG_SECONDS) and x)
    marks = register("test.marks", lambda x: marked.set() or x)  # type: ignore[func-returns-value]

    def interrupt(step: Step) -> None:
        raise KeyboardInterrupt

    # While a helper waits in the second, this thread has run the first and waits for it.
    fetches = [_slow(g.constant(1.0)), marks(waits(g.constant(1.0)))]
    definitions = [op.definition for op in fetches[0].graph.get_operations()]
    plan = executor.Plan(definitions, [], [one.name for one in fetches])
    plan._is_parallel = True
    for node in plan.nodes:
        node.seconds = 1.0
    monkeypatch.setattr(Step, "check_outside", interrupt)
    with pytest.raises(KeyboardInterrupt):
        plan.run(Step(Resources()), [])
    going.set()
    wait_until(lambda: "ndistribute graph" not in [one.name for one in threading.enumerate()])
    assert not marked.is_set()


def test_a_step_that_takes_too_long_does_not_wait_for_what_cannot_be_ended(monkeypatch):
    monkeypatch.setattr(executor, "_GIVE_UP_SECONDS", 0.0)
    going = threading.Event()
    endless = g.py_function(lambda: going.wait(HANG_SECONDS), [])
    session = g.Session(config=g.ConfigProto(operation_timeout_in_ms=10))
    with session, pytest.raises(errors.DeadlineExceededError):
        session.run(endless)
    assert not going.is_set()
    going.set()


# The code, and behind an arrow the error and a pattern of its message.
MISTAKES = r"""
run(g.placeholder(float) + 1)
-> InvalidArgumentError: has no value
run(g.Variable(1.0))
-> FailedPreconditionError: initializer
run(g.constant([1.0, 2.0]) @ g.constant([1.0]))
-> InvalidArgumentError: 'matmul' \(numpy.matmul\) failed: ValueError.*made in .*test_graph.py
1 if g.constant(1.0) else 2
-> TypeError: cond
float(g.constant(1.0))
-> TypeError: Session.run
np.add(g.constant(1.0), 1.0, out=np.zeros(1))
-> TypeError: read-only
np.cumsum(g.constant(1.0), 0, None, g.constant(1.0))
-> TypeError: cumsum with out=
np.nan_to_num(g.constant(1.0), False)
-> TypeError: with copy=False
np.median(g.constant([1.0]), overwrite_input=True)
-> TypeError: overwrite_input=True
np.save("x", g.constant(1.0))
-> TypeError: save cannot be an operation
g.Graph().add("identity", [g.constant(1.0)])
-> ValueError: another graph
g.DatasetIterator([])
-> ValueError: empty
g.device("/tpu:0")
-> ValueError: '/tpu:0': operations of graphs run only on CPUs and GPUs. To use TPUs
g.replica_device_setter(2, ps_strategy=3)
-> TypeError: ps_strategy is a function
g.Variable([1.0], name="w") + g.GradientDescentOptimizer(0.1).minimize(g.constant(1.0))
-> ValueError: the loss depends on none of \[w:0
g.AdagradOptimizer(0.1, initial_accumulator_value=0.0)
-> ValueError: initial_accumulator_value must be above 0, got 0
nd.optimizers.SGD(lambda step: 0.1).minimize(np.sum(g.Variable([1.0])))
-> ValueError: is a function of the step: pass global_step
in_graph(None)
-> TypeError: needs an optimizer that does not wrap another one
in_graph(nd.optimizers.LossScale(nd.optimizers.SGD(0.1)))
-> TypeError: needs an optimizer that does not wrap another one
"""
ROWS = re.findall(r"^(.+)\n-> (\w+): (.+)$", MISTAKES, re.MULTILINE)


@pytest.mark.parametrize(("code", "error", "message"), ROWS, ids=[code for code, _, _ in ROWS])
def test_mistakes_say_what_to_do(session, code, error, message):
    kind = vars(errors)[error] if error in vars(errors) else vars(builtins)[error]
    with pytest.raises(kind, match=message):
        eval(
            compile(code, __file__, "eval"), {**globals(), "run": session.run, "in_graph": in_graph}
        )


def test_groups_and_names(session):
    v, graph = g.Variable(np.zeros(2), name="v"), session.graph
    with graph.name_scope("train"):
        op = g.group(v.assign_add([1.0, 2.0]))
    session.run(g.global_variables_initializer())
    assert op.name == "train/group"
    assert session.run("train/group") is None
    np.testing.assert_array_equal(session.run("v/read:0"), [1.0, 2.0])
    assert g.as_tensor(v).graph is graph


def test_functions_and_tapes_of_control_flow_do_not_meet_those_around_it(session):
    x = g.placeholder(np.float64)
    one, two = (lambda k=k: g.py_function(lambda: k, []) for k in (1.0, 2.0))
    assert [session.run(g.cond(np.less(x, 0), one, two), {x: at}) for at in (-1, 1)] == [1.0, 2.0]
    y = x * x
    descent = g.while_loop(
        lambda i, w: i < 2, lambda i, w: [i + 1, w - 0.25 * g.gradients(w * w, w)[0]], [0, x]
    )
    assert session.run([g.gradients(y, x)[0], descent[1]], {x: 4.0}) == [8.0, 1.0]


def test_a_session_that_ends_leaves_variables_of_whatever_names():
    resources = Resources()
    resources.variables.assign("scope/w", np.zeros(1))
    names: list[Any] = ["scope/w", 5]
    for name in names:
        resources.get("aggregate", name, object)
    resources.get("generator", "random", object, session="scope")
    resources.forget("scope")
    assert [name for _, _, name in resources._kept] == names
    assert resources.variables.get("scope/w") is not None


def test_an_update_holds_the_locks_of_its_slots(session):
    w = g.Variable(np.zeros(3), name="w")
    update = g.MomentumOptimizer(0.1, 0.9).minimize(np.sum(w * w))
    session.run(g.global_variables_initializer())
    resources = session._runner._resources  # type: ignore[union-attr]
    slot = resources.variables.find("w/Momentum/momentum")
    done = threading.Thread(target=session.run, args=(update,), daemon=True)
    with slot.lock:
        done.start()
        done.join(0.2)
        assert done.is_alive()
    done.join(HANG_SECONDS)
    assert not done.is_alive()


def after(change: Any, result: Callable[[], Any]) -> Any:
    """Return what a function makes, all of which comes after a change."""
    with g.get_default_graph().control_dependencies([change]):
        return result()


def test_a_loop_that_would_read_an_old_value_in_each_round_is_refused(session):
    v = g.Variable(np.array(1.0), name="v")

    def doubled(i: Any) -> Any:
        return after(v.assign(v * 2.0), lambda: g.identity(i + 1))

    def in_branch(i: Any) -> Any:
        return g.cond(i < 9, lambda: doubled(i), lambda: i)

    def loop(body: Any) -> Any:
        return g.while_loop(lambda i: i < 4, body, [0.0])[0]

    programs = [
        lambda: loop(doubled),
        lambda: loop(in_branch),
        lambda: g.cond(np.array(True), lambda: loop(doubled), lambda: 0.0),
        lambda: g.while_loop(
            lambda i: v < 4, lambda i: after(v.assign_add(1.0), lambda: g.identity(i)), [0.0]
        ),
    ]
    for program in programs:
        with pytest.raises(ValueError, match=r"reads 'v' before changing it.*: make the"):
            program()
    before = v.read_value()
    again = loop(lambda i: after(v.assign(before * 2.0), lambda: i + 1))
    sums = loop(lambda i: after(v.assign_add(i), lambda: i + 1))
    session.run(g.global_variables_initializer())
    assert [session.run(again), session.run(v)] == [4.0, 2.0]
    assert [session.run(sums), session.run(v)] == [4.0, 8.0]


def test_a_branch_reads_what_a_branch_around_it_has_changed(session):
    v, rate = g.Variable(np.array(1.0)), g.constant(np.array(2.0))

    def branch(function: Any) -> Any:
        return g.cond(np.array(True), function, lambda: np.array(0.0))

    inner = branch(lambda: after(v.assign_add(1.0), lambda: branch(lambda: v * 1.0)))
    outer = branch(lambda: after(branch(lambda: v.assign_add(1.0)), lambda: v * 1.0))
    update = g.MomentumOptimizer(0.5, 0.0)
    updated = branch(lambda: after(update.apply_gradients([(rate, v)]), v.read_value))
    session.run(g.global_variables_initializer())
    assert [session.run(one) for one in (inner, outer, updated)] == [2.0, 3.0, 2.0]


def test_a_tape_in_a_py_function_leaves_the_record_of_the_branch_around_it(session):
    def slope_of_square(a: Any) -> Any:
        with GradientTape() as tape:
            a = tape.watch(np.asarray(a))
            square = a * a
        return tape.gradient(square, a)

    def branch() -> Any:
        square = x * x
        called = g.py_function(slope_of_square, [square])
        return after(called, lambda: square * square + called)

    x = g.constant(np.array(3.0))
    y = g.cond(np.array(True), branch, lambda: x)
    assert session.run([y, g.gradients(y, x)[0]]) == [99.0, 108.0]


def test_what_surrounds_a_branch_may_come_before_what_is_in_it(session):
    v = g.Variable(1.0, name="v")
    taken = g.placeholder(np.bool_, ())
    add = v.assign_add(1.0)
    graph = add.graph

    def changed() -> Any:
        return after(v.assign(5.0), lambda: v.read_value() + v)

    def count(i: Any, total: Any) -> Any:
        return after(v.assign_add(1.0), lambda: [i + 1, total + v])

    ordered = g.cond(taken, lambda: after(g.constant(1.0), lambda: v * v), lambda: v)
    slope = g.gradients(ordered, v)[0]
    waits = g.cond(taken, lambda: after(g.group(add), lambda: g.constant(1.0)), lambda: 0.0)
    reads = g.cond(taken, changed, lambda: g.constant(0.0))
    sums = g.while_loop(lambda i, _: np.less(i, 3), count, [np.int64(0), np.float32(0)])[1]
    session.run(g.global_variables_initializer())
    session.run(waits, {taken: True})
    assert session.run([v, slope], {taken: True}) == [2.0, 4.0]
    assert session.run(reads, {taken: True}) == 10.0
    assert session.run(sums) == 6.0 + 7.0 + 8.0
    with (
        g.Graph().as_default() as other,
        pytest.raises(ValueError, match="belongs to another graph"),
        other.control_dependencies([add]),
    ):
        pass
    assert graph.get_operations()  # It is as it was.


def test_what_a_run_returns_shares_no_memory(session):
    x, buffer = g.placeholder(np.float64, [None, 2]), np.zeros(2)

    def count() -> Any:
        buffer[:] += 1
        return buffer

    doubled, counted = 2 * x, g.py_function(count, [])
    fetches = [doubled, g.identity(doubled), np.reshape(doubled, -1), counted, g.identity(counted)]
    found = session.run(fetches, {x: [[1.0, 2.0]]})
    for value in found:
        before = [one.copy() for one in found]
        np.add(value, 10, out=value)
        for one, kept in zip(found, before, strict=True):
            assert one is value or np.array_equal(one, kept)
    assert session.run(counted).tolist() == buffer.tolist() == [2.0, 2.0]


def test_counts_are_arrays_and_groups_take_nests(session):
    x = g.placeholder(np.float32, [None, 3])
    rows = np.shape(x)[0].astype(np.float32)  # type: ignore[attr-defined]
    fetches = [rows, np.shape(x), np.size(x), np.size(x, 1), np.ndim(x)]
    found = session.run(fetches, {x: np.ones((2, 3))})
    assert [np.asarray(one).tolist() for one in found] == [2.0, [2, 3], 6, 3, 2]
    v = g.Variable(0.0, name="v")
    session.run(v.initializer)
    session.run(g.group((v.assign_add(1.0), [v.assign_add(2.0).op]), None))
    assert session.run(v) == 3.0


def test_a_session_that_closes_ends_its_steps(session):
    going = g.while_loop(lambda i: np.greater_equal(i, 0), lambda i: i * 1, [np.int64(1)])
    other = g.Session()
    with ThreadPoolExecutor() as threads:
        running = threads.submit(other.run, going)
        wait_until(lambda: other._runner._steps)  # type: ignore[union-attr]
        other.close()
        with pytest.raises(errors.CancelledError, match="closed"):
            running.result(HANG_SECONDS)
