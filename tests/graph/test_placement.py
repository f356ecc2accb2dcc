"""Where operations of graphs are placed, as scopes, functions and strategies say it."""

from collections.abc import Iterator

import numpy as np
import pytest

from ndistribute import errors
from ndistribute import graph as g


@pytest.fixture(autouse=True)
def graph() -> Iterator[g.Graph]:
    with g.Graph().as_default() as graph:
        yield graph


def test_inner_scopes_count_more_and_none_forgets_the_outer_ones() -> None:
    with g.device("/job:ps/task:0/cpu:0"):
        with g.device("/task:1"):
            assert g.constant(1.0).device == "/job:ps/task:1/device:CPU:0"
            with g.device(None), g.device("gpu:1"):
                assert g.constant(1.0).device == "/device:GPU:1"
        assert g.constant(1.0).device == "/job:ps/task:0/device:CPU:0"
    assert g.constant(1.0).device == ""


def test_a_function_places_each_operation_and_outer_scopes_add_to_it() -> None:
    def place(op: g.Operation) -> str | None:
        return {"placeholder": "/task:2"}.get(op.type)

    with g.device("/job:worker/task:0"), g.device(place):
        assert g.placeholder(float).device == "/job:worker/task:2"
        assert g.constant(1.0).device == "/job:worker/task:0"


def test_a_task_that_does_not_exist_is_an_error_that_names_the_operation() -> None:
    with g.device("/job:ps/task:3"):
        x = g.constant(1.0, name="x")
    with (
        g.Session() as session,
        pytest.raises(errors.InvalidArgumentError, match="tasks are") as it,
    ):
        session.run(x)
    assert it.value.op == "x"


def test_all_of_a_variable_is_where_the_variable_is() -> None:
    with g.device(g.replica_device_setter(2, worker_device="/job:worker/task:3")):
        first = g.Variable(lambda: g.random_normal([2]) * 2.0, name="w")
        second = g.Variable(np.zeros(2))
        product = first * second
        found = g.gradients(product, [first, second])
    operations = first.graph.get_operations()
    assert {op.device for op in operations if op.name.startswith("w")} == {"/job:ps/task:0"}
    assert first.initial_value.name == "w/multiply:0"
    assert second.assign_add([1.0, 1.0]).device == "/job:ps/task:1"
    assert {product.device, *(one.device for one in found)} == {"/job:worker/task:3"}


def test_an_initial_value_that_was_made_before_stays_where_it_is() -> None:
    with g.device("/job:worker/task:1"):
        made = g.random_normal([2])
    with g.device("/job:ps/task:0"):
        variable = g.Variable(made)
    assert (made.device, variable.device) == ("/job:worker/task:1", "/job:ps/task:0")


SETTERS = {
    "a cluster": ({"cluster": {"ps": ["a:1", "b:1"], "worker": ["c:1"]}}, "", "/job:ps/task:0"),
    "no server": ({"cluster": {"worker": ["c:1"]}}, "", ""),
    "a job in the scope": ({"ps_tasks": 2}, "/job:other", "/job:other"),
    "a task in the scope": ({"ps_tasks": 2}, "/task:7", "/job:ps/task:7"),
    "a GPU in the scope": ({"ps_tasks": 2}, "/gpu:1", "/job:ps/task:0/device:GPU:1"),
    "unmerged": ({"ps_tasks": 2, "merge_devices": False}, "/gpu:1", "/device:GPU:1"),
    "other operations": ({"ps_tasks": 2, "ps_ops": ["constant"]}, "", "/job:worker"),
    "a strategy": ({"ps_tasks": 2, "ps_strategy": lambda op: 1}, "", "/job:ps/task:1"),
    "another device": (
        {"ps_tasks": 2, "ps_device": "/job:x/gpu:0"},
        "",
        "/job:x/task:0/device:GPU:0",
    ),
}


@pytest.mark.parametrize("case", SETTERS)
def test_variables_are_placed_by_the_setter_and_the_scopes_in_it(case: str) -> None:
    options, inner, expected = SETTERS[case]
    with g.device(g.replica_device_setter(**options)), g.device(inner):  # type: ignore[arg-type]
        assert g.Variable(0.0).device == expected


def test_greedy_balancing_counts_bytes_and_refuses_unknown_shapes() -> None:
    balanced = g.GreedyLoadBalancingStrategy(2, g.byte_size_load_fn)
    with g.device(g.replica_device_setter(2, ps_strategy=balanced)):
        sizes = [(4, np.float64), (6, np.float32), (1, np.float64), (3, np.float32)]
        tasks = [g.Variable(np.zeros(n, dtype)).device[-1] for n, dtype in sizes]
        assert tasks == ["0", "1", "1", "0"]
        with pytest.raises(ValueError, match=r"bytes of 'unknown' \(variable\) are not known"):
            g.Variable(g.placeholder(np.float32), name="unknown")
