"""Functions, arguments and results as bytes: by cloudpickle, which only this file imports.

Pickles are read only from sealed connections, whose other end has proved that it knows the secret
and whose control records carry a MAC. The pickle itself stands in the control record; the data of
large arrays travels beside it, and is never executed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pickle
from types import ModuleType
from typing import Any

import numpy as np

from ndistribute.errors import MissingDependencyError
from ndistribute.transport.codec import Array, Record

_BUFFER_BYTES = 16384  # Copying less than this costs less than a buffer of its own.
_PROTOCOL = 5
_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None)})


class Pickled(Record, frozen=True):
    """A pickle, and the data of large arrays in the order in which the pickle refers to them."""

    body: bytes
    buffers: tuple[Array, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the size of the pickle and its buffers."""
        size = len(self.body)
        for buffer in self.buffers:
            size += buffer.nbytes
        return size


def dump(value: Any) -> Pickled:
    """Return an object as bytes, which do not change when the object does.

    >>> load(dump(lambda: 7))()
    7
    """
    if type(value) in _PLAIN:  # Two calls in place of ten: most functions return None.
        return Pickled(pickle.dumps(value, _PROTOCOL))
    buffers: list[Array] = []

    def stays_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        try:
            data = buffer.raw()
        except BufferError:  # It is not contiguous, so it has to be copied.
            return True
        if data.nbytes < _BUFFER_BYTES:
            return True
        # A copy, since it is sent later: by then the array may hold something else.
        buffers.append(np.array(data, np.uint8))
        return False

    body = require_cloudpickle().dumps(value, protocol=_PROTOCOL, buffer_callback=stays_in_pickle)
    return Pickled(body, tuple(buffers))


def load(pickled: Pickled) -> Any:
    """Return the object; its arrays can be written to, and share no memory with the bytes."""
    # Only a process that has proved itself has sent this, over a sealed connection.
    return pickle.loads(pickled.body, buffers=map(bytearray, pickled.buffers))  # noqa: S301


def key_of(pickled: Pickled) -> str:
    """Return a digest under which both ends of a connection keep a function."""
    digest = hashlib.sha256(pickled.body)
    for buffer in pickled.buffers:
        digest.update(buffer.data)
    return digest.hexdigest()


@functools.cache
def require_cloudpickle() -> ModuleType:
    """Return the module cloudpickle; raise MissingDependencyError if it is not installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise MissingDependencyError(
            "Functions are sent to workers by cloudpickle, which is not installed: "
            "pip install 'ndistribute[ps]'"
        ) from error
