"""NumPy takes a variable like the array that it holds, and never changes it."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import mirrored

ARITHMETIC = "add sub mul truediv floordiv mod pow".split()
BITS = "and_ or_ xor lshift rshift".split()
COMPARISONS = "lt le gt ge eq ne".split()

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


@pytest.mark.parametrize("name", ARITHMETIC + COMPARISONS)
def test_operators_on_both_sides(v, name):
    function = getattr(operator, name)
    for other in (2, 2.5, np.float32(2), X + 1, [[2.0], [3.0]], v):
        plain = X if other is v else other
        assert same(function(v, other), function(X, np.asarray(plain)))
        assert same(function(other, v), function(np.asarray(plain), X))
    assert np.array_equal(v, X)


@pytest.mark.parametrize("name", BITS)
def test_operators_on_bits(name):
    bits = np.array([1, 2, 6])
    v = nd.Variable(bits)
    function = getattr(operator, name)
    for other in (1, np.array([3, 1, 2])):
        assert same(function(v, other), function(bits, other))
        assert same(function(other, v), function(other, bits))
    assert same(~v, ~bits)


def test_products(w):
    assert same(w @ X.T, X @ X.T)
    assert same(X.T @ w, X.T @ X)
    assert same(w @ w.T, X @ X.T)
    assert same([1.0, 2.0] @ w, np.array([1.0, 2.0]) @ X)


@pytest.mark.parametrize("function", [operator.neg, operator.pos, abs])
def test_unary_operators(w, function):
    assert same(function(w), function(X))


def test_divmod(w):
    for pair in ((w, 2), (7, w)):
        quotient, remainder = divmod(*pair)
        plain = [X if one is w else one for one in pair]
        assert same(quotient, divmod(*plain)[0])
        assert same(remainder, divmod(*plain)[1])


@pytest.mark.parametrize(
    "function",
    [
        np.exp,
        np.sqrt,
        np.sum,
        np.mean,
        np.transpose,
        np.cumsum,
        np.argmax,
        np.ravel,
        np.isnan,
        np.shape,
        np.ndim,
        np.size,
        np.copy,
        np.array,
        np.asarray,
        np.linalg.norm,
        lambda a: np.maximum(a, 3.0),
        lambda a: np.add(a, a),
        lambda a: np.multiply(2.0, a, dtype=np.float32),
        lambda a: np.add.reduce(a, axis=1),
        lambda a: np.add.outer(a, a),
        lambda a: np.maximum.accumulate(a, axis=1),
        lambda a: np.concatenate([a, a]),
        lambda a: np.concatenate((a, X), axis=1),
        lambda a: np.stack([a, a], axis=-1),
        lambda a: np.vstack((X, a)),
        lambda a: np.where(a > 2, a, 0.0),
        lambda a: np.where(a, 1, 2),
        lambda a: np.einsum("ij,kj->ik", a, a),
        lambda a: np.tensordot(a, a, axes=2),
        lambda a: np.clip(a, a_min=2.0, a_max=None),
        lambda a: np.sum(a, axis=0, keepdims=True),
        lambda a: np.linalg.multi_dot([a, a.T, X]),
        lambda a: np.interp(a, [0, 10], [0, 1]),
        lambda a: np.add(X, X, where=a > 2, out=np.zeros_like(X)),
        np.zeros_like,
        lambda a: np.array([a, a]),
        lambda a: np.array_equal(a, X),
        lambda a: np.pad(a, 1),
        lambda a: np.take(a, [0, 2], axis=1),
        lambda a: np.select([a > 4, a > 2], [a, 0 * a], 9.0),
        lambda a: np.block([[a, a]]),
    ],
)
def test_functions(w, function):
    assert same(function(w), function(X))


@pytest.mark.parametrize(
    "use",
    [
        lambda a: a.T,
        lambda a: a.sum(),
        lambda a: a.mean(axis=0),
        lambda a: a.reshape(-1),
        lambda a: a.reshape(3, 2),
        lambda a: a.astype(np.float32),
        lambda a: a.max(axis=1, keepdims=True),
        lambda a: a.argmin(),
        lambda a: a.flatten(),
        lambda a: a.dot(X.T),
        lambda a: a.tolist(),
        lambda a: a.nbytes,
        lambda a: a.itemsize,
        lambda a: a.size,
        lambda a: a.ndim,
        lambda a: a.shape,
        lambda a: a.dtype.name,
        lambda a: a.copy(),
        lambda a: a.clip(2, 3),
        lambda a: a.squeeze(),
        lambda a: a.round(1),
        lambda a: a.item(3),
    ],
)
def test_methods_and_attributes(w, use):
    assert same(use(w), use(X))


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(1, None),
        (0, 1),
        (slice(None), 2),
        ...,
        None,
        [1, 0, 1],
        np.array([[0], [1]]),
        X > 2,
        (np.array([0, 1]), np.array([2, 0])),
    ],
)
def test_indexing(w, index):
    assert same(w[index], X[index])


def test_a_variable_is_an_index():
    row, rows, mask = nd.Variable(1), nd.Variable([1, 0]), nd.Variable([True, False])
    for index in (row, rows, mask, (row, 2), (rows, rows)):
        plain = tuple(np.asarray(i) for i in index) if isinstance(index, tuple) else index.numpy()
        assert np.array_equal(X[index], X[plain])
        assert np.array_equal(nd.Variable(X)[index], X[plain])
    assert [10, 20, 30][row] == 20
    assert list(range(row)) == [0]


def test_containers(w):
    assert len(w) == 2
    assert [row.tolist() for row in w] == X.tolist()
    assert 5.0 in w
    assert 9.0 not in w
    (a, b) = nd.Variable([1.0, 2.0])
    assert (a, b) == (1, 2)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint8", "bool"])
def test_numbers(dtype):
    v = nd.Variable(np.array(1, dtype))
    assert (float(v), int(v), bool(v), complex(v)) == (1.0, 1, True, 1 + 0j)
    assert math.sqrt(v) == 1
    assert round(float(v)) == 1


def test_a_complex_number():
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


def test_a_variable_is_a_key():
    v, w = nd.Variable(1.0), nd.Variable(1.0)
    table = {v: "v", w: "w"}
    assert (table[v], table[w]) == ("v", "w")
    assert len({v, w, v}) == 2


def test_small_dtypes_stay_small():
    v = nd.Variable(np.float32([1, 2]))
    for result in (v * 2, v + 1.5, 1 / v, np.exp(v), v.sum(), v @ v, v**2):
        assert result.dtype == np.float32
