"""What the tests of this folder share: a variable and a check against finite differences.

The variable is the least that the tape may rely on; the real ones are tested with the tape
elsewhere.
"""

from __future__ import annotations

import numpy as np

from ndistribute.autodiff import GradientTape, custom_gradient, untrack
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.context import current_frame


def _read(value):
    return value.tracked_value() if isinstance(value, StandInVariable) else value


class StandInVariable(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that can be assigned, and that tells the tape when it is read."""

    is_distributed_variable = True
    __array_priority__ = 1000.0
    __hash__ = object.__hash__

    def __init__(self, value, trainable=True):
        self.array = np.array(value)
        self.trainable = trainable

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype

    def tracked_value(self):
        snapshot = self.array.view()
        snapshot.flags.writeable = False
        recorder = current_frame().recorder
        return snapshot if recorder is None else recorder.read(self, snapshot)

    def assign(self, value):
        self.array = np.array(untrack(value), self.array.dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return getattr(ufunc, method)(*map(_read, inputs), **kwargs)

    def __array_function__(self, function, types, args, kwargs):
        def read(value):
            if isinstance(value, list | tuple):
                return type(value)(map(read, value))
            return _read(value)

        return function(*map(read, args), **{name: read(value) for name, value in kwargs.items()})

    def __getitem__(self, index):
        return self.tracked_value()[index]


def dense(gradient):
    return gradient.to_dense() if isinstance(gradient, IndexedSlices) else gradient


def gradients_of(function, *arrays, **kwargs):
    """Return a function's value and the gradients of the sum of its elements."""
    with GradientTape() as tape:
        tracked = tape.watch(list(arrays))
        value = function(*tracked)
    return untrack(value), tape.gradient(value, tracked, "zero", **kwargs)


def finite_differences(function, arrays, weights, step=1e-6):
    """Return the central differences of ``sum(weights * function(*arrays))``, in float64."""
    differences = []
    for array in arrays:
        slope = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            saved = array[index]
            ends = []
            for sign in (1, -1):
                array[index] = saved + sign * step
                ends.append(np.sum(weights * function(*arrays)))
            array[index] = saved
            slope[index] = (ends[0] - ends[1]) / (2 * step)
        differences.append(slope)
    return differences


def check_gradients(function, *arrays, rtol=1e-6):
    """Compare a function's gradients with finite differences, and see that float32 stays float32.

    Args:
        function: of the arrays; returns one array.
        arrays: float64, away from points where the function has no derivative.
    """
    arrays = [np.array(array, np.float64) for array in arrays]
    with GradientTape() as tape:
        tracked = tape.watch([array.copy() for array in arrays])
        result = function(*tracked)
    raw = function(*[array.copy() for array in arrays])
    np.testing.assert_allclose(untrack(result), raw, rtol=1e-14)
    weights = np.random.default_rng(0).normal(size=np.shape(raw))
    gradients = tape.gradient(result, tracked, "zero", output_gradients=weights)
    expected = finite_differences(function, arrays, weights)
    for gradient, slope in zip(gradients, expected, strict=True):
        whole = dense(gradient)
        assert isinstance(whole, np.ndarray)
        assert whole.shape == slope.shape
        assert whole.dtype == slope.dtype
        np.testing.assert_allclose(whole, slope, rtol=rtol, atol=1e-7)
    _check_float32(function, arrays)


@custom_gradient
def probe(x):
    """Pass an array on, and see that the rule behind it gives a gradient that fits it."""

    def rule(g):
        assert g.shape == x.shape
        assert g.dtype == x.dtype
        return g

    return x.copy(), [rule]


def _check_float32(function, arrays):
    singles = [array.astype(np.float32) for array in arrays]
    value, gradients = gradients_of(lambda *inputs: function(*map(probe, inputs)), *singles)
    assert value.dtype == function(*singles).dtype
    for gradient, single in zip(gradients, singles, strict=True):
        assert gradient.dtype == np.float32
        assert gradient.shape == single.shape
