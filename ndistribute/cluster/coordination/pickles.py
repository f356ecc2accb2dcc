"""Functions, arguments and results as bytes: by cloudpickle, which only this file knows.

Both sides unpickle only what came over a session, whose peer has proved that it knows the secret.
A message is sealed at its head alone, so the digest of what is unpickled stands there: bytes that
somebody changed on the way are never run. Large arrays travel beside the pickle, as data.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import pickle
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from ndistribute.cluster.wire.tensors import Array
from ndistribute.errors import AuthenticationError, MissingDependencyError

__all__ = ["Pickled", "TooLongError", "dump", "load", "require"]

_BESIDE_BYTES = 16384  # Of less, copying costs less than a buffer of its own.
_PROTOCOL = 5


@dataclass(frozen=True, slots=True, eq=False)
class Pickled:
    """Hold a pickled object.

    Args:
        digest: of the body.
        body: the pickle.
        buffers: the data of large arrays, in the order of the pickle.
    """

    digest: str
    body: Array
    buffers: tuple[Array, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return how much it takes."""
        return self.body.nbytes + sum(buffer.nbytes for buffer in self.buffers)


def require() -> None:
    """Raise where cloudpickle is not installed.

    Raises:
        MissingDependencyError: it is not.
    """
    _cloudpickle()


class TooLongError(ValueError):
    """Say that an object takes more bytes than it may."""


def dump(value: Any, most_bytes: float = math.inf) -> Pickled:
    """Return an object as bytes, which do not change when it does.

    Args:
        value: the object.
        most_bytes: how long it may be.

    Raises:
        TooLongError: it is longer.
        Exception: the object is not picklable; what exactly is raised depends on the object.

    >>> load(dump(lambda: 7))()
    7
    """
    beside: list[Array] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        try:
            data = buffer.raw()
        except BufferError:  # It is not contiguous, so it has to be copied.
            return True
        if data.nbytes < _BESIDE_BYTES:
            return True
        beside.append(np.frombuffer(data, np.uint8))
        return False

    body = _cloudpickle().dumps(value, protocol=_PROTOCOL, buffer_callback=stays)
    nbytes = len(body) + sum(data.nbytes for data in beside)
    if nbytes > most_bytes:
        raise TooLongError(f"{nbytes} bytes")
    # Copies, since they are sent later: by then the arrays may hold something else.
    copies = tuple(data.copy() for data in beside)
    return Pickled(_digest(body), np.frombuffer(body, np.uint8), copies)


def load(pickled: Pickled) -> Any:
    """Return the object; its arrays can be written to, and share nothing with the bytes.

    Raises:
        AuthenticationError: the bytes are not those that were sent.
        Exception: what unpickling raises, such as for a module that this process has not.
    """
    body = pickled.body.data
    if _digest(body) != pickled.digest:
        raise AuthenticationError(
            "A pickled object was changed on its way. Set NDISTRIBUTE_TLS_CERT, _KEY and _CA to "
            "keep others off the wire."
        )
    # The peer has proved itself, and what it sent is what came.
    return pickle.loads(body, buffers=[bytearray(data) for data in pickled.buffers])  # noqa: S301


def _digest(body: bytes | memoryview) -> str:
    return hashlib.sha256(body).hexdigest()


@functools.cache
def _cloudpickle() -> ModuleType:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise MissingDependencyError(
            "Functions are sent to workers by cloudpickle, which is not installed: "
            "pip install 'ndistribute[ps]'"
        ) from error
