"""Feature columns: how the raw features of a batch become the input of a model.

A column names its features and is plain data; its tensors and variables are made when it is used in
a graph. Features are tensors of shape ``(batch,)`` or ``(batch, n)``. A categorical column turns
them into ids below `buckets`. The id -1 stands for a missing value, which has no effect.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ndistribute import graph as g
from ndistribute.devices import to_host
from ndistribute.exports import export as _export
from ndistribute.graph.graph import apply_named
from ndistribute.numpy_functions import register

Features = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column, which has values or ids for each example; a bucketized column has both.

    Attributes:
        name: the name, which orders the columns and names their variables.
        width: the number of values of an example; of a categorical column, the number of ids.
        dtype: the dtype of the values.
        values: returns a tensor of shape ``(batch, width)`` for features, and makes the variables
            that it needs; the second argument is whether optimizers change these. None: the column
            is categorical.
        ids: returns an integer tensor of shape ``(batch, n)`` for features. None: the column is not
            categorical.
    """

    name: str
    width: int
    dtype: np.dtype[Any] = field(default=np.dtype(np.float32))
    values: Callable[[Features, bool], Any] | None = field(default=None, repr=False)
    ids: Callable[[Features], Any] | None = field(default=None, repr=False)


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    dtype: Any = np.float32,
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> Column:
    """Return a column of numbers.

    Args:
        key: the name of the feature.
        shape: the shape of the feature of one example.
        dtype: the dtype of the column.
        normalizer_fn: a function of the tensor of shape ``(batch, width)``.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 1 for size in sizes):
        raise ValueError(f"numeric_column({key!r}): shape must be 1 or more, got {shape}.")
    width = math.prod(sizes)

    def values(features: Features, trainable: bool) -> Any:
        feature = _feature(features, key)
        rows = _function("numbers", feature, key, list(sizes)).astype(dtype)
        return rows if normalizer_fn is None else normalizer_fn(rows)

    return Column(key, width, np.dtype(dtype), values)


def bucketized_column(source_column: Column, boundaries: Sequence[float]) -> Column:
    """Return a column of the intervals in which numbers lie.

    Args:
        source_column: a numeric column.
        boundaries: ascending numbers; n numbers make n + 1 intervals. Each interval includes its
            lower end.
    """
    values = getattr(source_column, "values", None)
    if values is None:
        raise ValueError(f"bucketized_column needs a numeric_column, got {source_column!r}.")
    ascending = all(a < b for a, b in itertools.pairwise(boundaries))
    if not len(boundaries) or not ascending:
        raise ValueError(f"bucketized_column: boundaries must ascend, got {boundaries!r}.")
    dtype = np.result_type(source_column.dtype, np.float32)  # Between integers, too.
    bounds, width = np.array(boundaries, dtype), source_column.width
    size = len(bounds) + 1

    def ids(features: Features) -> Any:
        places: Any = np.searchsorted(bounds, values(features, False), side="right")
        return places + np.arange(width) * size

    name = f"{source_column.name}_bucketized"
    indicator = indicator_column(Column(name, width * size, ids=ids))
    return dataclasses.replace(indicator, name=name, ids=ids)


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> Column:
    """Return a column of integers below `num_buckets`.

    Args:
        key: the name of the feature.
        num_buckets: the number of ids.
        default_value: the id for integers out of range; None: these fail the run.
    """
    _check_size(num_buckets, f"categorical_column_with_identity({key!r}): num_buckets")
    if default_value is not None and not 0 <= default_value < num_buckets:
        why = (
            f"default_value must be 0 or more and below num_buckets={num_buckets}, got "
            f"{default_value}."
        )
        raise ValueError(f"categorical_column_with_identity({key!r}): {why}")
    return _looked_up(key, num_buckets, "checked", num_buckets, default_value)


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[Any],
    dtype: Any = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> Column:
    """Return a column of words or integers, whose ids are their indices in a list.

    Args:
        key: the name of the feature.
        vocabulary_list: the words, each once.
        dtype: ignored; accepted for compatibility with TensorFlow.
        default_value: the id of other words; -1: they count as missing.
        num_oov_buckets: the number of additional ids; other words get one of these by their hash.
    """
    words = tuple(vocabulary_list)
    if not words or len(set(words)) < len(words):
        reason = (
            f"the vocabulary must contain at least one word, and each word once; got {words[:5]!r}."
        )
        raise ValueError(f"categorical_column_with_vocabulary_list({key!r}): {reason}")
    if num_oov_buckets and default_value != -1:
        why = "pass default_value or num_oov_buckets, not both."
        raise ValueError(f"categorical_column_with_vocabulary_list({key!r}): {why}")
    buckets = len(words) + num_oov_buckets
    return _looked_up(key, buckets, "lookup", np.array(words), default_value, num_oov_buckets)


def categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: Any = None
) -> Column:
    """Return a column of words or integers, whose ids are hashes of their text.

    The hash is BLAKE2b, the same in all processes. TensorFlow's ids differ.

    Args:
        key: the name of the feature.
        hash_bucket_size: the number of ids.
        dtype: ignored; accepted for compatibility with TensorFlow.
    """
    _check_size(hash_bucket_size, f"categorical_column_with_hash_bucket({key!r}): hash_bucket_size")
    return _looked_up(key, hash_bucket_size, "lookup", np.array([], str), -1, hash_bucket_size)


def crossed_column(keys: Sequence[str | Column], hash_bucket_size: int) -> Column:
    """Return a column of the combinations of several columns, whose ids are hashes.

    An example with several words has all combinations of them. The hash is that of
    `categorical_column_with_hash_bucket`.

    Args:
        keys: names of features of words or integers, and categorical or bucketized columns.
        hash_bucket_size: the number of ids.
    """
    _check_size(hash_bucket_size, f"crossed_column({keys!r}): hash_bucket_size")
    if len(keys) < 2:
        raise ValueError(f"crossed_column needs two keys or more, got {keys!r}.")
    names = sorted(key if isinstance(key, str) else key.name for key in keys)

    sources = [
        functools.partial(_feature, key=key)
        if isinstance(key, str)
        else _ids_of(key, "crossed_column")
        for key in keys
    ]

    def ids(features: Features) -> Any:
        return _function("crossed", [source(features) for source in sources], hash_bucket_size)

    return Column("_X_".join(names), hash_bucket_size, ids=ids)


def indicator_column(categorical_column: Column) -> Column:
    """Return a column with the number of occurrences of each id."""
    source, ids = categorical_column, _ids_of(categorical_column, "indicator_column")

    def values(features: Features, trainable: bool) -> Any:
        return _function("counts", ids(features), source.width)

    return Column(f"{source.name}_indicator", source.width, values=values)


def embedding_column(
    categorical_column: Column,
    dimension: int,
    combiner: str = "mean",
    initializer: Callable[..., Any] | None = None,
    trainable: bool = True,
    dtype: Any = np.float32,
) -> Column:
    """Return a column with a learned vector for each id.

    Args:
        categorical_column: the column of ids.
        dimension: the length of the vectors.
        combiner: how the vectors of an example's ids are combined: ``"mean"``, ``"sum"``, or
            ``"sqrtn"``, the sum divided by the root of their number. Without ids the result is
            zeros.
        initializer: called with a shape and a dtype; None: truncated normal of standard deviation
            ``1 / sqrt(dimension)``.
        trainable: whether optimizers change the vectors.
        dtype: the dtype of the vectors.
    """
    _check_size(dimension, "embedding_column: dimension")
    if combiner not in ("mean", "sum", "sqrtn"):
        raise ValueError(f"combiner must be 'mean', 'sum' or 'sqrtn', got {combiner!r}.")
    source, ids = categorical_column, _ids_of(categorical_column, "embedding_column")
    shape = (source.width, dimension)

    def values(features: Features, trains: bool) -> Any:
        draw = functools.partial(g.truncated_normal, stddev=dimension**-0.5, dtype=dtype)
        initial = draw(shape) if initializer is None else initializer(shape, np.dtype(dtype))
        table = g.get_variable("embedding_weights", None, dtype, initial, trains and trainable)
        return _combined(table, ids(features), combiner)

    return Column(f"{source.name}_embedding", dimension, np.dtype(dtype), values)


def input_layer(
    features: Features, feature_columns: Column | Iterable[Column], trainable: bool = True
) -> Any:
    """Return a tensor of shape ``(batch, width)``: the columns side by side, sorted by name.

    Args:
        features: a tensor for each key.
        feature_columns: the columns; categorical ones in `indicator_column` or `embedding_column`.
        trainable: whether optimizers change the embeddings.

    Raises:
        KeyError: the features lack the key of a column.
        ValueError: a column is categorical, or two columns have the same name.

    >>> from ndistribute.graph.session import Session
    >>> columns = [bucketized_column(numeric_column("age"), [18, 65]), numeric_column("size")]
    >>> features = {"age": np.array([30.0, 65.0]), "size": np.array([1.5, 2.0])}
    >>> Session().run(input_layer(features, columns))
    array([[0. , 1. , 0. , 1.5],
           [0. , 0. , 1. , 2. ]], dtype=float32)
    """
    parts = []
    with g.variable_scope(None, "input_layer"):
        for column in sorted_columns(feature_columns):
            values = column.values
            if values is None:
                why = "wrap it in indicator_column or embedding_column."
                raise ValueError(f"input_layer got the categorical column {column.name!r}: {why}")
            with g.variable_scope(None, column.name):
                parts.append(values(features, trainable))
        return np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def linear_model(features: Features, feature_columns: Any, units: int = 1) -> Any:
    """Return a linear function of columns, of shape ``(batch, units)``; weights start at zero.

    Args:
        features: a tensor for each key.
        feature_columns: the columns; a categorical one has a weight for each id.
        units: the number of outputs.

    >>> with g.Graph().as_default(), g.Session() as session:
    ...     y = linear_model({"x": np.ones(3)}, [numeric_column("x")])
    ...     session.run(g.global_variables_initializer())
    ...     session.run(y).shape
    (3, 1)
    """
    columns = sorted_columns(feature_columns)
    dtype = dtype_of(columns)
    with g.variable_scope(None, "linear_model"):
        total: Any = g.get_variable("bias_weights", initializer=np.zeros(units, dtype))
        for column in columns:
            with g.variable_scope(None, column.name):
                start = np.zeros((column.width, units), dtype)
                if column.ids is not None:
                    ids = column.ids(features)
                    part = _combined(g.get_variable("weights", initializer=start), ids, "sum")
                else:
                    values = column.values(features, True)
                    part = values @ g.get_variable("weights", initializer=start)
                total = total + part
    return total


def sorted_columns(feature_columns: Any) -> list[Any]:
    """Return columns sorted by name."""
    is_alone = isinstance(feature_columns, Column)
    columns = [feature_columns] if is_alone else list(feature_columns)
    for column in columns:
        if not isinstance(column, Column):
            raise ValueError(f"{column!r} is not a feature column: use for example numeric_column.")
    names = sorted(column.name for column in columns)
    twice = [a for a, b in itertools.pairwise(names) if a == b]
    if twice or not columns:
        none = "pass at least one feature column."
        raise ValueError(
            f"two feature columns are named {twice[0]!r}: pass each column once." if twice else none
        )
    return sorted(columns, key=lambda column: column.name)


def dtype_of(columns: Iterable[Any]) -> np.dtype[Any]:
    """Return the dtype for the weights of columns: the widest of theirs, at least float32."""
    return np.result_type(np.float32, *(column.dtype for column in columns))


def _looked_up(key: str, buckets: int, function: str, *args: Any) -> Column:
    """Return a column whose ids a function computes from a feature."""
    return Column(key, buckets, ids=lambda batch: _function(function, _feature(batch, key), *args))


def _ids_of(column: Any, what: str) -> Callable[[Features], Any]:
    ids: Callable[[Features], Any] | None = getattr(column, "ids", None)
    if ids is None:
        raise ValueError(f"{what} needs a categorical column, got {column!r}.")
    return ids


def _check_size(value: int, what: str) -> None:
    if value < 1:
        raise ValueError(f"{what} must be 1 or more, got {value}.")


def _feature(features: Features, key: str) -> g.Tensor:
    if not isinstance(features, Mapping) or key not in features:
        there = ", ".join(map(repr, features)) if isinstance(features, Mapping) else "one array"
        raise KeyError(f"a feature column needs the feature {key!r}; input_fn returned {there}.")
    return g.as_tensor(features[key])


def _combined(table: g.Variable, ids: Any, combiner: str) -> Any:
    """Return the rows of a table for the ids of each example, combined into one."""
    present = np.greater_equal(ids, 0).astype(table.dtype)[..., None]
    total = np.sum(table[np.maximum(ids, 0)] * present, axis=1)
    if combiner == "sum":
        return total
    count = np.maximum(np.sum(present, axis=1), 1)
    return total / (count if combiner == "mean" else np.sqrt(count))


# The functions that operations call. They look ids up on the host, where arrays of strings are.


def _function(name: str, *args: Any) -> Any:
    return apply_named(f"feature_column.{name}", args, {})


def _rows(values: Any) -> Any:
    array = to_host(values)
    return array.reshape(len(array), math.prod(array.shape[1:]))


def _numbers(values: Any, key: str, sizes: Sequence[int]) -> Any:
    if math.prod(values.shape[1:]) != math.prod(sizes):
        raise ValueError(
            f"the feature {key!r} has shape {values.shape}, but its numeric_column expects "
            f"{('batch', *sizes)}: set its argument shape."
        )
    return values.reshape(len(values), math.prod(sizes))


def _checked(values: Any, buckets: int, default: int | None) -> Any:
    ids = _rows(values)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"ids must be integers, got {ids.dtype}.")
    outside = (ids >= buckets) | (ids < -1 if default is None else ids < 0)
    if default is not None:
        return np.where(outside & (ids != -1), default, ids)
    if outside.any():
        why = "raise num_buckets, or pass default_value."
        raise ValueError(
            f"the id {ids[outside][0]} is not in [0, {buckets}), which num_buckets sets: {why}"
        )
    return ids


def lookup(values: Any, vocabulary: Any, default: int, oov_buckets: int) -> Any:
    """Return the places of words in a vocabulary, in rows of arrays."""
    places = {_plain(word): place for place, word in enumerate(vocabulary.tolist())}

    def place(word: Any) -> int:
        plain = _plain(word)
        if plain in places:
            return places[plain]
        if plain == "" or (type(word) is int and word == -1):  # It is missing.
            return -1
        return len(places) + _hash(plain, oov_buckets) if oov_buckets else default

    rows = _rows(values)
    return np.array([place(word) for word in rows.ravel().tolist()], np.int64).reshape(rows.shape)


def _crossed(values: Sequence[Any], buckets: int) -> Any:
    def place(words: tuple[Any, ...]) -> int:
        plain = [_plain(word) for word in words]
        is_missing = any(word in ("", -1) for word in plain)
        return -1 if is_missing else _hash("_X_".join(map(str, plain)), buckets)

    rows = zip(*(_rows(each).tolist() for each in values), strict=True)
    return np.array([[*map(place, itertools.product(*row))] for row in rows], np.int64)


def _plain(word: Any) -> Any:
    return word.decode("utf-8", "surrogateescape") if isinstance(word, bytes) else word


def _hash(word: Any, buckets: int) -> int:
    text = str(word).encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") % buckets


def _counts(ids: Any, buckets: int) -> Any:
    counts = np.zeros((len(ids), buckets), np.float32)
    row, column = np.nonzero(ids >= 0)
    np.add.at(counts, (row, ids[row, column]), 1)
    return counts


for _callable in (_numbers, _checked, lookup, _crossed, _counts):
    register(f"feature_column.{_callable.__name__.lstrip('_')}", _callable)


_export(vars(), but="dtype_of lookup sorted_columns")
