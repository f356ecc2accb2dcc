"""Sources of elements: arrays, numbers, a user's function, files, or a loader of batches.

Sources neither copy arrays nor write to them. Elements are read-only views, so that a step that
writes to them fails at once instead of changing the next epoch. Files are read one after another.
Patterns of paths are expanded when the dataset is created, in an order that is the same on all
workers, so that the workers can divide the files.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from ndistribute import tree
from ndistribute.data import elements, loaders, pipeline
from ndistribute.data.elements import Chunk, Element, Rows, as_element, drop, is_frame, read_only
from ndistribute.data.pipeline import ElementSpec, Epoch, LeafSpec, Node
from ndistribute.guest_tensors import is_tensor
from ndistribute.mistakes import count_of

Reader = Callable[[str], Any]

_WILDCARDS = frozenset("*?[")
_CORRECT_CSV = "Correct it, or pass reader=fn to from_files to read such files."
_MISSING_VALUES = frozenset(["", "na", "n/a", "nan", "null", "none", "-", "?"])


def single(tensors: Any) -> Node:
    """Return a node of one element: a nest of arrays."""
    element = read_only(as_element(tensors))
    return Node(
        name="from_tensors",
        chunks=lambda epoch, start: drop(iter(((element,),)), start),
        spec=ElementSpec(1, like=_like(element, 0)),
        arrays=tuple(tree.flatten(element)),
    )


def slices(tensors: Any) -> Node:
    """Return a node of the rows of a nest of arrays."""
    columns = read_only(as_element(tensors))
    remedy = "Check the arrays, or use from_tensors for one element."
    length = elements.leading_length(tree.flatten(columns), "from_tensor_slices", remedy)
    node = _of_rows("from_tensor_slices", Rows.of(columns, length), _like(columns, 1))
    return dataclasses.replace(node, arrays=tuple(tree.flatten(columns)))


def numbers(values: range, dtype: Any = np.int64) -> Node:
    """Return a node of the numbers of a range."""
    columns = [values if np.dtype(dtype) == np.int64 else np.array(values, dtype)]
    rows = Rows(0, [(columns, range(len(values)))])
    return _of_rows(repr(values), rows, LeafSpec(np.dtype(dtype), ()))


def counted(start: int, step: int = 1) -> Node:
    """Return a node of endless numbers."""
    node = numbers(range(start, start + step * (1 << 62), step))
    spec = dataclasses.replace(node.spec, cardinality=pipeline.INFINITE_CARDINALITY)
    return dataclasses.replace(node, name=f"counter({start}, {step})", spec=spec)


def _of_rows(name: str, rows: Rows, like: Any) -> Node:
    spec = ElementSpec(len(rows), batched=False, like=like)
    return Node(
        name=name, chunks=lambda epoch, start: iter((rows[start:] if start else rows,)), spec=spec
    )


def generated(
    make: Callable[..., Iterable[Any]], signature: Any = None, args: tuple[Any, ...] = ()
) -> Node:
    """Return a node of the elements that a user's function yields; each epoch calls it again."""
    if not callable(make):
        raise ValueError(
            f"from_generator needs a function that returns an iterable, got {make!r}. Pass the "
            "generator function itself, not its result: each epoch calls it again."
        )

    def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
        conform = elements.copied if like is None else functools.partial(_conform, specs=like)
        return zip(map(conform, islice(make(*args), start, None)))

    like = None if signature is None else tree.map_leaves(_spec_of, signature)
    name = f"from_generator({pipeline.name_of(make)})"
    return Node(name=name, chunks=chunks, spec=ElementSpec(like=like), runs_user_code=True)


def iterable(batches: Any) -> Node:
    """Return a node of the batches of a collection, such as a list or another library's loader."""
    write = "Dataset.from_tensor_slices({}).batch(global_batch_size)"
    together = f"For arrays whose rows belong together write {write.format('(x, y)')}"
    by_column = write.format(elements.COLUMNS_OF_FRAME)
    refused = (
        (isinstance(batches, tuple), f"{together}; pass a list of batches that exist already."),
        (is_frame(batches), f"For one array per column write {by_column}."),
        (isinstance(batches, np.ndarray | Mapping | str | bytes), f"Write {write.format('...')}."),
        (not hasattr(batches, "__iter__"), "Pass an object that can be iterated repeatedly."),
        (
            hasattr(batches, "__next__"),
            "It can be iterated only once: pass the function that creates it to "
            "Dataset.from_generator.",
        ),
    )
    kind = type(batches).__name__
    for wrong, remedy in refused:
        if wrong:
            raise ValueError(f"expected a dataset, got {kind}. {remedy}")

    def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
        return zip(map(element, islice(loader, start - epoch.loaded, None)))

    def element(batch: Any) -> Element:
        # PyTorch's default collate returns lists instead of tuples.
        if from_torch and type(batch) is list:
            batch = tuple(batch)
        made = as_element(batch, lists_nest=True)
        tensors[:] = map(is_tensor, tree.flatten_up_to(made, batch))
        return made

    # Loaders over a stream have no length, or a __len__ that raises.
    length = operator.length_hint(batches, pipeline.UNKNOWN_CARDINALITY)
    spec, runs = ElementSpec(length), not isinstance(batches, Sequence)
    from_torch = loaders.is_torch_loader(batches)
    loader, tensors = batches, [from_torch]
    if from_torch and not has_state(batches) and not loaders.obstacle(batches):
        loader = loaders.TorchLoader(batches)
    return Node(
        name=kind,
        chunks=chunks,
        spec=spec,
        loader=loader,
        runs_user_code=runs,
        tensors=tensors,
    )


def has_state(loader: Any) -> bool:
    """Return True if a loader can save and restore its position."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def matching(paths: Any, what: str = "from_files") -> tuple[str, ...]:
    """Return the paths of files, in the order of the patterns and sorted for each."""
    # An item of a tensor or an array.
    paths = paths.tolist() if hasattr(paths, "tolist") else paths
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    try:
        names = tuple(path for item in several for path in _matches(os.fspath(item), what))
    except TypeError:
        raise TypeError(f"{what} needs paths or patterns, got {paths!r}.") from None
    if not names:
        raise ValueError(f"{what} needs at least one path, or a pattern such as 'train-*.npy'.")
    return names


def listed(patterns: Any) -> Node:
    """Return a node of the paths of files; workers that divide the input by files divide them."""
    names = matching(patterns, "list_files")
    missing = [name for name in names if not os.path.exists(name)]
    if missing:
        raise ValueError(f"list_files: no file matches {missing[0]!r}.")
    paths = np.array(names)

    def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
        number, count = epoch.shard
        columns = [paths[number::count]]
        return iter((Rows(0, [(columns, range(len(columns[0])))])[start:],))

    spec = ElementSpec(len(names), batched=False, like=LeafSpec(paths.dtype, ()))
    return Node(
        name=f"list_files({count_of(len(names), 'file')})", chunks=chunks, spec=spec, files=names
    )


def files(paths: Any, reader: Reader | None = None) -> Node:
    """Return a node of the elements in files, one file after another."""
    names = matching(paths)
    parts = [(path, _reader_for(path) if reader is None else reader) for path in names]

    def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
        number, count = epoch.shard
        read = (_read(path, by) for path, by in parts[number::count])
        return drop(chain.from_iterable(read), start)

    name, spec = f"from_files({count_of(len(names), 'file')})", ElementSpec(batched=False)
    return Node(name=name, chunks=chunks, spec=spec, files=names, runs_user_code=True)


def _like(columns: Element, axis: int) -> Any:
    return tree.map_leaves(lambda leaf: LeafSpec(leaf.dtype, leaf.shape[axis:]), columns)


def typed(types: Any, shapes: Any) -> Any:
    """Return the signature of elements with a nest of dtypes and, if it is not None, of shapes."""
    if shapes is None:
        return types
    pairs = zip(tree.flatten(types), tree.flatten_up_to(types, shapes), strict=True)
    return tree.unflatten(types, [LeafSpec(np.dtype(dtype), shape) for dtype, shape in pairs])


def _spec_of(leaf: Any) -> LeafSpec:
    """Return the spec for a leaf of a signature; a dtype alone matches any shape."""
    if isinstance(leaf, type | np.dtype | str):
        return LeafSpec(np.dtype(leaf), None)
    return LeafSpec(np.dtype(leaf.dtype), tuple(leaf.shape))


def _conform(value: Any, specs: Any) -> Element:
    """Return the element for a value: with the structure of a signature, and cast to its dtypes."""
    try:
        parts = tree.flatten_up_to(specs, value)
        # A tuple at the place of a leaf has the rows of an array.
        arrays = (np.array(part) if isinstance(part, tuple) else part for part in parts)
        leaves = list(map(elements.copied, arrays))
    except ValueError:
        raise ValueError(
            f"from_generator: the generator yielded {value!r}, whose structure differs from that "
            f"of output_signature, {specs!r}."
        ) from None
    return tree.unflatten(specs, list(map(_conform_leaf, leaves, tree.flatten(specs))))


def _conform_leaf(leaf: Any, spec: LeafSpec) -> Any:
    wanted = leaf.shape if spec.shape is None else spec.shape
    pairs = zip(wanted, leaf.shape, strict=True)
    if len(wanted) != leaf.ndim or any(want not in (None, have) for want, have in pairs):
        raise ValueError(
            f"from_generator: the generator yielded shape {leaf.shape} where output_signature says "
            f"{wanted}. Yield arrays of that shape, or write None for a length that varies."
        )
    return leaf.astype(spec.dtype, copy=False)


def _matches(path: str, what: str) -> list[str]:
    if _WILDCARDS.isdisjoint(path) or os.path.exists(path):
        return [path]
    names = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not names:
        raise ValueError(
            f"{what}: no file matches {path!r} in the directory {os.getcwd()!r}. Every worker "
            "must see all files under the same names."
        )
    return names


def _reader_for(path: str) -> Reader:
    extension = PurePath(path).suffix.lower()
    if extension not in _READERS:
        raise ValueError(
            f"from_files has no reader for {path!r}: it reads {', '.join(_READERS)}. Pass "
            "reader=fn, where fn(path) returns arrays, whose rows are the elements, or an iterable."
        )
    return _READERS[extension]


def _read(path: str, read: Reader) -> Iterator[Chunk]:
    """Yield the rows of a file's arrays at once, and the elements of an iterable singly."""
    content: Any = None
    try:
        content = read(path)
        if _is_stream(content):
            yield from zip(map(as_element, content))
            return
        content = elements.columns_of(content) if is_frame(content) else content
        columns = read_only(as_element(content))
        remedy = "Return arrays of equally many rows, or an iterable of elements, from the reader."
        yield Rows.of(columns, elements.leading_length(tree.flatten(columns), "from_files", remedy))
    except Exception as error:
        error.add_note(f"while {path!r} was read")
        raise
    finally:
        if _is_stream(content):
            getattr(content, "close", bool)()


def _is_stream(content: Any) -> bool:
    nested = isinstance(content, np.ndarray | tuple | list | dict)
    arrays = nested or hasattr(content, "__array__") or dataclasses.is_dataclass(content)
    return isinstance(content, Iterable) and not arrays and not is_frame(content)


def _read_npy(path: str) -> npt.NDArray[Any]:
    return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]


def _read_npz(path: str) -> dict[str, npt.NDArray[Any]]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _read_csv(path: str) -> npt.NDArray[np.float64]:
    """Return the numbers of a CSV file; a first line without numbers is a header."""
    with open(path, encoding="utf-8-sig") as file:
        lines = list(enumerate(file, 1))
    if header := not any(map(_is_number, lines[0][1].split(",") if lines else ())):
        _check_header(path, lines[0][1].partition("#")[0].strip() if lines else "")
    rows = [(number, line) for number, line in lines[header:] if line.strip()]
    if not rows:
        return np.empty((0, 0))
    try:
        return np.loadtxt([line for _, line in rows], delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(_fault_of_csv(path, rows) or f"{path}: {error}") from error


def _check_header(path: str, line: str) -> None:
    """Raise an error if the first line has only missing values, or is not separated by commas."""
    cells = [cell.strip(" \t\"'").lower() for cell in line.split(",")]
    other = "," not in line and any(separator in line for separator in ";\t")
    if other or (line and _MISSING_VALUES.issuperset(cells)):
        what = "is not separated by commas" if other else "contains no value"
        raise ValueError(f"{path}, line 1: {line!r} {what}, so it is not a header. {_CORRECT_CSV}")


def _fault_of_csv(path: str, lines: Iterable[tuple[int, str]]) -> str | None:
    """Return a message about the first line that is not a row of numbers; None if there is none."""
    width = 0
    for number, line in lines:
        cells = line.partition("#")[0].split(",")
        if not "".join(cells).strip():
            continue
        where = f"{path}, line {number}:"
        for column, cell in enumerate(cells, 1):
            if not _is_number(cell):
                what = f"column {column} is {cell.strip()!r}, which is not a number."
                return f"{where} {what} {_CORRECT_CSV}"
        if width and len(cells) != width:
            return (
                f"{where} {count_of(len(cells), 'column')}, but the lines before it have {width}."
            )
        width = len(cells)
    return None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


_READERS: dict[str, Reader] = {".npy": _read_npy, ".npz": _read_npz, ".csv": _read_csv}
