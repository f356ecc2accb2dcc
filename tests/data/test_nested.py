"""Datasets in datasets resume, are shared and are shuffled as others; text files become columns."""

import collections
import gzip
from itertools import islice

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.data import Dataset, InputOptions, make_csv_dataset, text_lines
from tests.data.workers import cpus, distribute, on_workers, pieces_of, raised, rows_of

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


@pytest.fixture
def folder(tmp_path):
    for part in range(4):
        lines = "".join(f"{part}{line}\n" for line in range(3))
        (tmp_path / f"part-{part}.txt").write_text(lines)
    return tmp_path


def test_lines_come_file_after_file_or_alternate(folder):
    paths = [str(folder / f"part-{part}.txt") for part in range(2)]
    in_order = ["00", "01", "02", "10", "11", "12"]
    names = Dataset.from_tensor_slices(paths)
    assert list(text_lines(paths)) == list(text_lines(names)) == in_order
    assert list(text_lines(np.array(paths))) == in_order
    assert list(text_lines(paths, num_parallel_reads=2)) == ["00", "10", "01", "11", "02", "12"]
    (folder / "a.gz").write_bytes(gzip.compress(b"x\r\n\ny"))
    assert list(text_lines(str(folder / "a.gz"), "GZIP")) == ["x", "", "y"]


def test_list_files_gives_another_order_each_time_unless_told_not_to(folder):
    pattern = str(folder / "part-*.txt")
    ordered = [str(path) for path in Dataset.list_files(pattern, shuffle=False)]
    assert ordered == sorted(map(str, folder.iterdir()))
    files = Dataset.list_files(pattern, seed=1)
    orders = [[str(path) for path in files] for _ in range(4)]
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == ordered for order in orders)
    assert len(files) == 4


@pytest.mark.parametrize("policy", ["file", "auto", "data", "off"])
def test_workers_that_divide_listed_files_read_each_once(folder, policy):
    def work(workers):
        files = Dataset.list_files(str(folder / "part-*.txt"), shuffle=policy != "data")
        lines = files.repeat(2).interleave(text_lines, 2).map(int).batch(4)
        dataset = distribute(lines, cpus(1), InputOptions(policy, 0), workers=workers)
        iterator = iter(dataset)
        before = pieces_of(islice(iterator, 3))
        resumed = iter(dataset)
        resumed.load_state_dict(iterator.state_dict())
        after = pieces_of(iterator)
        assert pieces_of(resumed) == after
        return before + after

    shares = raised(on_workers(2, work))
    rows = [[10 * part + line for part in range(4) for line in range(3)] * 2] * 2
    if policy == "off":
        assert [sorted(rows_of([share])) for share in shares] == [sorted(each) for each in rows]
    else:
        assert sorted(rows_of(shares)) == sorted(rows[0])
    if policy in ("file", "auto"):
        parts = [{row // 10 for row in rows_of([share])} for share in shares]
        assert parts == [{0, 2}, {1, 3}]


@pytest.mark.parametrize("cardinality", ["take_while", "enumerate", "sample", "scan"])
def test_what_counts_elements_over_all_files_is_not_divided_by_files(folder, cardinality):
    lines = text_lines(str(folder / "part-*.txt"))
    dataset = {
        "take_while": lambda: lines.take_while(bool),
        "enumerate": lambda: lines.enumerate().map(lambda i, line: line),
        "sample": lambda: Dataset.sample_from_datasets([lines, lines]),
        "scan": lambda: lines.scan(0, lambda state, line: (state, line)),
    }[cardinality]()

    def work(workers):
        return distribute(dataset.batch(2), cpus(1), InputOptions("file"), workers=workers)

    with pytest.raises(ValueError, match=r"count elements over all files|reads other sources"):
        raised(on_workers(2, work))


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


def test_the_types_of_csv_columns_are_inferred(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b,c,d,e\n1,3000000000,1.5,x,\n2,,NA,"y,z",7\n')
    batches = make_csv_dataset(str(path), 2, num_epochs=1, shuffle=False, na_value="NA")
    (batch,) = batches
    assert {name: (column.dtype.kind, column.tolist()) for name, column in batch.items()} == {
        "a": ("i", [1, 2]),
        "b": ("i", [3000000000, 0]),
        "c": ("f", [1.5, 0.0]),
        "d": ("U", ["x", "y,z"]),
        "e": ("i", [0, 7]),
    }
    assert [batch[name].dtype.itemsize for name in "abce"] == [4, 8, 4, 4]


def test_csv_columns_are_chosen_and_have_defaults(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1;x;\n2;y;5\n")
    options = {"column_names": ["a", "b", "c"], "header": False, "field_delim": ";"}
    chosen = {"select_columns": [2, "a"], "column_defaults": [np.float32, 9], "label_name": "c"}
    once = {"num_epochs": 1, "shuffle": False}
    ((features, label),) = make_csv_dataset(str(path), 2, **options, **chosen, **once)
    assert (list(features), label.tolist()) == (["a"], [9, 5])
    assert features["a"].dtype == np.float32
    endless = make_csv_dataset(str(path), 3, **options, shuffle_seed=1)
    assert endless.cardinality() == nd.data.INFINITE_CARDINALITY
    assert sum(len(batch["a"]) for batch in islice(endless, 4)) == 12


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,b\n1\n", {}, r"a\.csv, line 2: 1 cell\(s\), but there are 2 columns"),
        ("a,b\n1,x\n", {"column_defaults": [0, 0]}, "column 'b': invalid literal"),
        ("a,b\n1,\n", {"column_defaults": [0, np.int32]}, "column 'b' is empty in row 1"),
        ("a,b\n1,2\n", {"column_defaults": [0]}, "column_defaults has 1 values for 2"),
        ("a,b\n1,2\n", {"label_name": "c"}, "label_name 'c' is not among"),
        ("", {}, "pass column_names"),
        ("a\n1\n", {"compression_type": "LZ4"}, "'' or 'GZIP', got 'LZ4'"),
    ],
)
def test_what_does_not_fit_a_csv_file_is_refused(tmp_path, text, options, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(make_csv_dataset(str(tmp_path / "a.csv"), 1, num_epochs=1, **options))


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
