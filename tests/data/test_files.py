"""Files become elements by their reader, in an order that is the same wherever they are read."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ndistribute.data import UNKNOWN_CARDINALITY, Dataset


def save_numbers(folder, lengths):
    """Write files of the numbers from 0 on, so many to each."""
    paths = [folder / f"part-{index:03}.npy" for index in range(len(lengths))]
    stops = np.cumsum(lengths)
    for path, length, stop in zip(paths, lengths, stops, strict=True):
        np.save(path, np.arange(stop - length, stop, dtype=np.int32))
    return paths


def test_the_rows_of_npy_files_are_elements_file_after_file(tmp_path):
    paths = save_numbers(tmp_path, [3, 0, 2])
    dataset = Dataset.from_files(paths)
    assert [int(x) for x in dataset] == [0, 1, 2, 3, 4]
    assert [batch.tolist() for batch in dataset.batch(2)] == [[0, 1], [2, 3], [4]]
    assert next(iter(dataset)).dtype == np.int32
    assert dataset.cardinality() == UNKNOWN_CARDINALITY


def test_the_arrays_of_an_npz_file_stay_together(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(4.0).reshape(2, 2), y=np.arange(2))
    (batch,) = Dataset.from_files(tmp_path / "a.npz").batch(4)
    assert {name: leaf.tolist() for name, leaf in batch.items()} == {
        "x": [[0.0, 1.0], [2.0, 3.0]],
        "y": [0, 1],
    }


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("1,2\n3.5,-4\n\n", [[1, 2], [3.5, -4]]),
        ("\ufeff1,2\n", [[1, 2]]),  # A byte order mark is no header.
        ("width,height\n1,2\n", [[1, 2]]),
        ("# by hand; in metres\n", []),
        ("\n", []),
        ("", []),
    ],
)
def test_the_lines_of_a_csv_file_are_rows_of_numbers(tmp_path, content, rows):
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    assert [row.tolist() for row in Dataset.from_files(tmp_path / "a.csv")] == rows


class Frame:
    """Imitates a DataFrame of polars: has columns, and iterating gives those."""

    columns = ("x", "y")

    def __getitem__(self, name):
        return SimpleNamespace(to_numpy=lambda: np.array([f"{name}0", f"{name}1"]))

    def __iter__(self):
        return iter(self[name] for name in self.columns)

    def to_numpy(self):
        return np.stack([column.to_numpy() for column in self], 1)


def test_a_reader_may_return_a_dataframe():
    rows = list(Dataset.from_files("a.csv", lambda path: Frame()))
    assert rows == [{"x": "x0", "y": "y0"}, {"x": "x1", "y": "y1"}]


def test_a_reader_may_yield_elements_one_by_one(tmp_path):
    def read(path):
        for word in Path(path).read_text().split():
            yield np.int64(word), path.endswith("b.txt")

    for name, text in (("a.txt", "1 2"), ("b.txt", "3")):
        (tmp_path / name).write_text(text)
    dataset = Dataset.from_files(str(tmp_path / "*.txt"), read)
    assert [(int(x), bool(y)) for x, y in dataset] == [(1, False), (2, False), (3, True)]


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
    for paths, order in (
        (str(tmp_path / "part-*.npy"), [0, 1]),
        ([second, first], [1, 0]),
        ([tmp_path / "part-*1.npy", first], [1, 0]),
    ):
        assert [int(x) for x in Dataset.from_files(paths)] == order
    np.save(tmp_path / "a[0].npy", np.arange(2))  # It looks like a pattern, and is a file.
    assert len(list(Dataset.from_files(tmp_path / "a[0].npy"))) == 2


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"no array")
    uneven = Dataset.from_files("a.npy", lambda path: (np.zeros(2), np.zeros(3)))
    for dataset, message in (
        (Dataset.from_files(tmp_path / "a.npy"), "pickle"),
        (uneven, "Return arrays of equally many rows"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            list(dataset)
        assert "a.npy' was read" in caught.value.__notes__[0]
