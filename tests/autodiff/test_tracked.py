"""A tracked array is used like the array that it stands for."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape, Tracked, untrack
from ndistribute.device import as_array
from ndistribute.values import PerReplica
from tests.autodiff.standin import StandInVariable


@pytest.fixture
def x():
    with GradientTape() as tape:
        yield tape.watch(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32))


def test_attributes(x):
    assert (x.shape, x.ndim, x.size, x.dtype) == ((2, 3), 2, 6, np.float32)
    assert (x.nbytes, x.itemsize, len(x)) == (24, 4, 2)
    assert (np.shape(x), np.ndim(x), np.size(x)) == ((2, 3), 2, 6)
    assert repr(x).startswith("Tracked(array([[1.")


def test_conversions_after_the_tape():
    with GradientTape() as tape:
        x = tape.watch(np.array([[1.0, 2.0]], np.float32))
        scalar = x[0, 0] * 2.5
        with pytest.raises(TypeError):
            iter(scalar)
        with pytest.raises(ValueError, match="ambiguous"):
            bool(x)
    assert float(scalar) == scalar.item() == complex(scalar).real == 2.5
    assert int(scalar) == 2
    assert round(scalar) == 2
    assert round(scalar / 3, 2) == 0.83
    assert x.tolist() == [[1, 2]]
    array = np.asarray(x)
    assert type(array) is np.ndarray
    assert np.shares_memory(array, untrack(x))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert np.array(x).flags.writeable
    assert np.asarray(x, np.float64).dtype == np.float64
    assert as_array(x) is untrack(x)
    assert not np.shares_memory(x.numpy(), untrack(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x > 2,
        lambda x: x >= 2,
        lambda x: x < 2,
        lambda x: x <= x[0],
        lambda x: x == 3,
        lambda x: x != 3,
        np.isnan,
        np.isfinite,
        np.signbit,
        lambda x: np.logical_and(x, x > 1),
        lambda x: x.argmax(),
        lambda x: x.argmin(axis=1),
        lambda x: np.argmax(x, axis=0),
        np.argsort,
        lambda x: x.argsort(axis=0),
        lambda x: x.any(),
        np.all,
        np.floor,
        np.ceil,
        np.trunc,
        np.rint,
        lambda x: x.round(1),
        np.round,
        lambda x: x // 2,
        lambda x: np.nonzero(x)[0],
        lambda x: x.nonzero()[1],
        lambda x: np.searchsorted(x[0], 2.5),
        np.count_nonzero,
        lambda x: np.histogram(x, 2)[0],
        lambda x: np.digitize(x, [1, 2, 3]),
        lambda x: x.astype(np.int32),
        lambda x: x.astype(bool),
        np.zeros_like,
        np.ones_like,
        lambda x: np.full_like(x, 2),
        lambda x: np.empty_like(x)[:0],
        lambda x: np.allclose(x, x),
        lambda x: np.array_equal(x, x + 1),
        lambda x: np.result_type(x, np.float64),
        lambda x: 3.0 in x,
        lambda x: x == "auto",
        lambda x: x == [[1, 2, 3], [3, 4, 5]],
        lambda x: untrack(x)[0] > x,
    ],
)
def test_what_has_no_gradient_is_plain(function, x):
    result = function(x)
    expected = function(untrack(x))
    assert not isinstance(result, Tracked)
    assert type(result) is type(expected)
    np.testing.assert_array_equal(result, expected)


def test_constants_mix_on_either_side(x):
    raw = untrack(x)
    for other in (2, 2.0, np.float32(2), np.float64(2), raw, raw.tolist(), np.int64(3), True):
        for function in (np.add, lambda a, b: a * b, lambda a, b: a - b, lambda a, b: a / b):
            for result, expected in (
                (function(x, other), function(raw, other)),
                (function(other, x), function(other, raw)),
            ):
                assert isinstance(result, Tracked)
                assert result.dtype == expected.dtype
                np.testing.assert_array_equal(untrack(result), expected)


def test_variables_mix_on_either_side(x):
    variable = StandInVariable(np.ones((3, 2), np.float32))
    expected = untrack(x) @ variable.array
    for result in (
        x @ variable,
        np.matmul(x, variable),
        np.dot(x, variable),
        np.einsum("ij,jk->ik", x, variable),
        (variable.tracked_value().T @ x.T).T,
    ):
        assert isinstance(result, Tracked)
        np.testing.assert_array_equal(untrack(result), expected)
    assert isinstance(variable * x.T, Tracked)
    assert np.concatenate([x, variable[:1, :1] * x]).shape == (4, 3)
    assert np.stack([variable, variable, x.T]).shape == (3, 3, 2)
    assert np.where(x.T > 2, variable, x.T).shape == (3, 2)


def test_an_in_place_operator_makes_a_new_array(x):
    before = untrack(x).copy()
    other = x
    other += 1
    other *= 2
    assert isinstance(other, Tracked)
    assert other is not x
    np.testing.assert_array_equal(untrack(x), before)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, a: x.__setitem__(0, 1.0),
        lambda x, a: np.add(x, 1.0, out=x),
        lambda x, a: np.add(a, a, out=x),
        lambda x, a: np.add(x, 1.0, out=a),
        lambda x, a: a.__iadd__(x),
        lambda x, a: np.exp(x, out=a),
        lambda x, a: np.sum(x, axis=0, out=a[0]),
        lambda x, a: x.sum(axis=0, out=a[0]),
        lambda x, a: np.outer(x[0], x[0], out=np.ones((3, 3))),
        lambda x, a: np.copyto(a, x),
        np.copyto,
        lambda x, a: np.add.at(x, 0, 1.0),
        lambda x, a: np.add.at(a, 0, x[0]),
        lambda x, a: np.put(a, 0, x[0, 0]),
        lambda x, a: np.fill_diagonal(x, 0.0),
        lambda x, a: np.nan_to_num(x, copy=False),
        lambda x, a: np.median(x, overwrite_input=True),
        lambda x, a: np.quantile(x, 0.3, overwrite_input=True),
    ],
)
def test_writing_is_refused_with_advice(write, x):
    before, target = untrack(x).copy(), np.ones((2, 3), np.float32)
    with pytest.raises(TypeError, match=r"tracked.*(Make a new array|Use the result)"):
        write(x, target)
    np.testing.assert_array_equal(untrack(x), before)
    assert (target == 1).all()


def test_per_replica_values_refuse_arithmetic(x):
    with pytest.raises(TypeError, match="local_results"):
        x + PerReplica([1.0, 2.0])


def test_untrack_keeps_the_structure(x):
    raw = untrack(x)
    nest = {"a": [x, 1, None], "b": (x * 1, "text")}
    result = untrack(nest)
    assert result["a"][0] is raw
    assert result["a"][1:] == [1, None]
    assert type(result["b"][0]) is np.ndarray
    assert result["b"][1] == "text"
    plain = {"a": [1, raw]}
    assert untrack(plain) is plain


def test_a_copy_is_another_array(x):
    assert np.shares_memory(untrack(copy.copy(x)), untrack(x))
    assert not np.shares_memory(untrack(x.copy()), untrack(x))


def test_copies_and_pickles_hold_no_graph():
    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        loss = np.sum(copy.deepcopy([x])[0] * 3)
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(loss)
    assert tape.gradient(loss, x).tolist() == [3, 3]
    assert type(copy.deepcopy(x)) is np.ndarray
    assert type(pickle.loads(pickle.dumps(x))) is np.ndarray
    assert pickle.loads(pickle.dumps(loss)) == 6


@pytest.mark.parametrize(
    "view",
    [lambda y: y[:], lambda y: y.reshape(3, 2), lambda y: next(iter(y)), lambda y: y.T, np.ravel],
)
def test_values_can_not_be_overwritten_before_the_gradient(view):
    with GradientTape() as tape:
        x = tape.watch(np.zeros((2, 3)))
        y = np.exp(x)
    with pytest.raises(ValueError, match="read-only"):
        view(y)[...] = 100
    assert (tape.gradient(y, x) == 1).all()


def test_public_methods_are_described():
    for name in dir(Tracked):
        member = getattr(Tracked, name)
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            assert re.match(r"\w.*\.$", (member.__doc__ or "").splitlines()[0]), name
