"""A tracked array is used like the array that it stands for, and loses no gradient silently."""

import copy
import logging
import math
import pickle
import re

import numpy as np
import pytest
import scipy.sparse
import scipy.special

import ndistribute as nd
from ndistribute.autodiff import GradientTape, Tracked, stop_gradient, untrack
from ndistribute.devices import as_array
from ndistribute.values import PerReplica
from tests.autodiff.standin import StandInVariable, check_gradients

HERE = re.escape(__file__)


@pytest.fixture
def x():
    with GradientTape() as tape:
        yield tape.watch(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32))


def test_a_tracked_array_has_the_attributes_of_its_array(x):
    assert (x.shape, x.ndim, x.size, x.dtype) == ((2, 3), 2, 6, np.float32)
    assert (x.nbytes, x.itemsize, len(x)) == (24, 4, 2)
    assert (np.shape(x), np.ndim(x), np.size(x)) == ((2, 3), 2, 6)
    assert repr(x).startswith("Tracked(array([[1.")
    for name in dir(Tracked):
        member = getattr(Tracked, name)
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            assert re.match(r"\w.*\.$", (member.__doc__ or "").splitlines()[0]), name


def test_conversions_after_the_tape():
    with GradientTape() as tape:
        x = tape.watch(np.array([[1.0, 2.0]], np.float32))
        scalar = x[0, 0] * 2.5
        with pytest.raises(TypeError):
            iter(scalar)
        with pytest.raises(ValueError, match="ambiguous"):
            bool(x)
    assert float(scalar) == scalar.item() == complex(scalar).real == 2.5
    assert (int(scalar), round(scalar), round(scalar / 3, 2)) == (2, 2, 0.83)
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


WITHOUT_GRADIENT = """
x > 2; x <= x[0]; x != 3; x == "auto"; x == [[1, 2, 3], [3, 4, 5]]; untrack(x)[0] > x; 3.0 in x
np.isnan(x); np.signbit(x); np.logical_and(x, x > 1); np.allclose(x, x); np.array_equal(x, x + 1)
x.argmax(); x.argmin(axis=1); np.argmax(x, axis=0); np.argsort(x); x.any(); np.count_nonzero(x)
np.nonzero(x)[0]; x.nonzero()[1]; np.searchsorted(x[0], 2.5); np.digitize(x, [1, 2, 3])
np.floor(x); x.round(1); np.round(x); x // 2; np.histogram(x, 2)[0]; x.astype(int); x.astype(bool)
np.zeros_like(x); np.full_like(x, 2); np.empty_like(x)[:0]; np.result_type(x, np.float64)
"""


@pytest.mark.parametrize("expression", re.split(r"; |\n", WITHOUT_GRADIENT.strip()))
def test_what_has_no_gradient_is_plain(expression, x):
    result, expected = (
        eval(expression, {"np": np, "untrack": untrack, "x": one}) for one in (x, untrack(x))
    )
    assert type(result) is type(expected)
    np.testing.assert_array_equal(result, expected)


def test_constants_and_variables_mix_on_either_side(x):
    raw = untrack(x)
    for other in (2, 2.0, np.float32(2), np.float64(2), raw, raw.tolist(), np.int64(3), True):
        for function in (np.add, lambda a, b: a - b):
            for result, expected in (
                (function(x, other), function(raw, other)),
                (function(other, x), function(other, raw)),
            ):
                assert isinstance(result, Tracked)
                assert result.dtype == expected.dtype
                np.testing.assert_array_equal(untrack(result), expected)
    variable = StandInVariable(np.ones((3, 2), np.float32))
    for result in (
        x @ variable,
        np.dot(x, variable),
        np.einsum("ij,jk->ik", x, variable),
        (variable.tracked_value().T @ x.T).T,
    ):
        assert isinstance(result, Tracked)
        np.testing.assert_array_equal(untrack(result), raw @ variable.array)
    assert isinstance(variable * x.T, Tracked)
    assert np.concatenate([x, variable[:1, :1] * x]).shape == (4, 3)
    assert np.stack([variable, variable, x.T]).shape == (3, 3, 2)
    assert np.where(x.T > 2, variable, x.T).shape == (3, 2)


ADVICE = r"(x\[i\] = v on a t|t)racked.*(a new array with np\.where\(mask, v, x\)|Use the result)"
WRITES = """
x.__setitem__(0, 1.0); np.add(x, 1.0, out=x); np.add(a, a, out=x); a.__iadd__(x); np.exp(x, out=a)
x.sum(axis=0, out=a[0]); np.outer(x[0], x[0], out=np.ones((3, 3))); np.copyto(a, x); np.copyto(x, a)
np.add.at(x, 0, 1.0); np.add.at(a, 0, x[0]); np.put_along_axis(x, np.array([[0], [2]]), 0.0, 1)
np.fill_diagonal(x, 0.0); np.nan_to_num(x, copy=False); np.median(x, overwrite_input=True)
np.sum(x, 0, None, a[0]); np.max(x, 0, a[0]); np.std(x, 0, None, a[0]); np.median(x, 0, None, True)
"""


@pytest.mark.parametrize("write", re.split(r"; |\n", WRITES.strip()))
def test_writing_is_refused_with_advice(write, x):
    before, target = untrack(x).copy(), np.ones((2, 3), np.float32)
    with pytest.raises(TypeError, match=ADVICE):
        eval(write, {"np": np, "x": x, "a": target})
    np.testing.assert_array_equal(untrack(x), before)
    assert (target == 1).all()


def test_per_replica_values_refuse_arithmetic(x):
    with pytest.raises(TypeError, match="local_results"):
        x + PerReplica([1.0, 2.0])


def test_untrack_keeps_the_structure(x):
    raw = untrack(x)
    result = untrack({"a": [x, 1, None], "b": (x * 1, "text")})
    assert result["a"][0] is raw
    assert result["a"][1:] == [1, None]
    assert type(result["b"][0]) is np.ndarray
    plain = {"a": [1, raw]}
    assert untrack(plain) is plain


def test_copies_and_pickles_hold_no_graph():
    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        loss = np.sum(copy.deepcopy([x])[0] * 3)
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(loss)
    assert tape.gradient(loss, x).tolist() == [3, 3]
    assert np.shares_memory(untrack(copy.copy(x)), untrack(x))
    assert type(copy.deepcopy(x)) is np.ndarray
    assert pickle.loads(pickle.dumps(loss)) == 6


@pytest.mark.parametrize(
    "view", [lambda y: y[:], lambda y: y.reshape(3, 2), lambda y: next(iter(y)), lambda y: y.T]
)
def test_values_can_not_be_overwritten_before_the_gradient(view):
    with GradientTape() as tape:
        x = tape.watch(np.zeros((2, 3)))
        y = np.exp(x)
    with pytest.raises(ValueError, match="read-only"):
        view(y)[...] = 100
    assert (tape.gradient(y, x) == 1).all()


def test_showing_and_comparing_is_no_conversion():
    with GradientTape() as tape:
        x = tape.watch(np.float32(2.5)) * 1
        shown = [f"{x:.2f} {x}", "%.1f" % x, "%d" % x, "{:.3f}".format(x), repr(x), str(x)]  # noqa: UP031, UP032
        record = logging.LogRecord("", 0, "", 0, "%.1f", (x,), None)
        assert record.getMessage() == "2.5"
        assert x > 2
        assert bool(x)
        assert max(x, 3.0) == 3
    assert shown[:4] == ["2.50 2.5", "2.5", "2", "2.500"]


def test_a_variable_is_refused_where_it_is_watched():
    v, counter = nd.Variable(2.0, name="v"), nd.Variable(3)
    frozen = nd.Variable(4.0, trainable=False)
    for convert in (float, np.asarray, math.sqrt, lambda v: v.item(), lambda v: np.array([v, v])):
        with GradientTape():
            with pytest.raises(TypeError, match=HERE):
                convert(v)
            convert(frozen)
            convert(counter)
        with GradientTape(watch_accessed_variables=False):
            convert(v)
        convert(v)
    with GradientTape() as tape:
        with tape.stop_recording():
            float(tape.watch(3.0))
            float(v)
        assert v.numpy() == 2
        assert f"{v:.1f}" == "2.0"
        assert v > 1


def test_stop_gradient_gives_constants():
    v = nd.Variable([1.0, 2.0])
    with GradientTape() as tape:
        x = tape.watch(np.array([3.0, 4.0]))
        nest = {"x": [stop_gradient(x), 1], "v": nd.stop_gradient((v, None))}
        loss = np.sum(x * nest["x"][0] + v * nest["v"][0])
    assert (nest["x"][1], nest["v"][1]) == (1, None)
    assert [g.tolist() for g in tape.gradient(loss, [x, v])] == [[3, 4], [1, 2]]
    for constant in (nest["x"][0], nest["v"][0]):
        assert not isinstance(constant, Tracked)
        with pytest.raises(ValueError, match="read-only"):
            constant[0] = 0


def test_lists_of_tracked_arrays_are_stacked_where_the_call_is_seen():
    x = np.array([2.0, 3.0])
    check_gradients(lambda a, b, w: np.dot([a, b], w), 3.0, 4.0, x)
    check_gradients(lambda a, w: np.where([True, False], [a, 2 * a], w), 3.0, x)
    check_gradients(lambda a, b, w: w @ [[a, b], [b, 1.0]], 3.0, 4.0, x)
    check_gradients(lambda x: np.clip(x, a_min=[x[0] * 2, 0.5], a_max=2.0), x)
    with GradientTape() as tape:
        tracked = tape.watch(x)
        total = np.sum(tracked, where=[tracked[0], tracked[1]])
    with pytest.raises(TypeError, match=rf"np\.sum .*{HERE}.*no derivative rule"):
        tape.gradient(total, tracked)


class Foreign:
    """An array of another library, as of pandas, PyTorch on a CPU or JAX."""

    def __init__(self, array):
        self.array = np.array(array)

    def __array__(self, dtype=None, copy=None):
        return self.array if dtype is None else self.array.astype(dtype)

    def __mul__(self, other):
        return NotImplemented


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, foreign: foreign * x,
        lambda x, foreign: np.add(foreign, x) - foreign,
        lambda x, foreign: np.where(foreign, x, foreign),
        lambda x, foreign: np.clip(x, 0.0, foreign),
    ],
)
def test_arrays_of_other_libraries_are_converted(operation):
    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        y = operation(x, Foreign([2.0, 3.0]))
    assert type(untrack(y)) is np.ndarray
    assert tape.gradient(y, x).tolist() in ([2, 3], [1, 1])


@pytest.mark.parametrize("other", [object(), scipy.sparse.eye(3)], ids=["object", "sparse"])
def test_what_is_no_array_is_refused(other):
    with GradientTape() as tape:
        x = tape.watch(np.ones(3))
        with pytest.raises(TypeError, match=rf"np\.multiply.*{HERE}:\d+: convert"):
            x * other


def test_polyval_has_a_gradient_or_is_refused():
    """Coefficients of several dimensions gave the values of other elements."""
    polyval = np.polynomial.polynomial.polyval
    x, columns = np.array([0.5, 2.0, 3.0]), np.arange(9.0).reshape(3, 3)
    check_gradients(lambda x: polyval(x, [1, 2, 3]) + polyval(x[0], columns), x)
    check_gradients(lambda x: polyval(x, columns, tensor=False) + 0 * x, x)
    with GradientTape() as tape:
        tracked = tape.watch(x)
        for arguments in ((tracked, columns), (2.0, tracked), ([tracked[0]], x)):
            with pytest.raises(TypeError, match=rf"polyval.*{HERE}:\d+"):
                polyval(*arguments)
