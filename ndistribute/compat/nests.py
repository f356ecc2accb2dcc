"""`tf.nest`: functions of nests of lists, tuples, dicts and dataclasses."""

from __future__ import annotations

from typing import Any

from ndistribute import tree
from ndistribute.mistakes import accepting, count_of


def is_nested(structure: Any) -> bool:
    """Return whether a value is a nest and not a leaf."""
    return tree.outline(structure) != tree.outline(None)


@accepting("expand_composites")
def flatten(structure: Any) -> list[Any]:
    """Return the leaves in order; those of dicts in the order of the keys."""
    return tree.flatten(structure)


@accepting("expand_composites")
def assert_same_structure(nest1: Any, nest2: Any, check_types: bool = True) -> None:
    """Raise an error unless two nests are equal except for their leaves.

    Raises:
        TypeError: only the types of the nests differ.
        ValueError: the nests differ in another way.
    """
    if not tree.same_structure(nest1, nest2):
        untyped = tree.same_structure(_untyped(nest1), _untyped(nest2))
        if check_types or not untyped:
            error = TypeError if untyped else ValueError
            raise error(f"the two structures differ: {nest1!r} and {nest2!r}.")


@accepting("expand_composites")
def map_structure(func: Any, *structure: Any, check_types: bool = True) -> Any:
    """Return a nest of the results of a function on the leaves of nests."""
    if not structure:
        raise ValueError("map_structure needs at least one structure.")
    for other in structure[1:]:
        assert_same_structure(structure[0], other, check_types)
    columns = zip(*map(tree.flatten, structure), strict=True)
    return tree.unflatten(structure[0], [func(*column) for column in columns])


@accepting("expand_composites")
def pack_sequence_as(structure: Any, flat_sequence: Any) -> Any:
    """Return a nest like another one, with leaves from a list."""
    leaves, count = list(flat_sequence), len(tree.flatten(structure))
    if len(leaves) != count:
        raise ValueError(
            f"the structure has {count_of(count, 'leaf', 'leaves')}, but the list has "
            f"{len(leaves)}."
        )
    return tree.unflatten(structure, leaves)


def _untyped(nest: Any) -> Any:
    """Return a nest with lists for all sequences."""
    if isinstance(nest, dict):
        return {key: _untyped(nest[key]) for key in nest}
    return list(map(_untyped, nest)) if isinstance(nest, list | tuple) else nest
