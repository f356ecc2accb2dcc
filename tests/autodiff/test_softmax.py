"""`logsumexp`, `softmax` and `log_softmax` are SciPy's, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

import ndistribute as nd
from tests.autodiff.standin import gradients_of

X = np.random.default_rng(0).normal(size=(2, 3, 4)) * 100
EXTREME = np.array([[1e4, -1e4, 0.0], [-np.inf, 0.0, 1.0], [700.0, 710.0, 720.0]])
NAMES = ("logsumexp", "softmax", "log_softmax")


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_scipy(name, axis):
    ours, theirs = getattr(nd, name), getattr(special, name)
    np.testing.assert_allclose(ours(X, axis), theirs(X, axis), rtol=1e-12)
    value, (gradient,) = gradients_of(lambda x: ours(x, axis), X)
    np.testing.assert_allclose(value, theirs(X, axis), rtol=1e-12)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", NAMES)
def test_large_and_masked_values_do_not_overflow(name):
    value, (gradient,) = gradients_of(lambda x: getattr(nd, name)(x, axis=1), EXTREME)
    np.testing.assert_allclose(value, getattr(special, name)(EXTREME, axis=1))
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", NAMES)
def test_the_dtype_is_kept_and_long_sums_are_exact(name, dtype):
    value, (gradient,) = gradients_of(getattr(nd, name), np.zeros(5000, dtype))
    assert value.dtype == gradient.dtype == dtype
    expected = {"logsumexp": np.log(5000), "softmax": 1 / 5000, "log_softmax": -np.log(5000)}
    np.testing.assert_allclose(value, expected[name], rtol=1e-3)


def test_lists_numbers_and_variables_are_taken():
    assert nd.softmax([0, 0]).tolist() == [0.5, 0.5]
    assert nd.logsumexp(3.0) == 3
    assert nd.log_softmax(nd.Variable([7.0])).tolist() == [0]
