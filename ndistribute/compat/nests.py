"""`tf.nest`: what is done with nests of lists, tuples, dicts and dataclasses."""

from __future__ import annotations

from typing import Any

from ndistribute import tree
from ndistribute.mistakes import accepting


@accepting("expand_composites")
def flatten(structure: Any) -> list[Any]:
    """Return the leaves in order, of dicts in the order of their keys."""
    return tree.flatten(structure)


@accepting("expand_composites")
def assert_same_structure(nest1: Any, nest2: Any) -> None:
    """Raise a ValueError if two nests differ in more than their leaves."""
    if not tree.same_structure(nest1, nest2):
        raise ValueError(f"the two structures differ: {nest1!r} and {nest2!r}.")


@accepting("expand_composites")
def map_structure(func: Any, *structure: Any) -> Any:
    """Return the nest of the results of a function for the leaves of nests."""
    if not structure:
        raise ValueError("map_structure needs at least one structure.")
    for other in structure[1:]:
        assert_same_structure(structure[0], other)
    columns = zip(*map(tree.flatten, structure), strict=True)
    return tree.unflatten(structure[0], [func(*column) for column in columns])


@accepting("expand_composites")
def pack_sequence_as(structure: Any, flat_sequence: Any) -> Any:
    """Return a nest like another one, with leaves from a list."""
    leaves, count = list(flat_sequence), len(tree.flatten(structure))
    if len(leaves) != count:
        raise ValueError(f"the structure has {count} leaves, but the list has {len(leaves)}.")
    return tree.unflatten(structure, leaves)
