"""What would change a variable behind the back of its copies is refused."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import mirrored

OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()

X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


@pytest.fixture(params=["on_write", "on_read"])
def v(request):
    with mirrored(2) as strategy, strategy.scope():
        yield nd.Variable(X, synchronization=request.param, aggregation="only_first_replica")


@pytest.mark.parametrize("name", OPERATORS)
def test_in_place_operators_are_refused(v, name):
    with pytest.raises(TypeError, match="assign"):
        getattr(operator, f"i{name}")(v, 1)
    assert np.array_equal(v, X)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.__setitem__(0, 9.0),
        lambda v: v.__setitem__(..., 9.0),
        lambda v: np.add(X, X, out=v),
        lambda v: np.add(v, 1, v),
        lambda v: np.exp(X, out=(v,)),
        lambda v: np.divmod(X, 2, out=(v, None)),
        lambda v: np.add.reduce(np.stack([X, X]), out=v),
        lambda v: np.add.at(v, [0], 1.0),
        lambda v: np.sum(np.stack([X, X]), axis=0, out=v),
        lambda v: np.concatenate([X[:1], X[1:]], out=v),
        lambda v: np.clip(X, 0, 1, out=v),
        lambda v: np.matmul(X, np.eye(3), out=v),
        lambda v: np.cumsum(X, axis=0, out=v),
    ],
)
def test_a_variable_is_no_output(v, change):
    with pytest.raises(TypeError, match="assign"):
        change(v)
    assert np.array_equal(v, X)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: np.copyto(v, 1.0),
        lambda v: np.put(v, [0], 1.0),
        lambda v: np.fill_diagonal(v, 1.0),
        lambda v: v.fill(1.0),
        lambda v: v.sort(),
        lambda v: v.put([0], 1.0),
        lambda v: v.T.__setitem__(0, 1.0),
    ],
)
def test_functions_that_change_their_argument_are_refused(v, change):
    with pytest.raises((ValueError, TypeError)):
        change(v)
    assert np.array_equal(v, X)


def test_arrays_and_numbers_are_changed_by_variables():
    array, number = X.copy(), 1.0
    array += nd.Variable(X)
    array[0] = nd.Variable([7.0, 7.0, 7.0])
    number += nd.Variable(2.0)
    assert np.array_equal(array, [[7, 7, 7], [8, 10, 12]])
    assert number == 3
