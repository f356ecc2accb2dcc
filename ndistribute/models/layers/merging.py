"""Layers that combine a list of inputs, and functions that create such a layer and call it.

The inputs of elementwise layers broadcast. An input with fewer axes gets axes of length 1 after the
batch axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff import untrack
from ndistribute.devices import array_namespace
from ndistribute.exports import export as _export
from ndistribute.models.layers.layer import Layer


class Merging(Layer):
    """The base class of layers that combine a list of arrays."""

    needs: ClassVar[int] = 0
    """The number of inputs that the layer needs; 0: any."""

    def checked(self, inputs: Any) -> list[Any]:
        """Return the inputs, which must be a list of arrays as long as the layer needs."""
        count = len(inputs) if isinstance(inputs, list | tuple) else 0
        if not count or count != (self.needs or count):
            raise ValueError(
                f"{self.name} needs a list of {self.needs or 'several'} arrays, such as layer([a, "
                f"b]), got {f'a list of {count}' if count else type(inputs).__name__}."
            )
        return list(inputs)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return where any input counts, if all have masks."""
        if mask is None or any(each is None for each in mask):
            return None
        return functools.reduce(np.logical_or, mask)


class Elementwise(Merging):
    """The base class of layers that combine the elements of their inputs; see `Add`."""

    operation: ClassVar[Any]

    def call(self, inputs: Sequence[Any]) -> Any:
        """Return the combined array."""
        inputs = self.checked(inputs)
        axes = max(array.ndim for array in inputs)
        total, *others = (
            array.reshape(array.shape[0], *(1,) * (axes - array.ndim), *array.shape[1:])
            if array.ndim < axes
            else array
            for array in inputs
        )
        for array in others:
            total = type(self).operation(total, array)
        return total


class Add(Elementwise):
    """A layer that adds its inputs up.

    >>> Add()([np.ones((2, 3)), np.ones((2, 1))])[0]
    array([2., 2., 2.], dtype=float32)
    """

    operation = np.add


class Multiply(Elementwise):
    """A layer that multiplies its inputs.

    >>> Multiply()([np.full((1, 2), 3.0), np.full((1, 2), 2.0)])
    array([[6., 6.]], dtype=float32)
    """

    operation = np.multiply


class Maximum(Elementwise):
    """A layer that returns the largest elements of its inputs.

    >>> Maximum()([np.array([[1.0, 4.0]]), np.array([[3.0, 2.0]])])
    array([[3., 4.]], dtype=float32)
    """

    operation = np.maximum


class Minimum(Elementwise):
    """A layer that returns the smallest elements of its inputs.

    >>> Minimum()([np.array([[1.0, 4.0]]), np.array([[3.0, 2.0]])])
    array([[1., 2.]], dtype=float32)
    """

    operation = np.minimum


class Subtract(Elementwise):
    """A layer that subtracts the second of its two inputs from the first.

    >>> Subtract()([np.array([[5.0]]), np.array([[3.0]])])
    array([[2.]], dtype=float32)
    """

    operation = np.subtract
    needs = 2


class Average(Add):
    """A layer that returns the mean of its inputs.

    >>> Average()([np.array([[5.0]]), np.array([[3.0]])])
    array([[4.]], dtype=float32)
    """

    def call(self, inputs: Sequence[Any]) -> Any:
        """Return the mean."""
        return super().call(inputs) / len(inputs)


class Concatenate(Merging):
    """A layer that joins its inputs along an axis.

    Args:
        axis: the axis.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> Concatenate()([np.zeros((2, 3)), np.zeros((2, 4))]).shape
    (2, 7)
    """

    def __init__(self, axis: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self.axis = axis

    def call(self, inputs: Sequence[Any]) -> Any:
        """Return the joined array."""
        return np.concatenate(self.checked(inputs), axis=self.axis)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the joined masks, or where an input counts; inputs without a mask always count."""
        if mask is None:
            return None
        axes = max(each.ndim for each in mask if each is not None)
        ones, axis = array_namespace(untrack(inputs[0])).ones, self.axis % inputs[0].ndim
        masks = [
            ones(array.shape[:axes], bool) if each is None else each
            for array, each in zip(inputs, mask, strict=True)
        ]
        if axis < axes:
            return np.concatenate(masks, axis=axis)
        return functools.reduce(np.logical_or, masks)


def _function(kind: Any) -> Callable[..., Any]:
    """Return the function that makes a layer and calls it."""

    def merge(inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        return kind(*args, **options)(inputs)

    name = kind.__name__.lower()
    merge.__name__ = merge.__qualname__ = name
    merge.__doc__ = f"Return what `{kind.__name__}` returns for a list, with the layer's arguments."
    return merge


add, subtract, multiply = map(_function, (Add, Subtract, Multiply))
average, maximum, minimum = map(_function, (Average, Maximum, Minimum))
concatenate = _function(Concatenate)


_export(vars(), but="Elementwise Merging")
