"""Nested structures: lists, tuples, named tuples, dicts and dataclasses of leaves.

Everything else, None included, is a leaf. Dict items are visited in sorted order, so that replicas
which built the same dict in another order still agree. A structure in which nothing changes is
returned as the very same object.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ndistribute.values import PerReplica

__all__ = ["flatten", "map_leaves", "regroup", "same_structure", "select", "unflatten"]

Leaf = Any
Tree = Any


def flatten(tree: Tree) -> list[Leaf]:
    """Return the leaves of a structure in a fixed order.

    >>> flatten({"b": [1, 2], "a": (3, None)})
    [3, None, 1, 2]
    """
    leaves: list[Leaf] = []
    _collect(tree, leaves)
    return leaves


def unflatten(like: Tree, leaves: Iterable[Leaf]) -> Tree:
    """Build a structure of the shape of `like` from leaves in the order of `flatten`.

    >>> unflatten({"b": [0, 0], "a": 0}, [3, 1, 2])
    {'b': [1, 2], 'a': 3}
    """
    return _rebuild(like, iter(leaves))


def map_leaves(fn: Callable[..., Leaf], tree: Tree, *others: Tree) -> Tree:
    """Apply `fn` to the leaves of one structure, or of several of the same structure.

    Raises:
        ValueError: the structures differ.

    >>> map_leaves(lambda a, b: a + b, [1, {"x": 2}], [10, {"x": 20}])
    [11, {'x': 22}]
    """
    for other in others:
        if not same_structure(tree, other):
            raise ValueError(f"structures differ: {tree!r} and {other!r}")
    columns = zip(flatten(tree), *(flatten(other) for other in others), strict=True)
    return unflatten(tree, [fn(*column) for column in columns])


def same_structure(left: Tree, right: Tree) -> bool:
    """Say whether two structures nest alike; leaves are not compared.

    >>> same_structure([1, (2, 3)], ["a", ("b", None)])
    True
    >>> same_structure([1], (1,))
    False
    """
    left_items, right_items = _children(left), _children(right)
    if left_items is None or right_items is None:
        return left_items is None and right_items is None
    return (
        type(left) is type(right)
        and len(left_items) == len(right_items)
        and all(
            left_key == right_key and same_structure(left_child, right_child)
            for (left_key, left_child), (right_key, right_child) in zip(
                left_items, right_items, strict=True
            )
        )
    )


def select(tree: Tree, replica: int, num_replicas: int) -> Tree:
    """Replace each `PerReplica` leaf by the component of one replica.

    Raises:
        ValueError: a `PerReplica` has another number of components than there are replicas.

    >>> select([PerReplica([1, 2]), "same"], 1, 2)
    [2, 'same']
    """
    if isinstance(tree, PerReplica):
        if len(tree.values) != num_replicas:
            raise ValueError(
                f"a PerReplica of {len(tree.values)} component(s) was passed where there are "
                f"{num_replicas} replica(s): it needs one component for each replica of the "
                "strategy that runs."
            )
        return tree.values[replica]
    items = _children(tree)
    if not items:
        return tree
    chosen = [select(child, replica, num_replicas) for _, child in items]
    if all(new is old for new, (_, old) in zip(chosen, items, strict=True)):
        return tree
    return _with_children(tree, [key for key, _ in items], chosen)


def regroup(trees: Sequence[Tree], make_leaf: Callable[[Sequence[Leaf]], Leaf]) -> Tree:
    """Turn one structure per replica into one structure whose leaves join those of the replicas.

    Args:
        trees: one structure per replica, in replica order.
        make_leaf: joins the leaves that stand at one place.

    Raises:
        ValueError: the structures differ between replicas.

    >>> regroup([{"loss": 1}, {"loss": 2}], tuple)
    {'loss': (1, 2)}
    """
    first = trees[0]
    if all(_nesting(tree) is None for tree in trees):
        return make_leaf(trees)
    for replica, tree in enumerate(trees):
        if not same_structure(first, tree):
            raise ValueError(
                f"replica {replica} gave {_outline(tree)}, replica 0 gave "
                f"{_outline(first)}. Every replica must pass and return the same structure."
            )
    columns = zip(*(flatten(tree) for tree in trees), strict=True)
    return unflatten(first, [make_leaf(column) for column in columns])


def _children(tree: Tree) -> list[tuple[Any, Tree]] | None:
    """Return (key, child) pairs in a fixed order, or None for a leaf."""
    kind = _nesting(tree)
    if kind is None:
        return None
    if kind is dict:
        try:
            keys = sorted(tree)
        except TypeError:
            keys = sorted(tree, key=repr)
        return [(key, tree[key]) for key in keys]
    if kind is list:
        return list(enumerate(tree))
    # A field that the constructor does not take is computed from the others.
    fields = [field.name for field in dataclasses.fields(tree) if field.init]
    return [(name, getattr(tree, name)) for name in fields]


def _nesting(tree: Tree) -> type | None:
    """Return how a value nests: as a dict, a list, an object with fields, or not."""
    kind: Any = type(tree)
    return _nesting_of_type(kind)


@functools.lru_cache(maxsize=1024)
def _nesting_of_type(kind: type) -> type | None:
    if issubclass(kind, dict):
        return dict
    if issubclass(kind, list | tuple):
        return list
    return object if dataclasses.is_dataclass(kind) else None


def _with_children(tree: Tree, keys: Sequence[Any], children: Sequence[Tree]) -> Tree:
    if isinstance(tree, dict):
        built = dict(zip(keys, children, strict=True))
        ordered = {key: built[key] for key in tree}
        return ordered if type(tree) is dict else _copy_of_mapping(tree, ordered)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*children)
    if isinstance(tree, list | tuple):
        return type(tree)(children)
    return dataclasses.replace(tree, **dict(zip(keys, children, strict=True)))


def _copy_of_mapping(tree: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    clone = copy.copy(tree)  # Its own `copy` would make a plain dict of most subclasses.
    clone.update(items)
    return clone


def _collect(tree: Tree, leaves: list[Leaf]) -> None:
    items = _children(tree)
    if items is None:
        leaves.append(tree)
    else:
        for _, child in items:
            _collect(child, leaves)


def _rebuild(like: Tree, leaves: Iterator[Leaf]) -> Tree:
    items = _children(like)
    if items is None:
        return next(leaves)
    return _with_children(like, [key for key, _ in items], [_rebuild(c, leaves) for _, c in items])


def _outline(tree: Tree) -> str:
    items = _children(tree)
    if items is None:
        return "a leaf"
    inside = ", ".join(
        _outline(child) if isinstance(tree, list | tuple) else f"{key}: {_outline(child)}"
        for key, child in items
    )
    return f"{type(tree).__name__}({inside})"
