"""Linear algebra, Fourier transforms, functions made of others, and functions without rules."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape
from tests.autodiff.standin import check_gradients, gradients_of

RNG = np.random.default_rng(0)
SQUARE = RNG.normal(size=(3, 3))
POSITIVE = np.stack([SQUARE @ SQUARE.T + 3 * np.eye(3), np.diag([4.0, 5.0, 7.0]) + 0.1])
TALL = RNG.normal(size=(4, 3))
X = RNG.uniform(0.5, 2, (3, 4))


def symmetric(x):
    return (x + np.swapaxes(x, -1, -2)) / 2


LINALG = {
    "inv": np.linalg.inv,
    "det": np.linalg.det,
    "slogdet": lambda x: np.linalg.slogdet(x)[1],
    "slogdet_by_name": lambda x: np.linalg.slogdet(x).logabsdet,
    "cholesky": lambda x: np.linalg.cholesky(symmetric(x)),
    "eigh": lambda x: np.linalg.eigh(symmetric(x))[0],
    "eigenvectors": lambda x: np.abs(np.linalg.eigh(symmetric(x)).eigenvectors),
    "eigvalsh": lambda x: np.linalg.eigvalsh(symmetric(x)),
    "matrix_power": lambda x: np.linalg.matrix_power(x, 3) + np.linalg.matrix_power(x, -2),
}
OTHERS = {
    "pinv": lambda x: np.linalg.pinv(x.T),
    "singular_values": lambda x: np.linalg.svd(x, full_matrices=False)[1],
    "singular_vectors": lambda x: np.abs(np.linalg.svd(x.T, full_matrices=False).U),
    "nuclear_norm": lambda x: np.linalg.norm(x, "nuc"),
    "multi_dot": lambda x: np.linalg.multi_dot([x, x.T, x]),
    "cross": lambda x: np.cross(x[:, :3], x[:, 1:]),
    "gradient": lambda x: np.gradient(np.concatenate([x, x * x], axis=1), axis=1),
    "fft": lambda x: np.abs(np.fft.fft(x)),
    "ifft": lambda x: np.real(np.fft.ifft(np.fft.fft(x) * np.fft.fft(x * x))),
    "rfft": lambda x: np.abs(np.fft.rfft(x)) + np.abs(np.fft.rfft(x.T, axis=0)).T,
    "irfft": lambda x: np.fft.irfft(np.fft.rfft(x, norm="ortho") * 2, norm="ortho"),
    "fftn": lambda x: np.abs(np.fft.fftn(x)) * np.abs(np.fft.fft2(x)),
    "fftshift": lambda x: np.fft.fftshift(x) * np.fft.ifftshift(x),
    "angle": lambda x: np.angle(x + 1j * x * x),
    "partition": lambda x: np.partition(x[0], 2),
    "linspace": lambda x: np.linspace(x[0, 0], x[0, 1], 5),
    "median": lambda x: np.median(x) + np.median(x, axis=0) + np.median(x[:, :3], axis=1)[0],
    "compress": lambda x: np.compress([True, False, True], x, axis=0),
    "extract": lambda x: np.extract(np.greater(x, 1), x),
    "delete": lambda x: np.delete(x, [0, 2], axis=0),
    "select": lambda x: np.select([np.greater(x, 1.5), np.greater(x, 1)], [x * 2, x * x], 3.0),
    "meshgrid": lambda x: np.multiply(*np.meshgrid(x[0], x[:, 0])),
    "meshgrid_by_row": lambda x: np.meshgrid(x[0], x[:, 0], indexing="ij")[1],
    "nansum": lambda x: np.nansum(x, axis=0) + np.nanmean(x, axis=0),
}
LINE = re.escape(__file__) + r":\d+"
MISSING = {
    "np.interp": lambda x: np.interp(x, [0, 1, 2], [0, 1, 4], left=0),
    "np.apply_along_axis": lambda x: np.apply_along_axis(np.sort, 0, x),
    "np.unique": np.unique,
    "np.linalg.qr": lambda x: np.linalg.qr(x)[1],
    "np.linalg.svd": lambda x: np.linalg.svd(x)[2],
    "np.add.reduceat": lambda x: np.add.reduceat(x, [0, 1]),
    "np.frexp": lambda x: np.frexp(x)[0],
    "np.choose": lambda x: np.choose([0, 2, 0, 1], [x[0], x[1]], mode="clip"),
    "np.divide": lambda x: np.divide(x, x, where=np.ones(x.shape, bool)),
    "np.sum": lambda x: np.sum(x, where=np.ones(x.shape, bool)),
    "np.linalg.norm": lambda x: np.linalg.norm(x, 2, keepdims=True),
    "np.ravel": lambda x: np.ravel(x, order="K"),
    "np.pad": lambda x: np.pad(x, 1, mode="mean"),
}


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra(name):
    check_gradients(LINALG[name], POSITIVE[0], rtol=1e-5)
    check_gradients(LINALG[name], POSITIVE, rtol=1e-5)


@pytest.mark.parametrize("right", [TALL.T, TALL[0], np.stack([TALL.T, TALL.T])], ids=np.shape)
def test_solve(right):
    left = POSITIVE if right.ndim == 3 else POSITIVE[0]
    check_gradients(np.linalg.solve, left, right, rtol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    check_gradients(OTHERS[name], X, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:'where' used without 'out'")
@pytest.mark.parametrize("name", MISSING)
def test_a_function_without_a_rule_works_forward_and_is_named_when_the_gradient_is_asked(name):
    x = np.random.default_rng(0).uniform(0.1, 0.9, (3, 4))
    with GradientTape() as tape:
        tracked = tape.watch(x)
        result = MISSING[name](tracked)
    np.testing.assert_array_equal(result, MISSING[name](x))
    with pytest.raises(
        TypeError, match=rf"^{name}\b.*{LINE}.*no derivative rule.*nd\.custom_gradient"
    ):
        tape.gradient(result, tracked)


def test_a_function_without_a_rule_is_no_error_where_no_gradient_flows():
    with GradientTape() as tape:
        x, y = tape.watch((np.ones(3), np.ones(3)))
        np.unique(x)
        total = np.sum(y * np.unique(x)[0])
    assert tape.gradient(total, y).tolist() == [1, 1, 1]


def test_results_that_were_not_used_count_as_zeros():
    def parts(x):
        u, s, _vt = np.linalg.svd(x, full_matrices=False)
        return np.sum(s) + np.abs(u[0, 0])

    check_gradients(parts, X, rtol=1e-5)


def test_rules_that_compute_in_float64_are_cast():
    for function in (
        lambda x: np.logaddexp2(x, 1.0),
        np.linalg.pinv,
        lambda x: np.fft.rfft(x).real,
    ):
        _, (gradient,) = gradients_of(function, X.astype(np.float32))
        assert gradient.dtype == np.float32
