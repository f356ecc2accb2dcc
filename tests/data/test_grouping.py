"""Elements are resampled, counted and cast; rows of CSV files become elements."""

import numpy as np
import pytest

from ndistribute.data import Dataset, csv_rows, make_csv_dataset


def lists(dataset):
    return [batch.tolist() for batch in dataset]


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
    (nested,) = Dataset.from_tensors([[b"a\0"], [b"b"]])
    assert nested.tolist() == [[b"a\0"], [b"b"]]
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


def test_numbers_are_counted_endlessly():
    counter = Dataset.counter(5, -2, np.float32)
    assert [x.item() for x in counter.skip(1).take(3)] == [3.0, 1.0, -1.0]
    assert (counter.cardinality(), repr(counter.element_spec)) == (-1, "float32[]")
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
    for name, instead in (("save", "from_files"), ("ragged_batch", "padded_batch")):
        with pytest.raises(AttributeError, match=f"has no {name}: use .*{instead}"):
            getattr(Dataset.range(2), name)
    with pytest.raises(ValueError, match="from_files"):
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
