"""NumPy takes a variable like the array that it holds, and never changes it."""

import math
import operator
import re

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
        for other in (2.5, np.float32(2), X + 1, [[2.0], [3.0]], v):
            plain = X if other is v else other
            assert same(function(v, other), function(X, np.asarray(plain))), function
            assert same(function(other, v), function(np.asarray(plain), X)), function
    bits = np.array([1, 2, 6])
    b = nd.Variable(bits, synchronization=v.synchronization, aggregation="only_first_replica")
    for function in (getattr(operator, name) for name in BITS):
        assert same(function(b, 1), function(bits, 1)), function
        assert same(function(1, b), function(1, bits)), function
    assert same(~b, ~bits)
    assert np.array_equal(v, X)


USES = """
-a; +a; abs(a); np.exp(a); np.mean(a); np.argmax(a); np.shape(a); np.asarray(a); a.T; a.mean(axis=0)
a @ X.T; X.T @ a; [1.0, 2.0] @ a; np.array(divmod(a, 2)); np.array(divmod(7, a)); np.add.outer(a, a)
np.multiply(2.0, a, dtype=np.float32); np.add.reduce(a, axis=1); np.maximum.accumulate(a, axis=1)
np.concatenate((a, X), axis=1); np.array([a, a]); np.where(a > 2, a, 0.0)
np.einsum("ij,kj->ik", a, a); np.linalg.multi_dot([a, a.T, X])
np.add(X, X, where=a > 2, out=np.zeros_like(X)); np.select([a > 4, a > 2], [a, 0 * a], 9.0)
a.astype(np.float32); a.max(axis=1, keepdims=True)
a.tolist(); a.nbytes; a.item(3); a[0]; a[:, 2]; a[...]; a[None]; a[[1, 0, 1]]; a[X > 2]
"""


@pytest.mark.parametrize("use", re.split(r"; |\n", USES.strip()))
def test_functions_methods_and_indexing(w, use):
    ours, theirs = (eval(use, {"np": np, "X": X, "a": array}) for array in (w, X))
    assert same(ours, theirs)


def test_a_variable_indexes_arrays_and_lists():
    row, rows, mask = nd.Variable(1), nd.Variable([1, 0]), nd.Variable([True, False])
    for index in (row, rows, mask, (rows, row), (slice(None), row)):
        plain = tuple(
            part.numpy() if isinstance(part, nd.Variable) else part
            for part in (index if isinstance(index, tuple) else (index,))
        )
        assert np.array_equal(X[index], X[plain])
        assert np.array_equal(nd.Variable(X)[index], X[plain])
    assert [10, 20, 30][row] == 20


def test_a_variable_is_a_container_and_a_key(w):
    assert len(w) == 2
    assert [row.tolist() for row in w] == X.tolist()
    assert 5.0 in w
    assert 9.0 not in w
    assert {w: "w", nd.Variable(X): "other"}[w] == "w"


def test_a_variable_converts_to_numbers_and_formats():
    for dtype in ("float32", "int64", "bool"):
        v = nd.Variable(np.array(1, dtype))
        assert (float(v), int(v), bool(v), complex(v)) == (1.0, 1, True, 1 + 0j)
        assert math.sqrt(v) == 1
    assert complex(nd.Variable(1 + 2j)) == 1 + 2j
    assert f"{nd.Variable(2.5):.2f} {nd.Variable(7):03d}" == "2.50 007"
    assert "2.5" in f"{nd.Variable(2.5)}"


def test_what_arrays_refuse_is_refused(w):
    number = nd.Variable(1.5)
    for use, error, says in (
        (lambda: float(w), TypeError, None),
        (lambda: int(w), TypeError, None),
        (lambda: f"{w:.2f}", TypeError, None),
        (lambda: bool(w), ValueError, "truth value"),
        (lambda: len(number), TypeError, None),
        (lambda: iter(number), TypeError, None),
        (lambda: operator.index(number), TypeError, None),
        (lambda: w.missing, AttributeError, "no attribute 'missing'"),
        (lambda: w[7], IndexError, None),
    ):
        with pytest.raises(error, match=says):
            use()


def test_small_dtypes_stay_small():
    v = nd.Variable(np.float32([1, 2]))
    for result in (v * 2, v + 1.5, 1 / v, np.exp(v), v.sum(), v @ v, v**2):
        assert result.dtype == np.float32


CHANGES = [
    *(lambda v, name=name: getattr(operator, f"i{name}")(v, 1) for name in IN_PLACE),
    lambda v: v.__setitem__(0, 9.0),
    lambda v: np.add(v, 1, v),
    lambda v: np.divmod(X, 2, out=(v, None)),
    lambda v: np.add.reduce(np.stack([X, X]), out=v),
    lambda v: np.add.at(v, [0], 1.0),
    lambda v: np.concatenate([X[:1], X[1:]], out=v),
]


def test_what_would_change_a_variable_behind_its_copies_is_refused(v):
    for change in CHANGES:
        with pytest.raises(TypeError, match="assign_add"):
            change(v)
        assert np.array_equal(v, X)
    for change in (
        lambda v: np.copyto(v, 1.0),
        lambda v: np.fill_diagonal(v, 1.0),
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
