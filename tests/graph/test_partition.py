"""Graphs that are cut by task: together, the parts compute what the whole computes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import ndistribute as nd
from ndistribute import graph as g
from ndistribute.graph.executor import Plan
from ndistribute.graph.partition import cut, pruned
from ndistribute.graph.step import Resources, Step
from tests.processes import free_addresses

TASKS = ["/job:a/task:0", "/job:a/task:1", "/job:b/task:0"]


@contextlib.contextmanager
def over_servers(graph: g.Graph, initialize: Any = None) -> Iterator[g.Session]:
    """Yield a session over a server for each task, in which variables are initialised."""
    spec = free_addresses({"a": 2, "b": 1})
    with contextlib.ExitStack() as stack:
        for task in [("b", 0), ("a", 1), ("a", 0)]:
            server = stack.enter_context(nd.Server(spec, *task))
        session = stack.enter_context(g.Session(server.target, graph))
        session.run([] if initialize is None else initialize)
        yield session


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_cut_graph_computes_what_the_whole_computes(data):
    draw = data.draw
    with g.Graph().as_default() as graph:
        x = g.placeholder(np.float64, [3])
        tensors, variables, steps = [x], [], []
        last: dict[Any, Any] = {}  # By variable: its last update.
        for k in range(draw(st.integers(3, 14))):
            left, right = (draw(st.sampled_from(tensors)) for _ in range(2))
            after = draw(st.lists(st.sampled_from(steps), max_size=2)) if steps else []
            kind = draw(st.sampled_from(["variable", "update", "add", "tanh", "cond", "constant"]))
            with graph.device(draw(st.sampled_from(TASKS))), graph.control_dependencies(after):
                if kind == "variable":
                    variables.append(g.Variable(np.arange(3.0) + k))
                    tensors.append(variables[-1].value())
                elif kind == "update" and variables:
                    # After all reads and earlier updates: otherwise each order is right.
                    changed = draw(st.sampled_from(variables))
                    with graph.control_dependencies([*tensors[1:], *last.get(changed, [])]):
                        steps.append(changed.assign_add(left).op)
                    last[changed] = [steps[-1]]
                elif kind == "cond":
                    tensors.append(g.cond(np.sum(left) < 0, lambda: left * 2, lambda: right + 1))  # noqa: B023
                elif kind == "constant":
                    tensors.append(g.identity(g.constant(np.full(3, k / 7))))
                else:
                    tensors.append(np.tanh(left) if kind == "tanh" else left + right)
        slopes = [one for one in g.gradients(tensors[-1], [x, *variables]) if one is not None]
        fetches = [*draw(st.lists(st.sampled_from([*tensors[1:], x * x]))), *slopes]
        after_all = g.group(*steps) if steps else g.group(tensors[-1])
        reads = []
        with graph.control_dependencies([after_all, *fetches]):
            reads = [one.read_value() for one in variables]
        initialize = g.global_variables_initializer()
    whole = Resources()
    feeds = {x: np.linspace(-1, 1, 3)}
    definitions = {op.name: op.definition for op in graph.get_operations()}
    Plan(pruned(definitions, [], [initialize.name], []), [], []).run(Step(whole), [])
    fetches = list(dict.fromkeys([*fetches, *reads]))
    names = [one.name for one in fetches]
    needed = pruned(definitions, names, [after_all.name], [x.name])
    expected = Plan(needed, [x.name], names).run(Step(whole), list(feeds.values()))
    with over_servers(graph, initialize) as session:
        found, _ = session.run([fetches, after_all], feeds)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_value_goes_once_to_each_task_that_uses_it() -> None:
    with g.Graph().as_default() as graph:
        with graph.device(TASKS[0]):
            x = g.identity(g.constant(2.0))
        uses = []
        for task in TASKS[1:]:
            with graph.device(task):
                uses += [x + 1.0, x * x]
        definitions = [op.definition for op in graph.get_operations()]
        tasks = {one.name: one.device for one in definitions}
        parts = cut(definitions, tasks, [one.name for one in uses], [])
    kinds = {task: [one.kind for one in part.operations] for task, part in parts.items()}
    assert [kinds[task].count("send") for task in TASKS] == [2, 0, 0]
    assert [kinds[task].count("recv") for task in TASKS] == [0, 1, 1]


def test_a_training_step_moves_gradients_and_nothing_else_for_its_updates() -> None:
    with g.Graph().as_default() as graph:
        with graph.device(TASKS[0]):
            variables = [g.Variable(np.zeros(2), name=f"w{k}") for k in range(3)]
        with graph.device(TASKS[1]):
            variables.append(g.Variable(np.zeros(2), name="w3"))
        with graph.device(TASKS[2]):
            pairs = [(g.constant(np.ones(2)), variable) for variable in variables]
            step = g.GradientDescentOptimizer(0.1).apply_gradients(pairs)
            after = g.group(step, name="after")
        definitions = {op.name: op.definition for op in graph.get_operations()}

    def sends(target: str) -> list[int]:
        needed = pruned(definitions, [], [target], [])
        parts = cut(needed, {one.name: one.device for one in needed}, [], [])
        return [[one.kind for one in parts[task].operations].count("send") for task in TASKS]

    assert sends(step.name) == [0, 0, 4]  # Its end is the end of the step.
    assert sends(after.name) == [1, 1, 4]  # Each task tells once that its updates are done.


def test_what_runs_after_a_fed_tensor_runs_on_any_task():
    with g.Graph().as_default() as graph:
        x = g.placeholder(np.float64)
        with graph.control_dependencies([x]), graph.device(TASKS[1]):
            y = g.constant(2.0) * 3.0
        with over_servers(graph) as session:
            assert session.run(y, {x: np.array(1.0)}) == 6.0


def test_updates_of_a_variable_keep_the_order_that_control_dependencies_give():
    with g.Graph().as_default() as graph:
        with graph.device(TASKS[0]):
            v = g.Variable(np.zeros(1))
        steps: list[Any] = []
        for k in range(6):
            with graph.device(TASKS[k % 3]), graph.control_dependencies(steps[-1:]):
                change = g.constant(np.full(1, k + 1.0)) * 1.0
                with graph.control_dependencies([*steps[-1:], change]):
                    steps.append([v.assign_add, v.assign][k % 2](change).op)
        with graph.device(TASKS[1]), graph.control_dependencies(steps[4:5]):
            seen = v.read_value() * 1.0
        with over_servers(graph, v.initializer) as session:
            assert [session.run(seen).tolist() for _ in range(5)] == [[9.0]] * 5
