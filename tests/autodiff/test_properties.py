"""What holds for any shapes, axes and indices."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ndistribute.autodiff import GradientTape, custom_gradient
from tests.autodiff.standin import check_gradients

SEEDS = st.integers(0, 99)


@given(
    hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=3),
    st.sampled_from(
        [
            np.multiply,
            lambda x, y: x / y,
            lambda x, y: np.where(np.greater(x, 1), x, y) - y,
            lambda x, y: np.maximum(x, y) * x**y,
        ]
    ),
    SEEDS,
)
def test_broadcasting(shapes, function, seed):
    rng = np.random.default_rng(seed)
    check_gradients(function, *(rng.uniform(0.5, 2, shape) for shape in shapes.input_shapes))


@given(
    hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=2, max_side=3), SEEDS
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
def test_programs(steps, sources):
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
