"""Variables whose components live on GPUs, and central ones that replicas on GPUs fetch."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.devices import Device
from ndistribute.stream import working_on
from tests.gpu.placing import components, here, hosts, need, on, place_of, rank, replica

START = np.arange(12.0).reshape(4, 3)


def make(strategy, value=START, **policy):
    with strategy.scope():
        return nd.Variable(value, **policy)


def copies(variable):
    return hosts(variable.values)


def homes(strategy):
    """Return the memory space in which each replica's component belongs."""
    if isinstance(strategy, nd.ParameterServerStrategy):
        return ["cpu"]
    central = getattr(strategy, "parameter_device", None)
    return [device.memory_space for device in ([central] if central else strategy.devices)]


def test_every_component_is_where_it_belongs(strategy):
    for value in (START, components(strategy, lambda _: START).values[-1], lambda: START):
        variable = make(strategy, value)
        assert [place_of(array) for array in variable.values] == homes(strategy)
        for copy in [*copies(variable), variable.numpy()]:
            np.testing.assert_array_equal(copy, START)


def test_a_replica_reads_on_its_own_device(strategy):
    variable = make(strategy)

    def step():
        assert on(variable.value, replica().device)
        np.testing.assert_array_equal(variable.numpy(), START)
        assert float(variable[1, 2]) == 5.0
        return here(np.ones((4, 3))) * variable + variable @ here(np.ones((3, 1)))

    for total in hosts(strategy.run(step).values):
        np.testing.assert_array_equal(total, START + START.sum(1, keepdims=True))


@pytest.mark.parametrize(
    ("how", "aggregation"),
    [("assign", "mean"), ("assign_add", "only_first_replica"), ("assign_sub", "sum")],
)
def test_replicas_write_together(strategy, how, aggregation):
    size = strategy.num_replicas_in_sync
    variable = make(strategy, aggregation=aggregation)
    strategy.run(lambda: getattr(variable, how)(here(np.full((4, 3), rank() + 1.0))))
    if size == 1 or aggregation == "only_first_replica":
        written = 1.0
    else:
        written = sum(range(1, size + 1)) / (size if aggregation == "mean" else 1)
    expected = {"assign": START * 0, "assign_add": START, "assign_sub": START}[how]
    expected = expected + (-written if how == "assign_sub" else written)
    for copy in copies(variable):
        np.testing.assert_allclose(copy, expected, rtol=1e-15)
    for seen in hosts(strategy.run(lambda: variable.value).values):
        np.testing.assert_allclose(seen, expected, rtol=1e-15)


def test_writes_across_replicas_reach_every_copy(strategy):
    variable = make(strategy)
    last = components(strategy, lambda _: np.ones((4, 3))).values[-1]
    variable.assign(last).assign_add(START).assign_sub(last)
    for copy in copies(variable):
        np.testing.assert_array_equal(copy, START)
    for total in hosts(strategy.run(lambda: variable.value + 0.0).values):
        np.testing.assert_array_equal(total, START)


@pytest.mark.parametrize(
    ("how", "dtype", "inside"),
    [
        ("scatter_add", "int64", True),
        ("scatter_update", "float32", True),
        ("scatter_sub", "int32", False),
    ],
)
def test_rows_are_written_each_time_they_are_named(strategy, how, dtype, inside):
    variable = make(strategy, START.astype(dtype), aggregation="sum")
    size = strategy.num_replicas_in_sync if inside else 1
    indices, rows = np.array([2, 0, 2]), np.array([[1], [2], [3]]).repeat(3, 1).astype(dtype)
    expected = START.astype(dtype)
    if how == "scatter_update":
        expected[[0, 2]] = np.array([[2], [3]]) * size
    else:
        sign = 1 if how == "scatter_add" else -1
        np.add.at(expected, indices, rows * size * sign)
    if inside:
        strategy.run(lambda: getattr(variable, how)(here(indices), here(rows)))
    else:
        getattr(variable, how)(indices, components(strategy, lambda _: rows).values[-1])
    for copy in copies(variable):
        np.testing.assert_array_equal(copy, expected)


def test_each_replica_keeps_what_is_combined_on_read(strategy):
    size = strategy.num_replicas_in_sync
    variable = make(strategy, np.zeros(3), synchronization="on_read", aggregation="sum")

    def step():
        variable.assign_add(here(np.full(3, rank() + 1.0)))
        assert on(variable.value, replica().device)
        return variable.value

    for index, own in enumerate(hosts(strategy.run(step).values)):
        np.testing.assert_array_equal(own, np.full(3, index + 1.0))
    total = np.full(3, size * (size + 1) / 2)
    np.testing.assert_array_equal(variable.numpy(), total)
    variable.assign_add(components(strategy, lambda _: np.ones(3)).values[-1])
    np.testing.assert_array_equal(variable.numpy(), total + 1)
    variable.assign(components(strategy, lambda _: np.full(3, 12.0)).values[-1])
    np.testing.assert_allclose(variable.numpy(), 12.0)
    np.testing.assert_allclose(hosts([strategy.reduce("mean", variable)])[0], 12.0 / size)


def test_a_snapshot_stays_as_it_was(strategy):
    variable = make(strategy, aggregation="sum")
    across = variable.values

    def step():
        before = variable.value
        part = variable[1:]
        variable.assign_add(here(np.ones((4, 3))))
        return before, part, variable.value

    size = strategy.num_replicas_in_sync
    for before, part, after in map(hosts, strategy.local_results(strategy.run(step))):
        np.testing.assert_array_equal(before, START)
        np.testing.assert_array_equal(part, START[1:])
        np.testing.assert_array_equal(after, START + size)
    for snapshot in hosts(across):
        np.testing.assert_array_equal(snapshot, START)


def test_an_update_is_in_place_when_nobody_holds_a_read(strategy):
    if isinstance(strategy, nd.ParameterServerStrategy):
        pytest.skip("what a server updates comes from there anew")
    variable = make(strategy)

    def addresses():
        return [
            array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
            for array in variable.begin_update()
        ]

    before = addresses()
    variable.assign_add(START)
    assert addresses() == before
    held = variable.component()
    variable.assign_add(START)
    assert addresses() != before
    np.testing.assert_array_equal(hosts([held])[0], START * 2)


READS = {
    "value": lambda v: v.value,
    "read_value": lambda v: v.read_value(),
    "slice": lambda v: v[1:],
    "row": lambda v: v[0],
    "transposed": lambda v: v.T,
    "method": lambda v: v.reshape(-1),
    "function": lambda v: np.reshape(v, (2, 6)),
    "functions": lambda v: np.split(v, 2)[1],
    "iterated": lambda v: next(iter(v)),
}


@pytest.mark.parametrize("how", ["on_write", "on_read"])
def test_a_write_through_what_was_read_does_not_reach_the_variable(strategy, how):
    variable = make(strategy, synchronization=how, aggregation="only_first_replica")

    def spoil():
        for read in READS.values():
            # Refused on a CPU; a GPU has no arrays that are read-only.
            with contextlib.suppress(ValueError):
                read(variable)[...] = 9.0

    spoil()
    strategy.run(spoil)
    with contextlib.suppress(ValueError):
        variable.fill(9.0)
    with contextlib.suppress(ValueError):
        for part in (*variable.values, *strategy.local_results(variable)):
            part[...] = 9.0
    for copy in [*copies(variable), *hosts(strategy.run(lambda: variable + 0.0).values)]:
        np.testing.assert_array_equal(copy, START)


def test_a_variable_prints_and_converts(strategy):
    variable = make(strategy, 2.5)
    assert float(variable) == 2.5
    assert "2.5" in repr(variable)
    assert f"{variable:.2f}" == "2.50"
    assert int(make(strategy, 3)) == 3
    np.testing.assert_array_equal(np.asarray(make(strategy)), START)


def test_what_another_device_was_given_is_done_when_it_is_left(cupy):
    need(cupy, 2)
    with working_on(Device("gpu:1")):
        there = cupy.ones(3) + 1
    with cupy.cuda.Device(1), cupy.cuda.Stream(non_blocking=True):
        assert float((there * 2).sum()) == 12.0
