"""Lines of text files, and the columns and rows of CSV files, become elements."""

import gzip
from itertools import islice

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.data import Dataset, InputOptions, csv_rows, make_csv_dataset, text_lines
from tests.data.workers import cpus, distribute, on_workers, pieces_of, raised, rows_of


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
        ("a,b\n1\n", {}, r"a\.csv, line 2: 1 cell for 2 columns"),
        ("a,b\n1,x\n", {"column_defaults": [0, 0]}, "column 'b': invalid literal"),
        ("a,b\n1,\n", {"column_defaults": [0, np.int32]}, "column 'b' is empty in row 1"),
        ("a,b\n1,2\n", {"column_defaults": [0]}, "column_defaults has 1 value for 2 columns"),
        ("a,b\n1,2\n", {"label_name": "c"}, "label_name 'c' is not among"),
        ("", {}, "pass column_names"),
        ("a\n1\n", {"compression_type": "LZ4"}, "'' or 'GZIP', got 'LZ4'"),
    ],
)
def test_what_does_not_fit_a_csv_file_is_refused(tmp_path, text, options, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(make_csv_dataset(str(tmp_path / "a.csv"), 1, num_epochs=1, **options))


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
