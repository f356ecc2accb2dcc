"""No gradient is lost without a word: turning a tracked array into a plain one raises."""

from __future__ import annotations

import logging
import math
import re

import numpy as np
import pytest
import scipy.sparse
import scipy.special

import ndistribute as nd
from ndistribute.autodiff import GradientTape, Tracked, stop_gradient, untrack
from tests.autodiff.standin import check_gradients

HERE = re.escape(__file__)
PLAIN = np.zeros(3)


class Foreign:
    """An array of another library, as of pandas, PyTorch on a CPU or JAX."""

    def __init__(self, array):
        self.array = np.array(array)

    def __array__(self, dtype=None, copy=None):
        return self.array if dtype is None else self.array.astype(dtype)

    def __mul__(self, other):
        return NotImplemented


def assigned(x):
    PLAIN[:] = x


def assigned_one(x):
    PLAIN[0] = x[0]


# ruff: noqa: PLW0108  # The lambdas are the lines that the messages quote.
LOSES = {
    "float(x[0])": lambda x: float(x[0]),
    "int(x[0])": lambda x: int(x[0]),
    "complex(x[0])": lambda x: complex(x[0]),
    "x[0].item()": lambda x: x[0].item(),
    "x.tolist()": lambda x: x.tolist(),
    "math.sqrt(x[0])": lambda x: math.sqrt(x[0]),
    "np.asarray(x)": lambda x: np.asarray(x),
    "np.array([x[0], x[1]])": lambda x: np.array([x[0], x[1]]),
    "np.sum([x[0], x[1]])": lambda x: np.sum([x[0], x[1]]),
    "np.full(3, x[0])": lambda x: np.full(3, x[0]),
    "np.vectorize(math.exp)(x)": lambda x: np.vectorize(math.exp)(x),
    "np.dot([x[0], x[1]], PLAIN[:2])": lambda x: np.dot([x[0], x[1]], PLAIN[:2]),
    "PLAIN[:]": assigned,
    "PLAIN[0]": assigned_one,
    "scipy.special.logsumexp(x)": lambda x: scipy.special.logsumexp(x),
    "scipy.special.softmax(x)": lambda x: scipy.special.softmax(x),
    "scipy.sparse.eye(3) @ x": lambda x: scipy.sparse.eye(3) @ x,
}


@pytest.mark.parametrize("expression", LOSES)
def test_a_conversion_is_refused_where_a_tape_records(expression):
    with GradientTape() as tape:
        x = tape.watch(np.ones(3)) * 2
        with pytest.raises((TypeError, ValueError)) as caught:
            LOSES[expression](x)
        with tape.stop_recording():
            LOSES[expression](x)
    LOSES[expression](x)
    # NumPy has its own error where one element can not be set, and names ours as the cause.
    refusal = caught.value.__cause__ or caught.value
    assert type(refusal) is TypeError
    message = str(refusal)
    assert expression in message
    assert re.search(HERE + r":\d+ converts a tracked array to a plain value", message)
    assert "np.stack" in message
    assert "nd.stop_gradient(x)" in message


@pytest.mark.parametrize("name", ["logsumexp", "softmax", "log_softmax"])
def test_what_has_a_replacement_names_it(name):
    with GradientTape() as tape:
        x = tape.watch(np.ones(3))
        with pytest.raises(TypeError, match=rf"nd\.{name} "):
            getattr(scipy.special, name)(x)


def test_showing_and_comparing_is_no_conversion():
    with GradientTape() as tape:
        x = tape.watch(np.float32(2.5)) * 1
        shown = [f"{x:.2f} {x}", "%.1f" % x, "%d" % x, "{:.3f}".format(x), repr(x), str(x)]  # noqa: UP031, UP032
        record = logging.LogRecord("", 0, "", 0, "%.1f", (x,), None)
        assert record.getMessage() == "2.5"
        assert x > 2
        assert x == 2.5
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
    with GradientTape():
        assert v.numpy() == 2
        assert f"{v:.1f}" == "2.0"
        assert v > 1


def test_stop_gradient_gives_constants():
    v = nd.Variable([1.0, 2.0])
    with GradientTape() as tape:
        x = tape.watch(np.array([3.0, 4.0]))
        nest = {"x": [stop_gradient(x), 1], "v": nd.stop_gradient((v, None))}
        loss = np.sum(x * nest["x"][0] + v * nest["v"][0])
    assert not isinstance(nest["x"][0], Tracked)
    assert (nest["x"][1], nest["v"][1]) == (1, None)
    assert [g.tolist() for g in tape.gradient(loss, [x, v])] == [[3, 4], [1, 2]]
    for constant in (nest["x"][0], nest["v"][0]):
        with pytest.raises(ValueError, match="read-only"):
            constant[0] = 0


def test_lists_of_tracked_arrays_are_stacked_where_the_call_is_seen():
    w = np.array([2.0, 3.0])
    check_gradients(lambda a, b, w: np.dot([a, b], w), 3.0, 4.0, w)
    check_gradients(lambda a, w: np.where([True, False], [a, 2 * a], w), 3.0, w)
    check_gradients(lambda a, b, w: w @ [[a, b], [b, 1.0]], 3.0, 4.0, w)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, foreign: x * foreign,
        lambda x, foreign: foreign * x,
        lambda x, foreign: np.add(foreign, x) - foreign,
        lambda x, foreign: np.where(foreign, x, foreign),
        lambda x, foreign: np.clip(x, 0.0, foreign),
    ],
)
def test_arrays_of_other_libraries_are_converted(operation):
    values = np.array([2.0, 3.0])
    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        y = operation(x, Foreign(values))
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


def test_lists_in_keywords():
    x = np.array([0.3, 1.5])
    check_gradients(lambda x: np.clip(x, a_min=[x[0] * 2, 0.5], a_max=2.0), x)
    with GradientTape() as tape:
        tracked = tape.watch(x)
        total = np.sum(tracked, where=[tracked[0], tracked[1]])
    with pytest.raises(TypeError, match=rf"np\.sum .*{HERE}.*no derivative rule"):
        tape.gradient(total, tracked)
