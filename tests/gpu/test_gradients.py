"""Derivatives of NumPy code that runs on GPU arrays are those of the same code on the host."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.devices import Device, copy_to, is_gpu_array, to_host
from tests.models.test_operations import calls

X = np.random.default_rng(0).uniform(0.2, 0.9, (3, 4))
Y = np.random.default_rng(1).uniform(0.2, 0.9, (3, 4))
ROWS, MASK = np.array([2, 0, 2]), X > 0.5

UNARY = (
    "negative positive absolute square sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan arcsin "
    "arccos arctan sinh cosh tanh arcsinh arctanh reciprocal sign sum mean max min prod var std "
    "ravel transpose flip fliplr flipud tril triu diagonal trace squeeze copy cumsum sort "
    "atleast_3d"
).split()
BINARY = (
    "add subtract multiply divide power maximum minimum fmax fmin logaddexp arctan2 hypot vdot "
    "outer inner"
).split()


def named(name, count):
    """Return NumPy's function of one or two arrays."""
    return lambda *arrays: getattr(np, name)(*arrays[:count])


EXPRESSIONS = {
    "sum-axis": lambda x, y: np.sum(x, axis=1) * np.mean(y, axis=-1),
    "keepdims": lambda x, y: x / np.sum(x, axis=1, keepdims=True),
    "max-axis": lambda x, y: np.max(x, axis=0) + x.min(axis=(0, 1)),
    "prod-axis": lambda x, y: np.prod(x, axis=1),
    "var-axis": lambda x, y: np.var(x, axis=0) + x.std(axis=0),
    "broadcast": lambda x, y: x + y[0] + np.broadcast_to(x[:, :1], (3, 4)),
    "numbers": lambda x, y: 2 * x**3 - 1 / x + (1 - x) ** 0.5 + 2**x,
    "matmul": lambda x, y: x @ y.T @ x,
    "vector": lambda x, y: (x @ y[0]) @ x + x[:, 0] @ y,
    "stacked": lambda x, y: np.matmul(np.broadcast_to(x, (2, 3, 4)), y.T),
    "dot": lambda x, y: np.dot(x, y.T),
    "tensordot": lambda x, y: np.tensordot(x, y, axes=([1], [1])),
    "einsum": lambda x, y: np.einsum("ij,kj->ik", x, y),
    "where": lambda x, y: np.where(np.greater(x, y), x, 2 * y),
    "clip": lambda x, y: np.clip(x, 0.4, 0.7) + x.clip(0.3, 0.8),
    "concatenate": lambda x, y: np.concatenate([x, y, x], axis=1),
    "stack": lambda x, y: np.stack([x, y], axis=1) * np.hstack([x, y]).reshape(3, 2, 4),
    "split": lambda x, y: np.split(x, 2, axis=1)[1] * np.split(y, 2, axis=1)[0],
    "reshape": lambda x, y: np.reshape(x, (4, 3)) * y.reshape(-1, 3),
    "moved": lambda x, y: np.moveaxis(x, 0, 1) + np.swapaxes(y, 0, 1) + np.expand_dims(x.T, 0),
    "roll": lambda x, y: np.roll(x, 1, axis=0) + np.rot90(y, 2) + np.repeat(x, 2, axis=0)[::2],
    "pad": lambda x, y: np.pad(x, ((1, 0), (0, 2))) ** 2 + np.pad(x, 1, mode="edge")[1:, 0:1],
    "windows": lambda x, y: np.lib.stride_tricks.sliding_window_view(x, (2, 2)) * y[0, 0],
    "convolve": lambda x, y: np.convolve(x[0], y[1, :3]) + np.correlate(x[0], y[0], "full")[1:],
    "quantile": lambda x, y: np.quantile(x, 0.3, axis=0) + np.median(y),
    "products": lambda x, y: np.cumprod(x, axis=1) + np.partition(y, 2) + np.linspace(x, y, 3)[1],
    "inverse": lambda x, y: np.linalg.solve(x @ y.T, x) + np.linalg.inv(x @ y.T)[0, 0],
    "fourier": lambda x, y: np.fft.irfft(np.fft.rfft(x) * np.fft.rfft(y), n=4),
    "log-softmax": lambda x, y: nd.log_softmax(x, axis=1) + nd.softmax(y) + nd.logsumexp(x),
    "tile": lambda x, y: np.tile(x, (2, 1)),
    "part": lambda x, y: x[1] * x[:, 1:][0].sum() + y[-1, ::2].sum() + x[..., None][0, :, 0],
    "rows": lambda x, y: x[ROWS] * y[[0, 1, 1]],
    "pairs": lambda x, y: x[ROWS, np.arange(3)] + y[np.arange(3), [0, 3, 1]],
    "mask": lambda x, y: x[MASK] * 2,
    "take": lambda x, y: np.take(x, ROWS, axis=1) + y.take(ROWS, axis=1),
    "take_along_axis": lambda x, y: np.take_along_axis(x, np.argsort(x, 1), 1),
    "average": lambda x, y: np.average(x, axis=0) + np.ptp(y, axis=0),
    "norm": lambda x, y: np.linalg.norm(x) + np.linalg.norm(y, axis=1).sum(),
    "diff": lambda x, y: np.diff(x, axis=1),
    "softmax": lambda x, y: np.exp(x - x.max(axis=1, keepdims=True)),
    "astype": lambda x, y: x.astype(np.float32).astype(np.float64),
    "comparisons": lambda x, y: x * (x > y) + np.where(x <= y, x, 0) * (y != 0),
    "methods": lambda x, y: x.mean(axis=0).reshape(2, 2).T.ravel() + y.sum(0).squeeze(),
}
# By name: a function, and what it gets.
GROUPS = {
    "functions of one": {name: (named(name, 1), (X, Y)) for name in UNARY},
    "functions of two": {name: (named(name, 2), (X, Y)) for name in BINARY},
    "expressions": {name: (function, (X, Y)) for name, function in EXPRESSIONS.items()},
    "operations of models": {str(number): call for number, call in enumerate(calls())},
}


def gradients(function, arrays, place):
    """Return a value, its gradients, and the gradients of the sum of their squares."""
    with nd.GradientTape() as outer:
        inputs = outer.watch([copy_to(array, Device(place)) for array in arrays])
        with nd.GradientTape() as inner:
            value = function(*inputs)
        slopes = [dense(slope) for slope in inner.gradient(value, inputs, "zero")]
        total = sum(np.sum(slope * slope) for slope in slopes)
    seconds = outer.gradient(total, inputs, "zero")
    return [getattr(each, "value", each) for each in [value, *slopes, *map(dense, seconds)]]


def dense(slope):
    return slope.to_dense() if isinstance(slope, nd.IndexedSlices) else slope


@pytest.mark.parametrize("group", GROUPS)
def test_first_and_second_gradients_are_those_of_the_host(cupy, group):
    for name, (function, arrays) in GROUPS[group].items():
        both = [gradients(function, arrays, place) for place in ("cpu:0", "gpu:0")]
        for on_host, on_gpu in zip(*both, strict=True):
            assert is_gpu_array(on_gpu), name
            assert (on_gpu.shape, on_gpu.dtype) == (on_host.shape, on_host.dtype), name
            np.testing.assert_allclose(
                to_host(on_gpu), on_host, rtol=1e-12, atol=1e-12, err_msg=name
            )
