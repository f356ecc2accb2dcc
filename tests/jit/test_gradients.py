"""Gradients in a compiled function are those of the plain one, or refused with a line."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.errors import TracingError
from tests.autodiff.standin import agree, both, dense, gradients_of
from tests.autodiff.test_expressions import DIFFERENTIATED, REFUSED_TWICE, X, lines, named

pytest.importorskip("jax")

EXPRESSIONS = lines(DIFFERENTIATED)
# They need values before the program runs, or a function or an option that JAX does not have.
REFUSED = """
np.nanmax(np.where(mask, x, np.nan), axis=1) - np.nanmin(np.where(mask, x, np.nan), axis=1)
np.nanmedian(np.where(mask, x, np.nan), axis=1)
np.nanquantile(np.where(mask, x, np.nan), 0.4) + np.nanpercentile(x, 70, axis=0)
np.take(x, range(2)) + x.compress([True, False, True], axis=0).sum()
np.linalg.lstsq(x.T, y[0])[0] + np.linalg.lstsq(q, x[:, 0])[0]
np.linalg.lstsq(x.T, x[:2].T * y[:2].T)[0]
np.linalg.lstsq(x.T, y[:2].T)[1] + np.linalg.lstsq(y.T, v)[0].sum() + np.linalg.lstsq(x.T, v)[3][:2]
np.linalg.eigvals(p).real
np.abs(np.linalg.eig(q).eigenvectors) + np.abs(np.linalg.eig(s).eigenvectors)
x[x > 0.4]
np.compress(mask, x, axis=1) + np.extract(x > 0.6, x).sum()
np.bincount(labels, weights=x[:, 0], minlength=5)
np.bincount(labels, x[:, 1]) + np.bincount(labels > 0, x[:, 1]).sum()
np.tril(v) + 2 * np.triu(v)
special.expit(x) + special.log_expit(x) + special.logit(x)
special.erf(x) + special.erfc(x) + special.erfcx(x) + special.erfi(x) + special.dawsn(x)
special.erfinv(x) + special.erfcinv(x)
special.gammaln(x) + special.loggamma(x) + special.gamma(x) + special.rgamma(x)
special.digamma(x) + special.psi(x)
special.huber(0.3, x) + special.huber(x, y)
special.pseudo_huber(0.3, x) + special.pseudo_huber(x, y)
special.expm1(x) + special.log1p(x) + special.exp2(x) + special.exp10(x) + special.cbrt(x)
special.j0(x) + special.j1(x) + special.k0(x) + special.k1(x) + special.iv(2, x) + special.jv(2, x)
windows(x, 2, axis=1).mean(axis=-1)
np.einsum("ijkl,kl->ij", windows(x, (2, 3)), y[:2, :3])
windows(np.stack([x, y]), (2, 2), axis=(1, 2)).max(axis=(-1, -2))
np.convolve(v, 2.0) + np.convolve(a, v)
np.interp(x, [0.0, 0.5, 1.0], [1.0, 3.0, 2.0])
np.sum([0.5, 1.0, 2.0] * x[:, 0]) + sum(x[0]) + max(x[0])
"""
DIRECTION = np.random.default_rng(5).uniform(-1, 1, X.shape)


def derivatives(expression, twice):
    """Return a function with the value and the gradients of an expression."""
    code = compile(expression, expression, "eval")

    def function(x):
        return eval(code, named(x))

    def compute(x):
        value, (gradient,) = gradients_of(function, x)
        if expression in REFUSED_TWICE or not twice:
            return value, dense(gradient)
        return value, dense(gradient), both(function, x, np.ones_like(value), DIRECTION)[1]

    return compute


def check(expressions, twice=False):
    """Compare derivatives, and return the errors of those that are refused."""
    table, errors = [(e, derivatives(e, twice)) for e in expressions], {}

    @nd.function
    def compiled(x):
        results = []
        for expression, compute in table:
            try:
                results.append(compute(x))
            except (TracingError, TypeError, ValueError) as error:
                errors[expression] = str(error)
                results.append(())
        return results

    results, wrong = compiled(X), []
    for (expression, compute), result in zip(table, results, strict=True):
        for k, (value, other) in enumerate(zip(result, compute(X), strict=False)):
            try:
                assert value.dtype == other.dtype
                agree(value, other, 1e-9)
            except AssertionError as error:
                wrong.append(f"{expression}, derivative {k}: {error}")
    assert not wrong, "\n".join(wrong)
    return errors


@pytest.mark.parametrize("part", range(0, 6, 2))
def test_gradients_are_those_of_plain_code(part):
    expressions = EXPRESSIONS[part::6]  # Every second one, because compiling takes long.
    errors = check(expressions)
    assert list(errors) == [e for e in expressions if e in set(lines(REFUSED))], errors


def test_second_derivatives_are_those_of_plain_code():
    refused = {*lines(REFUSED), *(e for e in EXPRESSIONS if "prod" in e)}  # Its rule looks for 0.
    assert check([e for e in EXPRESSIONS[::8] if e not in refused], twice=True) == {}


def test_softmax_in_nested_tapes_and_what_a_custom_gradient_computes_again():
    @nd.custom_gradient
    def noisy(x):
        noise = nd.get_replica_context().rng.normal(size=3)
        return x * noise, lambda g: [g * noise]

    def second(function):
        def compute(x):
            _, result = both(function, x, np.arange(3.0), np.ones(3))
            return result

        return compute

    x = np.array([0.5, -1.0, 2.0])
    for function in (nd.softmax, nd.log_softmax):
        agree(nd.function(second(function))(x), second(function)(x), 1e-12)
    with pytest.raises(TypeError, match="returned a different result"):
        nd.function(second(lambda x: noisy(x) * x))(x)


def test_rows_stay_rows_and_stop_gradient_and_custom_gradient_work():
    table, rows = nd.Variable(np.arange(8.0).reshape(4, 2)), np.array([1, 3, 1])

    @nd.custom_gradient
    def doubled(x):
        return x * 2, lambda g: [g * 5]

    def step(rows):
        with nd.GradientTape() as tape:
            taken = np.take(table, rows, axis=0)
            loss = np.sum(doubled(taken) * nd.stop_gradient(taken))
        return loss, tape.gradient(loss, table)

    (loss, gradient), (plain, expected) = nd.function(step)(rows), step(rows)
    assert type(gradient) is type(expected)
    assert loss == plain
    np.testing.assert_array_equal(dense(gradient), dense(expected))
    np.testing.assert_array_equal(nd.function(lambda r: dense(step(r)[1]))(rows), dense(expected))
