"""What a store holds as tensors and JSON, and the log of what changed it since.

A log is a file of records, each with a checksum, in the order in which the store was changed. With
the snapshot before it, it holds all that a server acknowledged. Nothing that is read is ever run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ndistribute import tensor_files
from ndistribute.errors import CheckpointCorruptError
from ndistribute.parameter_server.aggregation import Aggregation
from ndistribute.parameter_server.messages import Logged
from ndistribute.parameter_server.store import Applied, ClockGroup, Store
from ndistribute.parameter_server.variables import Cell
from ndistribute.transport.codec import Array, Buffer, Decoder, encode, nbytes_of

__all__ = ["UpdateLog", "read_log", "restore", "take"]

_SYNC_SECONDS = 60.0
# The checksum of what follows; how long the control record is, and how many buffers there are.
# Then come the buffers' lengths, the control record and the buffers.
_HEAD = struct.Struct("<III")
_CHECKSUM = struct.Struct("<I")
_log = logging.getLogger("ndistribute")


class _Saved(msgspec.Struct):
    """What JSON holds of a store; where an array belongs it has the name of a tensor."""

    total: int
    versions: dict[str, int]
    applied: dict[str, Applied]
    aggregates: dict[str, Aggregation]
    clocks: dict[str, ClockGroup]


def take(store: Store) -> tuple[dict[str, Array], Any]:
    """Return what a store holds, as tensors that never change and what JSON can hold.

    Everything is in it but calls that wait: who made them asks again.

    >>> tensors, data = take(Store())
    >>> restore(tensors, data).total
    0
    """
    cells = store.variables.cells
    tensors = {f"variables/{name}": cell.lend() for name, cell in cells.items()}

    def save_array(array: Array) -> str:
        name = f"sums/{len(tensors)}"
        tensors[name] = array.copy()
        return name

    saved = _Saved(
        store.total,
        {name: cell.version for name, cell in cells.items()},
        store.applied,
        {  # What is held of a step that is over is memory to use again, and no more.
            name: held if held.givers else dataclasses.replace(held, sums={})
            for name, held in store.aggregates.items()
        },
        store.clocks,
    )
    return tensors, msgspec.to_builtins(saved, enc_hook=save_array)


def restore(tensors: Mapping[str, Array], data: Any, floor: int = 0) -> Store:
    """Return a store in the state that `take` returned.

    Args:
        tensors: from `take`; they are the store's from now on.
        data: from `take`.
        floor: versions of the variables become higher, so that clients that read what the snapshot
            does not have read again.

    Raises:
        CheckpointCorruptError: it is something else.
    """
    try:
        saved = msgspec.convert(data, _Saved, dec_hook=lambda kind, name: tensors[name])
        store = Store(floor)
        for name, version in saved.versions.items():
            array = tensors[f"variables/{name}"]
            owned = array if array.flags.owndata else array.copy()
            store.variables.cells[name] = Cell(owned, max(version, floor + 1))
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise CheckpointCorruptError(f"it is not what this version writes: {error}") from error
    store.total = store.began = saved.total
    store.applied, store.aggregates = saved.applied, saved.aggregates
    store.clocks = saved.clocks
    return store


class UpdateLog:
    """Append to a new log, and bring what was appended to the disk.

    `append` is called under the lock of the store, so the order of the log is that of the changes.
    `sync` is called outside of it, from any thread: one sync serves all that wait for one.

    Args:
        path: of the file, which is made for this user alone.

    Attributes:
        written: how long the log is.
        broken: why what is in the file is not known, if that happened.

    Raises:
        OSError: it can not be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0
        self.broken: OSError | None = None
        self._synced = 0
        self._syncing = False
        self._turn = threading.Condition()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        try:
            tensor_files.sync(path.parent)
        except OSError:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise

    def append(self, request: Logged) -> None:
        """Write a request to the file, though not yet to the disk.

        Raises:
            OSError: it can not be written; nothing of it stays in the log unless that is `broken`.
        """
        control, buffers = encode(request)
        lengths = struct.pack(f"<{len(buffers)}Q", *map(nbytes_of, buffers))
        head = _HEAD.pack(0, len(control), len(buffers))[_CHECKSUM.size :] + lengths + control
        checksum = zlib.crc32(head)
        for buffer in buffers:
            checksum = zlib.crc32(buffer, checksum)
        try:
            _write(self._file, _CHECKSUM.pack(checksum) + head)
            for buffer in buffers:
                _write(self._file, buffer)
            self.written += _CHECKSUM.size + len(head) + sum(map(nbytes_of, buffers))
        except OSError:
            try:
                os.ftruncate(self._file, self.written)
            except OSError as error:
                self.broken = error
            raise

    def sync(self, position: int) -> None:
        """Wait until what was written up to a position is on the disk.

        Raises:
            OSError: it is not, and may or may not be there after a restart.
        """
        with self._turn:
            waits = self._turn.wait_for(
                lambda: self._synced >= position or self.broken or not self._syncing, _SYNC_SECONDS
            )
            if self._synced >= position:
                return
            if self.broken or not waits:
                raise self.broken or TimeoutError(f"{self.path} was not synced in time")
            self._syncing, end = True, self.written
        error = None
        try:
            os.fdatasync(self._file)
        except OSError as failed:
            error = failed
        with self._turn:
            self._syncing = False
            if error is None:
                self._synced = end
            else:
                # The system may have dropped what it could not write: nothing here is known.
                self.broken = error
            self._turn.notify_all()
        if error is not None:
            raise error

    def close(self, *, covered: bool) -> None:
        """Close the file; a second call does nothing.

        Args:
            covered: whether a snapshot on the disk holds all that is in it.
        """
        with self._turn:
            self._turn.wait_for(lambda: not self._syncing, _SYNC_SECONDS)
            self._synced = self.written if covered else self._synced
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def read_log(path: Path) -> Iterator[Logged]:
    """Return the requests in a log, and cut off what was not written whole at its end.

    Raises:
        OSError: it can not be read, or cut.
    """
    decoder: Decoder[Logged] = Decoder(Logged)
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        whole = 0
        while whole < size:
            record = _read_record(file, size - whole)
            if record is None:
                _log.warning("%s: the last %d bytes are not whole and cut off", path, size - whole)
                file.truncate(whole)
                os.fsync(file.fileno())
                return
            whole = file.tell()
            yield decoder.decode(*record)


def _read_record(file: Any, left: int) -> tuple[bytes, list[Buffer]] | None:
    """Return the control record and the buffers of one request; None if they are not whole."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    checksum, control_bytes, count = _HEAD.unpack(head)
    if _HEAD.size + 8 * count + control_bytes > left:
        return None
    described = file.read(8 * count + control_bytes)
    lengths = struct.unpack_from(f"<{count}Q", described)
    if _HEAD.size + len(described) + sum(lengths) > left:
        return None
    found = zlib.crc32(described, zlib.crc32(head[_CHECKSUM.size :]))
    buffers: list[Buffer] = []
    for length in lengths:
        buffers.append(file.read(length))
        found = zlib.crc32(buffers[-1], found)
    return (described[8 * count :], buffers) if found == checksum else None


def _write(file: int, buffer: Buffer) -> None:
    view = memoryview(buffer).cast("B")
    while view:
        view = view[os.write(file, view) :]
