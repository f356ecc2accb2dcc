"""Derivatives of NumPy code that runs on GPU arrays are those of the same code on the host."""

import numpy as np

import ndistribute as nd
from ndistribute.devices import Device, copy_to, is_device_array, to_host
from tests.autodiff.test_expressions import DIFFERENTIATED, EYE, PLAIN, X, function_of, lines
from tests.models.test_operations import calls

# How many of the expressions compute with GPU arrays alone: the others mix them with those of the
# host, which CuPy refuses, or need functions that it has not. What it has depends on its version.
LEAST = {"imitation": 200, "real": 120}


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


def check(name, function, arrays):
    """Compare a function's value and gradients on the GPU with those of the host."""
    both = [gradients(function, arrays, place) for place in ("cpu:0", "gpu:0")]
    for on_host, on_gpu in zip(*both, strict=True):
        assert is_device_array(on_gpu), name
        assert (on_gpu.shape, on_gpu.dtype) == (on_host.shape, on_host.dtype), name
        np.testing.assert_allclose(to_host(on_gpu), on_host, rtol=1e-9, atol=1e-9, err_msg=name)


def test_first_and_second_gradients_of_expressions_are_those_of_the_host(cupy, kind):
    compared = 0
    for expression in lines(DIFFERENTIATED):
        try:
            check(expression, function_of(expression), (X, PLAIN["y"], EYE))
        except (AttributeError, NotImplementedError, TypeError):
            continue
        compared += 1
    assert compared >= LEAST[kind]


def test_operations_of_models_and_casts_have_the_gradients_of_the_host(cupy):
    check("casts", lambda x: x.astype(np.float32).astype(np.float64), [X])
    for number, (function, arrays) in enumerate(calls()):
        check(f"operation {number}", function, arrays)
