"""Files become elements by their reader, in an order that is the same wherever they are read."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ndistribute.data import UNKNOWN_CARDINALITY, Dataset
from tests.data.workers import cpus, distribute, pieces_of, save_numbers


def test_the_rows_of_npy_files_are_elements_file_after_file(tmp_path):
    paths = save_numbers(tmp_path, [3, 0, 2])
    dataset = Dataset.from_files(paths)
    assert [int(x) for x in dataset] == [0, 1, 2, 3, 4]
    assert [batch.tolist() for batch in dataset.batch(2)] == [[0, 1], [2, 3], [4]]
    assert next(iter(dataset)).dtype == np.int32
    assert dataset.cardinality() == UNKNOWN_CARDINALITY


def test_the_arrays_of_an_npz_file_stay_together(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
    (batch,) = Dataset.from_files(tmp_path / "a.npz").batch(4)
    assert batch["x"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert batch["y"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("header", ["", "width,height\n"])
def test_the_lines_of_a_csv_file_are_rows_of_numbers(tmp_path, header):
    (tmp_path / "a.csv").write_text(header + "1,2\n3.5,-4\n\n")
    (batch,) = Dataset.from_files(tmp_path / "a.csv").batch(4)
    assert batch.tolist() == [[1.0, 2.0], [3.5, -4.0]]
    assert batch.dtype == np.float64


@pytest.mark.parametrize("content", ["", "\n", "width,height\n", "# by hand; in metres\n"])
def test_a_csv_file_without_rows_has_no_elements(tmp_path, content):
    (tmp_path / "a.csv").write_text(content)
    assert list(Dataset.from_files(tmp_path / "a.csv")) == []


def test_a_mark_of_the_byte_order_is_no_header(tmp_path):
    (tmp_path / "a.csv").write_text("1,2\n3,4\n", encoding="utf-8-sig")
    assert [row.tolist() for row in Dataset.from_files(tmp_path / "a.csv")] == [[1, 2], [3, 4]]


class Column:
    def __init__(self, values):
        self._values = values

    def to_numpy(self):
        return np.array(self._values)


class Frame:
    """Imitates a DataFrame of polars: has columns, and iterating gives those."""

    def __init__(self, **columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return self._columns[name]

    def __iter__(self):
        return iter(self._columns.values())

    def to_numpy(self):
        return np.stack([column.to_numpy() for column in self], 1)


def test_a_reader_may_return_a_dataframe():
    frame = Frame(x=Column([1, 2]), y=Column(["a", "b"]))
    rows = list(Dataset.from_files("a.csv", lambda path: frame))
    assert [(int(row["x"]), str(row["y"])) for row in rows] == [(1, "a"), (2, "b")]


def test_a_reader_may_yield_elements_one_by_one(tmp_path):
    for name, text in (("a.txt", "1 2\n3 4\n"), ("b.txt", "5 6\n")):
        (tmp_path / name).write_text(text)

    def read(path):
        with open(path) as lines:
            for line in lines:
                yield np.array(line.split(), np.int64), path.endswith("b.txt")

    dataset = Dataset.from_files(str(tmp_path / "*.txt"), read)
    assert [(x.tolist(), bool(y)) for x, y in dataset] == [
        ([1, 2], False),
        ([3, 4], False),
        ([5, 6], True),
    ]


def test_a_file_that_is_left_half_way_is_closed(tmp_path):
    (tmp_path / "a.txt").write_text("1\n2\n3\n")
    opened = []

    def read(path):
        with open(path) as lines:
            opened.append(lines)
            yield from lines

    iterator = iter(Dataset.from_files(tmp_path / "a.txt", read).map(int))
    assert next(iterator) == 1
    del iterator
    gc.collect()
    assert opened[0].closed


def test_a_pattern_is_its_files_sorted_and_a_list_keeps_its_order(tmp_path):
    first, second = save_numbers(tmp_path, [1, 1])
    assert [int(x) for x in Dataset.from_files(str(tmp_path / "part-*.npy"))] == [0, 1]
    assert [int(x) for x in Dataset.from_files([second, first])] == [1, 0]
    several = Dataset.from_files([tmp_path / "part-*1.npy", first])
    assert [int(x) for x in several] == [1, 0]


def test_a_name_that_looks_like_a_pattern_is_found_first(tmp_path):
    np.save(tmp_path / "a[0].npy", np.arange(2))
    assert len(list(Dataset.from_files(tmp_path / "a[0].npy"))) == 2


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match="pickle") as caught:
        list(Dataset.from_files(tmp_path / "a.npy"))
    assert "a.npy' was read" in caught.value.__notes__[0]
    uneven = Dataset.from_files("x", lambda path: (np.zeros(2), np.zeros(3)))
    with pytest.raises(ValueError, match="Let the reader return arrays of as many rows"):
        list(uneven)


def test_the_arrays_of_a_reader_are_not_to_be_written():
    kept = np.zeros((2, 3))
    row = next(iter(Dataset.from_files("x", lambda path: kept)))
    with pytest.raises(ValueError, match="read-only"):
        row += 1


def test_files_are_gone_on_with_in_the_middle(tmp_path):
    paths = save_numbers(tmp_path, [3, 0, 2, 4])
    dataset = distribute(Dataset.from_files(paths).batch(2), cpus(1))
    for taken in range(6):
        iterator = iter(dataset)
        for _ in range(min(taken, 5)):
            next(iterator)
        resumed = iter(dataset)
        resumed.load_state_dict(iterator.state_dict())
        assert pieces_of(resumed) == pieces_of(iterator)
