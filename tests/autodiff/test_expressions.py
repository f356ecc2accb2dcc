"""What users write in a training step is differentiated right, or refused by name.

One expression a line, of `x` (3 by 4, positive, no two elements alike), of a number `a`, a vector
`v`, a square matrix `q`, a positive definite one `p`, stacks `s` of those and `c` of `x`, and an
empty array `e`, which are made from it, and of the plain arrays `y` (like `x`), `mask`, `rows` and
`labels`.
"""

import importlib
import linecache
import math
import re
import traceback
from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse, special

import ndistribute as nd
from ndistribute.autodiff import GradientTape
from ndistribute.autodiff.rules import COMPOSED, JOINT_RULES, RULES, RULES_BY_PATH
from ndistribute.autodiff.rules.elementwise import SPECIAL, special_rules
from ndistribute.autodiff.rules.placing import placed
from ndistribute.numpy_functions import cast
from tests.autodiff.standin import check_gradients, check_second, dense

TABLES = (RULES, RULES_BY_PATH, JOINT_RULES, COMPOSED)
RNG = np.random.default_rng(7)
X, EYE = RNG.uniform(0.2, 0.9, (3, 4)), np.eye(3)
PLAIN = {
    "labels": np.array([1, 3, 0]),
    "mask": np.array([True, False, True, True]),
    "math": math,
    "nd": nd,
    "np": np,
    "plain": np.zeros(3),
    "rows": np.array([2, 0, 2]),
    "sparse": sparse,
    "special": special,
    "windows": np.lib.stride_tricks.sliding_window_view,
    "y": RNG.uniform(0.2, 0.9, (3, 4)),
}

DIFFERENTIATED = """
# arithmetic
x + y - 2 * x / y + 1 / x
x**2 + x**0.5 + x**y + 2**x
-x + abs(x - 0.5) + np.abs(-x)
x // 0.3 * x + x % 0.3
np.add(x, y) * np.subtract(1, x)
np.multiply(x, y) + np.divide(y, x) + np.true_divide(x, 3)
np.power(x, 3) + np.float_power(x, 1.5)
np.square(x) + np.sqrt(x) + np.cbrt(x) + np.reciprocal(x)
np.exp(x) + np.exp2(x) + np.expm1(x)
np.log(x) + np.log2(x) + np.log10(x) + np.log1p(x)
np.sin(x) + np.cos(x) + np.tan(x)
np.arcsin(x) + np.arccos(x) + np.arctan(x) + np.arctan2(x, y)
np.sinh(x) + np.cosh(x) + np.tanh(x)
np.arcsinh(x) + np.arccosh(x + 1) + np.arctanh(x)
np.maximum(x, 0.5) + np.minimum(x, y) + np.fmax(x, y) + np.fmin(x, 0.4)
np.clip(x, 0.3, 0.7) * x + x.clip(0.3)
np.sign(x - 0.5) * x + np.copysign(x, y - 0.5)
np.hypot(x, y) + np.logaddexp(x, y) + np.logaddexp2(x, 0.0)
np.fmod(x, 0.3) + np.mod(x, 0.3) + np.remainder(y, x)
np.deg2rad(x) + np.rad2deg(x) + np.degrees(x) + np.radians(x)
np.sinc(x) + np.ldexp(x, 2)
np.nan_to_num(x) + np.positive(x) + np.negative(x) * x
np.divmod(x, 0.3)[1]
np.floor(x) * x + np.round(x, 1) * x + np.rint(x) * x + np.trunc(x) * x
np.unwrap(5 * x)
np.where(x > 0.5, x, 0.01 * x)
np.where(mask, x, np.exp(x))
np.heaviside(x - 0.5, 0.5) * x
# powers, numbers and empty arrays
x**-1 + x**1 + x**3 + x**0 + x ** np.array(2, x.dtype) + (-x) ** 3 + np.square(-x)
np.abs(-a) + np.square(a) + np.sqrt(a) + np.tanh(a) + np.exp(a) + np.copy(a) + np.conj(a) + a**0.5
np.sum(np.sqrt(e) + np.tanh(e) + np.exp(e) + np.copy(e) + np.nan_to_num(e) + e**0.5 + abs(e)) + x
np.nan_to_num(a) + np.astype(x, "f8")
np.sum(a[None] * np.ones(3)) + a * a
# complex
np.abs(np.exp(1j * x) + x)
np.abs(np.exp(1j * a) + a) + np.real(a * (1 + 2j)) + np.imag(a * 3j)
np.real(x * (1 + 2j)) + np.imag(x * (2 + 3j) * x)
np.angle(x + 1j * y * x)
np.imag(a * 1j) + np.angle(a + 1j)
np.vecdot(x + 1j * y, 1j * x).imag
(np.conj(x * 1j) * (x + 2j)).real
np.real_if_close(x * (1 + 0j)) if False else np.real(x + 0j)
# reductions
np.sum(x) + np.sum(x, axis=0) + x.sum(axis=1, keepdims=True)
np.mean(x, axis=-1) + x.mean()
np.var(x, axis=0) + x.var(ddof=1)
np.std(x, axis=1, keepdims=True) + x.std()
np.prod(x, axis=0) + x.prod()
np.max(x, axis=1) + np.amin(x) + x.min(axis=(0, 1))
np.ptp(x, axis=0)
np.average(x, axis=0, weights=y)
np.average(x, axis=1)
np.median(x, axis=1) + np.median(x)
np.median(x, axis=(0, 1), keepdims=True)
np.quantile(x, 0.3, axis=0)
np.quantile(x, [0.1, 0.55, 0.9], axis=1, keepdims=True)
np.percentile(x, [25, 75]) + np.percentile(x, 60, method="midpoint")
np.quantile(np.stack([x, x * y, y]), [0.2, 0.7], axis=(0, 2))
np.cumsum(x, axis=1) + x.cumsum(axis=0)
np.cumprod(x, axis=1) + x.cumprod().reshape(3, 4)
np.logaddexp(v[0], v[1]) + np.add.reduce(x, axis=0) + np.multiply.reduce(x, axis=0)
np.add.accumulate(x, axis=1)
np.nansum(np.where(mask, x, np.nan), axis=0)
np.nanmean(np.where(mask, x, np.nan), axis=1)
np.nanmax(np.where(mask, x, np.nan), axis=1) - np.nanmin(np.where(mask, x, np.nan), axis=1)
np.nanstd(np.where(mask, x, np.nan), axis=1) + np.nanvar(np.where(mask, x, np.nan))
np.nanprod(x, axis=0) + np.nancumsum(x, axis=0) + np.nancumprod(x, axis=1)
np.nanmedian(np.where(mask, x, np.nan), axis=1)
np.nanquantile(np.where(mask, x, np.nan), 0.4) + np.nanpercentile(x, 70, axis=0)
np.cov(x) @ np.cov(x, ddof=0)
np.take(x, range(2)) + x.compress([True, False, True], axis=0).sum()
x[range(2)] + x[(0, 2), range(2)].sum()
np.trapezoid(x, axis=1) + np.trapezoid(x, [0.0, 1.0, 3.0, 4.0])
np.trapezoid(np.exp(v), v)
np.count_nonzero(x > 0.5) * x
# linear algebra
x @ y.T @ x
np.matmul(x, y.T) + np.dot(x, y.T) + x.dot(y.T)
np.dot(v, v) + np.vdot(v, v) + np.inner(v, v) + v @ v
np.outer(v, v) + np.multiply.outer(v, v)
np.tensordot(x, y, axes=([0, 1], [0, 1])) * np.tensordot(x, y.T, axes=1)
np.einsum("ij,kj->ik", x, y)
np.einsum("ii->i", q) + np.einsum("ii", q) + np.einsum("ij->j", q)
np.einsum("...j,...j->...", x, y) + np.einsum("...j,j", x, v)
np.kron(x, y[:2]) + np.kron(y[0], x).sum()
np.cross(x[:, :3], y[:, 1:])
np.trace(q) + np.linalg.trace(q) + np.diagonal(q) + np.linalg.diagonal(q)
np.linalg.norm(x) + np.linalg.norm(x, axis=1) + np.linalg.norm(x, "fro")
np.linalg.norm(v, 1) + np.linalg.norm(v, np.inf) + np.linalg.norm(v, 3) + np.linalg.norm(v, -np.inf)
np.linalg.norm(x, 2) + np.linalg.norm(x, "nuc") + np.linalg.norm(x, 1) + np.linalg.norm(x, np.inf)
np.linalg.vector_norm(x, axis=1) + np.linalg.matrix_norm(x)
np.linalg.inv(q) + np.linalg.pinv(q)
np.linalg.pinv(x)
np.linalg.det(q)
np.linalg.slogdet(p).logabsdet
np.linalg.solve(q, x)
np.linalg.solve(q, x[:, 0])
np.linalg.solve(p, y)
np.linalg.lstsq(x.T, y[0])[0] + np.linalg.lstsq(q, x[:, 0])[0]
np.linalg.lstsq(x.T, x[:2].T * y[:2].T)[0]
np.linalg.lstsq(x.T, y[:2].T)[1] + np.linalg.lstsq(y.T, v)[0].sum() + np.linalg.lstsq(x.T, v)[3][:2]
np.linalg.cholesky(p)
np.linalg.eigh(p)[0]
np.linalg.eigh(p).eigenvectors ** 2
np.linalg.eigvalsh(p)
np.linalg.eigvals(p).real
np.linalg.svd(x, compute_uv=False)
np.linalg.svd(x, full_matrices=False)[0] ** 2
np.linalg.svd(x, full_matrices=False).Vh ** 2
np.linalg.svdvals(x) + np.linalg.svd(x)[1]
np.linalg.svd(np.stack([x, y]), full_matrices=False)[0] ** 2
np.linalg.svd(np.stack([x, y]))[1]
np.linalg.qr(np.stack([q, q @ q]))[1] + np.linalg.pinv(np.stack([q, q.T]))
np.linalg.norm(np.stack([q, q.T]), 2, axis=(1, 2)) + np.linalg.norm(np.stack([q, p]), -1, (1, 2))
np.linalg.qr(q)[0] + np.linalg.qr(q)[1]
np.linalg.qr(x.T).R
np.linalg.matrix_power(q, 3)
np.linalg.inv(s) + np.linalg.matrix_power(s, -2) + np.linalg.matrix_power(s, 3)
np.linalg.det(s) + np.linalg.slogdet(s).logabsdet
np.linalg.cholesky(s) + np.linalg.eigvalsh(s)[:, None]
np.abs(np.linalg.eigh(s).eigenvectors)
np.abs(np.linalg.eig(q).eigenvectors) + np.abs(np.linalg.eig(s).eigenvectors)
np.linalg.solve(p, x.T[:3]) + np.linalg.solve(s, np.stack([q, q])).sum()
np.linalg.multi_dot([x, x.T, x])
np.linalg.cond(q)
np.vecdot(x, y) + np.linalg.vecdot(x, x)
# indexing
x[0] + x[1, 2] + x[:, -1].sum() + x[..., 0].sum()
x[:, ::2] + x[:, 1::2]
x[rows] * 2
x[np.arange(3), labels]
x[:, mask]
x[x > 0.4]
x[[0, 1, 1]] + x * (x > y) + np.where(x <= y, x, 0) * (y != 0)
x[:, None, :] * x[None, :, :]
x[np.ix_([0, 2], [1, 3])]
np.take(x, rows, axis=0) + x.take(rows, axis=0)
np.take(x, [5, -9], mode="wrap")
np.take_along_axis(x, labels[:, None], axis=1)
np.take_along_axis(x, np.argsort(x, axis=1)[:, -2:], axis=1)
np.compress(mask, x, axis=1) + np.extract(x > 0.6, x).sum()
np.select([x > 0.7, x > 0.4], [x**2, x], 0.1)
np.delete(x, 1, axis=0)
np.bincount(labels, weights=x[:, 0], minlength=5)
np.bincount(labels, x[:, 1]) + np.bincount(labels > 0, x[:, 1]).sum()
np.diag(v) + np.diag(q).sum() + np.diagflat(v)
np.tril(x) + np.triu(x, 1)
np.tril(v) + 2 * np.triu(v)
np.argmax(x) * x + np.argsort(x, axis=0) * x + np.searchsorted([0.3, 0.6], x) * x
# shape
x.reshape(4, 3) @ x + np.reshape(x, (2, -1)).sum()
x.T @ x + np.transpose(x) @ x + x.transpose(1, 0) @ x
np.ravel(x) + x.flatten() + x.ravel()
np.expand_dims(x, 0) + x[None] + np.squeeze(x[None])
np.swapaxes(x, 0, 1) + np.moveaxis(x, 0, 1)
np.broadcast_to(v, (3, 4)) * x
np.broadcast_arrays(v, x)[0] * x
np.concatenate([x, y]) + np.concatenate([y, x])
np.stack([x, y], axis=-1) + np.stack([a, a * a])
np.vstack([x, v]) + np.hstack([x, x])[0, :4] + np.dstack([x, x]).sum()
np.column_stack([v, v]) + np.append(v, 1.0).sum()
np.block([[x, x], [x * x, y]])
np.block([v, v * v])
np.split(x, 2, axis=1)[0] + np.array_split(x, 2)[0][:, :2].sum() + np.hsplit(x, 2)[1]
np.unstack(x, axis=1)[1] if hasattr(np, "unstack") else x[:, 1]
np.tile(x, (2, 2)) + np.tile(x, 2).sum()
np.repeat(x, 2, axis=1) + x.repeat(2).sum()
np.repeat(x, [1, 0, 3], axis=0)
np.flip(x, axis=1) + np.fliplr(x) + np.flipud(x) + x[::-1]
np.roll(x, 1, axis=0) + np.roll(x, 2) + np.rot90(x, 2)
np.resize(x, (4, 4))
np.atleast_2d(v) + np.atleast_3d(x).sum() + np.atleast_1d(a)
np.meshgrid(v, x[:, 0])[1] * np.meshgrid(v, x[:, 0])[0]
np.linspace(a, 2.0, 5) + np.linspace(v, x[1], 5, axis=1).sum()
np.full_like(x, a) + np.zeros_like(x) + np.ones_like(x) * x
np.copy(x) + x.copy() + x.astype(np.float64)
# shapes of an array of 2 by 3 by 4
np.reshape(c, (6, 4), order="F") + c.reshape((6, 4), order="F") * np.ones((6, 4))
np.ravel(c, order="F") * c.flatten()
np.transpose(c, (1, 2, 0)) * c.transpose(1, 2, 0) + c.T.transpose((1, 0, -1)).sum()
np.moveaxis(c, (0, 1), (2, 0)) + np.moveaxis(c, source=0, destination=1).sum()
np.squeeze(c[:1]) + c[:1].squeeze(0)
np.broadcast_to(c[:, :1], (5, 2, 3, 4))
np.atleast_2d(c[0, 0, 0]) + np.atleast_3d(c[0, 0]) * np.atleast_3d(c[0])
np.rot90(c, 1, (1, 2))
np.roll(c, (1, 1), (1, 2)) + np.flip(c, (0, 2)) * np.flip(c)
np.repeat(c, 2, axis=1) + c.repeat(2, axis=-2)
np.tile(c, (2, 1, 1, 2))
np.tile(c[0, 0], (3, 2))
np.tril(c, k=-1) + np.triu(c, 1)
np.diagonal(c, 1, 1, 2) * c.diagonal(1, axis1=1, axis2=2) + np.diagonal(c, -1, 0, 2).sum()
np.diag(c[0], 1) * np.diag(c[0], -1)[0] + np.diag(c[0, 0], 1)[0, 1]
np.full_like(c, c[0, 0, 0], shape=(2, 2)) + np.full_like(c[0, :2, :2], 3)
np.stack((*np.meshgrid(c[0, 0], [1.0]), c[0, :1])) + np.meshgrid(c[0, 0], c[0, :, 0])[1][0]
np.meshgrid(c[0, 0], c[0, :, 0], indexing="ij")[1]
np.trace(c, 1, 1, 2, dtype=np.float64) + c.trace(offset=1, axis1=1, axis2=2)
np.trace(c, 1, 1, 2, None, None) + np.trace(c, 0, 1, 2, out=None)
np.split(c * c, [1, 3], axis=-1)[1] + np.array_split(c, 3, axis=2)[0]
np.split(c, indices_or_sections=2, axis=-1)[1] + np.split(ary=c, indices_or_sections=[2], axis=2)[0]
np.dsplit(c, 2)[1] * np.vsplit(c, 2)[1][:, :, :2]
np.multiply(*c) + sum(row * k for k, row in enumerate(c))
np.concatenate([c, c[0]], axis=None)
np.stack([c.sum(), c[0, 0, 0], 3.0])
np.hstack([c[0, 0], c[1, 1], 2.0])
np.append(c, c, axis=1)
np.delete(c, [0, 2], axis=2)
np.var(c, 1, correction=1) + np.std(c, 1, correction=1) + c.std(1, ddof=1)
np.cumulative_sum(c, axis=1) if hasattr(np, "cumulative_sum") else c
np.matvec(c[0], c[0, 0]) * np.vecmat(c[0, :, 0], c[0])[:3] if hasattr(np, "matvec") else c
np.take(c, 1, axis=1) + c.take([[-1, 0], [1, 1]], -1).sum() + np.take(c, [0, 2, 2])[0]
np.take_along_axis(c, np.zeros((1, 1, 1), int), -1) + np.take_along_axis(c, np.argsort(c, 0), 0)
c[0] * c[1] + c[1] + c[0, 0] + np.sum(c) + c[1] * np.square(c)[1, [0, 0, 2]]
# transforms
np.abs(np.fft.fft(x))
np.abs(np.fft.fft(x, 6)) + np.abs(np.fft.fft(x, 6, axis=0)).sum()
np.real(np.fft.ifft(np.fft.fft(x) * np.fft.fft(y)))
np.abs(np.fft.rfft(x)) ** 2
np.abs(np.fft.rfft(x, 7, norm="ortho"))
np.fft.irfft(np.fft.rfft(x) * np.fft.rfft(y), n=4)
np.fft.irfft(np.fft.rfft(x[:, :3]), n=3) + np.fft.irfft(np.fft.rfft(x), n=7)[:, :3]
np.abs(np.fft.fft2(x)) + np.abs(np.fft.ifft2(x)) + np.abs(np.fft.fftn(x)) + np.abs(np.fft.ifftn(x))
np.fft.irfft2(np.fft.rfft2(x)) + np.fft.irfftn(np.fft.rfftn(x, norm="ortho"), s=(3, 4), axes=(0, 1))
np.abs(np.fft.fftn(np.stack([x, y]), (5, 3), (1, 2), "ortho")) + np.abs(np.fft.rfft2(x, (5, 4)))
np.fft.irfftn(np.fft.rfftn(np.stack([x, y]), axes=(2, 1)), axes=(2, 1), norm="forward")
np.fft.fftfreq(4, a)
np.fft.fftshift(x) * np.fft.ifftshift(x)
np.fft.hfft(x) + np.abs(np.fft.ihfft(x)).sum()
# sorting
np.sort(x, axis=1) * y
np.sort(x, axis=None)[-3:]
x[np.arange(3), np.argmax(x, axis=1)]
np.partition(x, 2, axis=1)[:, 2:].sum(axis=1)
np.max(x, axis=1) - np.sort(x, axis=1)[:, -2]
# special functions
special.expit(x) + special.log_expit(x) + special.logit(x)
special.erf(x) + special.erfc(x) + special.erfcx(x) + special.erfi(x) + special.dawsn(x)
special.erfinv(x) + special.erfcinv(x)
special.ndtr(x) + special.log_ndtr(x) + special.ndtri(x)
special.gammaln(x) + special.loggamma(x) + special.gamma(x) + special.rgamma(x)
special.digamma(x) + special.psi(x)
special.beta(x, y) + special.betaln(y, x)
special.xlogy(x, y) + special.xlogy(y, x) + special.xlog1py(x, y) + special.xlog1py(y, x)
special.entr(x) + special.rel_entr(x, y) + special.rel_entr(y, x)
special.kl_div(x, y) + special.kl_div(y, x)
special.huber(0.3, x) + special.huber(x, y)
special.pseudo_huber(0.3, x) + special.pseudo_huber(x, y)
special.expm1(x) + special.log1p(x) + special.exp2(x) + special.exp10(x) + special.cbrt(x)
special.i0(x) + special.i0e(x) + special.i1(x) + special.i1e(x)
special.j0(x) + special.j1(x) + special.k0(x) + special.k1(x) + special.iv(2, x) + special.jv(2, x)
special.gammainc(2.0, x) + special.gammaincc(2.0, x) + special.betainc(2.0, 3.0, x)
special.expi(x) + special.exp1(x) + special.spence(x)
special.softplus(x) if hasattr(special, "softplus") else np.logaddexp(x, 0)
nd.logsumexp(x) + nd.logsumexp(x, axis=1) @ nd.logsumexp(x, axis=1, keepdims=True)
nd.softmax(x) + nd.softmax(x, axis=-1) * y
nd.log_softmax(x) + nd.log_softmax(x, axis=1)
# padding, windows, interpolation
np.pad(x, 1) + np.pad(x, 1, constant_values=2.0)
np.pad(x, ((1, 2), (0, 3)), mode="edge")
np.pad(x, 2, mode="reflect") * np.pad(x, 2, mode="symmetric") * np.pad(x, 2, mode="wrap")
windows(x, 2, axis=1).mean(axis=-1)
np.einsum("ijkl,kl->ij", windows(x, (2, 3)), y[:2, :3])
windows(np.stack([x, y]), (2, 2), axis=(1, 2)).max(axis=(-1, -2))
np.convolve(v, [1.0, 2.0, 3.0]) + np.convolve(v, [1.0, 2.0, 3.0], "same").sum()
np.convolve(v, 2.0) + np.convolve(a, v)
np.convolve(v, x[1, :3], "valid") + np.convolve(v, x[1], "same")[:2]
np.correlate(v, x[0, :2]) + np.correlate(x[0, :2], v, "same")[:3]
np.correlate(v, y[0], "full")
np.interp(x, [0.0, 0.5, 1.0], [1.0, 3.0, 2.0])
np.interp([0.3, 0.6], np.sort(v), x[1])
np.diff(x, axis=1) + np.diff(x, n=1, axis=1) ** 2
np.ediff1d(x)
np.gradient(x, axis=1) + np.gradient(x, 0.5)[0]
# losses and layers, as they are written
np.mean((x @ y.T - 1) ** 2)
-np.mean(np.log(nd.softmax(x, axis=1)[np.arange(3), labels]))
np.maximum(0, 1 - x * y).mean()
np.mean(np.logaddexp(0, x) - x * y)
(x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
0.5 * x * (1 + np.tanh(0.79788456 * (x + 0.044715 * x**3)))
1 / (1 + np.exp(-x)) + x / (1 + np.abs(x))
np.sum([0.5, 1.0, 2.0] * x[:, 0]) + sum(x[0]) + max(x[0])
np.multiply(x, [1.0, 2.0, 3.0, 4.0]) + [1.0, 2.0, 3.0, 4.0] * x
np.stack([t * t for t in v]) + np.sum(np.stack([a, a]))
np.float32(2) * x + np.float64(3) * x + x * 2
np.linalg.slogdet(q)[1]
"""

# Turned into plain values, computed by Python or by functions without a rule: each is a TypeError
# that names what stands before the bar.
REFUSED = """
# conversions
float | float(a)
int | int(a * 10)
complex | complex(a)
math.sqrt | math.sqrt(a)
a.item | a.item()
x.tolist | x.tolist()
np.asarray | np.asarray(x)
np.array | np.array([a, a])
np.array | np.array(x) * 2
np.asarray | np.asarray([t * t for t in v])
np.full | np.full(3, a)
np.arange | np.arange(a, 3.0)
np.float64 | np.float64(a)
np.float32 | np.float32(a) * x
np.sum | np.sum([a, a])
np.dot | np.dot([a, a], [1.0, 2.0])
np.exp | np.exp([a, a])
np.fromiter | np.fromiter((t for t in v), float)
np.c_ | np.c_[v, v]
np.r_ | np.r_[v, 1.0]
np.matrix | np.matrix(x) * 2
np.ma.array | np.ma.array(x)
np.vectorize | np.vectorize(lambda t: t * t)(x)
np.random.default_rng(0).normal | np.random.default_rng(0).normal(a, 1.0)
np.random.default_rng(0).choice | np.random.default_rng(0).choice(v, 2)
np.lib.stride_tricks.as_strided | np.lib.stride_tricks.as_strided(x, (2, 2), (8, 8))
special.logsumexp | special.logsumexp(x)
special.softmax | special.softmax(x, axis=1)
special.log_softmax | special.log_softmax(x)
special.multigammaln | special.multigammaln(x + 3, 2)
sparse.eye | sparse.eye(4) @ v
stats.norm.pdf | stats.norm.pdf(x)
integrate.trapezoid | integrate.trapezoid(v)
signal.convolve | signal.convolve(v, v)
linalg.expm | linalg.expm(q)
plain | plain.__setitem__(0, a)
plain | plain.__setitem__(slice(3), v[:3])
# functions without a rule, or arguments beyond it
np.polyval | np.poly1d(v)(2.0)
the ufunc <lambda> | np.frompyfunc(lambda t: t * t, 1, 1)(x)
zeta | special.zeta(2.0, x)
np.unique | np.unique(x)
np.choose | np.choose([0, 1, 0, 1], [x[0], x[1]])
np.modf | np.modf(3 * x)[0]
np.piecewise | np.piecewise(x, [x < 0.4], [lambda t: t**2])
np.concatenate | np.concatenate([[a, a], v])
np.concatenate | np.concatenate(x)
np.stack | np.stack(x)
np.interp | np.interp(x, [0.0, 1.0], [1j, 1.0])
np.nanmax | np.nanmax(np.where(y > 0, np.nan, x))
np.median | np.median(x[:0])
np.sign | np.sign(x + 1j * y)
np.apply_along_axis | np.apply_along_axis(np.sort, 0, x)
np.add.reduceat | np.add.reduceat(x, [0, 2])
np.frexp | np.frexp(x)[0]
np.i0 | np.i0(x)
np.polyval | np.polyval(v, 2.0)
np.polyfit | np.polyfit([0.0, 1.0, 2.0, 3.0], v, 1)
np.insert | np.insert(x, 1, 0.0, axis=0)
np.linalg.svd | np.linalg.svd(x)[2]
np.linalg.svd | np.linalg.svd(x + 1j * y)[0]
np.linalg.lstsq | np.linalg.lstsq(x, y[:, 0])[0]
np.linalg.lstsq | np.linalg.lstsq(np.stack([v, v], axis=1), y[0])[0]
np.linalg.pinv | np.linalg.pinv(x, 0.5)
np.linalg.norm | np.linalg.norm(x, 2, keepdims=True)
np.pad | np.pad(x, 1, mode="mean")
np.interp | np.interp(x, [0.0, 1.0], [0.0, 1.0], left=0.0)
np.sum | np.sum(x, where=mask)
np.max | np.max(x, initial=0.0, where=mask)
np.ravel | np.ravel(x, "K")
np.interp | np.interp(x, [0.0, 1.0], [0.0, 1.0], period=1.0)
np.cov | np.cov(x, aweights=v)
np.linspace | np.linspace(a, 1.0, 5, retstep=True)[0]
np.nanvar | np.nanvar(x, where=mask)
np.quantile | np.quantile(y, a)
special.iv | special.iv(a, 1.0)
special.gammainc | special.gammainc(x, 1.0)
special.betainc | special.betainc(x, 1.0, 0.5)
np.linalg.qr | np.linalg.qr(x)[1]
np.divide | np.divide(x, x, where=np.ones(x.shape, bool))
special.airy | special.airy(x)[0]
"""


def lines(table: str) -> list[str]:
    return [line for line in table.splitlines() if line and not line.startswith("#")]


CONVERSIONS = lines(REFUSED.partition("# functions")[0])
# The expressions whose second derivatives are refused, and what the error names.
REFUSED_TWICE = {"special.digamma(x) + special.psi(x)": "zeta"}


def named(x: Any, y: Any = PLAIN["y"], eye: Any = EYE) -> dict[str, Any]:
    """Return what an expression may use, computed from `x`, which is tracked or plain."""
    q = x[:, :3] + 2 * eye
    p = q @ q.T
    stacks = {"s": np.stack([p, p + eye]), "c": np.stack([x, x * x])}
    parts = {"x": x, "y": y, "a": x[0, 0], "v": x[1], "e": x[:, :0], "q": q, "p": p}
    return {**PLAIN, **stacks, **parts}


def function_of(expression: str) -> Callable[..., Any]:
    """Return an expression as a function of `x`, and of the arrays `y` and `eye` if they differ."""
    code = compile(expression, expression, "eval")
    return lambda *arrays: eval(code, named(*arrays))


@cache
def more_of_scipy() -> dict:
    """Return modules whose import takes seconds, which not all who collect this file can spare."""
    names = ("integrate", "linalg", "signal", "stats")
    return {name: importlib.import_module(f"scipy.{name}") for name in names}


@pytest.mark.parametrize("expression", lines(DIFFERENTIATED))
def test_an_expression_is_differentiated_twice(expression):
    function = function_of(expression)
    check_gradients(function, X, rtol=1e-5)
    if expression in REFUSED_TWICE:
        with pytest.raises(TypeError, match=REFUSED_TWICE[expression]):
            check_second(function, X)
    else:
        check_second(function, X)
    with GradientTape() as tape:
        x = tape.watch(X)
        result = function(x)
    assert dense(tape.gradient(result, x)).any()


@pytest.mark.filterwarnings("ignore:the matrix subclass", "ignore::PendingDeprecationWarning")
@pytest.mark.filterwarnings("ignore:'where' used without 'out'")
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:Mean of empty", "ignore:invalid value")
@pytest.mark.parametrize("row", lines(REFUSED))
def test_an_expression_without_a_derivative_is_refused_by_name(row):
    name, _, expression = row.partition(" | ")
    # An error shows the source of the line, as it does for a script.
    linecache.cache["step.py"] = (len(expression), None, [expression], "step.py")
    code = compile(expression, "step.py", "eval")
    with GradientTape() as tape:
        x = tape.watch(X)
        names = named(x) | more_of_scipy()
        with pytest.raises((TypeError, ValueError)) as caught:
            tape.gradient(eval(code, names), x)
    # Where an element is set, NumPy raises a ValueError from ours.
    error = caught.value.__cause__ or caught.value
    assert isinstance(error, TypeError)
    message = str(error)
    assert name in message
    assert "step.py" in "".join(traceback.format_exception(error))
    if row in CONVERSIONS:
        assert "step.py:1 converts a tracked array to a plain value" in message
        assert "np.stack" in message
        assert "nd.stop_gradient(x)" in message
        replaced = re.search(r"special\.(\w*softmax|logsumexp)", expression)
        assert replaced is None or f"nd.{replaced[1]} " in message
        eval(code, names)  # No tape records any more.


def test_the_documentation_lists_every_function_with_a_rule():
    page = (Path(__file__).parents[2] / "docs" / "gradients.md").read_text()
    section = page.partition("## Differentiable functions")[2].partition("\n## ")[0]
    ours, theirs = section.split("ufuncs of `scipy.special`")
    for text, module, functions in (
        (ours, np, {function for table in TABLES for function in table} - {cast, placed}),
        (theirs, special, {getattr(special, name) for name in SPECIAL}),
    ):
        names = " ".join(re.findall(r"^\|[^|]+\| `(.+)` \|$", text, re.MULTILINE)).split()
        # A function that this NumPy does not have yet is None.
        listed = [
            reduce(lambda owner, name: getattr(owner, name, None), name.split("."), module)
            for name in names
        ]
        assert functions - set(listed) == set()
        without = [
            name
            for name, one in zip(names, listed, strict=True)
            if one is not None and not (one in functions or special_rules(one))
        ]
        assert without == []
        assert len(names) == len(set(names))
