"""Derivatives of functions that work element by element, over shapes that broadcast."""

from __future__ import annotations

import numpy as np
import pytest

from tests.autodiff.standin import check_gradients, gradients_of, probe

SHAPES = [
    ((), ()),
    ((3,), ()),
    ((), (2, 3)),
    ((2, 3), (3,)),
    ((2, 1), (1, 3)),
    ((0,), (1,)),
    ((4, 1, 2), (3, 1)),
]


def augmented(x, y):
    x = np.add(x, y)
    x += y
    x *= 2
    x -= 1
    x /= y
    return x


BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "float_power": np.float_power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "fmax": np.fmax,
    "fmin": np.fmin,
    "logaddexp": np.logaddexp,
    "logaddexp2": np.logaddexp2,
    "arctan2": np.arctan2,
    "hypot": np.hypot,
    "remainder": np.remainder,
    "where": lambda x, y: np.where(np.greater(x, y), x, y * 3),
    "where_of_numbers": lambda x, y: np.where([[True]], x, 2.0) + np.where(False, 1.0, y),
    "clip": lambda x, y: np.clip(x, a_min=0.9, a_max=1.3) + (y * 1).clip(0.9, None),
    "clip_to_arrays": lambda x, y: np.clip(1.1, np.minimum(x, y), np.maximum(x, y) + 0.1),
    "operators": lambda x, y: (
        -x + 2 * y - x / 3 + 4 / y - (5 - x) * y + (y * 1) ** x + 2**x + abs(y) + +x
    ),
    "in_place_operators_make_new_arrays": augmented,
    "nested_functions": lambda x, y: np.exp(-np.square(x * y)) + x * np.log(y) * np.sqrt(x),
    "sigmoid": lambda x, y: 1 / (1 + np.exp(-x * y)),
    "keywords": lambda x, y: np.add(x, y, dtype=np.float64) * np.exp(x, casting="same_kind"),
    "divmod": lambda x, y: x % y + x // y,
    "outer": lambda x, y: np.multiply.outer(x, y) + np.subtract.outer(x, y),
}

UNARY = {
    name: getattr(np, name)
    for name in (
        "negative positive absolute fabs sign square sqrt reciprocal exp exp2 expm1 log log2 log10 "
        "log1p sin cos tan arctan sinh cosh tanh arcsinh rad2deg degrees deg2rad radians sinc copy "
        "nan_to_num real conj"
    ).split()
} | {
    "arcsin": lambda x: np.arcsin(x / 2),
    "arccos": lambda x: np.arccos(x / 2),
    "arccosh": lambda x: np.arccosh(x + 1),
    "arctanh": lambda x: np.arctanh(x / 2),
    "below_zero": lambda x: np.abs(-x) + np.square(-x) + (-x) ** 3,
    "quick_powers": lambda x: x**2 + x**0.5 + x**-1 + x**1,
    "powers": lambda x: x**3 + x**1.5 + x**0 + x ** np.array(2),
    "astype": lambda x: x.astype(np.float64) * 2 + x.astype("f8"),
    "of_complex": lambda x: np.abs(np.exp(1j * x) + x) + np.real(x * (1 + 2j)) + np.imag(x * 3j),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    for shapes in SHAPES:
        rng = np.random.default_rng(3)
        x, y = (rng.uniform(0.5, 1.8, shape) for shape in shapes)
        check_gradients(BINARY[name], x, y)


@pytest.mark.parametrize("name", BINARY)
def test_one_argument_is_a_number(name):
    x = np.random.default_rng(4).uniform(0.5, 1.8, (2, 3))
    y = np.float64(1.1)
    check_gradients(lambda x: BINARY[name](x, y), x)
    check_gradients(lambda x: BINARY[name](y, x), x)


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    for shape in [(), (3,), (2, 0), (2, 3)]:
        x = np.random.default_rng(5).uniform(0.2, 1.6, shape)
        check_gradients(UNARY[name], x)


@pytest.mark.parametrize(
    "ufunc", [one for one in BINARY.values() if isinstance(one, np.ufunc)], ids=repr
)
def test_a_number_beside_float32_keeps_float32(ufunc):
    if ufunc is np.float_power:
        pytest.skip("computes in float64, as its name says")
    x = np.full((2, 3), 1.5, np.float32)
    for number in (2, 1.1, np.float32(1.1)):
        for value, (gradient,) in (
            gradients_of(lambda x, y=number: ufunc(probe(x), y), x),
            gradients_of(lambda x, y=number: ufunc(y, probe(x)), x),
        ):
            assert value.dtype == gradient.dtype == np.float32


@pytest.mark.parametrize(
    ("function", "to_x", "to_y"),
    [(np.maximum, [1, 0, 1], [0, 1, 0]), (np.minimum, [0, 1, 1], [1, 0, 0])],
)
def test_ties_go_to_the_first_argument(function, to_x, to_y):
    _, (x, y) = gradients_of(function, np.array([2.0, 1.0, 3.0]), np.array([1.0, 2.0, 3.0]))
    assert x.tolist() == to_x
    assert y.tolist() == to_y


@pytest.mark.parametrize("function", [np.fmax, np.fmin])
def test_a_nan_gets_no_gradient_where_it_loses(function):
    _, (x, y) = gradients_of(function, np.array([np.nan, 1.0]), np.array([2.0, np.nan]))
    assert x.tolist() == [0, 1]
    assert y.tolist() == [1, 0]


def test_power_at_zero_has_a_finite_derivative():
    _, (x, y) = gradients_of(np.power, np.zeros(3), np.array([0.0, 1.0, 2.0]))
    assert x.tolist() == [0, 1, 0]
    assert y.tolist() == [0, 0, 0]


def test_bounds_of_clip_have_gradients():
    _, (x, low, high) = gradients_of(
        np.clip, np.array([0.0, 1.0, 2.0]), np.float64(0.5), np.float64(1.5)
    )
    assert x.tolist() == [0, 1, 0]
    assert low == 1
    assert high == 1


def test_a_list_beside_a_tracked_array_is_stacked():
    check_gradients(lambda x, y: y * [[x, 2 * x], [y, 1.0]], 3.0, 4.0)


def test_float16_sums_are_exact():
    _, (bias,) = gradients_of(
        lambda b: np.zeros((4096, 2), np.float16) + b, np.zeros(2, np.float16)
    )
    assert bias.dtype == np.float16
    assert bias.tolist() == [4096, 4096]


def test_a_complex_source_gets_the_direction_of_steepest_ascent():
    _, (z,) = gradients_of(lambda z: np.abs(z) ** 2, np.array([1 + 2j, -3j]))
    np.testing.assert_allclose(z, [2 + 4j, -6j])
