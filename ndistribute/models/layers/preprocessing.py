"""Layers that prepare features: normalisation by known statistics, and numbers for categories.

`adapt` reads the data once, outside of replicas; afterwards a layer is a function of its input. The
lookups compute on the host, such as in `Dataset.map`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.context import current_trace
from ndistribute.models import operations
from ndistribute.models.layers.core import as_floats, positive, random_generator
from ndistribute.models.layers.layer import Layer
from ndistribute.models.symbolic import describes


class Normalization(Layer):
    """A layer that subtracts a mean and divides by a standard deviation, which `adapt` computes.

    Args:
        axis: the axes with statistics of their own; None: one mean and variance for all elements.
        mean: the mean, instead of `adapt`.
        variance: the variance, instead of `adapt`.
        invert: whether to compute the inverse.
        options: `name` and `dtype`, see `Layer`.

    >>> layer = Normalization()
    >>> layer.adapt(np.array([[1.0], [3.0]]))
    >>> layer(np.array([[1.0], [5.0]])).tolist()
    [[-1.0], [3.0]]
    """

    def __init__(
        self,
        axis: int | Sequence[int] | None = -1,
        mean: Any = None,
        variance: Any = None,
        invert: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if (mean is None) != (variance is None):
            raise ValueError("Normalization: pass both mean and variance, or none and call adapt.")
        self.axis = (axis,) if isinstance(axis, int) else tuple(axis or ())
        self.invert, self._statistics = bool(invert), (mean, variance)
        self.mean: Any = None
        self.variance: Any = None

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the mean and the variance."""
        kept = {k % len(input_shape) for k in self.axis}
        shape = [n if k in kept else 1 for k, n in enumerate(input_shape)]
        for name, value, start in zip(
            ("mean", "variance"), self._statistics, ("zeros", "ones"), strict=True
        ):
            variable = self.add_weight(name, shape, start, trainable=False)
            setattr(self, name, variable)
            if value is not None:
                variable.assign(np.broadcast_to(np.asarray(value, variable.dtype), shape))

    def adapt(self, data: Any) -> None:
        """Compute the mean and the variance of an array, or of a dataset of batches.

        Call it outside of `run`; every worker passes the same data.
        """
        count, mean, variance = 0, np.float64(0), np.float64(0)
        for batch in _batches_of(data):
            rows = np.asarray(batch, np.float64)
            kept = {k % rows.ndim for k in self.axis}
            axes = tuple(k for k in range(rows.ndim) if k not in kept)
            size = rows.size // max(1, int(np.prod([rows.shape[k] for k in kept])))
            share, step = size / max(1, count + size), rows.mean(axes, keepdims=True) - mean
            spread = rows.var(axes, keepdims=True) - variance
            variance = variance + share * (spread + (1 - share) * step**2)
            count, mean = count + size, mean + share * step
        if not count:
            raise ValueError(f"{self.name}: adapt got no data.")
        self._statistics = mean, variance
        if not self.built:
            self.build((None, *rows.shape[1:]))  # type: ignore[arg-type]
        self.mean.assign(mean.astype(self.mean.dtype))
        self.variance.assign(variance.astype(self.variance.dtype))

    def call(self, inputs: Any) -> Any:
        """Return the normalised input."""
        x = as_floats(inputs, self.mean)
        deviation = np.maximum(np.sqrt(self.variance), 1e-7)
        return x * deviation + self.mean if self.invert else (x - self.mean) / deviation


class GaussianNoise(Layer):
    """A layer that in training adds normal random numbers.

    Args:
        stddev: their standard deviation.
        options: `name`, `trainable` and `dtype`, see `Layer`.
    """

    supports_masking = True

    def __init__(self, stddev: float, **options: Any) -> None:
        super().__init__(**options)
        self.stddev = float(stddev)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the input, in training with noise."""
        if not training:
            return inputs
        noise = random_generator().standard_normal(inputs.shape, dtype=np.float32)
        return inputs + noise.astype(inputs.dtype) * inputs.dtype.type(self.stddev)


class CategoryEncoding(Layer):
    """A layer that turns category numbers into vectors.

    Args:
        num_tokens: the number of categories.
        output_mode: ``"one_hot"`` for a vector for each number; ``"multi_hot"`` for a 1 for each
            number on the last axis, and ``"count"`` for how often it occurs there.
        options: `name` and `dtype`, see `Layer`.

    >>> CategoryEncoding(4)(np.array([[0, 2], [3, 3]])).tolist()
    [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """

    def __init__(self, num_tokens: int, output_mode: str = "multi_hot", **options: Any) -> None:
        super().__init__(**options)
        self.num_tokens = positive(num_tokens, "CategoryEncoding: num_tokens")
        self.output_mode = _checked_mode(output_mode, "CategoryEncoding", "one_hot")

    def call(self, inputs: Any) -> Any:
        """Return the vectors."""
        what = f"{self.name}: numbers must be in [0, {self.num_tokens})"
        operations.check_range(inputs, self.num_tokens, what, "Increase num_tokens.")
        return _encoded(inputs, self.num_tokens, self.output_mode, self.compute_dtype)


class StringLookup(Layer):
    """A layer that turns words into the numbers of a vocabulary, or back.

    Args:
        max_tokens: the largest size of a vocabulary of `adapt`, with what is not a word.
        num_oov_indices: 1 if there is a number for words out of the vocabulary, else 0: they are
            refused.
        mask_token: a word whose number is 0; None: there is none.
        oov_token: the word for numbers of no word.
        vocabulary: the words; None: those that `adapt` counts, the most frequent first.
        invert: whether to turn numbers into words.
        output_mode: ``"int"`` for numbers, or as for `CategoryEncoding`.
        options: `name` and `dtype`, see `Layer`.

    >>> layer = StringLookup(vocabulary=["a", "b"])
    >>> layer(np.array([["b", "z"]])), layer.get_vocabulary()
    (array([[2, 0]]), ['[UNK]', 'a', 'b'])
    """

    _type: ClassVar[Any] = str
    _dtype: ClassVar[Any] = object
    _oov: ClassVar[Any] = "[UNK]"

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: Any = None,
        oov_token: Any = None,
        vocabulary: Any = None,
        invert: bool = False,
        output_mode: str = "int",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        kind = type(self).__name__
        if num_oov_indices not in (0, 1):
            raise ValueError(f"{kind}: num_oov_indices must be 0 or 1, got {num_oov_indices}.")
        self.output_mode = _checked_mode(output_mode, kind, "int", "one_hot")
        self.max_tokens, self.num_oov_indices, self.invert = max_tokens, num_oov_indices, invert
        self._oov_token = self._oov if oov_token is None else oov_token
        masks = mask_token is not None and output_mode == "int"
        self._special = [mask_token] * masks + [self._oov_token] * num_oov_indices
        self._tokens: list[Any] | None = None
        if vocabulary is not None:
            self.set_vocabulary(vocabulary)

    def adapt(self, data: Any) -> None:
        """Make the vocabulary of an array, or of a dataset of batches."""
        counts = Counter[Any]()
        for batch in _batches_of(data):
            counts.update(self._values(batch))
        ordered = sorted(counts, key=lambda token: (counts[token], token), reverse=True)
        words = [token for token in ordered if token not in self._special]
        room = None if self.max_tokens is None else max(0, self.max_tokens - len(self._special))
        self.set_vocabulary(words[:room])

    def set_vocabulary(self, vocabulary: Any) -> None:
        """Set the words, with or without the mask and the word for others in front."""
        words = self._values(vocabulary)
        if self._special and words[: len(self._special)] == self._special:
            words = words[len(self._special) :]
        if len({*words}) < len(words):
            raise ValueError(f"{self.name}: the vocabulary has a word twice.")
        self._tokens = words
        self._numbers = {token: k for k, token in enumerate(self.get_vocabulary())}

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:
        """Return the words in the order of their numbers."""
        return (self._special if include_special_tokens else []) + (self._tokens or [])

    def vocabulary_size(self) -> int:
        """Return how many numbers there are."""
        return len(self.get_vocabulary())

    def call(self, inputs: Any) -> Any:
        """Return the numbers or vectors of words, or the words of numbers."""
        if self._tokens is None or current_trace() is not None:
            problem = "it has no vocabulary: call adapt, or pass one"
            if self._tokens is not None:
                problem = "a compiled step has no words: map them before, such as in Dataset.map"
            raise RuntimeError(f"{self.name}: {problem}.")
        shape = np.shape(inputs)
        if self.invert:
            words = dict(enumerate(self.get_vocabulary()))
            tokens = [words.get(int(n), self._oov_token) for n in np.ravel(inputs)]
            return np.array(tokens, self._dtype).reshape(shape)
        other = len(self._special) - 1 if self.num_oov_indices else 0 if describes() else None
        numbers = [self._numbers.get(token, other) for token in self._values(inputs)]
        if None in numbers:
            word = self._values(inputs)[numbers.index(None)]
            raise ValueError(f"{self.name}: {word!r} is not in the vocabulary.")
        indices = np.array(numbers, np.int64).reshape(shape)
        if self.output_mode == "int":
            return indices
        return _encoded(indices, self.vocabulary_size(), self.output_mode, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, with the vocabulary of `adapt`."""
        return super().get_config() | ({"vocabulary": self._tokens} if self._tokens else {})

    def _values(self, batch: Any) -> list[Any]:
        flat = np.ravel(np.asarray(batch)).tolist()
        return [self._type(v.decode() if isinstance(v, bytes) else v) for v in flat]


class IntegerLookup(StringLookup):
    """A layer that turns integers into the numbers of a vocabulary, or back; see `StringLookup`.

    >>> IntegerLookup(vocabulary=[10, 20])(np.array([20, 10, 7])).tolist()
    [2, 1, 0]
    """

    _type = int
    _dtype = np.int64
    _oov = -1


def _batches_of(data: Any) -> Iterable[Any]:
    is_array = hasattr(data, "dtype") or isinstance(data, list | tuple)
    return [data] if is_array else data


def _checked_mode(mode: str, kind: str, *others: str) -> str:
    known = (*others, "multi_hot", "count")
    if mode not in known:
        raise ValueError(f"{kind}: output_mode must be one of {[*known]}, got {mode!r}.")
    return mode


def _encoded(indices: Any, count: int, mode: str, dtype: Any) -> Any:
    """Return a vector for each number, or one for the numbers on the last axis."""
    if mode == "one_hot" and indices.ndim > 1 and indices.shape[-1] == 1:
        indices = indices[..., 0]
    each = indices[..., None] == np.arange(count)
    if mode == "one_hot":
        return each.astype(dtype)
    return (each.any(axis=-2) if mode == "multi_hot" else each.sum(axis=-2)).astype(dtype)
