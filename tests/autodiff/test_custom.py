"""Operations that bring their own derivative."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape, Tracked, custom_gradient
from ndistribute.collective.indexed_slices import IndexedSlices
from tests.autodiff.standin import StandInVariable, check_gradients


@custom_gradient
def dense_layer(x, w, b, *, scale=1.0):
    """Multiply, add and scale, each gradient on its own."""

    def to_w(g):
        return x.T @ (g * scale)

    out = x @ w
    out += b
    out *= scale
    return out, [lambda g: g @ w.T * scale, to_w, lambda g: g.sum(axis=0) * scale]


@custom_gradient
def softmax_cross_entropy(logits, labels):
    """Keep the gradient from the forward pass."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    p = shifted / shifted.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(p[rows, labels]).mean()
    p[rows, labels] -= 1
    p /= len(labels)
    return loss, lambda g: [p * g, None]


def test_a_fused_layer():
    rng = np.random.default_rng(0)
    shapes = [(4, 3), (3, 2), (2,)]
    arrays = [rng.normal(size=shape) for shape in shapes]
    check_gradients(lambda x, w, b: dense_layer(x, w, b, scale=3.0), *arrays)
    check_gradients(lambda w: dense_layer(arrays[0], w, arrays[2]), arrays[1])


def test_a_fused_loss():
    logits = np.random.default_rng(0).normal(size=(4, 3))
    labels = np.array([0, 2, 1, 1])
    check_gradients(lambda z: softmax_cross_entropy(z, labels), logits)


def test_variables_are_arguments():
    w, b = StandInVariable(np.ones((3, 2), np.float32)), StandInVariable(np.ones(2, np.float32))
    x = np.ones((4, 3), np.float32)
    with GradientTape() as tape:
        y = dense_layer(x, w, b)
    assert isinstance(y, Tracked)
    gradients = tape.gradient(y, [w, b])
    assert [g.tolist() for g in gradients] == [[[4, 4]] * 3, [4, 4]]
    assert [g.dtype for g in gradients] == [np.float32] * 2


def test_without_a_tape_it_is_a_plain_function():
    result = dense_layer(np.ones((1, 2)), StandInVariable(np.ones((2, 2))), np.zeros(2))
    assert type(result) is np.ndarray
    assert dense_layer.__name__ == "dense_layer"


def test_constants_beside_tracked_arrays():
    with GradientTape() as tape:
        x = tape.watch(np.ones((1, 2)))
    with GradientTape() as other:
        w = other.watch(np.ones((2, 2)))
        y = dense_layer(x, w, np.zeros(2))
    assert tape.gradient(y, x) is None
    assert other.gradient(y, w).tolist() == [[1, 1], [1, 1]]


def test_several_results():
    @custom_gradient
    def divide(a, b):
        def rule(gradients):
            quotient, remainder, count = gradients
            assert count is None
            assert remainder is None
            return [quotient / b, None]

        return (a / b, a % b, len(a)), rule

    with GradientTape() as tape:
        a = tape.watch(np.array([4.0, 9.0]))
        quotient, remainder, count = divide(a, 2.0)
    assert isinstance(remainder, Tracked)
    assert count == 2
    assert tape.gradient(quotient, a).tolist() == [0.5, 0.5]


def test_several_results_need_one_derivative():
    @custom_gradient
    def halves(x):
        return (x / 2, x / 2), [lambda g: g]

    with GradientTape() as tape:
        x = tape.watch(1.0)
        with pytest.raises(TypeError, match=r"halves.*one function of a list"):
            halves(x)


def test_a_result_without_gradients():
    @custom_gradient
    def top(x):
        return x.argmax(), lambda g: [None]

    with GradientTape() as tape:
        assert not isinstance(top(tape.watch(np.ones(3))), Tracked)


def test_rows_as_a_gradient():
    @custom_gradient
    def embed(table, ids):
        return table[ids], [lambda g: IndexedSlices(g, ids, table.shape), None]

    table = StandInVariable(np.ones((4, 2)))
    with GradientTape(persistent=True) as tape:
        y = embed(table, np.array([1, 1, 3]))
        z = embed(table * 1.0, np.array([1, 1, 3]))
    assert isinstance(tape.gradient(y, table), IndexedSlices)
    assert tape.gradient(y, table).indices.tolist() == [1, 1, 3]
    assert tape.gradient(z, table).tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
    assert tape.gradient([y, z], table).tolist() == [[0, 0], [4, 4], [0, 0], [2, 2]]


def test_gradients_are_cast_and_their_shape_is_checked():
    @custom_gradient
    def wrong(x, y):
        return x * y, [lambda g: np.ones(3), lambda g: 2.0]

    with GradientTape(persistent=True) as tape:
        x, y = tape.watch((np.ones(2, np.float32), np.float32(1)))
        z = wrong(x, y)
    gradient = tape.gradient(z, y)
    assert (gradient.dtype, gradient) == (np.float32, 2)
    with pytest.raises(ValueError, match=r"wrong.*\(3,\).*\(2,\)"):
        tape.gradient(z, x)


@pytest.mark.parametrize(
    ("derivative", "error", "message"),
    [
        (lambda g: [g], ValueError, r"fused was called with 2.*gave 1 gradients"),
        (lambda g: [g, g, g], ValueError, r"fused was called with 2.*gave 3 gradients"),
        (lambda g: g, TypeError, r"derivative of .*fused gave a ndarray where a list of 2"),
        ([lambda g: g], ValueError, r"fused was called with 2.*gave 1 derivatives"),
    ],
)
def test_a_wrong_number_of_gradients_is_refused(derivative, error, message):
    @custom_gradient
    def fused(x, y):
        return x * y, derivative

    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        with pytest.raises(error, match=message):
            tape.gradient(fused(x, 2.0), x)


def test_an_operation_from_outside_numpy():
    """How PyTorch, JAX or C code takes part."""
    erf = np.vectorize(math.erf, otypes=[float])

    @custom_gradient
    def tracked_erf(x):
        return erf(x), [lambda g: g * 2 / np.sqrt(np.pi) * np.exp(-x * x)]

    with GradientTape() as tape:
        x = tape.watch(np.array([0.0, 1.0]))
        y = tracked_erf(x)
    np.testing.assert_allclose(tape.gradient(y, x), [1.12837917, 0.41510750])


def test_results_that_are_numbers_of_python():
    @custom_gradient
    def squared(x):
        return float(x) ** 2, lambda g: [2 * x * g]

    @custom_gradient
    def halves(x):
        return (float(x) / 2, [complex(x), "text"]), lambda g: [g[0] / 2]

    with GradientTape(persistent=True) as tape:
        x = tape.watch(3.0)
        y = squared(x)
        half, (_, text) = halves(x)
    assert tape.gradient(y, x) == 6
    assert tape.gradient(half, x) == 0.5
    assert text == "text"


@pytest.mark.parametrize("several", [False, True])
def test_a_variable_that_is_no_argument_is_refused(several):
    v = StandInVariable(2.0)

    @custom_gradient
    def scaled(x, *, by=1.0):
        result = x * v.tracked_value() * by
        return (result, x) if several else result, lambda g: [g * 2]

    with GradientTape() as tape:
        x = tape.watch(3.0)
        with pytest.raises(TypeError, match=r"test_custom\.py:\d+, computed .* by position"):
            scaled(x, by=x)
