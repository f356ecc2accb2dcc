"""The data of `fit`, `evaluate` and `predict`: batches of one form, from arrays or datasets.

A batch is ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, of the global batch size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.context import get_strategy
from ndistribute.data import Dataset, as_dataset
from ndistribute.data.distributed import DistributedDataset
from ndistribute.mistakes import count_of
from ndistribute.values import PerReplica

_BATCH = 32


class DatasetCreator:
    """A function that makes the data of `fit`, `evaluate` or `predict` on each worker.

    Args:
        dataset_fn: called with the `InputContext` of the worker; returns a dataset of batches for a
            replica. If a chief schedules the steps, the dataset must repeat, because the chief does
            not know where it ends.
        input_options: `InputOptions`.

    Raises:
        TypeError: `dataset_fn` is not callable.

    >>> creator = DatasetCreator(lambda context: Dataset.range(6).batch(2))
    >>> creator.distributed(get_strategy()).cardinality()
    3
    """

    def __init__(self, dataset_fn: Callable[[Any], Any], input_options: Any = None) -> None:
        if not callable(dataset_fn):
            raise TypeError(f"dataset_fn must be a function of a context, got {dataset_fn!r}.")
        self.dataset_fn, self.input_options = dataset_fn, input_options

    def distributed(self, strategy: Any) -> Any:
        """Return the dataset of this process's replicas."""
        return strategy.distribute_datasets_from_function(self.dataset_fn, self.input_options)


def batches_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    shuffle: bool = False,
    class_weight: Mapping[int, float] | None = None,
) -> Any:
    """Return a dataset of batches, from arrays or from a dataset; see `Trainer.fit`."""
    check_counts(1, batch_size=batch_size)
    if isinstance(x, DatasetCreator):
        x = x.distributed(get_strategy())
    x, y, sample_weight = map(as_arrays, (x, y, sample_weight))
    if not _are_arrays(x):
        sized = batch_size is not None and not hasattr(x, "on_epoch_end")  # As Keras ignores it.
        if y is not None or sample_weight is not None or sized:
            what = "x is a dataset"
            if not isinstance(x, Dataset):
                what = f"x is a {type(x).__name__}, not arrays, so it is treated as a dataset"
            raise ValueError(
                f"{what}: its batches contain y and sample_weight, and determine the batch size. "
                "Do not pass y, sample_weight or batch_size; or make x an array."
            )
        data = x
        if not isinstance(x, DistributedDataset):
            data = as_dataset(_iterable(x))
            if data._node.tensors is not None:  # Models compute with arrays.
                data = type(data)(replace(data._node, tensors=None))
    else:
        if y is None and sample_weight is not None:
            raise ValueError("sample_weight was passed without labels: pass y, too.")
        x, y, sample_weight = map(_in_tuples, (x, y, sample_weight))
        parts = tuple(part for part in (x, y, sample_weight) if part is not None)
        alone = y is None and not isinstance(x, tuple)  # As Keras passes it to train_step.
        data = Dataset.from_tensor_slices(x if alone else parts)
        rows = len(data)
        if shuffle and rows > 1:
            data = data.shuffle(rows)
        data = data.batch(batch_size or _BATCH)
    if class_weight is None:
        return data
    if not isinstance(class_weight, Mapping):
        raise TypeError(
            f"class_weight must be a dict of weights by label, such as {{0: 1.0, 1: 5.0}}, got "
            f"{class_weight!r}."
        )
    if isinstance(data, DistributedDataset):
        raise ValueError(
            "class_weight needs a dataset that is not distributed yet: pass the dataset itself."
        )
    return data.map(lambda *batch: _with_class_weight(batch, class_weight))


def check_counts(least: int, **counts: Any) -> None:
    """Raise a `ValueError` if an argument is not an integer, or is below `least`; skip None."""
    for name, count in counts.items():
        if count is not None and not (isinstance(count, int | np.integer) and count >= least):
            raise ValueError(f"{name} must be an integer, {least} or more, got {count!r}.")


def split(x: Any, y: Any, weight: Any, share: float) -> tuple[Any, Any]:
    """Return the arrays in two parts: for training, and the last ones for validation."""
    if not _are_arrays(x):
        raise ValueError(
            f"validation_split needs arrays, got x as a {type(x).__name__}: pass validation_data, "
            "such as dataset.take(n), and train on dataset.skip(n)."
        )
    if not 0 < share < 1:
        raise ValueError(f"validation_split must be between 0 and 1, got {share}.")
    x, y, weight = map(as_arrays, (x, y, weight))
    rows = rows_of(x)
    at = int(rows * (1 - share))
    if not 0 < at < rows:
        raise ValueError(
            f"validation_split={share} of {count_of(rows, 'example')} leaves one part empty."
        )

    def cut(part: slice) -> Any:
        return tree.map_leaves(lambda array: None if array is None else array[part], (x, y, weight))

    return cut(slice(at)), cut(slice(at, None))


def for_validation(data: Any, batch_size: int | None, steps: int | None) -> dict[str, Any] | None:
    """Return the arguments of `evaluate` for `validation_data`, unless that is None."""
    if data is None:
        return None
    arrays = isinstance(data, tuple) and 2 <= len(data) <= 3
    if not arrays and (isinstance(data, tuple | list | str | float) or _are_arrays(data)):
        size = f" of {len(data)}" if isinstance(data, tuple | list) else ""
        raise ValueError(
            "validation_data must be (x, y), (x, y, sample_weight) or a dataset of such batches, "
            f"got a {type(data).__name__}{size}."
        )
    x, y, weight = unpacked(data)
    of_arrays = {} if y is None else {"y": y, "sample_weight": weight, "batch_size": batch_size}
    return {"x": x, **of_arrays, "steps": steps, "verbose": 0, "return_dict": True}


def unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Return the input, labels and weights of a batch, with None for each that it lacks."""
    if not isinstance(data, tuple):
        return data, None, None
    if not 1 <= len(data) <= 3:
        raise ValueError(
            f"a batch has {count_of(len(data), 'part')}: it must be x, (x, y) or (x, y, "
            "sample_weight)."
        )
    return (*data, None, None)[:3]


def rows_of(value: Any) -> int:
    """Return the number of examples of a batch."""
    return int(np.shape(tree.flatten(value)[0])[0])


def equal_parts(strategy: Any, batch: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a distributed batch, in parts with equally many rows on every replica if needed.

    With each part comes a `PerReplica` that says whether a replica has rows in it; None if all have
    rows. A replica without rows gets a row that does not count.
    """
    leaves = tree.flatten(batch)
    if not (strategy.needs_equal_parts and all(isinstance(leaf, PerReplica) for leaf in leaves)):
        yield batch, None
        return
    counts = PerReplica([np.array([rows_of(part)]) for part in leaves[0].values])
    everywhere = strategy.gather(counts, axis=0)
    start, stop = 0, everywhere.min() or 1
    while start < everywhere.max():
        has_rows = [np.bool_(count[0] > start) for count in counts.values]
        cut = functools.partial(_cut, start, stop)
        counting = PerReplica(has_rows) if everywhere.min() <= start else None
        yield tree.map_leaves(cut, batch), counting
        start, stop = stop, stop + 1


def _cut(start: int, stop: int, leaf: PerReplica) -> PerReplica:
    """Return some rows of each replica; a row of zeros or another row if it has none."""
    some = next((part[:1] for part in leaf.values if len(part)), None)
    if some is None:
        some = np.zeros((1, *leaf.values[0].shape[1:]), leaf.values[0].dtype)
    return PerReplica([part[start:stop] if start < len(part) else some for part in leaf.values])


def joined_parts(parts: Sequence[tuple[Any, Any]]) -> Any:
    """Return the results of a step for the parts of a batch, which `equal_parts` gave, as one."""
    if all(counting is None for _, counting in parts):
        return parts[0][0]

    def join(*leaves: PerReplica) -> PerReplica:
        replicas = range(len(leaves[0].values))
        pieces = [
            [leaf.values[k][: None if has is None or has.values[k] else 0] for k in replicas]
            for leaf, (_, has) in zip(leaves, parts, strict=True)
        ]
        return PerReplica([np.concatenate(column) for column in zip(*pieces, strict=True)])

    return tree.map_leaves(join, *(outputs for outputs, _ in parts))


def as_arrays(nest: Any) -> Any:
    """Return a nest with arrays for data frames and columns, and for lists of numbers.

    >>> as_arrays([[1, 2], [3, 4]]).shape
    (2, 2)
    """
    leaves = tree.flatten(nest)
    if isinstance(nest, list) and leaves and all(isinstance(leaf, int | float) for leaf in leaves):
        return np.array(nest)
    return tree.map_leaves(lambda x: x.to_numpy() if hasattr(x, "to_numpy") else x, nest)


class _Sequence:
    """The batches of an object with `__len__`, `__getitem__` and maybe `on_epoch_end`."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._batches.__getitem__, range(len(self)))
        getattr(self._batches, "on_epoch_end", list)()


def _iterable(batches: Any) -> Any:
    """Return an iterable that `as_dataset` accepts, for a generator or a `Sequence` of Keras."""
    if isinstance(batches, Iterator):
        if get_strategy().session is not None:
            raise ValueError(
                f"x is a {type(batches).__name__}, which cannot go back to an earlier batch, but "
                "elastic workers must go back when one of them is lost: pass "
                "Dataset.from_generator(function)."
            )
        return Dataset.from_generator(_rest_of(batches))
    is_sequence = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
    if is_sequence and (hasattr(batches, "on_epoch_end") or not hasattr(batches, "__iter__")):
        return _Sequence(batches)
    return batches


def _rest_of(batches: Iterator[Any]) -> Any:
    """Return a function whose results continue in an iterator; a look at the first takes none."""
    ahead: list[Any] = []

    def rest() -> Iterator[Any]:
        while True:
            if not ahead:
                ahead.extend(itertools.islice(batches, 1))
            if not ahead:
                return
            yield ahead[0]
            ahead.clear()

    return rest


def _in_tuples(nest: Any) -> Any:
    """Return a nest with tuples for lists, which a dataset would take for the rows of an array."""
    if isinstance(nest, dict):
        return {key: _in_tuples(part) for key, part in nest.items()}
    return tuple(map(_in_tuples, nest)) if isinstance(nest, list | tuple) else nest


def _are_arrays(x: Any) -> bool:
    arrays = all(hasattr(leaf, "shape") for leaf in tree.flatten(x))
    return arrays and not isinstance(x, Dataset)


def _with_class_weight(batch: Any, weights: Mapping[int, float]) -> Any:
    x, y, weight = unpacked(batch)
    if not hasattr(y, "ndim"):
        raise ValueError(
            "class_weight needs one array of labels, but the labels are a nest of arrays: pass a "
            "sample_weight for each output instead."
        )
    labels = y[..., 0] if y.ndim > 1 and y.shape[-1] == 1 else y
    if labels.ndim > 1 and labels.dtype.kind == "f":  # One-hot rows.
        labels = labels.argmax(axis=-1)
    factors = np.ones(labels.shape, np.float32)
    for label, factor in weights.items():
        factors[labels == label] = factor
    return x, y, factors if weight is None else factors * weight
