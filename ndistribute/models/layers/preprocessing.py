"""Layers that prepare features: they normalise by known statistics, or number categories.

`adapt` reads the data once, outside of replicas. Afterwards, the output of a layer depends only on
its input. The lookups compute on the host, for example in `Dataset.map`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.context import current_trace
from ndistribute.exports import export as _export
from ndistribute.models import operations
from ndistribute.models.layers.arguments import as_floats, one_of, positive, random_generator
from ndistribute.models.layers.layer import Layer
from ndistribute.models.symbolic import describes


class Normalization(Layer):
    """A layer that subtracts a mean and divides by a standard deviation, which `adapt` computes.

    Args:
        axis: the axes with separate statistics; None: one mean and variance for all elements.
        mean: the mean, instead of `adapt`.
        variance: the variance, instead of `adapt`.
        invert: whether to compute the inverse: multiply by the deviation and add the mean.
        options: `name` and `dtype`, see `Layer`.

    >>> layer = Normalization()
    >>> layer.adapt(np.array([[1.0], [3.0]]))
    >>> layer(np.array([[1.0], [5.0]])).tolist()
    [[-1.0], [3.0]]
    """

    fixes_last_axis = True
    supports_masking = True

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
            raise ValueError(
                "Normalization: pass both mean and variance, or pass neither and call adapt."
            )
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


class _Counting(Layer):
    """The base class of layers that can turn category numbers into vectors."""

    _modes: ClassVar[tuple[str, ...]] = ("int", "one_hot", "multi_hot", "count")

    def __init__(self, output_mode: str, **options: Any) -> None:
        super().__init__(**options)
        what = f"{type(self).__name__}: output_mode"
        self.output_mode = one_of(output_mode, what, self._modes)

    def _encoded(self, indices: Any, count: int, weights: Any = None) -> Any:
        """Return numbers, or a vector for each, or one for the numbers on the last axis."""
        mode, dtype = self.output_mode, self.compute_dtype
        if mode == "int":
            return indices
        if mode == "one_hot" and indices.ndim > 1 and indices.shape[-1] == 1:
            indices = indices[..., 0]
        each = indices[..., None] == np.arange(count)
        if mode == "one_hot" or indices.ndim == 0:
            return each.astype(dtype)
        counts = each.any(axis=-2) if mode == "multi_hot" else each.sum(axis=-2)
        return (counts * np.asarray(weights) if mode == "tf_idf" else counts).astype(dtype)


class CategoryEncoding(_Counting):
    """A layer that turns category numbers into vectors.

    Args:
        num_tokens: the number of categories.
        output_mode: ``"one_hot"`` returns a vector for each number. ``"multi_hot"`` returns one
            vector for the numbers on the last axis, with a 1 for each that occurs. ``"count"``
            returns such a vector with the number of occurrences.
        options: `name` and `dtype`, see `Layer`.

    >>> CategoryEncoding(4)(np.array([[0, 2], [3, 3]])).tolist()
    [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """

    _modes = ("one_hot", "multi_hot", "count")

    def __init__(self, num_tokens: int, output_mode: str = "multi_hot", **options: Any) -> None:
        super().__init__(output_mode, **options)
        self.num_tokens = positive(num_tokens, "CategoryEncoding: num_tokens")

    def call(self, inputs: Any) -> Any:
        """Return the vectors."""
        what = f"{self.name}: numbers must be in [0, {self.num_tokens})"
        operations.check_range(inputs, self.num_tokens, what, "Increase num_tokens.")
        return self._encoded(inputs, self.num_tokens)


class Discretization(_Counting):
    """A layer that turns numbers into the numbers of their bins.

    Args:
        bin_boundaries: the boundaries between the bins, in ascending order; None: `adapt` finds
            them.
        num_bins: the number of bins that `adapt` makes, with as many elements in each.
        output_mode: ``"int"`` for the number of the bin, or as for `CategoryEncoding`.
        options: `name` and `dtype`, see `Layer`.

    >>> Discretization([0.0, 1.0])(np.array([-2.0, 0.0, 5.0])).tolist()
    [0, 1, 2]
    """

    def __init__(
        self,
        bin_boundaries: Sequence[float] | None = None,
        num_bins: int | None = None,
        output_mode: str = "int",
        **options: Any,
    ) -> None:
        super().__init__(output_mode, **options)
        if (bin_boundaries is None) == (num_bins is None):
            raise ValueError("Discretization: pass either bin_boundaries, or num_bins for adapt.")
        self.bin_boundaries = None if bin_boundaries is None else [*map(float, bin_boundaries)]
        self.num_bins = num_bins

    def adapt(self, data: Any) -> None:
        """Find the boundaries for an array, or for a dataset of batches."""
        values = np.concatenate([np.ravel(batch) for batch in _batches_of(data)])
        shares = np.linspace(0, 1, positive(self.num_bins or 0, "Discretization: num_bins") + 1)
        self.bin_boundaries = np.quantile(values, shares[1:-1]).tolist()

    def call(self, inputs: Any) -> Any:
        """Return the numbers or vectors."""
        if self.bin_boundaries is None:
            raise RuntimeError(
                f"{self.name} has no boundaries: call adapt, or pass bin_boundaries."
            )
        indices = sum((inputs >= each).astype(np.int64) for each in self.bin_boundaries)
        return self._encoded(indices, len(self.bin_boundaries) + 1)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, with the boundaries of `adapt`."""
        known = {"bin_boundaries": self.bin_boundaries, "num_bins": None}
        return super().get_config() | (known if self.bin_boundaries is not None else {})


class Hashing(_Counting):
    """A layer that turns words or integers into numbers of bins, by a hash of their text.

    The hash is BLAKE2b, the same in all processes. The numbers differ from those of Keras.

    Args:
        num_bins: the number of bins.
        salt: a number; another number gives other bins.
        output_mode: ``"int"`` for the number of the bin, or as for `CategoryEncoding`.
        options: `name` and `dtype`, see `Layer`.

    >>> numbers = Hashing(10)(np.array(["a", "b", "a"]))
    >>> numbers.shape, bool(numbers[0] == numbers[2])
    ((3,), True)
    """

    def __init__(
        self,
        num_bins: int,
        salt: int | Sequence[int] | None = None,
        output_mode: str = "int",
        **options: Any,
    ) -> None:
        super().__init__(output_mode, **options)
        self.num_bins, self.salt = positive(num_bins, "Hashing: num_bins"), salt
        self._key = b"" if salt is None else repr(salt).encode()[:64]

    def call(self, inputs: Any) -> Any:
        """Return the numbers or vectors."""
        _refuse_trace(self)
        numbers = [self._bin(_text_of(value)) for value in np.ravel(inputs).tolist()]
        return self._encoded(np.array(numbers, np.int64).reshape(np.shape(inputs)), self.num_bins)

    def _bin(self, value: Any) -> int:
        digest = hashlib.blake2b(str(value).encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "big") % self.num_bins


class StringLookup(_Counting):
    """A layer that turns words into the numbers of a vocabulary, or back.

    Args:
        max_tokens: the largest size of the vocabulary that `adapt` makes, including the mask token
            and the number for unknown words.
        num_oov_indices: 1: words outside the vocabulary get a number; 0: they raise an error.
        mask_token: a word that gets the number 0; None: no such word.
        oov_token: the word that the inverse returns for the number of unknown words.
        vocabulary: the words; None: the words that `adapt` counts, the most frequent first.
        idf_weights: the weights of the words for ``"tf_idf"``; None: `adapt` computes them.
        invert: whether to turn numbers into words.
        output_mode: ``"int"`` for numbers; a mode of `CategoryEncoding`; or ``"tf_idf"`` for counts
            times weights. The weight of a word is larger if fewer of the rows that `adapt` reads
            contain it.
        options: `name` and `dtype`, see `Layer`.

    >>> layer = StringLookup(vocabulary=["a", "b"])
    >>> layer(np.array([["b", "z"]])), layer.get_vocabulary()
    (array([[2, 0]]), ['[UNK]', 'a', 'b'])
    """

    _modes: ClassVar[tuple[str, ...]] = ("int", "one_hot", "multi_hot", "count", "tf_idf")
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
        idf_weights: Any = None,
        invert: bool = False,
        output_mode: str = "int",
        **options: Any,
    ) -> None:
        super().__init__(output_mode, **options)
        kind = type(self).__name__
        if num_oov_indices not in (0, 1):
            raise ValueError(f"{kind}: num_oov_indices must be 0 or 1, got {num_oov_indices}.")
        self.max_tokens, self.num_oov_indices, self.invert = max_tokens, num_oov_indices, invert
        self._oov_token = self._oov if oov_token is None else oov_token
        masks = mask_token is not None and output_mode == "int"
        self._special = [mask_token] * masks + [self._oov_token] * num_oov_indices
        self._tokens: list[Any] | None = None
        self._weights: list[float] | None = None
        if vocabulary is not None:
            self.set_vocabulary(vocabulary, idf_weights)

    def adapt(self, data: Any) -> None:
        """Make the vocabulary of an array, or of a dataset of batches."""
        counts, rows, total = Counter[Any](), Counter[Any](), 0
        for batch in _batches_of(data):
            for tokens in self._rows(batch):
                counts.update(tokens)
                rows.update({*tokens})
                total += 1
        ordered = sorted(counts, key=lambda token: (counts[token], token), reverse=True)
        words = [token for token in ordered if token not in self._special]
        room = None if self.max_tokens is None else max(0, self.max_tokens - len(self._special))
        weights = [math.log(1 + total / (1 + rows[word])) for word in words[:room]]
        self.set_vocabulary(words[:room], weights)

    def set_vocabulary(self, vocabulary: Any, idf_weights: Any = None) -> None:
        """Set the words; the mask and the word for unknown words may come first.

        Args:
            vocabulary: the words.
            idf_weights: the weight of each word, for ``"tf_idf"``; unknown words get the mean
                weight.
        """
        words = self._values(vocabulary)
        if self._special and words[: len(self._special)] == self._special:
            words = words[len(self._special) :]
        if twice := [word for word, count in Counter(words).items() if count > 1]:
            raise ValueError(
                f"{self.name}: the vocabulary has {twice[0]!r} twice: pass each word once."
            )
        weights = None if idf_weights is None else np.ravel(idf_weights).tolist()[-len(words) :]
        if self.output_mode == "tf_idf" and (weights is None or len(weights) != len(words)):
            raise ValueError(f"{self.name}: tf_idf needs idf_weights, one for each word.")
        self._tokens, self._weights = words, weights
        self._numbers = {token: k for k, token in enumerate(self.get_vocabulary())}

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:
        """Return the words in the order of their numbers."""
        return (self._special if include_special_tokens else []) + (self._tokens or [])

    def vocabulary_size(self) -> int:
        """Return how many numbers there are."""
        return len(self.get_vocabulary())

    def call(self, inputs: Any) -> Any:
        """Return the numbers or vectors of words, or the words of numbers."""
        self._check_words()
        if self.invert:
            words = dict(enumerate(self.get_vocabulary()))
            tokens = [words.get(int(n), self._oov_token) for n in np.ravel(inputs)]
            return np.array(tokens, self._dtype).reshape(np.shape(inputs))
        return self._vectors(self._numbered_words(self._values(inputs), np.shape(inputs)))

    def _numbered_words(self, values: list[Any], shape: Sequence[int]) -> Any:
        """Return the numbers of words, in an array of a shape."""
        other = len(self._special) - 1 if self.num_oov_indices else 0 if describes() else None
        numbers = [self._numbers.get(token, other) for token in values]
        if None in numbers:
            word = values[numbers.index(None)]
            raise ValueError(f"{self.name}: {word!r} is not in the vocabulary.")
        return np.array(numbers, np.int64).reshape(shape)

    def _vectors(self, indices: Any) -> Any:
        """Return numbers in the form of the result."""
        size, known = self.vocabulary_size(), self._weights or []
        others = [float(np.mean(known or [0.0]))] * (size - len(known))
        return self._encoded(indices, size, others + known)

    def _check_words(self) -> None:
        if self._tokens is None:
            raise RuntimeError(f"{self.name} has no vocabulary: call adapt, or pass vocabulary.")
        _refuse_trace(self)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, with the vocabulary of `adapt`."""
        known = {"vocabulary": self._tokens, "idf_weights": self._weights}
        return super().get_config() | (known if self._tokens else {})

    def _rows(self, batch: Any) -> Iterable[list[Any]]:
        """Return the words of each row of a batch."""
        rows = np.asarray(batch)
        return [self._values(row) for row in (rows if rows.ndim > 1 else rows[..., None])]

    def _values(self, batch: Any) -> list[Any]:
        return [self._type(_text_of(value)) for value in np.ravel(np.asarray(batch)).tolist()]


class IntegerLookup(StringLookup):
    """A layer that turns integers into the numbers of a vocabulary, or back; see `StringLookup`.

    >>> IntegerLookup(vocabulary=[10, 20])(np.array([20, 10, 7])).tolist()
    [2, 1, 0]
    """

    _type = int
    _dtype = np.int64
    _oov = -1


class TextVectorization(StringLookup):
    """A layer that turns texts into the numbers of their words.

    Args:
        max_tokens: as for `StringLookup`.
        standardize: ``"lower_and_strip_punctuation"``, ``"lower"``, ``"strip_punctuation"``, None,
            or a function of an array of texts.
        split: ``"whitespace"``, ``"character"``, None, or a function of a text that returns words.
        ngrams: also count up to this many consecutive words as a word; or the numbers, in a tuple.
        output_mode: ``"int"`` for the numbers of the words in order, with 1 for unknown words and 0
            after the last word; or as for `StringLookup`.
        output_sequence_length: the length of rows of numbers; None: the length of the longest text.
        options: as for `StringLookup`.

    >>> layer = TextVectorization(vocabulary=["a", "text"])
    >>> layer(np.array(["A text!", "other"]))
    array([[2, 3],
           [1, 0]])
    """

    _modes = "int", "multi_hot", "count", "tf_idf"

    def __init__(
        self,
        max_tokens: int | None = None,
        standardize: str | Callable[[Any], Any] | None = "lower_and_strip_punctuation",
        split: str | Callable[[Any], Any] | None = "whitespace",
        ngrams: int | Sequence[int] | None = None,
        output_mode: str = "int",
        output_sequence_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(max_tokens, mask_token="", output_mode=output_mode, **options)
        if not callable(standardize):
            one_of(standardize, f"{self.name}: standardize, unless a function,", _STANDARDS)
        if not callable(split):
            one_of(split, f"{self.name}: split, unless a function,", _SPLITS)
        self.standardize, self.split = standardize, split
        self.output_sequence_length = output_sequence_length
        counts = range(1, ngrams + 1) if isinstance(ngrams, int) else ngrams
        self.ngrams = (1,) if counts is None else tuple(counts)

    def call(self, inputs: Any) -> Any:
        """Return the numbers, of shape ``(batch, words)``, or vectors."""
        self._check_words()
        rows = self._rows(inputs)
        if self.output_mode == "int":
            # At least 1, so that an empty text builds the layers after this one.
            longest = 32 * len(rows) if describes() else max([1, *map(len, rows)])
            n = longest if self.output_sequence_length is None else self.output_sequence_length
            rows = [[*row, *[""] * n][:n] for row in rows]
        vectors = [self._vectors(self._numbered_words(row, (len(row),))) for row in rows]
        if not vectors:  # An empty batch; its result has the shape of others.
            return self(np.full(1, ""))[:0]
        return np.stack(vectors) if np.ndim(inputs) else vectors[0]

    def _rows(self, batch: Any) -> list[list[str]]:
        texts = np.asarray(batch)
        if texts.ndim > 1 and texts.shape[1:] != (1,):
            raise ValueError(f"{self.name}: texts must have the shape (batch,), got {texts.shape}.")
        words = [_text_of(text) for text in texts.ravel().tolist()]
        if callable(self.standardize):
            words = np.asarray(self.standardize(np.array(words, str))).tolist()
        else:
            words = [*map(_STANDARDS[self.standardize], words)]
        split: Any = _SPLITS.get(self.split, self.split)
        rows = [[_text_of(word) for word in split(_text_of(text))] for text in words]
        return [
            [" ".join(row[k : k + n]) for n in self.ngrams for k in range(len(row) - n + 1)]
            for row in rows
        ]


_stripped = functools.partial(re.compile("[" + re.escape(string.punctuation) + "]").sub, "")
_STANDARDS: dict[Any, Callable[[str], str]] = {
    "lower_and_strip_punctuation": lambda text: _stripped(text.lower()),
    "strip_punctuation": _stripped,
    "lower": str.lower,
    None: str,
}
_SPLITS: dict[Any, Any] = {"whitespace": str.split, "character": list, None: lambda text: [text]}


def _refuse_trace(layer: Layer) -> None:
    if current_trace() is not None:
        problem = (
            "a compiled step cannot compute with text: call the layer before the step, such as in "
            "Dataset.map"
        )
        raise RuntimeError(f"{layer.name}: {problem}.")


def _text_of(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _batches_of(data: Any) -> Iterable[Any]:
    is_array = hasattr(data, "dtype") or isinstance(data, list | tuple)
    return [data] if is_array else data


_export(vars())
