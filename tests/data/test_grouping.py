"""Elements are grouped, resampled, counted, stored and drawn; a stored file is whole or missing."""

import collections

import ml_dtypes
import numpy as np
import pytest

from ndistribute.data import Dataset, InputOptions, csv_rows, make_csv_dataset
from tests.data.workers import cpus, distribute, on_workers, pieces_of, raised, rows_of


def lists(dataset):
    return [batch.tolist() for batch in dataset]


def test_windows_of_one_key_come_when_they_are_full_and_the_rest_by_key():
    numbers = Dataset.from_tensor_slices([3, 1, 4, 1, 5, 9, 2, 6])
    grouped = numbers.group_by_window(lambda x: x % 2, lambda key, window: window.batch(5), 3)
    assert lists(grouped) == [[3, 1, 1], [4, 2, 6], [5, 9]]
    sizes = numbers.group_by_window(
        lambda x: x % 2, lambda key, window: window.batch(9), window_size_func=lambda key: key + 1
    )
    assert lists(sizes) == [[3, 1], [4], [1, 5], [2], [6], [9]]
    iterator = iter(grouped)
    next(iterator)
    resumed = iter(grouped)
    resumed.load_state_dict(iterator.state_dict())
    assert lists(resumed) == [[4, 2, 6], [5, 9]]
    for options in ({}, {"window_size": 2, "window_size_func": len}):
        with pytest.raises(ValueError, match="either window_size or window_size_func"):
            numbers.group_by_window(abs, abs, **options)


rows = Dataset.from_tensor_slices([1, 5, 2, 3, 6, 4]).map(np.arange)


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({}, [(2, 2), (2, 4), (2, 6)]),
        ({"padded_shapes": [8], "padding_values": -1}, [(2, 8)] * 3),
        ({"drop_remainder": True}, [(2, 2), (2, 4), (2, 6)]),
    ],
)
def test_elements_of_similar_lengths_are_padded_together(options, shapes):
    batches = list(rows.bucket_by_sequence_length(len, [3, 5], [2, 2, 2], **options))
    assert sorted(batch.shape for batch in batches) == shapes
    assert sum(int((batch > 0).sum()) for batch in batches) == 0 + 4 + 1 + 2 + 5 + 3


def test_a_bucket_may_be_padded_to_its_end():
    options = {"padded_shapes": ((None,), ()), "pad_to_bucket_boundary": True}
    pairs = rows.map(lambda x: (x, len(x)))
    batches = pairs.bucket_by_sequence_length(lambda x, n: n, [4, 7], [2, 2, 2], **options)
    assert sorted(x.shape for x, _ in batches) == [(1, 3), (1, 6), (2, 3), (2, 6)]
    unpadded = rows.bucket_by_sequence_length(len, [2, 9], [1, 1, 1], no_padding=True)
    assert [x.shape for x in unpadded] == [(1, n) for n in (1, 5, 2, 3, 6, 4)]
    too_long = rows.bucket_by_sequence_length(len, [4], [9, 9], [None], pad_to_bucket_boundary=True)
    with pytest.raises(ValueError, match="has no length for an element of 4 or more"):
        list(too_long)
    with pytest.raises(ValueError, match="ascending bucket_boundaries, and one more"):
        rows.bucket_by_sequence_length(len, [4, 2], [1, 1, 1])


@pytest.mark.parametrize("initial", [None, [0.25, 0.75]])
def test_resampling_gives_classes_the_frequencies_of_a_distribution(initial):
    numbers = Dataset.range(8000).rejection_resample(
        lambda x: int(x % 4 > 0), [0.5, 0.5], initial, 7
    )
    kinds = [int(kind) for kind, x in numbers if (x % 4 > 0) == kind]
    assert 3500 < len(kinds) < 4500
    assert 0.45 < np.mean(kinds) < 0.55
    with pytest.raises(ValueError, match="must be 0 to 1, got 2"):
        list(Dataset.range(3).rejection_resample(lambda x: 2, [0.5, 0.5]))
    with pytest.raises(ValueError, match="a frequency for each class"):
        Dataset.range(3).rejection_resample(abs, [0.5, 0.5], [1.0])


def test_a_promised_number_of_elements_is_checked():
    odd = Dataset.range(9).filter(lambda x: x % 2)
    assert len(odd.assert_cardinality(4).batch(4)) == 1
    for wrong, message in ((3, "has more element"), (5, r"has 4 element\(s\), but 5")):
        with pytest.raises(ValueError, match=message):
            list(odd.assert_cardinality(wrong))


def test_random_numbers_are_those_of_their_seed_again_or_others_in_each_iteration():
    same, others = Dataset.random(3).take(4), Dataset.random(3, True).take(4)
    assert list(same) == list(same)
    assert list(others) != list(others)
    assert Dataset.random().cardinality() == -1


def test_the_only_element_of_a_dataset_is_taken():
    assert Dataset.from_tensors(7).get_single_element() == 7
    for dataset, many in ((Dataset.range(0), "no element"), (Dataset.range(5), "several elements")):
        with pytest.raises(ValueError, match=many):
            dataset.get_single_element()


Pair = collections.namedtuple("Pair", "x y")
ELEMENTS = {
    "numbers": Dataset.range(7),
    "none": Dataset.range(0),
    "dicts": Dataset.from_tensor_slices({"b": ["a", "bcd"], "a": ([1.5, 2], [[1], [2]])}),
    "lengths": rows,
    "bfloat16": Dataset.from_tensor_slices(np.arange(4, dtype=ml_dtypes.bfloat16)).batch(3),
    "bytes": Dataset.from_generator(lambda: iter([b"a\0", b"", b"bcd"])),
    "bools": Dataset.from_tensors((True, np.array([b"ab"]), [1, 2])),
}


@pytest.mark.parametrize("kind", ELEMENTS)
def test_elements_are_stored_as_they_are(tmp_path, kind):
    def told(value):
        if isinstance(value, tuple | list):
            return [type(value), *map(told, value)]
        if isinstance(value, dict):
            return {key: told(item) for key, item in value.items()}
        return value.dtype.kind, value.tolist(), bytes(value) if isinstance(value, bytes) else None

    dataset = ELEMENTS[kind]
    dataset.save(tmp_path / "elements")
    loaded = Dataset.load(tmp_path / "elements")
    assert [*map(told, loaded)] == [*map(told, dataset)]
    assert loaded.cardinality() == len(list(dataset))
    assert [*map(told, loaded.skip(2))] == [*map(told, dataset)][2:]


def test_a_file_of_elements_is_whole_or_missing(tmp_path):
    path = tmp_path / "elements"

    def fails(number):
        return 1 // (2 - number)

    Dataset.range(2).save(path)
    with pytest.raises(ZeroDivisionError):
        Dataset.range(4).map(lambda x: fails(int(x))).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert lists(Dataset.load(path)) == [0, 1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not a whole file that save wrote"):
        Dataset.load(path)
    for dataset, message in (
        (Dataset.range(2).repeat(), "endless"),
        (Dataset.range(2).map(lambda x: 1 if x else 1.5), "elements differ"),
        (Dataset.from_tensors(Pair(1, 2)), "nests of tuples"),
        (Dataset.from_tensors({1: 2}), "text as keys"),
        (Dataset.from_tensors(np.array([None])), "numbers or text"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.save(tmp_path / "other")
    assert list(tmp_path.iterdir()) == [path]


def test_workers_share_a_loaded_dataset_if_their_files_are_equal(tmp_path):
    def work(workers):
        path = tmp_path / f"{name}{workers.rank}"
        Dataset.range(9).map(lambda x: x + workers.rank * shift).save(path)
        loaded = Dataset.load(path).batch(4)
        return pieces_of(distribute(loaded, cpus(1), InputOptions("data"), workers=workers))

    name, shift = "equal", 0
    assert rows_of(raised(on_workers(2, work))) == list(range(9))
    name, shift = "other", 1
    with pytest.raises(ValueError, match="checksum"):
        raised(on_workers(2, work))


def test_a_generator_and_bytes_are_not_changed_silently():
    def reuses():
        buffer = np.zeros(2, int)
        for number in range(4):
            buffer[:] = number
            yield {"x": buffer}

    wanted = [{"x": [n, n]} for n in range(4)]
    for dataset in (lambda d: d, lambda d: d.prefetch(4), lambda d: d.cache()):
        elements = dataset(Dataset.from_generator(reuses))
        assert [{"x": e["x"].tolist()} for e in elements] == wanted
    ended = [b"a\0", b"b"]
    (batch,) = Dataset.from_tensor_slices(ended).map(lambda x: x).batch(2)
    assert list(batch) == ended
    assert Dataset.from_tensors([[b"a\0"], [b"b"]]).get_single_element().tolist() == [
        [b"a\0"],
        [b"b"],
    ]
    with pytest.raises(TypeError, match="text and numbers do not make one array"):
        list(Dataset.range(2).map(lambda x: "a" if x else 1).batch(2))
    with pytest.raises(TypeError, match="is a set: it needs arrays or numbers"):
        Dataset.from_tensors({1, 2})


@pytest.mark.parametrize("batched", [False, True])
def test_an_interrupt_leaves_no_element_out(batched):
    def interrupted(number):
        if number == 2 and not interrupts:
            interrupts.append(number)
            raise KeyboardInterrupt
        return number

    interrupts = []
    dataset = Dataset.range(6).map(interrupted)
    dataset = dataset.batch(2) if batched else dataset
    iterator, expected = iter(dataset), [[2, 3], [4, 5]] if batched else [2, 3, 4, 5]
    for _ in range(1 if batched else 2):
        next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = iterator.state_dict()
    with pytest.raises(RuntimeError, match=r"interrupted in an element|ended with an error"):
        next(iterator)
    resumed = iter(dataset)
    resumed.load_state_dict(state)
    assert lists(resumed) == expected


def test_numbers_are_counted_endlessly_and_what_comes_again_is_left_out():
    counter = Dataset.counter(5, -2, np.float32)
    assert [x.item() for x in counter.skip(1).take(3)] == [3.0, 1.0, -1.0]
    assert (counter.cardinality(), repr(counter.element_spec)) == (-1, "float32[]")
    assert list(Dataset.from_tensor_slices(["b", "a", "b"]).unique()) == ["b", "a"]
    optional = iter(Dataset.range(1))
    assert optional.get_next_as_optional().get_value() == 0
    assert not optional.get_next_as_optional().has_value()


def test_a_signature_says_what_is_one_array():
    def pairs():
        yield (1,), [(2, 3), (4, 5)]

    signature = (np.zeros(1, np.int8), np.zeros((2, 2), np.float32))
    (element,) = Dataset.from_generator(pairs, output_signature=signature)
    assert [(leaf.dtype.name, leaf.tolist()) for leaf in element] == [
        ("int8", [1]),
        ("float32", [[2, 3], [4, 5]]),
    ]


def test_nothing_to_choose_from_is_refused():
    for choose in (Dataset.sample_from_datasets, Dataset.choose_from_datasets):
        with pytest.raises(ValueError, match="datasets should not be empty"):
            choose([], Dataset.range(2))


def test_methods_that_only_tensorflow_has_are_refused_with_what_to_use():
    for name, instead in (("snapshot", "Dataset.load"), ("ragged_batch", "padded_batch")):
        with pytest.raises(AttributeError, match=f"has no {name}: use .*{instead}"):
            getattr(Dataset.range(2), name)
    with pytest.raises(ValueError, match=r"save\(path\)"):
        Dataset.range(2).cache("file")
    with pytest.raises(AttributeError, match="no attribute 'bach'"):
        Dataset.range(2).bach(2)


def test_the_rows_of_csv_files_are_tuples_of_cells_with_defaults(tmp_path):
    path = tmp_path / "cells.csv"
    path.write_text("1,2,x\n,5,\n")
    rows = csv_rows(np.array(str(path)), [9, np.float32, "y"])
    rows = [tuple(cell.item() for cell in row) for row in rows]
    assert rows == [(1, 2.0, "x"), (9, 5.0, "y")]
    columns = csv_rows(path, [8, 9], header=True, select_cols=[1, 0])
    assert [tuple(map(int, row)) for row in columns] == [(5, 9)]
    with pytest.raises(ValueError, match="record_defaults has 2 values for 3 columns"):
        csv_rows(path, [8, 9])


def test_rows_of_a_csv_file_that_do_not_fit_are_left_out_if_told_so(tmp_path):
    path = tmp_path / "cells.csv"
    path.write_text("a,b\n1,2\n3\nx,4\n5,6\n")
    options = {"column_defaults": [0, 0], "num_epochs": 1, "shuffle": False}
    (batch,) = make_csv_dataset(path, 9, ignore_errors=True, num_parallel_reads=2, **options)
    assert {name: column.tolist() for name, column in batch.items()} == {"a": [1, 5], "b": [2, 6]}
    with pytest.raises(ValueError, match="line 3"):
        list(make_csv_dataset(path, 9, **options))
