"""Operations that bring their own derivative."""

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape, Tracked, custom_gradient
from ndistribute.indexed_slices import IndexedSlices
from tests.autodiff.standin import StandInVariable, check_gradients


@custom_gradient
def dense_layer(x, w, b, *, scale=1.0):
    """Multiply, add and scale, each gradient on its own."""
    out = x @ w
    out += b
    out *= scale
    return out, [
        lambda g: g @ w.T * scale,
        lambda g: x.T @ (g * scale),
        lambda g: g.sum(axis=0) * scale,
    ]


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


def test_a_fused_layer_and_loss():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in [(4, 3), (3, 2), (2,)]]
    check_gradients(lambda x, w, b: dense_layer(x, w, b, scale=3.0), *arrays)
    check_gradients(lambda w: dense_layer(arrays[0], w, arrays[2]), arrays[1])
    labels = np.array([0, 2, 1, 1])
    check_gradients(lambda z: softmax_cross_entropy(z, labels), arrays[0])


def test_variables_are_arguments_and_others_are_constants():
    w, b = StandInVariable(np.ones((3, 2), np.float32)), StandInVariable(np.ones(2, np.float32))
    with GradientTape() as old:
        x = old.watch(np.ones((4, 3), np.float32))
    with GradientTape() as tape:
        y = dense_layer(x, w, b)
    gradients = tape.gradient(y, [w, b])
    assert [g.tolist() for g in gradients] == [[[4, 4]] * 3, [4, 4]]
    assert [g.dtype for g in gradients] == [np.float32] * 2
    assert old.gradient(y, x) is None
    assert type(dense_layer(np.ones((4, 3)), w, np.zeros(2))) is np.ndarray
    assert dense_layer.__name__ == "dense_layer"


def test_several_results_and_numbers_of_python():
    @custom_gradient
    def divide(a, b):
        def rule(gradients):
            quotient, *others = gradients
            assert others == [None] * 4
            return [quotient / b, None]

        return (a / b, a % b, len(a), [complex(a[0]), "text"]), rule

    @custom_gradient
    def squared(x):
        return float(x) ** 2, lambda g: [2 * x * g]

    @custom_gradient
    def top(x):
        return x.argmax(), lambda g: [None]

    with GradientTape(persistent=True) as tape:
        a = tape.watch(np.array([4.0, 9.0]))
        quotient, remainder, count, (_, text) = divide(a, 2.0)
        square = squared(a[0])
        assert not isinstance(top(a), Tracked)
    assert isinstance(remainder, Tracked)
    assert (count, text) == (2, "text")
    assert tape.gradient(quotient, a).tolist() == [0.5, 0.5]
    assert tape.gradient(square, a).tolist() == [8, 0]


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
    ("several", "derivative", "error", "message"),
    [
        (False, lambda g: [g], ValueError, r"fused was called with 2.*returned 1 gradients"),
        (False, lambda g: [g, g, g], ValueError, r"fused was called with 2.*returned 3 gradients"),
        (False, lambda g: g, TypeError, r"of .*fused returned a ndarray, not a list of 2"),
        (False, [lambda g: g], ValueError, r"fused was called with 2.*returned 1 derivatives"),
        (True, [lambda g: g], TypeError, r"fused.*one function of the list"),
    ],
)
def test_a_wrong_derivative_is_refused(several, derivative, error, message):
    @custom_gradient
    def fused(x, y):
        return (x, x) if several else x * y, derivative

    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        with pytest.raises(error, match=message):
            tape.gradient(fused(x, 2.0), x)


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
