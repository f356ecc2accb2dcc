"""What an element of a dataset is: a nest of NumPy arrays, rank-0 leaves being NumPy scalars.

The rules by which users' values become elements, elements become batches and batches fall apart
again stand here once. As in `tf.data`, a list is one array; tuples, dicts and dataclasses nest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ndistribute import tree
from ndistribute.device import as_array

__all__ = [
    "Element",
    "as_batch",
    "as_element",
    "call_with",
    "is_frame",
    "leading_length",
    "read_only",
    "stack",
    "unstack",
]

Element = Any
Leaf = Any


def as_element(value: Any) -> Element:
    """Turn what a user's function gave into an element.

    Raises:
        ValueError: a leaf is None, or is not rectangular.

    >>> as_element(([1, 2], 3.0))
    (array([1, 2]), np.float64(3.0))
    """
    return _convert(value, lambda items: False)


def as_batch(value: Any) -> Element:
    """Turn what a foreign iterable gave into a batch.

    Other libraries' loaders give lists of arrays where `tf.data` gives tuples, so here a list that
    holds arrays nests.

    >>> as_batch([np.zeros((4, 3)), [0, 1, 2, 3]])[1]
    array([0, 1, 2, 3])
    """
    return _convert(value, _holds_arrays)


def read_only(element: Element) -> Element:
    """Return views that refuse writes, for arrays that the dataset will hand out again."""

    def view(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, np.ndarray):
            return leaf
        frozen = leaf.view()
        frozen.flags.writeable = False
        return frozen

    return tree.map_leaves(view, element)


def stack(elements: Sequence[Element]) -> Element:
    """Join elements into a batch, along a new leading axis.

    Raises:
        ValueError: the elements differ in structure or shape.

    >>> stack([(1, np.array([2, 3])), (4, np.array([5, 6]))])
    (array([1, 4]), array([[2, 3],
           [5, 6]]))
    """
    first = elements[0]
    if all(hasattr(element, "dtype") for element in elements):
        return _stack_leaf(elements)
    # Flat tuples and dicts, the common elements, take a fifth of the time of the general way.
    if type(first) is tuple and all(_alike(first, element) for element in elements):
        return tuple(stack(column) for column in zip(*elements, strict=True))
    if type(first) is dict and all(_alike(first, element) for element in elements):
        return {key: stack([element[key] for element in elements]) for key in first}
    for element in elements:
        if not tree.same_structure(first, element):
            raise ValueError(
                f"batch: the elements {first!r} and {element!r} differ in structure. Return the "
                "same structure for every element."
            )
    columns = zip(*(tree.flatten(element) for element in elements), strict=True)
    return tree.unflatten(first, [_stack_leaf(column) for column in columns])


def unstack(batch: Element, length: int) -> Iterator[Element]:
    """Take a batch apart into the elements along its leading axis."""
    if isinstance(batch, np.ndarray):
        yield from batch
        return
    # Flat tuples and dicts, the common batches, take a quarter of the time of the general way.
    if type(batch) is tuple and all(isinstance(column, np.ndarray) for column in batch):
        yield from zip(*batch, strict=True)
        return
    if type(batch) is dict and all(isinstance(column, np.ndarray) for column in batch.values()):
        for items in zip(*batch.values(), strict=True):
            yield dict(zip(batch, items, strict=True))
        return
    leaves = tree.flatten(batch)
    for row in range(length):
        yield tree.unflatten(batch, [leaf[row] for leaf in leaves])


def is_frame(value: Any) -> bool:
    """Return True for a table with named columns, such as a DataFrame of pandas or polars."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def leading_length(leaves: Sequence[Leaf], what: str, remedy: str) -> int:
    """Return the number of rows of a batch.

    Args:
        leaves: the arrays of the batch, which must share their leading length.
        what: the call that needs it, for the error.
        remedy: what the user should do instead, for the error.

    Raises:
        ValueError: a leaf is a scalar, or the leading lengths differ.
    """
    lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
    if len(lengths) == 1 and -1 not in lengths:
        return int(lengths.pop())
    shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "no leaf"
    raise ValueError(
        f"{what} got an element of {shapes}, but needs every leaf to have the same leading length. "
        f"{remedy}"
    )


def call_with(fn: Callable[..., Any], element: Element) -> Any:
    """Call a user's function on an element; a tuple's items become separate arguments."""
    return fn(*element) if type(element) is tuple else fn(element)


def _convert(value: Any, nests: Callable[[list[Any]], bool]) -> Element:
    if isinstance(value, np.ndarray | np.generic):
        return _leaf(value)
    if isinstance(value, tuple):
        items = [_convert(item, nests) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: _convert(item, nests) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: _convert(getattr(value, name), nests) for name in fields}
        return dataclasses.replace(value, **changed)
    if isinstance(value, list) and nests(value):
        return [_convert(item, nests) for item in value]
    if value is None:
        raise ValueError(
            "a dataset's element has a leaf that is None; a leaf must be an array or a number. "
            "Check that the function given to map or from_generator returns its result."
        )
    if is_frame(value):
        raise ValueError(
            f"a {type(value).__name__} is a table, not an array. Give dict(frame) for one array a "
            "column, or frame.to_numpy() for one array of all of them."
        )
    try:
        return _leaf(as_array(value))
    except ValueError as error:
        raise _not_rectangular() from error


def _leaf(array: Any) -> Leaf:
    if array.dtype == object and any(isinstance(v, list | tuple | np.ndarray) for v in array.flat):
        raise _not_rectangular()
    return array[()] if array.ndim == 0 else array


def _not_rectangular() -> ValueError:
    return ValueError(
        "a leaf of a dataset's element is not rectangular: a list is one array, and its rows have "
        "different lengths. Pad the rows, or give a tuple where you mean several arrays."
    )


def _holds_arrays(items: list[Any]) -> bool:
    return any(isinstance(item, tuple | dict) or getattr(item, "ndim", 0) > 0 for item in items)


def _alike(first: Any, element: Any) -> bool:
    if type(first) is not type(element) or len(first) != len(element):
        return False
    return type(first) is tuple or first.keys() == element.keys()


def _stack_leaf(column: Sequence[Leaf]) -> npt.NDArray[Any]:
    try:
        return np.array(column) if isinstance(column[0], np.generic) else np.stack(column)
    except ValueError as error:
        shapes = ", ".join(sorted({str(np.shape(leaf)) for leaf in column}))
        raise ValueError(
            f"batch: elements of shapes {shapes} do not stack into one array. Pad them to one "
            "shape in map, or use batch(1)."
        ) from error
