"""What the tests of this folder share: a variable and checks against finite differences.

The variable is the least that the tape may rely on; the real ones are tested with the tape
elsewhere.
"""

import numpy as np

from ndistribute.autodiff import GradientTape, custom_gradient, untrack
from ndistribute.context import current_frame
from ndistribute.indexed_slices import IndexedSlices

STEP = 1e-6


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


def finite_differences(function, arrays, weights):
    """Return the central differences of ``sum(weights * function(*arrays))``, in float64."""
    return [change_of(lambda: np.sum(weights * function(*arrays)), array) for array in arrays]


def change_of(function, array):
    """Return the central differences of a function that reads an array, by the array."""
    change = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        start = array[index]
        ends = []
        for step in (STEP, -STEP):
            array[index] = start + step
            ends.append(function())
        array[index] = start
        change[index] = (ends[0] - ends[1]) / (2 * STEP)
    return change


def both(function, x, weights, direction):
    """Return a function's gradient, and that of its product with a direction, by nested tapes."""
    with GradientTape() as outer:
        x = outer.watch(x)
        with GradientTape() as inner:
            y = function(x)
        slope = inner.gradient(y, x, "zero", output_gradients=weights)
        along = np.sum(slope * direction)
    return untrack(slope), dense(outer.gradient(along, x, "zero"))


def check_second(function, x):
    """Compare a function's second derivatives with the change of its first ones."""
    rng = np.random.default_rng(5)
    x, result = x.copy(), np.asarray(function(x))
    weights = rng.uniform(0.5, 1.5, result.shape).astype(result.dtype)
    direction = rng.uniform(-1, 1, x.shape)

    def first():
        return dense(gradients_of(function, x, output_gradients=weights)[1][0])

    slope, second = both(function, x, weights, direction)
    np.testing.assert_allclose(slope, first(), rtol=1e-9, atol=1e-12)
    agree(second, change_of(lambda: np.sum(first() * direction), x))


def agree(result, expected, precision=1e-5):
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(result, expected, rtol=precision, atol=precision * scale)


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
