"""`keras.ops` and `keras.random`: functions of Keras 3 that TensorFlow lacks.

Those that NumPy has are NumPy's, by `keras_operation`; here are the others.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ndistribute import models, tree
from ndistribute.compat import random_numbers, tensor_functions
from ndistribute.compat.graphs import dtype_of
from ndistribute.compat.signatures import plainly, unary
from ndistribute.compat.tensors import as_tensor
from ndistribute.devices import to_host
from ndistribute.models import losses
from ndistribute.models.layers.arguments import random_generator

_OPERANDS = "condition", "x", "x1", "x2", "xs", "arrays"
_NARROW: dict[Any, Any] = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}


def keras_operation(function: Any) -> Any:
    """Return a function of NumPy with the names of Keras's arguments, and its dtypes.

    A result has 64 bits only if an operand has, or if they are asked for.
    """

    @functools.wraps(function, ["__name__", "__doc__"])
    def call(*args: Any, **options: Any) -> Any:
        args += tuple(options.pop(name) for name in _OPERANDS if name in options)
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
    labels = np.asarray(x).astype(np.int64)  # Which may be floats.
    return tensor_functions.one_hot(labels, num_classes, axis=axis, dtype=dtype or np.float32)


def _normalize(x: Any, axis: int = -1, order: int = 2, epsilon: float = 1e-12) -> Any:
    return x / np.maximum(np.linalg.norm(x, order, axis, keepdims=True), epsilon)


def _binary_crossentropy(target: Any, output: Any, from_logits: bool = False) -> Any:
    return losses.binary_crossentropy(target[..., None], output[..., None], from_logits)


def _slice_update(inputs: Any, start_indices: Any, updates: Any) -> Any:
    result = np.array(inputs)
    places = zip(start_indices, np.shape(updates), strict=True)
    result[tuple(slice(int(first), int(first) + length) for first, length in places)] = updates
    return result


def fori_loop(lower: int, upper: int, body_fun: Any, init_val: Any) -> Any:
    """Return what a function of a number and a value makes of a value, called for each number."""
    for number in range(lower, upper):
        init_val = body_fun(number, init_val)
    return init_val


def while_loop(cond: Any, body: Any, loop_vars: Any, maximum_iterations: int | None = None) -> Any:
    """Return values that a function has changed, as long as another one returns True of them."""
    made, several = 0, isinstance(loop_vars, list | tuple)
    values = tuple(loop_vars) if several else (loop_vars,)
    while (maximum_iterations is None or made < maximum_iterations) and cond(*values):
        result, made = body(*values), made + 1
        values = tuple(result) if isinstance(result, list | tuple) else (result,)
    return values if several else values[0]


class SeedGenerator:
    """The state from which random functions draw; each replica has one of its own."""

    def __init__(self, seed: Any = None, name: Any = None) -> None:
        self.seed = seed
        self._generators: dict[int, np.random.Generator] = {}

    def generator(self) -> Any:
        """Return the generator of this replica."""
        if self.seed is None:
            return random_numbers.generator()
        return random_generator(self.seed, self._generators)

    def next(self) -> Any:
        """Return a number that serves as a seed."""
        return int(self.generator().integers(2**31))


def _generator(seed: Any) -> Any:
    """Return a generator that draws the same each time for a number."""
    return random_numbers.generator([0, seed] if isinstance(seed, int) else seed)


def _drawing(draw: Any) -> Any:
    """Return a random function that draws the same each time for a number as the seed."""

    def call(*args: Any, seed: Any = None, **options: Any) -> Any:
        return draw(*args, seed=_generator(seed), **options)

    return call


def _randint(shape: Any, minval: int, maxval: int, dtype: Any = np.int32, seed: Any = None) -> Any:
    return _generator(seed).integers(minval, maxval, tuple(shape)).astype(dtype_of(dtype))


def _shuffle(x: Any, axis: int = 0, seed: Any = None) -> Any:
    return np.take(x, _generator(seed).permutation(x.shape[axis]), axis)


one_hot, slice_update = unary(_one_hot, 0), unary(_slice_update)
normalize, binary_crossentropy = unary(_normalize), plainly(_binary_crossentropy)
normal, uniform, truncated_normal = (
    _drawing(pair[1])
    for pair in (random_numbers.normal, random_numbers.uniform, random_numbers.truncated_normal)
)
categorical, gamma = _drawing(random_numbers.categorical), _drawing(random_numbers.gamma)
dropout = _drawing(tensor_functions.dropout)
randint, shuffle = unary(_randint, 0), unary(_shuffle)


def extract_patches(
    images: Any, size: Any, strides: Any = None, dilation_rate: int = 1, padding: str = "valid"
) -> Any:
    """Return the elements of each window of images in a row, ``(batch, rows, columns, elements)``.

    Args:
        images: of shape ``(batch, height, width, channels)``.
        size: the height and width of a window, or one number.
        strides: the steps between windows; None: as long as they are.
        dilation_rate: must be 1.
        padding: must be ``"valid"``.
    """
    if (dilation_rate, padding) != (1, "valid"):
        raise ValueError("extract_patches: dilation_rate must be 1, and padding 'valid'.")
    height, width = (size, size) if isinstance(size, int) else size
    steps = size if strides is None else strides
    down, right = (steps, steps) if isinstance(steps, int) else steps
    rows, columns = (images.shape[1] - height) // down + 1, (images.shape[2] - width) // right + 1
    parts = [
        images[
            :,
            top : top + down * (rows - 1) + 1 : down,
            left : left + right * (columns - 1) + 1 : right,
        ]
        for top in range(height)
        for left in range(width)
    ]
    return as_tensor(np.concatenate(parts, axis=-1))


def function(inputs: Any, outputs: Any) -> Any:
    """Return a function of a list of arrays that computes symbolic outputs, as NumPy's arrays."""
    model = models.Model(inputs, outputs)

    def call(values: Any) -> Any:
        return tree.map_leaves(convert_to_numpy, model(values, training=False))

    return call


joined_last = unary(lambda tensors, axis=-1: np.concatenate(tensors, axis), 0)
flatten = unary(lambda x: np.reshape(x, (-1,)))
