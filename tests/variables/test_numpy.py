"""NumPy takes a variable like the array that it holds, and never changes it."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import mirrored

OPERATORS = "add sub mul truediv floordiv mod pow lt le gt ge eq ne".split()
BITS = "and_ or_ xor lshift rshift".split()
IN_PLACE = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


@pytest.fixture(params=["on_write", "on_read"])
def v(request):
    with mirrored(2) as strategy, strategy.scope():
        yield nd.Variable(X, synchronization=request.param, aggregation="only_first_replica")


@pytest.fixture
def w():
    return nd.Variable(X)


def same(left, right):
    return type(left) is type(right) and np.array_equal(left, right)


def test_operators_on_both_sides(v):
    for function in (getattr(operator, name) for name in OPERATORS):
        for other in (2, 2.5, np.float32(2), X + 1, [[2.0], [3.0]], v):
            plain = X if other is v else other
            assert same(function(v, other), function(X, np.asarray(plain))), function
            assert same(function(other, v), function(np.asarray(plain), X)), function
    assert np.array_equal(v, X)


def test_operators_on_bits():
    bits = np.array([1, 2, 6])
    v = nd.Variable(bits)
    for function in (getattr(operator, name) for name in BITS):
        for other in (1, np.array([3, 1, 2])):
            assert same(function(v, other), function(bits, other)), function
            assert same(function(other, v), function(other, bits)), function
    assert same(~v, ~bits)


def test_products_and_unary_operators(w):
    assert same(w @ X.T, X @ X.T)
    assert same(X.T @ w, X.T @ X)
    assert same([1.0, 2.0] @ w, np.array([1.0, 2.0]) @ X)
    for function in (operator.neg, operator.pos, abs):
        assert same(function(w), function(X))
    for pair in ((w, 2), (7, w)):
        plain = [X if one is w else one for one in pair]
        assert all(map(same, divmod(*pair), divmod(*plain)))


@pytest.mark.parametrize(
    "function",
    [
        np.exp,
        np.mean,
        np.argmax,
        np.shape,
        np.copy,
        np.array,
        np.asarray,
        np.zeros_like,
        np.linalg.norm,
        lambda a: np.add(a, a),
        lambda a: np.multiply(2.0, a, dtype=np.float32),
        lambda a: np.add.reduce(a, axis=1),
        lambda a: np.add.outer(a, a),
        lambda a: np.maximum.accumulate(a, axis=1),
        lambda a: np.concatenate((a, X), axis=1),
        lambda a: np.array([a, a]),
        lambda a: np.where(a > 2, a, 0.0),
        lambda a: np.einsum("ij,kj->ik", a, a),
        lambda a: np.clip(a, a_min=2.0, a_max=None),
        lambda a: np.linalg.multi_dot([a, a.T, X]),
        lambda a: np.add(X, X, where=a > 2, out=np.zeros_like(X)),
        lambda a: np.select([a > 4, a > 2], [a, 0 * a], 9.0),
    ],
)
def test_functions(w, function):
    assert same(function(w), function(X))


def test_methods_and_attributes(w):
    for use in (
        lambda a: a.T,
        lambda a: a.mean(axis=0),
        lambda a: a.reshape(3, 2),
        lambda a: a.astype(np.float32),
        lambda a: a.max(axis=1, keepdims=True),
        lambda a: a.dot(X.T),
        lambda a: a.tolist(),
        lambda a: a.nbytes,
        lambda a: a.shape,
        lambda a: a.dtype.name,
        lambda a: a.clip(2, 3),
        lambda a: a.item(3),
    ):
        assert same(use(w), use(X))


def test_indexing(w):
    mask, pairs = X > 2, (np.array([0, 1]), np.array([2, 0]))
    for index in (0, -1, slice(1, None), (slice(None), 2), ..., None, [1, 0, 1], mask, pairs):
        assert same(w[index], X[index])


def test_a_variable_is_an_index():
    row, rows, mask = nd.Variable(1), nd.Variable([1, 0]), nd.Variable([True, False])
    for index in (row, rows, mask, (rows, row), (slice(None), row)):
        plain = tuple(
            part.numpy() if isinstance(part, nd.Variable) else part
            for part in (index if isinstance(index, tuple) else (index,))
        )
        assert np.array_equal(X[index], X[plain])
        assert np.array_equal(nd.Variable(X)[index], X[plain])
    assert [10, 20, 30][row] == 20
    assert list(range(row)) == [0]


def test_containers_and_keys(w):
    assert len(w) == 2
    assert [row.tolist() for row in w] == X.tolist()
    assert 5.0 in w
    assert 9.0 not in w
    other = nd.Variable(X)
    assert {w: "w", other: "other"}[w] == "w"
    assert len({w, other, w}) == 2


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_numbers(dtype):
    v = nd.Variable(np.array(1, dtype))
    assert (float(v), int(v), bool(v), complex(v)) == (1.0, 1, True, 1 + 0j)
    assert math.sqrt(v) == 1
    assert complex(nd.Variable(1 + 2j)) == 1 + 2j


def test_what_arrays_refuse_is_refused(w):
    for use in (float, int, operator.index, lambda a: f"{a:.2f}"):
        with pytest.raises(TypeError):
            use(w)
    with pytest.raises(ValueError, match="truth value"):
        bool(w)
    number = nd.Variable(1.5)
    for use in (len, iter, operator.index):
        with pytest.raises(TypeError):
            use(number)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = w.missing
    with pytest.raises(IndexError):
        w[7]


def test_text():
    assert f"{nd.Variable(2.5):.2f}" == "2.50"
    assert f"{nd.Variable(7):03d}" == "007"
    assert "2.5" in str(nd.Variable(2.5))
    assert "2.5" in f"{nd.Variable(2.5)}"


def test_small_dtypes_stay_small():
    v = nd.Variable(np.float32([1, 2]))
    for result in (v * 2, v + 1.5, 1 / v, np.exp(v), v.sum(), v @ v, v**2):
        assert result.dtype == np.float32


CHANGES = [
    *(lambda v, name=name: getattr(operator, f"i{name}")(v, 1) for name in IN_PLACE),
    lambda v: v.__setitem__(0, 9.0),
    lambda v: np.add(v, 1, v),
    lambda v: np.exp(X, out=(v,)),
    lambda v: np.divmod(X, 2, out=(v, None)),
    lambda v: np.add.reduce(np.stack([X, X]), out=v),
    lambda v: np.add.at(v, [0], 1.0),
    lambda v: np.sum(np.stack([X, X]), axis=0, out=v),
    lambda v: np.concatenate([X[:1], X[1:]], out=v),
    lambda v: np.cumsum(X, axis=0, out=v),
]


def test_what_would_change_a_variable_behind_its_copies_names_assign(v):
    for change in CHANGES:
        with pytest.raises(TypeError, match="assign"):
            change(v)
        assert np.array_equal(v, X)


def test_functions_that_change_their_argument_are_refused(v):
    for change in (
        lambda v: np.copyto(v, 1.0),
        lambda v: np.put(v, [0], 1.0),
        lambda v: np.fill_diagonal(v, 1.0),
        lambda v: v.fill(1.0),
        lambda v: v.sort(),
        lambda v: v.T.__setitem__(0, 1.0),
    ):
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
