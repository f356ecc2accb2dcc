"""Derivatives of reductions, over all axes and with them kept."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.autodiff.standin import check_gradients, gradients_of

REDUCTIONS = ["sum", "mean", "prod", "max", "min", "var", "std", "amax", "amin"]
AXES = [None, 0, 1, -1, (0, 1), (-1, 0), ()]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name):
    x = np.random.default_rng(0).uniform(0.5, 2, (3, 4))
    function = getattr(np, name)
    axes = AXES[:-1] if name in ("var", "std") else AXES  # The deviation of one element is 0.
    for axis, keepdims in itertools.product(axes, [False, True]):
        kept = {"keepdims": keepdims}
        check_gradients(lambda x, a=axis, kept=kept: function(x, axis=a, **kept), x)
        check_gradients(lambda x, a=axis, kept=kept: np.multiply(function(x * x, a, **kept), 3), x)


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min", "var", "std", "cumsum"])
def test_methods(name):
    x = np.random.default_rng(0).uniform(0.5, 2, (3, 4))
    check_gradients(lambda x: getattr(x, name)(), x)
    check_gradients(lambda x: getattr(x, name)(axis=1), x)
    check_gradients(lambda x: getattr(x, name)(0), x)


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max"])
def test_a_number(name):
    check_gradients(getattr(np, name), np.float64(1.5))


@pytest.mark.parametrize("name", ["sum", "prod", "cumsum"])
def test_empty(name):
    check_gradients(getattr(np, name), np.zeros((0, 3)))
    check_gradients(lambda x: getattr(np, name)(x, axis=1), np.zeros((0, 3)))


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_product_with_zeros(zeros):
    x = np.array([[2.0, 3.0, 5.0], [7.0, 0.5, 1.5]])
    x[0, :zeros] = 0
    check_gradients(np.prod, x)
    check_gradients(lambda x: np.prod(x, axis=1), x)


def test_elements_that_tie_share_the_gradient_of_an_extreme():
    _, (x,) = gradients_of(
        lambda x: np.max(x, axis=1), np.array([[1.0, 3.0, 3.0], [4.0, 0.0, 1.0]])
    )
    assert x.tolist() == [[0, 0.5, 0.5], [1, 0, 0]]


@pytest.mark.parametrize("ddof", [0, 1])
def test_degrees_of_freedom(ddof):
    x = np.random.default_rng(0).normal(size=(3, 4))
    check_gradients(lambda x: np.var(x, axis=0, ddof=ddof), x)
    check_gradients(lambda x: np.std(x, ddof=ddof), x)
    check_gradients(lambda x: x.std(1, ddof=ddof), x)


def test_ufuncs_reduce_and_accumulate():
    x = np.random.default_rng(0).uniform(0.5, 2, (3, 4))
    check_gradients(lambda x: np.add.reduce(x) + np.maximum.reduce(x), x)
    check_gradients(lambda x: np.multiply.reduce(x, axis=1, keepdims=True), x)
    check_gradients(lambda x: np.add.accumulate(x, axis=1), x)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_along_an_axis(axis):
    x = np.random.default_rng(0).normal(size=(3, 4))
    check_gradients(lambda x: np.cumsum(x, axis=axis), x)
    check_gradients(lambda x: np.sort(x, axis=axis), x)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("n", [1, 2])
def test_diff(n, axis):
    check_gradients(lambda x: np.diff(x, n, axis), np.random.default_rng(0).normal(size=(3, 4)))


def test_averages():
    x, w = np.random.default_rng(0).uniform(0.5, 2, (2, 3, 4))
    check_gradients(lambda x, w: np.average(x, axis=1, weights=w), x, w)
    check_gradients(lambda x: np.average(x, axis=0), x)
    check_gradients(lambda x: np.ptp(x, axis=1), x)


@pytest.mark.parametrize("axis", [None, 0, 1, (0, 1)], ids=str)
def test_norm(axis):
    x = np.random.default_rng(0).normal(size=(3, 4))
    check_gradients(lambda x: np.linalg.norm(x, axis=axis, keepdims=True), x)
    check_gradients(lambda x: np.linalg.norm(x, axis=axis), x)


@pytest.mark.parametrize("order", [None, 1, 2, np.inf, 3])
def test_norms_of_vectors(order):
    x = np.random.default_rng(0).uniform(0.5, 2, (3, 4))
    check_gradients(lambda x: np.linalg.norm(x, order, axis=1), x)


def test_sums_in_another_dtype():
    value, (x,) = gradients_of(lambda x: np.sum(x, dtype=np.float64), np.ones(3, np.float32))
    assert value.dtype == np.float64
    assert x.dtype == np.float32


def test_logsumexp_is_stable_in_float32():
    def logsumexp(x):
        top = x.max(axis=-1, keepdims=True)
        return np.log(np.sum(np.exp(x - top), axis=-1)) + top[..., 0]

    x = np.array([[1000.0, 999.0, -1000.0]])
    check_gradients(logsumexp, x / 500)
    _, (gradient,) = gradients_of(logsumexp, x.astype(np.float32))
    np.testing.assert_allclose(gradient, [[0.7310586, 0.26894143, 0]], rtol=1e-5)
