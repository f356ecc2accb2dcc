"""Pickling of functions, arguments and results; only this file imports cloudpickle.

Pickles are read only from connections with MACs: the peer has proved that it knows the secret, and
a MAC covers all bytes. The pickle is part of the control record. The data of large arrays is sent
beside it, and is never executed.
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

_BUFFER_BYTES = 16384  # Smaller data is copied into the pickle, which is faster.
_PROTOCOL = 5
_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None)})


class Pickled(Record, frozen=True):
    """A pickle, and the data of large arrays in the order of the pickle."""

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
    """Return a pickled copy of an object.

    >>> load(dump(lambda: 7))()
    7
    """
    if type(value) in _PLAIN:  # Fast, because most functions return None.
        return Pickled(pickle.dumps(value, _PROTOCOL))
    buffers: list[Array] = []

    def stays_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        try:
            data = buffer.raw()
        except BufferError:  # It is not contiguous, so it must be copied.
            return True
        if data.nbytes < _BUFFER_BYTES:
            return True
        # A copy, because the array may change before the message is sent.
        buffers.append(np.array(data, np.uint8))
        return False

    body = require_cloudpickle().dumps(value, protocol=_PROTOCOL, buffer_callback=stays_in_pickle)
    return Pickled(body, tuple(buffers))


def load(pickled: Pickled) -> Any:
    """Return the object; its arrays are writable copies."""
    # The sender was authenticated, and its frames carry MACs.
    return pickle.loads(pickled.body, buffers=map(bytearray, pickled.buffers))  # noqa: S301


def key_of(pickled: Pickled) -> str:
    """Return the digest by which both ends of a connection identify a function."""
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
