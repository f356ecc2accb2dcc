"""Elements that are read from files, which several workers can divide among them.

A pass reads the files of its shard one after another and holds one of them at a time. Which of a
pattern's files there are is settled when the dataset is made, in an order that all workers share.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from ndistribute import tree
from ndistribute.data.elements import Element, as_element, leading_length, read_only
from ndistribute.data.pipeline import Node, Pass
from ndistribute.data.rows import ArrayRows, elements_of

__all__ = ["Reader", "files", "find_files", "reader_for"]

Reader = Callable[[str], Any]

_WILDCARDS = frozenset("*?[")


def files(paths: Any, reader: Reader | None = None) -> Node:
    """Return what a reader makes of each file, one file after another.

    Raises:
        ValueError: a pattern matches nothing, or there is no reader for an extension.
    """
    found = find_files(paths)
    readers = [reader_for(path) if reader is None else reader for path in found]
    parts = list(zip(found, readers, strict=True))

    def elements(current: Pass, start: int) -> Iterator[Element]:
        number, count = current.shard
        skipped = start
        for path, read in parts[number::count]:
            before, source = _open(path, read, skipped)
            skipped -= before
            for element in source:
                if skipped:
                    skipped -= 1
                else:
                    yield element

    return Node(elements=elements, batched=False, runs_user_code=True, files=found)


def find_files(paths: Any) -> tuple[str, ...]:
    """Return the files that paths and patterns stand for; those of a pattern are sorted.

    Args:
        paths: one or several; ``**`` in a pattern stands for any folders.

    Raises:
        ValueError: a pattern matches nothing, or there is no path at all.

    >>> find_files(["b.npy", "a.npy"])
    ('b.npy', 'a.npy')
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    try:
        found = [path for item in several for path in _matches(os.fspath(item))]
    except TypeError:
        raise TypeError(f"from_files needs paths or patterns, got {paths!r}.") from None
    if not found:
        raise ValueError("from_files needs at least one path, or a pattern such as 'train-*.npy'.")
    return tuple(found)


def reader_for(path: str) -> Reader:
    """Return what reads files of this extension.

    Raises:
        ValueError: nothing is known to.

    >>> reader_for("digits.npy") is reader_for("more/DIGITS.NPY")
    True
    """
    extension = PurePath(path).suffix.lower()
    if extension not in _READERS:
        raise ValueError(
            f"from_files knows no reader for {path!r}: it reads {', '.join(_READERS)}. Pass "
            "reader=fn, where fn(path) returns arrays, whose rows are the elements, or an iterable."
        )
    return _READERS[extension]


def _matches(path: str) -> list[str]:
    if _WILDCARDS.isdisjoint(path) or os.path.exists(path):
        return [path]
    found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not found:
        raise ValueError(
            f"from_files: no file matches {path!r}, seen from {os.getcwd()!r}. Every worker must "
            "see all files under the same names."
        )
    return found


def _open(path: str, read: Reader, skip: int) -> tuple[int, Iterator[Element]]:
    """Read a file.

    Returns:
        How many elements, at most `skip`, are left out of the others that follow.
    """
    try:
        content = read(path)
        if _is_stream(content):
            return 0, _streamed(path, content)
        columns = read_only(as_element(content))
        length = leading_length(
            tree.flatten(columns),
            "from_files",
            "Let the reader return arrays of as many rows, or an iterable of elements.",
        )
    except Exception as error:
        error.add_note(f"while {path!r} was read")
        raise
    before = min(skip, length)
    return before, elements_of(ArrayRows(columns, length), before)


def _is_stream(content: Any) -> bool:
    nested = isinstance(content, np.ndarray | tuple | list | dict)
    array_like = hasattr(content, "__array__") or dataclasses.is_dataclass(content)
    return isinstance(content, Iterable) and not nested and not array_like


def _streamed(path: str, content: Iterable[Any]) -> Iterator[Element]:
    try:
        yield from map(as_element, content)
    except Exception as error:
        error.add_note(f"while {path!r} was read")
        raise
    finally:
        close = getattr(content, "close", None)
        if close is not None:
            close()


def _read_npy(path: str) -> npt.NDArray[Any]:
    return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]


def _read_npz(path: str) -> dict[str, npt.NDArray[Any]]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _read_csv(path: str) -> npt.NDArray[np.float64]:
    """Read numbers separated by commas; a first line that holds none is a header."""
    with open(path, encoding="utf-8-sig") as lines:
        first = next(lines, "")
        header = not any(map(_is_number, first.split(",")))
        rows = [line for line in ([] if header else [first]) + list(lines) if line.strip()]
    if not rows:
        return np.empty((0, 0))
    try:
        return np.loadtxt(rows, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(_fault_of_csv(path, header) or f"{path}: {error}") from error


def _fault_of_csv(path: str, header: bool) -> str | None:
    """Return what is wrong with the first line that is no row of numbers, and where it is."""
    with open(path, encoding="utf-8-sig") as lines:
        width = 0
        for number, line in enumerate(lines, 1):
            cells = line.partition("#")[0].split(",")
            if (header and number == 1) or not "".join(cells).strip():
                continue
            where = f"{path}, line {number}:"
            for column, cell in enumerate(cells, 1):
                if not _is_number(cell):
                    return (
                        f"{where} column {column} is {cell.strip()!r}, which is no number. Correct "
                        "it, or pass reader=fn to from_files to read such files."
                    )
            width = width or len(cells)
            if len(cells) != width:
                return f"{where} {len(cells)} column(s), where the lines before it have {width}."
    return None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


_READERS: dict[str, Reader] = {".npy": _read_npy, ".npz": _read_npz, ".csv": _read_csv}
