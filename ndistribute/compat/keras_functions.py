"""`keras.ops`, `keras.random` and `keras.backend`: functions of Keras that TensorFlow lacks.

Functions that NumPy has come from NumPy through `keras_operation`; the others are here.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ndistribute import models, tree
from ndistribute.compat import random_numbers, tensor_functions
from ndistribute.compat.graphs import dtype_of
from ndistribute.compat.signatures import unary
from ndistribute.compat.tensors import as_tensor
from ndistribute.devices import to_host
from ndistribute.models.layers.arguments import random_generator

_NARROW: dict[Any, Any] = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}


def keras_operation(function: Any) -> Any:
    """Return a NumPy function with Keras's dtypes.

    A result has 64 bits only if an operand has 64 bits or the caller asks for them.
    """

    @functools.wraps(function, ["__name__", "__doc__"])
    def call(*args: Any, **options: Any) -> Any:
        if options.get("dtype") is not None:
            options["dtype"] = dtype_of(options["dtype"])
        wide = {getattr(leaf, "dtype", None) for leaf in tree.flatten((args, options))}
        wide.add(options.get("dtype"))

        def narrowed(result: Any) -> Any:
            dtype = getattr(result, "dtype", None)
            if dtype in _NARROW and dtype not in wide:
                result = result.astype(_NARROW[dtype])
            return as_tensor(result)

        return tree.map_leaves(narrowed, function(*args, **options))

    return call


def convert_to_numpy(x: Any) -> Any:
    """Return an array of NumPy."""
    return np.asarray(to_host(x))


def shape(x: Any) -> tuple[int, ...]:
    """Return the lengths of the axes in a tuple."""
    return tuple(np.shape(x))


def _one_hot(x: Any, num_classes: int, axis: int = -1, dtype: Any = None) -> Any:
    labels = np.asarray(x).astype(np.int64)  # The lengths may be floats.
    return tensor_functions.one_hot(labels, num_classes, axis=axis, dtype=dtype or np.float32)


class SeedGenerator:
    """The state from which random functions draw; each replica has its own."""

    def __init__(self, seed: Any = None, name: Any = None) -> None:
        self.seed = seed
        self._generators: dict[int, np.random.Generator] = {}

    def generator(self) -> Any:
        """Return the generator of this replica."""
        if self.seed is None:
            return random_numbers.generator()
        return random_generator(self.seed, self._generators)


def _drawing(draw: Any) -> Any:
    """Return a random function that draws the same numbers each time if the seed is a number."""

    def call(*args: Any, seed: Any = None, **options: Any) -> Any:
        return draw(*args, seed=[0, seed] if isinstance(seed, int) else seed, **options)

    return call


normal, uniform = _drawing(random_numbers.normal[1]), _drawing(random_numbers.uniform[1])
categorical, dropout = _drawing(random_numbers.categorical), _drawing(tensor_functions.dropout)
randint = functools.partial(uniform, dtype=np.int32)
one_hot = unary(_one_hot, 0)


def extract_patches(images: Any, size: Any) -> Any:
    """Return the elements of each window of images as ``(batch, rows, columns, elements)``.

    Args:
        images: of shape ``(batch, height, width, channels)``.
        size: the height and width of a window, or one number; the windows do not overlap.
    """
    height, width = (size, size) if isinstance(size, int) else size
    rows, columns, channels = images.shape[1] // height, images.shape[2] // width, images.shape[3]
    whole = images[:, : rows * height, : columns * width]
    parts = np.reshape(whole, (-1, rows, height, columns, width, channels))
    parts = np.transpose(parts, (0, 1, 3, 2, 4, 5))
    return as_tensor(np.reshape(parts, (-1, rows, columns, height * width * channels)))


def function(inputs: Any, outputs: Any) -> Any:
    """Return a function of a list of arrays that computes symbolic outputs as NumPy arrays."""
    model = models.Model(inputs, outputs)

    def call(values: Any) -> Any:
        return tree.map_leaves(convert_to_numpy, model(values, training=False))

    return call


joined_last = unary(lambda tensors, axis=-1: np.concatenate(tensors, axis), 0)
flatten = unary(lambda x: np.reshape(x, (-1,)))
