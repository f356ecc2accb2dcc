"""Datasets in datasets resume, are shared and are shuffled as others."""

import collections
from itertools import islice

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.data import Dataset, InputOptions
from tests.data.workers import cpus, distribute, pieces_of

Point = collections.namedtuple("Point", "x y")


def shuffled(seed=None):
    return lambda number: Dataset.range(10 * number, 10 * number + 4).shuffle(4, seed)


# Pipelines of 12 numbers, whose order depends on seeds.
PIPELINES = {
    "flat map": lambda: Dataset.range(3).flat_map(shuffled()),
    "interleave": lambda: Dataset.range(3).shuffle(3).interleave(shuffled(), 2, 1, -1),
    "nested": lambda: Dataset.range(1).flat_map(lambda _: Dataset.range(3).flat_map(shuffled())),
    "repeat": lambda: Dataset.range(1).flat_map(shuffled(3)).repeat(3),
    "window": lambda: Dataset.range(12).window(4).flat_map(lambda window: window.shuffle(4)),
    "sample": lambda: Dataset.sample_from_datasets(
        [Dataset.range(6), Dataset.range(10, 16)], rerandomize_each_iteration=True
    ),
    "scan": lambda: Dataset.range(12).shuffle(12).scan(0, lambda s, x: (s + x, s + x)),
}


@pytest.mark.parametrize("policy", ["data", "off"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_new_process_continues_within_a_later_epoch_where_it_was(name, policy, prefetch):
    def begin():
        dataset = PIPELINES[name]().batch(5)
        return distribute(dataset, cpus(2), InputOptions(policy, prefetch))

    dataset = begin()
    epochs = [pieces_of(dataset), pieces_of(dataset)]
    iterator = iter(dataset)
    pieces_of(islice(iterator, 2))
    state = iterator.state_dict()
    left = pieces_of(iterator)
    assert left
    resumed = iter(begin())
    resumed.load_state_dict(state)
    assert pieces_of(resumed) == left
    if name != "sample":
        assert epochs[0] != epochs[1]


def test_set_seed_decides_the_order_of_shuffles_that_functions_return():
    orders = []
    for seed in (1, 1, 2):
        nd.set_seed(seed)
        orders.append([int(x) for x in Dataset.range(3).flat_map(shuffled())])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == sorted(orders[0]) == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]


def test_a_shuffle_without_reshuffling_keeps_its_order_in_each_dataset_of_a_function():
    def parts(number):
        return Dataset.range(4).shuffle(4, seed=3, reshuffle_each_iteration=False)

    numbers = [int(x) for x in Dataset.range(2).flat_map(parts)]
    assert numbers[:4] == numbers[4:]
    dataset = Dataset.range(9).shuffle(9, seed=3, reshuffle_each_iteration=None)
    assert [int(x) for x in dataset] != [int(x) for x in dataset]


@pytest.mark.parametrize(
    ("elements", "options", "expected"),
    [
        ([[1], [2, 3]], {}, [[1, 0], [2, 3]]),
        ([[1], [2, 3]], {"padded_shapes": [None]}, [[1, 0], [2, 3]]),
        ([[1], [2, 3]], {"padded_shapes": [3], "padding_values": -1}, [[1, -1, -1], [2, 3, -1]]),
        ([["a"], ["b", "c"]], {"padding_values": "<end>"}, [["a", "<end>"], ["b", "c"]]),
        ([1, 2], {}, [1, 2]),
        ([[[1]], [[2, 3], [4, 5]]], {}, [[[1, 0], [0, 0]], [[2, 3], [4, 5]]]),
    ],
)
def test_a_padded_batch_has_the_longest_shape_or_that_which_is_asked(elements, options, expected):
    (batch,) = Dataset.from_generator(lambda: iter(elements)).padded_batch(2, **options)
    assert batch.tolist() == expected


def test_each_leaf_of_a_nest_is_padded_in_its_own_way():
    elements = [{"a": np.arange(n), "b": (n, np.ones((n, 2)))} for n in (1, 2)]
    dataset = Dataset.from_generator(lambda: iter(elements))
    shapes = {"a": [4], "b": ([], [None, 2])}
    (batch,) = dataset.padded_batch(2, shapes, {"a": 9, "b": (0, None)})
    assert batch["a"].tolist() == [[0, 9, 9, 9], [0, 1, 9, 9]]
    assert batch["b"][0].tolist() == [1, 2]
    assert batch["b"][1].tolist() == [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]
    assert len(list(dataset.repeat(2).padded_batch(3, drop_remainder=True))) == 1


@pytest.mark.parametrize("sizes", [1, 3, 4, [2, 2], [6], [0, 1], [1, 0]])
@pytest.mark.parametrize("drop", [False, True])
def test_rebatch_cuts_the_rows_anew(sizes, drop):
    rows = [row.tolist() for row in Dataset.range(8).batch(4).rebatch(sizes, drop)]
    each = [sizes] if isinstance(sizes, int) else sizes
    assert [len(row) for row in rows[: len(each)]] == each
    kept = 8 // sum(each) * sum(each) if drop else 8
    assert [number for row in rows for number in row] == list(range(kept))


def test_what_a_function_returns_keeps_its_kind():
    kinds = {
        "a": lambda x: {"a": x, "b": (x, x)},
        "b": lambda x: Point(x, {"a": x}),
        "c": lambda x: (x, [x, x]),
    }
    for make in kinds.values():
        dataset = Dataset.range(2).map(make)
        for element in (next(iter(dataset)), next(iter(dataset.batch(2)))):
            assert nd.tree.same_structure(make(0), element) or type(element[1]) is np.ndarray
    # A list means several values, as a tuple: here of different shapes.
    pairs = Dataset.range(2).map(lambda x: [x, [x, x]])
    assert [(int(x), y.tolist()) for x, y in pairs] == [(0, [0, 0]), (1, [1, 1])]
    assert [int(s) for s in pairs.map(lambda x, y: x + y.sum())] == [0, 3]


def test_every_method_takes_the_name_of_tensorflow():
    dataset = Dataset.range(3, name="numbers").map(lambda x: x, name="same").batch(2, name="two")
    assert [len(batch) for batch in dataset.enumerate(name="counted").map(lambda i, x: x)] == [2, 1]
    assert Dataset.zip(dataset, dataset, name="both").cardinality(name="length") == 2
    with pytest.raises(TypeError, match="nane"):
        dataset.take(2, nane="x")


def test_a_reduction_carries_a_nest_along():
    dataset = Dataset.range(4).map(lambda x: (x, 2 * x))
    total, count = dataset.reduce((0, 0), lambda state, pair: (state[0] + pair[1], state[1] + 1))
    assert (int(total), int(count)) == (12, 4)
    assert Dataset.range(0).reduce(np.float32(1), lambda state, x: x) == 1


@pytest.mark.parametrize(
    ("dataset", "spec"),
    [
        (Dataset.range(4), "int64[]"),
        (Dataset.range(4, output_type=np.int8).batch(2), "int8[None]"),
        (Dataset.range(4).map(lambda x: (x, [1.0, 2.0])), "(int64[], float64[2])"),
        (Dataset.range(4).map(lambda x: {"a": x / 2}).batch(2), "{'a': float64[None]}"),
        (Dataset.range(4).batch(2, drop_remainder=True).enumerate(), "(int64[], int64[2])"),
        (
            Dataset.from_generator(range, np.int8, (), args=(3,)).batch(2, True).rebatch(1),
            "int8[1]",
        ),
        (Dataset.range(4).shuffle(2).window(2), "int64[]"),
    ],
)
def test_element_spec_tells_dtypes_and_shapes(dataset, spec):
    assert repr(dataset.element_spec) == spec
    before = [repr(element) for element in dataset]
    assert repr(dataset.element_spec) == spec
    assert len(before) == len(list(dataset))


def test_specs_are_equal_to_those_of_other_libraries():
    class Spec:
        dtype, shape = np.float32, [None, 2]

    spec = Dataset.from_tensor_slices(np.ones((4, 2), np.float32)).batch(2).element_spec
    assert spec == Spec()
    assert spec != Dataset.range(2).element_spec
    assert spec != 3


def test_a_distributed_dataset_tells_what_each_replica_gets():
    dataset = Dataset.from_tensor_slices((np.ones((12, 2)), np.arange(12)))
    whole = distribute(dataset.batch(4, drop_remainder=True), cpus(2))
    assert repr(whole.element_spec) == (
        "(PerReplicaSpec(float64[2, 2], float64[2, 2]), PerReplicaSpec(int64[2], int64[2]))"
    )
    assert iter(whole).element_spec == whole.element_spec
    assert repr(distribute(Dataset.range(9).batch(3, True), cpus(2)).element_spec) == (
        "PerReplicaSpec(int64[None], int64[None])"
    )


def test_datasets_are_drawn_by_their_weights():
    def parts(count):
        return [Dataset.from_tensors(np.int64(at)).repeat() for at in range(count)]

    shares = [0.7, 0.1, 0.2]
    for weights in (shares, np.array(shares)):
        drawn = Dataset.sample_from_datasets(parts(3), weights, seed=1)
        counts = np.bincount([int(x) for x in drawn.take(3000)]) / 3000
        np.testing.assert_allclose(counts, shares, atol=0.03)
        assert drawn.cardinality() == nd.data.INFINITE_CARDINALITY
    finite = [Dataset.from_tensors(-1).repeat(2), Dataset.from_tensors(1).repeat(2)]
    for weights, expected in (([0.0, 1.0], [1, 1]), ([0.0, 0.0], [])):
        drawn = Dataset.sample_from_datasets(finite, weights, stop_on_empty_dataset=True)
        assert [int(x) for x in drawn] == expected
    drawn = Dataset.sample_from_datasets([parts(1)[0].take(1), *parts(2)[1:]], [0.5, 0.5])
    assert [int(x) for x in drawn.take(100)].count(0) == 1


def test_a_state_that_is_a_list_is_one_array_and_is_not_changed_for_later_epochs():
    fibonacci = Dataset.range(6).scan([0, 1], lambda a, _: ([a[1], a[0] + a[1]], a[1]))
    assert [int(x) for x in fibonacci] == [int(x) for x in fibonacci] == [1, 1, 2, 3, 5, 8]

    def count(state, x):
        state["sum"] = state["sum"] + x
        return state, state["sum"]

    sums = Dataset.range(4).scan({"sum": np.int64(0)}, count)
    assert [int(x) for x in sums] == [int(x) for x in sums] == [0, 1, 3, 6]
    initial = np.zeros(1)
    with pytest.raises(ValueError, match="read-only"):
        Dataset.range(2).reduce(initial, lambda state, x: state.__iadd__(x))
    assert initial == 0
