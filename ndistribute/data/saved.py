"""Files of the elements of a dataset: arrays one after another, and at the end what they make.

A file is written under a temporary name and renamed, so it is whole or missing.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.data.elements import Chunk, Element, as_element, drop
from ndistribute.data.pipeline import ElementSpec, Epoch, Node
from ndistribute.devices import to_host
from ndistribute.dtypes import dtype_named

# The end of a file, after the lengths of the description before it.
_END = b"ndistribute elements 1"


def write(path: str, values: Iterator[Element]) -> None:
    """Write elements to a file."""
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    like, count, checksum = None, 0, 0
    try:
        with open(temporary, "xb") as file:
            for element in values:
                structure = _described(element)
                if like not in (None, structure):
                    raise ValueError(f"save: elements differ: they are {like} and {structure}.")
                like, count = structure, count + 1
                for leaf in tree.flatten(element):
                    array = to_host(np.void(leaf) if isinstance(leaf, bytes) else leaf)
                    np.save(file, array, allow_pickle=False)
                    checksum = zlib.crc32(array.tobytes(), checksum)
            end = json.dumps({"like": like, "count": count, "checksum": checksum}).encode()
            file.write(end + len(end).to_bytes(8, "little") + _END)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


def source(path: str) -> Node:
    """Return a node of the elements in a file."""
    with open(path, "rb") as file:
        data = file.seek(0, os.SEEK_END) - len(_END) - 8
        file.seek(max(0, data))
        length, end = int.from_bytes(file.read(8), "little"), file.read()
        if end != _END or length > data:
            raise ValueError(f"load: {path!r} is not a whole file that save wrote.")
        file.seek(data - length)
        described = json.loads(file.read(length))

    def values() -> Iterator[Element]:
        with open(path, "rb") as file:
            for _ in range(described["count"]):
                yield _read(file, described["like"])

    def chunks(epoch: Epoch, start: int) -> Iterator[Chunk]:
        return drop(zip(values()), start)

    # Workers compare the checksum.
    arrays, spec = (np.array([described["checksum"]]),), ElementSpec(described["count"])
    return Node(name="load", chunks=chunks, spec=spec, arrays=arrays, runs_user_code=True)


def _described(nest: Any) -> Any:
    """Return the structure of an element for JSON, with the names of dtypes."""
    if isinstance(nest, bytes):
        return "bytes"
    if type(nest) is tuple or type(nest) is list:
        return [type(nest).__name__, *map(_described, nest)]
    if type(nest) is dict and all(isinstance(key, str) for key in nest):
        # In the order of `tree.flatten`.
        return {key: _described(nest[key]) for key in sorted(nest)}
    dtype = getattr(nest, "dtype", None)
    if dtype is None or dtype.hasobject or dtype.fields:
        raise ValueError(
            "save: elements are nests of tuples, and of dicts with text as keys, of arrays of "
            f"numbers or text; got {nest!r}."
        )
    return "text" if dtype.kind in "SU" else dtype.name


def _read(file: Any, like: Any) -> Element:
    if isinstance(like, dict):
        return {key: _read(file, each) for key, each in like.items()}
    if isinstance(like, list):
        items = [_read(file, each) for each in like[1:]]
        return tuple(items) if like[0] == "tuple" else items
    array = np.load(file, allow_pickle=False)
    if like == "bytes":
        return np.bytes_(array.tobytes())
    return as_element(array.view(dtype_named(like)) if array.dtype.kind == "V" else array)
