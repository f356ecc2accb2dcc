"""Operations of graphs on GPUs: inputs are copied there, and variables and gradients are there."""

import shutil

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import errors, graph
from ndistribute.numpy_functions import register
from tests.gpu.placing import need, place_of
from tests.processes import free_addresses

PLACES, SPEC = [], free_addresses({"ps": 1})


def noted(array):
    """Return an array, and note where it is."""
    PLACES.append(place_of(array))
    return array * 2.0


register("test.noted", noted)


def noted_tensor(x):
    return graph.Graph.add(graph.get_default_graph(), "test.noted", [x]).outputs[0]


@pytest.fixture(autouse=True)
def session(cupy):
    need(cupy, 2)
    PLACES.clear()
    with graph.Graph().as_default(), graph.Session() as session:
        yield session


def test_an_operation_computes_on_its_device_or_on_that_of_its_inputs(session):
    x = graph.placeholder(np.float64, [3])
    with graph.device("/gpu:1"):
        there = noted_tensor(x)
    behind = noted_tensor(there)
    with graph.device("/cpu:0"):
        back = noted_tensor(behind)
    with graph.device("/gpu:0"):
        other = noted_tensor(there)
    found = session.run([back, behind, other], {x: [1.0, 2.0, 3.0]})
    assert sorted(PLACES) == ["cpu", "gpu:0", "gpu:1", "gpu:1"]
    for one, factor in zip(found, (8, 4, 4), strict=True):
        np.testing.assert_array_equal(one, np.array([1.0, 2.0, 3.0]) * factor)
        assert isinstance(one, np.ndarray)


@pytest.mark.parametrize("where", ["/gpu:1", ""])
def test_training_on_a_gpu_computes_what_the_cpu_computes(session, where):
    data = np.random.default_rng(0).standard_normal((8, 4))

    def program(variables_on, rest_on):
        with graph.device(variables_on):
            w = graph.Variable(np.full((4, 2), 0.5))
            noise = graph.random_normal([8, 2], dtype=np.float64, seed=3)
        with graph.device(rest_on):
            loss = np.mean(np.tanh(data @ w + noise) ** 2)
            step = graph.MomentumOptimizer(0.1, 0.9).minimize(loss)
        session.run(graph.global_variables_initializer())
        for _ in range(3):
            session.run(step)
        return session.run(w)

    expected = program("/cpu:0", "/cpu:0")
    np.testing.assert_allclose(program(where, "/gpu:1"), expected, rtol=1e-12)


def test_a_variable_on_a_gpu_is_there_after_a_restart_of_its_server(tmp_path):
    with graph.device("/gpu:1"):
        w = graph.Variable(np.full(3, 0.5))
        step = graph.MomentumOptimizer(0.1, 0.9).minimize(np.sum(w * w))
        change, noted_w = w.assign_add([1.0, 2.0, 3.0]), noted_tensor(w)
    initialize = graph.global_variables_initializer()

    def run(folder, steps, first=None):
        with (
            nd.Server(SPEC, "ps", 0, snapshot_directory=folder, durability="log") as server,
            graph.Session(server.target) as session,
        ):
            if first is not None:
                session.run(first)
            for _ in range(steps):
                session.run(step)
                session.run([change.op, noted_w])
            shutil.copytree(folder, f"{folder}-killed")
            return session.run(w)

    expected = run(tmp_path / "whole", 4, initialize)
    run(tmp_path / "part", 2, initialize)
    np.testing.assert_array_equal(run(tmp_path / "part-killed", 2), expected)
    assert set(PLACES) == {"gpu:1"}


def test_a_gpu_that_does_not_exist_is_an_error_that_lists_those_there_are(session):
    with graph.device("/gpu:7"):
        x = graph.constant(1.0) + 1.0
    with pytest.raises(
        errors.InvalidArgumentError, match=r"no GPU:7 .* gpu:0, gpu:1, cpu:0\. Check"
    ):
        session.run(x)
    with graph.Session(config=graph.ConfigProto(allow_soft_placement=True)) as soft:
        assert soft.run(x) == 2.0
