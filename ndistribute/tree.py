"""Nested structures: lists, tuples, named tuples, dicts and dataclasses of leaves.

Every other value, including None, is a leaf. Dict items are visited in the order of sorted keys, so
replicas agree even if they built the same dict in different orders.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ndistribute.mistakes import count_of
from ndistribute.values import DistributedValues

Leaf = Any
Tree = Any
_has_items: Any = functools.cache(lambda kind: issubclass(kind, (Mapping, list, tuple)))


def flatten(tree: Tree) -> list[Leaf]:
    """Return the leaves of a structure in a fixed order."""
    if _nesting(type(tree)) is None:
        return [tree]
    return [leaf for child in _children(tree)[1] for leaf in flatten(child)]


def unflatten(like: Tree, leaves: Iterable[Leaf]) -> Tree:
    """Return a structure like `like`, with other leaves in the order of `flatten`."""
    rest = iter(leaves)
    if _nesting(type(like)) is None:  # This halves the time for a single array.
        return next(rest)
    # This takes a fifth of the time.
    if type(like) is tuple and not any(map(_nesting, map(type, like))):
        return tuple(rest)
    return _rebuilt(like, lambda _: next(rest))


def map_leaves(fn: Callable[..., Leaf], tree: Tree, *others: Tree) -> Tree:
    """Return a structure of the results of `fn` on the leaves of one or several structures."""
    if not others:
        return fn(tree) if _nesting(type(tree)) is None else _rebuilt(tree, fn)
    for other in others:
        if not same_structure(tree, other):
            raise ValueError(f"structures differ: {tree!r} and {other!r}")
    columns = zip(flatten(tree), *map(flatten, others), strict=True)
    return unflatten(tree, [fn(*column) for column in columns])


def leaves(path: str, nest: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects in a nest of lists, tuples and dicts, by path."""
    if not _has_items(type(nest)):
        yield path, nest
        return
    for name, value in nest.items() if isinstance(nest, Mapping) else enumerate(nest):
        yield from leaves(f"{path}/{name}" if path else str(name), value)


def same_structure(left: Tree, right: Tree) -> bool:
    """Return True if two structures are equal except for their leaves."""
    nesting = _nesting(type(left))
    if nesting is None or type(left) is not type(right):
        return nesting is _nesting(type(right)) is None
    (left_keys, left_children), (right_keys, right_children) = _children(left), _children(right)
    return left_keys == right_keys and all(map(same_structure, left_children, right_children))


def flatten_up_to(like: Tree, tree: Tree) -> list[Any]:
    """Return the parts of a structure at the leaves of `like`; a leaf stands for all below it.

    >>> flatten_up_to((0, {"a": 0, "b": 0}), ([1, 2], None))
    [[1, 2], None, None]
    """
    if _nesting(type(like)) is None:
        return [tree]
    if _nesting(type(tree)) is None:
        return [tree] * len(flatten(like))
    (keys, children), (other_keys, others) = _children(like), _children(tree)
    if keys != other_keys:
        raise ValueError(f"structures differ: {like!r} and {tree!r}")
    pairs = zip(children, others, strict=True)
    return [part for child, other in pairs for part in flatten_up_to(child, other)]


def select(tree: Tree, replica: int, num_replicas: int) -> Tree:
    """Return a structure with one replica's components; the same object if none is distributed."""

    def component(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, DistributedValues):
            return leaf
        if len(leaf.values) != num_replicas:
            raise ValueError(
                f"a {type(leaf).__name__} of {count_of(len(leaf.values), 'component')} was passed "
                f"to {count_of(num_replicas, 'replica')}: it needs one component for each replica "
                "of the strategy in this process."
            )
        return leaf.values[replica]

    return _rebuilt(tree, component, keep=True)


def regroup(trees: Sequence[Tree], make_leaf: Callable[[Sequence[Leaf]], Leaf]) -> Tree:
    """Return one structure in which `make_leaf` combines the replicas' leaves at each position."""
    first = trees[0]
    if not any(map(_nesting, map(type, trees))):
        return make_leaf(trees)
    for replica, tree in enumerate(trees):
        if not same_structure(first, tree):
            raise ValueError(
                f"replica {replica} passed or returned {outline(tree)}, replica 0 "
                f"{outline(first)}. Every replica must pass and return the same structure."
            )
    columns = zip(*map(flatten, trees), strict=True)
    return unflatten(first, [make_leaf(column) for column in columns])


@functools.lru_cache(maxsize=1024)
def _nesting_of(kind: type) -> type | None:
    """Return dict, list or object (for dataclasses) if a type is nested, None if it is a leaf."""
    if issubclass(kind, dict):
        return dict
    if issubclass(kind, list | tuple):
        return list
    return object if dataclasses.is_dataclass(kind) else None


_nesting: Callable[[Any], type | None] = _nesting_of


def _children(tree: Tree) -> tuple[list[Any], list[Tree]]:
    """Return the keys and the children of a structure that is not a leaf, in a fixed order."""
    nesting = _nesting(type(tree))
    if nesting is list:
        return list(range(len(tree))), list(tree)
    if nesting is dict:
        try:
            keys = sorted(tree)
        except TypeError:
            keys = sorted(tree, key=repr)
        return keys, [tree[key] for key in keys]
    # Fields that are not arguments of the constructor are computed from the others.
    names = [field.name for field in dataclasses.fields(tree) if field.init]
    return names, [getattr(tree, name) for name in names]


def _rebuilt(tree: Tree, make: Callable[[Leaf], Leaf], *, keep: bool = False) -> Tree:
    """Return a structure with new leaves; with `keep`, unchanged parts are not copied."""
    if _nesting(type(tree)) is None:
        return make(tree)
    keys, old = _children(tree)
    new = [_rebuilt(child, make, keep=keep) for child in old]
    if keep and all(map(operator.is_, new, old)):
        return tree
    if isinstance(tree, dict):
        built = dict(zip(keys, new, strict=True))
        ordered = {key: built[key] for key in tree}
        if type(tree) is dict:
            return ordered
        clone = copy.copy(tree)  # Most subclasses' own `copy` returns a plain dict.
        for key, value in ordered.items():  # `Counter.update` would add the values.
            clone[key] = value
        return clone
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*new)
    if isinstance(tree, list | tuple):
        return type(tree)(new)
    return dataclasses.replace(tree, **dict(zip(keys, new, strict=True)))


def outline(tree: Tree) -> str:
    """Return a text that is equal for structures that differ only in their leaves."""
    if _nesting(type(tree)) is None:
        return "a leaf"
    named = not isinstance(tree, list | tuple)
    pairs = zip(*_children(tree), strict=True)
    inside = [f"{key}: {outline(child)}" if named else outline(child) for key, child in pairs]
    return f"{type(tree).__name__}({', '.join(inside)})"
