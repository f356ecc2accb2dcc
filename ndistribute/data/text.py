"""Sources of text: the lines of files, and the columns of CSV files with their types.

A CSV file is read whole, so that its rows are batched by index like those of other arrays.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ndistribute.data import sources
from ndistribute.data.dataset import Dataset
from ndistribute.data.transformations import AUTOTUNE
from ndistribute.mistakes import count_of

_TYPES: tuple[Any, ...] = (np.int32, np.int64, np.float32, np.float64)
"""The types of columns of numbers, of which the first that fits is inferred."""

_QUOTING = (csv.QUOTE_NONE, csv.QUOTE_MINIMAL)


def text_lines(
    filenames: Any,
    compression_type: str | None = None,
    buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    *,
    kind: type[Dataset] = Dataset,
) -> Dataset:
    """Return a dataset of the lines of text files without line ends, one file after another.

    Args:
        filenames: one or several paths, or a dataset of paths.
        compression_type: ``"GZIP"`` or None.
        buffer_size: of each file, in bytes; Python chooses it, so it changes nothing.
        num_parallel_reads: the number of files whose lines alternate; a thread reads each of them.
        kind: the class of the dataset.

    >>> [str(line) for line in text_lines("tests/data/cars.csv")]
    ['name,doors,price', 'ant,3,9.5', 'bee,5,12']
    """
    read = functools.partial(_lines_of, open_text=_opener("text_lines", compression_type, "utf-8"))
    if not isinstance(filenames, Dataset) and num_parallel_reads is None:
        return kind(sources.files(filenames, read))
    names = filenames if isinstance(filenames, Dataset) else kind(sources.listed(filenames))
    return names.interleave(
        lambda path: kind(sources.files(str(path), read)),
        cycle_length=num_parallel_reads or 1,
        num_parallel_calls=num_parallel_reads,
    )


def make_csv_dataset(
    file_pattern: Any,
    batch_size: int,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[Any] | None = None,
    label_name: str | None = None,
    select_columns: Sequence[str | int] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    header: bool = True,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10_000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    sloppy: bool = False,
    num_rows_for_inference: int | None = 100,
    compression_type: str | None = None,
    ignore_errors: bool = False,
    encoding: str = "utf-8",
    *,
    kind: type[Dataset] = Dataset,
) -> Dataset:
    """Return a dataset of batches of the rows of CSV files: dicts of columns.

    Args:
        file_pattern: one or several paths or patterns.
        batch_size: the number of rows of a batch.
        column_names: the names of all columns; None takes them from the first line.
        column_defaults: for each column that is read, a dtype if no cell may be empty, or the value
            of empty cells. None infers the dtypes; an empty cell is then 0 or empty text.
        label_name: the column of labels, which is returned after the dict instead of in it.
        select_columns: the names or numbers of the columns to read; None reads all.
        field_delim: between cells.
        use_quote_delim: whether a cell in double quotes may contain the delimiter.
        na_value: a text that also marks an empty cell.
        header: whether the first line of each file has the names.
        num_epochs: how often the rows are repeated; None repeats them forever, and drops a last
            batch that is not full.
        shuffle: whether the rows are shuffled.
        shuffle_buffer_size: see `Dataset.shuffle`.
        shuffle_seed: see `Dataset.shuffle`.
        prefetch_buffer_size: see `Dataset.prefetch`; None means `AUTOTUNE`.
        num_parallel_reads: changes nothing: files are read whole, one after another.
        sloppy: changes nothing: the order is always the same.
        num_rows_for_inference: the number of rows from which the dtypes are inferred; None means
            all.
        compression_type: ``"GZIP"`` or None.
        ignore_errors: whether to leave out rows with too many or too few cells, or with cells that
            do not fit their column, instead of raising an error.
        encoding: the encoding of the text.
        kind: the class of the dataset.

    Raises:
        ValueError: no file matches, or the arguments do not fit the columns.

    >>> rows = make_csv_dataset("tests/data/cars.csv", 2, label_name="price", shuffle=False)
    >>> next(iter(rows))
    ({'name': array(['ant', 'bee'], dtype='<U3'), 'doors': array([3, 5], dtype=int32)},
     array([ 9.5, 12. ], dtype=float32))
    """
    what, paths = "make_csv_dataset", sources.matching(file_pattern, "make_csv_dataset")
    opener = _opener(what, compression_type, encoding)
    reader = CsvReader(opener, _QUOTING[bool(use_quote_delim)], field_delim, header, na_value)
    with reader.rows_of(paths[0]) as (first, _):
        names = list(column_names or first or ())
    if not names:
        raise ValueError(f"{what}: without a header, pass column_names.")
    wanted = range(len(names)) if select_columns is None else select_columns
    places = sorted(names.index(each) if isinstance(each, str) else each for each in wanted)
    if label_name is not None and label_name not in [names[place] for place in places]:
        raise ValueError(f"{what}: label_name {label_name!r} is not among {names}.")
    reader = replace(reader, names=names, places=places, label=label_name, ignores=ignore_errors)
    defaults = column_defaults
    if defaults is None:
        defaults = reader.inferred(paths, num_rows_for_inference)
    rows = kind(sources.files(paths, reader.filling(defaults, f"{what}: column_defaults")))
    rows = rows.shuffle(shuffle_buffer_size, shuffle_seed) if shuffle else rows
    batches = rows.repeat(num_epochs).batch(batch_size, drop_remainder=num_epochs is None)
    return batches.prefetch(AUTOTUNE if prefetch_buffer_size is None else prefetch_buffer_size)


def csv_rows(
    filenames: Any,
    record_defaults: Sequence[Any],
    compression_type: str | None = None,
    buffer_size: int | None = None,
    header: bool = False,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    *,
    kind: type[Dataset] = Dataset,
) -> Dataset:
    """Return a dataset of the rows of CSV files: tuples of cells.

    Args:
        filenames: one or several paths or patterns.
        record_defaults: see `column_defaults` of `make_csv_dataset`.
        compression_type: ``"GZIP"`` or None.
        buffer_size: of each file, in bytes; Python chooses it, so it changes nothing.
        header: whether to leave out the first line of each file.
        field_delim: between cells.
        use_quote_delim: whether a cell in double quotes may contain the delimiter.
        na_value: the text of an empty cell, besides no text.
        select_cols: the numbers of the columns to read; None reads all.
        kind: the class of the dataset.

    >>> rows = csv_rows("tests/data/cars.csv", ["", 0, 0.0], header=True)
    >>> [(str(name), int(doors), float(price)) for name, doors, price in rows]
    [('ant', 3, 9.5), ('bee', 5, 12.0)]
    """
    opener = _opener("csv_rows", compression_type, "utf-8")
    reader = CsvReader(opener, _QUOTING[bool(use_quote_delim)], field_delim, header, na_value)
    with reader.rows_of(sources.matching(filenames, "csv_rows")[0]) as (first, rows):
        names = [f"column {place}" for place, _ in enumerate(first or next(rows, ()))]
    places = range(len(names)) if select_cols is None else select_cols
    reader = replace(reader, names=names, places=places)
    read = reader.filling(record_defaults, "csv_rows: record_defaults")
    return kind(sources.files(filenames, lambda path: tuple(read(path).values())))


def _opener(what: str, compression: str | None, encoding: str) -> Callable[[str], Any]:
    """Return the function that opens a text file with a compression."""
    if compression not in (None, "", "GZIP"):
        raise ValueError(f"{what}: compression_type must be '' or 'GZIP', got {compression!r}.")
    opens: Callable[..., Any] = gzip.open if compression else open
    return lambda path: opens(path, "rt", encoding=encoding)


def _lines_of(path: str, open_text: Callable[[str], Any]) -> Iterator[np.str_]:
    with open_text(path) as lines:
        yield from (np.str_(line.rstrip("\n")) for line in lines)


@dataclass(frozen=True)
class CsvReader:
    """Reads a CSV file as a dict of columns, and a label if there is one."""

    open_text: Callable[[str], Any]
    quoting: Any
    delimiter: str
    header: bool
    missing: str  # A text that also marks an empty cell.
    names: Sequence[str] = ()  # The names of all columns.
    places: Sequence[int] = ()  # The indices of the columns that are read.
    label: str | None = None
    defaults: Sequence[Any] = ()  # The defaults of these columns.
    ignores: bool = False  # Whether rows that do not fit are left out.

    def __call__(self, path: str) -> Any:
        with self.rows_of(path) as (_, rows):
            table = [row for row in rows if not self.ignores or self._fits(row)]
        columns = self._columns(table)
        return columns if self.label is None else (columns, columns.pop(self.label))

    def filling(self, defaults: Sequence[Any], what: str) -> CsvReader:
        """Return this reader with defaults for empty cells, after checking how many there are."""
        if len(defaults) != len(self.places):
            raise ValueError(
                f"{what} has {count_of(len(defaults), 'value')} for "
                f"{count_of(len(self.places), 'column')}: pass one value for each column that is "
                "read."
            )
        return replace(self, defaults=defaults)

    def _columns(self, table: Sequence[Sequence[str]]) -> dict[str, Any]:
        return {
            (name := self.names[place]): self._column(name, [row[place] for row in table], default)
            for place, default in zip(self.places, self.defaults, strict=True)
        }

    def _fits(self, row: Sequence[str]) -> bool:
        try:
            return bool(self._columns([row]))
        except ValueError:
            return False

    def inferred(self, paths: Sequence[str], count: int | None) -> list[Any]:
        """Return a default for each column that is read, of the type that fits some first rows."""
        table = list[list[str]]()
        for path in paths:
            with self.rows_of(path) as (_, rows):
                table += islice(rows, None if count is None else count - len(table))
        return [self._type_of([row[place] for row in table])() for place in self.places]

    @contextlib.contextmanager
    def rows_of(self, path: str) -> Iterator[tuple[list[str] | None, Iterator[list[str]]]]:
        """Return the names in the first line of a file, if it has names, and the other rows."""
        with self.open_text(path) as lines:
            rows = csv.reader(lines, delimiter=self.delimiter, quoting=self.quoting)
            yield next(rows, None) if self.header else None, self._whole(path, rows)

    def _whole(self, path: str, rows: Any) -> Iterator[list[str]]:
        for row in filter(None, rows):
            if self.names and len(row) != len(self.names):
                if self.ignores:
                    continue
                raise ValueError(
                    f"{path}, line {rows.line_num}: {count_of(len(row), 'cell')} for "
                    f"{count_of(len(self.names), 'column')}."
                )
            yield row

    def _column(self, name: str, cells: list[str], default: Any) -> Any:
        is_kind = isinstance(default, type | np.dtype)
        value = np.empty(0, default) if is_kind else np.asarray(default).reshape(-1)
        for row, cell in enumerate(cells):
            if cell in ("", self.missing):
                if not value.size:
                    raise ValueError(
                        f"column {name!r} is empty in row {row + 1}: set a value for it in "
                        "column_defaults."
                    )
                cells[row] = str(value[0])
        try:
            column = np.array(cells, np.str_)
            return column if value.dtype.kind == "U" else column.astype(value.dtype)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"column {name!r}: {error}") from error

    def _type_of(self, cells: Sequence[str]) -> Any:
        known = np.array([cell for cell in cells if cell not in ("", self.missing)], np.str_)
        for kind in _TYPES if known.size else ():
            with contextlib.suppress(ValueError, OverflowError):
                if not np.isinf(known.astype(kind)).any():
                    return kind
        return np.str_
