"""Derivatives at the edges and of any shapes: broadcasting, empty arrays, stacks, ties and dtypes.

What is written in the middle of a step is in `test_expressions`.
"""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

import ndistribute as nd
from ndistribute.autodiff import GradientTape, custom_gradient
from tests.autodiff.standin import check_gradients, gradients_of, probe

LINE = re.escape(__file__) + r":\d+"
RNG = np.random.default_rng(0)
SQUARE = RNG.normal(size=(3, 3))
POSITIVE = np.stack([SQUARE @ SQUARE.T + 3 * np.eye(3), np.diag([4.0, 5.0, 7.0]) + 0.1])
X = RNG.uniform(0.5, 2, (3, 4))


def augmented(x, y):
    x = np.add(x, y)
    x += y
    x *= 2
    x -= 1
    x /= y
    return x


UFUNCS = [
    getattr(np, name)
    for name in (
        "add subtract multiply divide power maximum minimum fmax fmin logaddexp logaddexp2 arctan2 "
        "hypot remainder"
    ).split()
]
BINARY = {ufunc.__name__: ufunc for ufunc in (*UFUNCS, np.float_power)} | {
    "where": lambda x, y: np.where(np.greater(x, y), x, y * 3),
    "where_of_numbers": lambda x, y: np.where([[True]], x, 2.0) + np.where(False, 1.0, y),
    "clip": lambda x, y: np.clip(x, a_min=0.9, a_max=1.3) + (y * 1).clip(0.9, None),
    "clip_to_arrays": lambda x, y: np.clip(1.1, np.minimum(x, y), np.maximum(x, y) + 0.1),
    "operators": lambda x, y: (
        -x + 2 * y - x / 3 + 4 / y - (5 - x) * y + (y * 1) ** x + 2**x + abs(y) + +x
    ),
    "in_place_operators_make_new_arrays": augmented,
    "keywords": lambda x, y: np.add(x, y, dtype=np.float64) * np.exp(x, casting="same_kind"),
    "divmod": lambda x, y: x % y + x // y,
    "outer": lambda x, y: np.multiply.outer(x, y) + np.subtract.outer(x, y),
}
DOT = [
    *(((), (3,)), ((2, 3), ()), ((), ()), ((5, 2, 3), (3,)), ((3,), (5, 3, 4))),
    *(((2, 3), (5, 3, 4)), ((6, 1, 2, 3), (5, 3, 4)), ((0, 3), (3, 4)), ((2, 0), (0, 4))),
]
# Of an array of 4 by 3.
INDICES = """
-1 | np.int32(1) | 1:3 | ::-2 | ... | None | 1, None, :2 | True | 0:0 | [0, 2, 0] | []
:, [0, 0, 1] | np.array([[0, 1], [3, 3]]) | np.array(2) | np.array([], np.intp)
[0, 1, 0], [2, 2, 2] | x > 0 | [[0], [1]], np.array([0, 2, 0]) | [True, False, True, False]
[True, False, True, True], [0, 1, 1] | [True, False, True, True], 1
np.array([True, False, True, False]), np.array([True, False, True])
"""


@pytest.mark.parametrize("name", BINARY)
@settings(max_examples=15)
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=3), st.integers(0, 99))
def test_binary(name, shapes, seed):
    rng, number = np.random.default_rng(seed), np.float64(1.1)
    x, y = (rng.uniform(0.5, 1.8, shape) for shape in shapes.input_shapes)
    check_gradients(BINARY[name], x, y)
    check_gradients(lambda x: BINARY[name](x, number), x)
    check_gradients(lambda y: BINARY[name](number, y), y)


@pytest.mark.parametrize("ufunc", UFUNCS, ids=repr)
def test_a_number_beside_float32_keeps_float32(ufunc):
    x = np.full((2, 3), 1.5, np.float32)
    for number in (2, 1.1, np.float32(1.1)):
        for value, (gradient,) in (
            gradients_of(lambda x, y=number: ufunc(probe(x), y), x),
            gradients_of(lambda x, y=number: ufunc(y, probe(x)), x),
        ):
            assert value.dtype == gradient.dtype == np.float32


@pytest.mark.parametrize(
    ("function", "x", "y", "to_x", "to_y"),
    [
        (np.maximum, [2.0, 1.0, 3.0], [1.0, 2.0, 3.0], [1, 0, 1], [0, 1, 0]),
        (np.minimum, [2.0, 1.0, 3.0], [1.0, 2.0, 3.0], [0, 1, 1], [1, 0, 0]),
        (np.fmax, [np.nan, 1.0], [2.0, np.nan], [0, 1], [1, 0]),
        (np.fmin, [np.nan, 1.0], [2.0, np.nan], [0, 1], [1, 0]),
        (np.power, [0.0, 0.0, 0.0], [0.0, 1.0, 2.0], [0, 1, 0], [0, 0, 0]),
        (lambda x, y: np.max(np.stack([x, y])), [1.0, 3.0], [3.0, 0.0], [0, 0.5], [0.5, 0]),
        (
            lambda x, y: np.max(x, 1)[:1] * y,
            [[2, 2], [np.nan, 2]],
            [1.0],
            [[0.5, 0.5], [0, 0]],
            [2],
        ),
        (lambda x, y: np.clip(x, y[0], y[1]), [0.0, 1.0, 2.0], [0.5, 1.5], [0, 1, 0], [1, 1]),
    ],
)
def test_where_there_is_no_derivative_one_is_chosen(function, x, y, to_x, to_y):
    """The first argument wins a tie, elements that tie share, a NaN gets nothing."""
    _, gradients = gradients_of(function, np.array(x), np.array(y))
    assert [gradient.tolist() for gradient in gradients] == [to_x, to_y]


@pytest.mark.parametrize(
    ("function", "x", "slope"),
    [
        (lambda x: special.gammainc(1.0, x), [0, np.inf], [1, 0]),
        (lambda x: special.gammainc(2.0, x), [0, np.inf], [0, 0]),
        (lambda x: special.gammaincc(0.5, x), [0, np.inf], [-np.inf, 0]),
        (lambda x: special.betainc(1.0, 3.0, x), [0, 1], [3, 0]),
        (lambda x: special.betainc(2.0, 1.0, x), [0, 1], [0, 2]),
        (special.spence, [1, 2], [-1, -np.log(2)]),
    ],
)
def test_the_edge_of_a_domain_has_the_limit_of_the_derivative(function, x, slope):
    """It was NaN."""
    _, (gradient,) = gradients_of(function, np.array(x, float))
    np.testing.assert_allclose(gradient, slope)


@pytest.mark.parametrize("function", [special.jv, special.gammainc], ids=repr)
def test_an_argument_without_a_derivative_leaves_the_other_its_own(function):
    orders, points = np.array([1.0, 2.0]), np.array([0.5, 0.7])
    _, (expected,) = gradients_of(lambda x: function(orders, x), points)
    with GradientTape() as tape:
        order, x = tape.watch([orders, points])
        result = function(order, x)
    np.testing.assert_array_equal(tape.gradient(result, x), expected)


def test_a_number_that_is_joined_determines_the_dtype_as_in_numpy():
    single = np.float32([0.5, 1.5])
    for function in (lambda x: np.append(2.0, x), lambda x: np.append(x, 2)):
        values, (gradient,) = gradients_of(function, single)
        assert values.dtype == function(single).dtype == np.float64
        assert gradient.dtype == np.float32


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: np.zeros((4096, 1), np.float16) + x[-1:], 4096),
        (np.mean, 1 / 70000),
        (lambda x: np.mean(np.repeat(x, 2)), 1 / 70000),
        (lambda x: np.cumsum(x)[-1:] * np.float16(0.25), 0.25),
        (lambda x: np.abs(np.fft.rfft(x[-2:])[0]), 1),
    ],
)
def test_float16_is_summed_in_float32_as_are_counts_that_are_infinite(function, expected):
    _, (gradient,) = gradients_of(function, np.ones(70000, np.float16))
    assert gradient.dtype == np.float16
    np.testing.assert_allclose(gradient[-1], expected, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:Degrees of freedom", "ignore:invalid value", "ignore:divide by")
def test_no_degree_of_freedom_is_left():
    for function in (np.var, np.std, np.nanvar):
        value, (gradient,) = gradients_of(lambda x, f=function: f(x, ddof=1), np.ones(1))
        assert np.isnan([value, *gradient]).all()
    assert np.isnan(gradients_of(lambda x: np.nanvar(x, ddof=3), np.arange(2.0))[0])


@pytest.mark.parametrize(
    "function", [np.arccosh, lambda z: (2.0 + 1j) ** z, lambda z: np.power(-2.0, z), np.square]
)
def test_a_complex_source_gets_the_direction_of_steepest_ascent(function):
    z, step = np.array([-2 + 1j, -0.5 - 1j]), 1e-6
    _, (gradient,) = gradients_of(function, z)
    slope = (function(z + step) - function(z - step)) / (2 * step)
    np.testing.assert_allclose(gradient, np.conj(slope), rtol=1e-6)
    _, (gradient,) = gradients_of(lambda z: np.abs(z) ** 2, z)
    np.testing.assert_allclose(gradient, 2 * z)


def test_a_complex_base_has_a_derivative_by_a_real_exponent():
    base = np.array([-2.0 + 0.5j, 0j])
    _, (y,) = gradients_of(lambda y: base**y, np.array([2.0, 2.0]))
    np.testing.assert_allclose(y, (base**2 * np.log(base + (base == 0))).real)


def test_cholesky_gives_the_gradient_to_the_triangle_that_numpy_reads():
    check_gradients(lambda x: np.linalg.cholesky(np.tril(x)), POSITIVE[0], rtol=1e-5)
    check_gradients(lambda x: np.linalg.cholesky(np.triu(x), upper=True), POSITIVE[0], rtol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: np.linalg.norm(x, 3),
        lambda x: np.tensordot(x, x.T, ([0, 1], [0, 1])),
        lambda x: np.diff(x, axis=5),
        lambda x: np.gradient(x[:1]),
    ],
)
def test_what_numpy_refuses_is_refused(call):
    with pytest.raises(ValueError, match=r".") as expected:
        call(X)
    with GradientTape() as tape:
        x = tape.watch(X)
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            call(x)


@pytest.mark.parametrize("name", ["sum", "prod", "cumsum"])
def test_empty_arrays_and_zeros(name):
    function = getattr(np, name)
    check_gradients(lambda x: function(x, axis=1), np.zeros((0, 3)))
    for zeros in (0, 1, 2):
        x = np.array([[2.0, 3.0, 5.0], [7.0, 0.5, 1.5]])
        x[0, :zeros] = 0
        check_gradients(lambda x: np.sum(function(x)) + np.sum(function(x, axis=1)), x)
    check_gradients(lambda x: np.concatenate([np.reshape(x, (3, 0))] * 2), np.zeros((0, 3)))


@pytest.mark.parametrize("shapes", DOT, ids=str)
def test_dot_and_matmul(shapes):
    x, y = (RNG.normal(size=shape) for shape in shapes)
    check_gradients(np.dot, x, y)
    check_gradients(lambda y: np.dot(x, y), y)
    check_gradients(lambda x: x.dot(y) if np.ndim(x) else np.dot(x, y), x)
    if () not in shapes:
        check_gradients(lambda x, y: x @ y, x, y)


@pytest.mark.parametrize("axes", [0, 1, 2, ([1, 0], [0, 1]), (1, 0), ([-1], [-2])], ids=str)
def test_tensordot(axes):
    check_gradients(lambda x, y: np.tensordot(x, y, axes), SQUARE, POSITIVE[0])


def test_gradients_have_the_dtypes_of_their_sources_and_meet_blas():
    value, gradients = gradients_of(np.matmul, np.ones((2, 3), np.float32), np.ones((3, 2)))
    assert value.dtype == np.float64
    assert [gradient.dtype for gradient in gradients] == [np.float32, np.float64]
    value, (x,) = gradients_of(lambda x: np.sum(x, dtype=np.float64), np.ones(3, np.float32))
    assert (value.dtype, x.dtype) == (np.float64, np.float32)
    _, (bias,) = gradients_of(lambda b: np.zeros((256, 512), np.float32) + b, np.zeros(512))
    assert (bias == 256).all()
    # A broadcast gradient has stride 0.
    seed = np.broadcast_to(2.0, (4, 2))
    _, (w,) = gradients_of(lambda w: np.ones((4, 3)) @ w, np.ones((3, 2)), output_gradients=seed)
    assert w.tolist() == [[8, 8]] * 3


@pytest.mark.parametrize("index", re.split(r" \| |\n", INDICES.strip()))
def test_index(index):
    code = compile(f"square[{index}] * 2 + x[{index}]", index, "eval")

    def function(x):
        return eval(code, {"np": np, "x": x, "square": np.square(x)})

    check_gradients(function, RNG.normal(size=(4, 3)))


def test_a_function_without_a_rule_is_named_when_a_gradient_flows_through_it():
    with GradientTape(persistent=True) as tape:
        x, y = tape.watch((X, np.ones(3)))
        result = np.unique(x)
        other = np.sum(y * result[0])
    np.testing.assert_array_equal(result, np.unique(X))
    assert tape.gradient(other, y).shape == (3,)
    message = rf"^np\.unique\b.*{LINE}.*no derivative rule.*nd\.custom_gradient"
    with pytest.raises(TypeError, match=message):
        tape.gradient(result, x)


@pytest.mark.parametrize("name", ["logsumexp", "softmax", "log_softmax"])
def test_softmax_and_its_relatives_are_those_of_scipy(name):
    ours, theirs = getattr(nd, name), getattr(special, name)
    large = np.random.default_rng(0).normal(size=(2, 3, 4)) * 100
    extreme = np.array([[1e4, -1e4, 0.0], [-np.inf, 0.0, 1.0], [700.0, 710.0, 720.0]])
    for x, axis in ((large, None), (large, 0), (large, (0, 2)), (extreme, 1)):
        np.testing.assert_allclose(ours(x, axis), theirs(x, axis), rtol=1e-12)
        value, (gradient,) = gradients_of(lambda x, axis=axis: ours(x, axis), x)
        np.testing.assert_allclose(value, theirs(x, axis), rtol=1e-12)
        assert np.isfinite(gradient).all()
    for dtype in (np.float16, np.float32):
        value, (gradient,) = gradients_of(ours, np.zeros(5000, dtype))
        assert value.dtype == gradient.dtype == dtype
        np.testing.assert_allclose(value, theirs(np.zeros(5000)), rtol=1e-2)
    expected = theirs([7.0, 7.0])
    np.testing.assert_allclose(ours([7, 7]), expected)
    np.testing.assert_allclose(ours(nd.Variable([7.0, 7.0])), expected)
    assert ours(3.0) == theirs(3.0)


@given(
    hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=2, max_side=3),
    st.integers(0, 99),
)
def test_matmul(shapes, seed):
    rng = np.random.default_rng(seed)
    check_gradients(np.matmul, *(rng.normal(size=shape) for shape in shapes.input_shapes))


@given(st.data(), hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=3))
def test_reductions(data, shape):
    axes = data.draw(
        st.none()
        | st.integers(-len(shape), len(shape) - 1)
        | hnp.valid_tuple_axes(len(shape), min_size=1)
    )
    name = data.draw(st.sampled_from(["sum", "mean", "prod", "max", "min", "var"]))
    keepdims = data.draw(st.booleans())
    # Distinct elements: at a tie an extreme has no derivative.
    values = np.random.default_rng(0).permutation(np.linspace(0.5, 2, int(np.prod(shape))))
    check_gradients(
        lambda x: getattr(np, name)(x, axis=axes, keepdims=keepdims) * 1.0, values.reshape(shape)
    )


@given(st.data(), hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4))
def test_indexing(data, shape):
    index = data.draw(
        hnp.basic_indices(shape, allow_newaxis=True)
        | hnp.integer_array_indices(shape)
        | hnp.arrays(bool, shape)
        | st.lists(st.integers(-shape[0], shape[0] - 1), max_size=5)
    )
    if isinstance(index, list):
        index = np.array(index, np.intp)
    check_gradients(lambda x: x[index] * 1.0, np.random.default_rng(0).normal(size=shape))


@given(st.data())
def test_einsum(data):
    lengths = {"i": 2, "j": 3, "k": 1, "l": 0, "m": 2}
    terms = data.draw(st.lists(st.text("ijkm", max_size=3), min_size=1, max_size=3))
    present = sorted(set("".join(terms)))
    output = "".join(data.draw(st.permutations(present)))[: data.draw(st.integers(0, 3))]
    subscripts = ",".join(terms) + "->" + output
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=[lengths[c] for c in term]) for term in terms]
    check_gradients(lambda *arrays: np.einsum(subscripts, *arrays), *operands)


@custom_gradient
def fused(a, b):
    return np.sin(a) * b, lambda g: (g * np.cos(a) * b, g * np.sin(a))


OPERATIONS = [
    lambda a, b: a * b,
    lambda a, b: a - b,
    lambda a, b: np.tanh(a) + b[..., ::-1],
    lambda a, b: np.concatenate([a[..., :1], b[..., 1:]], axis=-1),
    lambda a, b: np.maximum(a, b + 10) * 0.5 + a,
    lambda a, b: np.split(a * 2, 3, axis=-1)[1] * b,
    fused,
    lambda a, b: a.sum(axis=-1, keepdims=True) / 8 + b,
]


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8
    ),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_any_program_has_the_same_gradients_twice(steps, sources):
    """Any program, any sources: asking twice gives the same gradients."""
    values = list(np.random.default_rng(0).uniform(-1, 1, (3, 2, 3)))

    def run(*inputs):
        made = list(inputs)
        for operation, left, right in steps:
            made.append(OPERATIONS[operation](made[left % len(made)], made[right % len(made)]))
        return made[-1], made

    check_gradients(lambda *inputs: run(*inputs)[0], *values, rtol=1e-5)
    with GradientTape(persistent=True) as tape:
        result, made = run(*tape.watch(values))
    asked = [made[k % len(made)] for k in sources]
    for one, other in zip(tape.gradient(result, asked), tape.gradient(result, asked), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)
            assert not np.shares_memory(one, other)
    np.testing.assert_array_equal(values, np.random.default_rng(0).uniform(-1, 1, (3, 2, 3)))
