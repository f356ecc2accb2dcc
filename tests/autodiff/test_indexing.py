"""Derivatives of indexing: dense for parts of arrays, rows for look-ups in a source."""

from __future__ import annotations

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape
from ndistribute.collective.indexed_slices import IndexedSlices
from tests.autodiff.standin import StandInVariable, check_gradients, dense

INDICES = [
    0,
    -1,
    np.int32(1),
    slice(1, 3),
    slice(None, None, -2),
    ...,
    None,
    (slice(None), 1),
    (..., slice(0, 2)),
    (1, None, slice(2)),
    (slice(0, 0),),
    [0, 2, 0],
    np.array([1, -1, 1]),
    np.array([[0, 1], [3, 3]]),
    np.array(2),
    np.array([], np.intp),
    [],
    np.array([True, False, True, False]),
    (np.array([0, 1, 0]), np.array([2, 2, 2])),
    (slice(None), np.array([0, 0, 1])),
    (np.array([[0], [1]]), np.array([0, 2, 0])),
    (np.array([0, 1, 1]), slice(1, 3)),
    (np.array([True, False, True, True]), 1),
    (np.array([True, False, True, True]), [0, 1, 1]),
    (np.array([True, False, True, False]), np.array([True, False, True])),
    np.arange(12).reshape(4, 3) % 2 == 0,
    True,
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_index(index):
    x = np.random.default_rng(0).normal(size=(4, 3))
    check_gradients(lambda x: x[index], x)
    check_gradients(lambda x: np.square(x)[index] * 2 + x[index], x)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("indices", [1, [0, 2, 2], np.array([[-1, 0], [1, 1]])], ids=str)
def test_take(indices, axis):
    x = np.random.default_rng(0).normal(size=(4, 3))
    check_gradients(lambda x: np.take(x, indices, axis=axis), x)
    check_gradients(lambda x: (x * x).take(indices, axis), x)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_take_along_axis(axis):
    x = np.random.default_rng(0).normal(size=(4, 3))
    order = np.argsort(x, axis=axis)
    check_gradients(lambda x: np.take_along_axis(x, order, axis), x)
    check_gradients(lambda x: np.take_along_axis(x, np.zeros((1, 1), int), axis), x)


def test_many_slices_of_one_array():
    x = np.random.default_rng(0).normal(size=(4, 3))
    check_gradients(lambda x: x[0] * x[1] + x[2] * x[0] + x[0, 0] + np.sum(x) + x[3], x)


def lookup(table, *look):
    """Return the gradient of the sum of what `look` makes of a variable."""
    variable = StandInVariable(table)
    with GradientTape() as tape:
        total = np.sum(sum(np.sum(one(variable)) for one in look))
    return tape.gradient(total, variable)


@pytest.mark.parametrize(
    "look",
    [
        lambda v: v[np.array([3, -1, 0])],
        lambda v: v[[3, -1, 0]],
        lambda v: np.take(v, [3, -1, 0], axis=0),
        lambda v: v.tracked_value().take(np.array([3, -1, 0]), 0),
    ],
)
def test_rows_of_a_variable_stay_rows(look):
    table = np.ones((5, 2), np.float32)
    rows = lookup(table, look)
    assert isinstance(rows, IndexedSlices)
    assert rows.indices.tolist() == [3, 4, 0]
    assert rows.values.tolist() == [[1, 1]] * 3
    assert rows.dense_shape == (5, 2)
    assert rows.dtype == np.float32


def test_rows_of_a_watched_array_stay_rows():
    with GradientTape() as tape:
        table = tape.watch(np.zeros(4))
        picked = table[np.array([[1, 1], [2, 0]])] * np.array([[1.0, 2.0], [3.0, 4.0]])
    rows = tape.gradient(picked, table)
    assert isinstance(rows, IndexedSlices)
    assert rows.indices.tolist() == [1, 1, 2, 0]
    assert rows.to_dense().tolist() == [4, 3, 3, 0]


def test_several_look_ups_are_joined_in_reverse_order():
    rows = lookup(np.ones((5, 2)), lambda v: v[[0, 1]], lambda v: v[[[4], [0]]] * 2.0)
    assert isinstance(rows, IndexedSlices)
    assert rows.indices.tolist() == [4, 0, 0, 1]
    assert rows.to_dense().tolist() == [[3, 3], [1, 1], [0, 0], [0, 0], [2, 2]]


@pytest.mark.parametrize("dense_first", [True, False])
def test_rows_and_a_dense_use_become_dense(dense_first):
    uses = [lambda v: v * 3.0, lambda v: v[np.array([1, 1])]]
    gradient = lookup(np.ones((3, 2)), *(uses if dense_first else uses[::-1]))
    assert gradient.tolist() == [[3, 3], [5, 5], [3, 3]]


def test_rows_and_a_slice_become_dense():
    for uses in ([lambda v: v[[1, 1]], lambda v: v[:1]], [lambda v: v[:1], lambda v: v[[1, 1]]]):
        assert lookup(np.ones((3, 1)), *uses).tolist() == [[1], [2], [0]]


def test_rows_of_a_result_are_dense():
    gradient = lookup(np.ones((3, 2)), lambda v: (v * 2.0)[np.array([1, 1])])
    assert gradient.tolist() == [[0, 0], [4, 4], [0, 0]]


def test_rows_belong_to_the_caller():
    indices = np.array([0, 1])
    seed = np.ones((2, 2))
    variable = StandInVariable(np.ones((3, 2)))
    with GradientTape() as tape:
        picked = variable[indices]
    rows = tape.gradient(picked, variable, output_gradients=seed)
    assert not np.shares_memory(rows.indices, indices)
    assert not np.shares_memory(rows.values, seed)


def test_a_table_without_columns():
    rows = lookup(np.ones((3, 0)), lambda v: v[[1, 2]])
    assert dense(rows).shape == (3, 0)


def test_one_source_named_twice_gets_two_sets_of_rows():
    variable = StandInVariable(np.ones((3, 2)))
    with GradientTape() as tape:
        picked = variable[[1]]
    first, second = tape.gradient(picked, [variable, variable])
    assert not np.shares_memory(first.values, second.values)
