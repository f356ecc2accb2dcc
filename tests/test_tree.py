"""Nests: what counts as one, and that nothing is lost in taking one apart and putting it back."""

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute import tree
from ndistribute.values import PerReplica


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    y: Any


@dataclasses.dataclass
class Derived:
    x: Any
    twice: Any = dataclasses.field(init=False, default=0)


class Named(dict):
    pass


class Adding(dict):
    """A dict whose `update` adds, as that of a `Counter` does."""

    def update(self, other):
        for key, value in other.items():
            self[key] = self.get(key, 0) + value


leaves = st.one_of(st.integers(), st.none(), st.text(max_size=2))
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Batch, inner, inner),
    ),
    max_leaves=12,
)


@given(nests)
def test_a_nest_survives_being_taken_apart(nest):
    assert tree.unflatten(nest, tree.flatten(nest)) == nest
    assert tree.flatten(tree.flatten(nest)) == tree.flatten(nest)
    assert tree.same_structure(nest, nest)
    assert not tree.same_structure(nest, [nest])


@given(nests, st.integers(1, 4))
def test_joining_and_selecting_are_inverse(nest, replicas):
    marked = [tree.map_leaves(lambda leaf, i=i: f"{i}{leaf}", nest) for i in range(replicas)]
    joined = tree.regroup(marked, PerReplica)
    assert [tree.select(joined, i, replicas) for i in range(replicas)] == marked


def test_dicts_are_visited_in_sorted_order_and_keep_their_own():
    nest = {"b": 1, "a": 2}
    assert tree.flatten(nest) == [2, 1]
    assert list(tree.map_leaves(str, nest).items()) == [("b", "1"), ("a", "2")]
    assert tree.regroup([nest, {"a": 20, "b": 10}], tuple) == {"a": (2, 20), "b": (1, 10)}


def test_keys_that_do_not_compare_are_taken():
    nest = {1: "one", "a": "letter", None: "none"}
    assert tree.unflatten(nest, tree.flatten(nest)) == nest


def test_containers_keep_their_type():
    for nest in (
        OrderedDict([("b", 1), ("a", 2)]),
        defaultdict(list, {"b": 1, "a": 2}),
        Named(b=1, a=2),
        Counter(b=1, a=2),
        Adding(b=1, a=2),
        Pair(1, [2]),
        Batch(1, {"a": 2}),
        [],
        {},
        (),
        [(), {}],
    ):
        built = tree.map_leaves(lambda leaf: leaf, nest)
        assert type(built) is type(nest)
        assert built == nest
    built = tree.map_leaves(str, defaultdict(list, {"a": 1}))
    assert built["new"] == []
    assert tree.map_leaves(lambda leaf: leaf + 1, Counter(a=1)) == Counter(a=2)


def test_maps_run_over_several_nests_at_once():
    assert tree.map_leaves(lambda a, b: a + b, {"x": [1]}, {"x": [10]}) == {"x": [11]}
    with pytest.raises(ValueError, match="differ"):
        tree.map_leaves(lambda a, b: a, [1], [1, 2])


def test_selecting_copies_only_what_changes_and_lets_a_dataclass_compute_a_field():
    nest = {"a": [1, (2, Batch(3, None))]}
    assert tree.select(nest, 0, 2) is nest
    assert tree.select(Derived(PerReplica([1, 2])), 1, 2) == Derived(2)


def test_a_wrong_number_of_components_is_refused():
    with pytest.raises(ValueError, match=r"PerReplica of 3 .* 2 replica"):
        tree.select([PerReplica([1, 2, 3])], 0, 2)


def test_structures_that_differ_are_refused_with_the_replica():
    for first, second in (
        *(([1], (1,)), ([1], [1, 2]), ({"a": 1}, {"b": 1})),
        *(([1], 1), (1, [1]), (Pair(1, 2), (1, 2))),
    ):
        assert not tree.same_structure(first, second)
        with pytest.raises(ValueError, match=r"replica 1 passed or returned"):
            tree.regroup([first, second], tuple)
