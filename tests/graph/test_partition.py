"""Graphs that are cut by task: together, the parts compute what the whole computes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute import graph as g
from ndistribute.graph.executor import Plan
from ndistribute.graph.partition import Part, cut, placed, pruned
from ndistribute.graph.step import Resources, Step

TASKS = ["/job:a/task:0", "/job:a/task:1", "/job:b/task:0"]


class Wires:
    """What the tasks of a step send to each other, and how often."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], Any] = {}
        self._waiting: dict[tuple[str, str], Callable[[Any], None]] = {}

    def send(self, task: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            with self._lock:
                self.sent.append((task, key))
                then = self._waiting.pop((task, key), None)
                self._values[task, key] = value
            if then is not None:
                then(value)

    def receive(self, task: str, key: str, then: Callable[[Any], None]) -> None:
        with self._lock:
            if (task, key) not in self._values:
                self._waiting[task, key] = then
                return
        then(self._values[task, key])


class End:
    """The wires as one task has them."""

    def __init__(self, wires: Wires, task: str) -> None:
        self.send, self._wires, self._task = wires.send, wires, task

    def receive(self, key: str, then: Callable[[Any], None]) -> None:
        self._wires.receive(self._task, key, then)

    def check(self, step: Step) -> None:
        """No task fails on its own."""


class Cluster:
    """Runs the parts of a graph, each with resources of its own."""

    def __init__(self, graph: g.Graph) -> None:
        self._graph = graph
        self._resources: dict[str, Resources] = defaultdict(Resources)

    def run(self, fetches: list[Any], targets: list[Any], feeds: dict[Any, Any]) -> list[Any]:
        """Run a step, and check that no value goes twice to a task."""
        names, fed = [one.name for one in fetches], [one.name for one in feeds]
        definitions = {op.name: op.definition for op in self._graph.get_operations()}
        needed = pruned(definitions, names, [one.name for one in targets], fed)
        tasks = placed(needed, lambda one: one.device or TASKS[0])
        parts = cut(needed, tasks, names, fed)
        wires, values = Wires(), dict(zip(fed, feeds.values(), strict=True))

        def work(task: str, part: Part) -> dict[str, Any]:
            step = Step(self._resources[task], outside=End(wires, task))
            plan = Plan(part.operations, part.feeds, part.fetches)
            results = plan.run(step, [values[name] for name in part.feeds])
            return dict(zip(part.fetches, results, strict=True))

        found: dict[str, Any] = {}
        with ThreadPoolExecutor(len(TASKS)) as threads:
            for run in [threads.submit(work, *item) for item in parts.items()]:
                found |= run.result(60.0)
        assert len(wires.sent) == len(set(wires.sent))
        return [found[name] for name in names]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_cut_graph_computes_what_the_whole_computes(data: st.DataObject) -> None:
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
    cluster = Cluster(graph)
    cluster.run([], [initialize], {})
    Plan(pruned(definitions, [], [initialize.name], []), [], []).run(Step(whole), [])
    fetches = list(dict.fromkeys([*fetches, *reads]))
    names = [one.name for one in fetches]
    needed = pruned(definitions, names, [after_all.name], [x.name])
    expected = Plan(needed, [x.name], names).run(Step(whole), list(feeds.values()))
    for ours, theirs in zip(cluster.run(fetches, [after_all], feeds), expected, strict=True):
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


def test_what_runs_after_a_fed_tensor_runs_on_any_task() -> None:
    with g.Graph().as_default() as graph:
        x = g.placeholder(np.float64)
        with graph.control_dependencies([x]), graph.device(TASKS[1]):
            y = g.constant(2.0) * 3.0
    assert Cluster(graph).run([y], [], {x: np.array(1.0)}) == [6.0]


def test_updates_of_a_variable_keep_the_order_that_control_dependencies_give() -> None:
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
        initialize = g.global_variables_initializer()
    cluster = Cluster(graph)
    cluster.run([], [initialize], {})
    for _ in range(5):
        np.testing.assert_array_equal(cluster.run([seen], [], {}), [[9.0]])
