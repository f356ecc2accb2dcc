"""Persistence of a store: snapshots, and logs of the changes since a snapshot.

A log is a file of requests, in the order in which the store executed them. Each has a checksum and
ends with a mark. A log and the snapshot before it contain all changes that the server acknowledged.
Reading either of them executes no code.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ndistribute import tensor_files
from ndistribute.errors import CheckpointCorruptError
from ndistribute.parameter_server.messages import Failure, Logged, Totals
from ndistribute.parameter_server.shared import packed, unpacked
from ndistribute.parameter_server.store import Applied, ClockGroup, Store
from ndistribute.parameter_server.stored_variables import Aggregation, Cell, Refused
from ndistribute.transport.codec import Array, Buffer, Decoder, MalformedError, encode

_CLAIM_SECONDS = 30.0  # A process that is ending may still write its last snapshot.
_EPOCH_BITS = 30
# A request begins with the checksum of the rest, and the lengths of the index and of all buffers,
# which follow. The index is the control record and the length of each buffer. A checksum continues
# that of the request before, also across logs, so a missing or misplaced request is detected.
_CHECKSUM, _LENGTHS = struct.Struct("<I"), struct.Struct("<QQ")
# A log begins and each request ends with this. If a mark follows a damaged request, the request was
# written completely and damaged later, perhaps in its lengths; otherwise the server was killed.
_MARK = b"\x93nd.log\n"
_log = logging.getLogger("ndistribute")


class _Saved(msgspec.Struct):
    """The JSON part of a snapshot, in which the name of a tensor replaces each array."""

    total: int
    versions: dict[str, int]
    applied: dict[str, Applied]
    aggregates: dict[str, Aggregation]
    clocks: dict[str, ClockGroup]
    shared: dict[str, tuple[bool, str]] = {}
    """Whether each variable of graphs keeps its shape, and the dtype of text saved as bytes."""
    epoch: int = 0
    kept: int = 0


def take(store: Store) -> tuple[dict[str, Array], Any]:
    """Return the state of a store, without waiting calls: immutable tensors and JSON data."""
    cells = store.variables.cells
    for held in store.aggregates.values():
        if not held.contributors:  # These sums are only buffers for reuse.
            held.sums = {}
    tensors = {f"variables/{name}": cell.snapshot() for name, cell in cells.items()}

    shared = {}
    for name, cell in list(store.shared.cells.items()):
        if cell.array is not None:
            tensors[f"shared/{name}"], dtype = packed(name, cell.snapshot())
            shared[name] = cell.keeps_shape, dtype

    def save_array(array: Array) -> str:
        name = f"sums/{len(tensors)}"
        tensors[name] = array.copy()
        return name

    versions = {name: cell.version for name, cell in cells.items()}
    whole = store.applied, store.aggregates, store.clocks, shared, store.epoch, store.kept
    saved = _Saved(store.total, versions, *whole)
    return tensors, msgspec.to_builtins(saved, enc_hook=save_array)


def restore(tensors: Mapping[str, Array], data: Any, floor: int = 0) -> Store:
    """Return a store in the state that `take` returned; the store owns the tensors."""
    # Versions rise above the floor, so clients fetch again what they read after the snapshot.
    saved = msgspec.convert(data, _Saved, dec_hook=lambda kind, name: tensors[name], str_keys=True)
    store = Store(floor)
    for name, version in saved.versions.items():
        owned = _owned(tensors[f"variables/{name}"])
        store.variables.cells[name] = Cell(owned, max(version, floor + 1))
    for name, (keeps_shape, dtype) in saved.shared.items():
        cell = store.shared.find(name)
        cell.keeps_shape = keeps_shape
        cell.array = _owned(unpacked(tensors[f"shared/{name}"], dtype))
    store.total = store.began = saved.total
    store.epoch, store.kept = saved.epoch, saved.kept
    store.applied, store.aggregates, store.clocks = saved.applied, saved.aggregates, saved.clocks
    return store


def _owned(array: Array) -> Array:
    return array if array.flags.owndata else array.copy()


class UpdateLog:
    """A new log: `append` runs under the lock of the store, `sync` outside it, once for all."""

    def __init__(self, path: Path, checksum: int) -> None:
        self.path = path
        self.checksum = checksum  # The checksum of the last request, here or in the previous log.
        self.written = 0
        self.broken: OSError | None = None  # The reason why the content of the file is unknown.
        self._synced = 0
        self._syncing = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        try:
            tensor_files.sync(path.parent)
        except OSError:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise

    def append(self, request: Logged) -> None:
        """Write a request to the file, not yet to the disk; on an error, write nothing."""
        control, buffers = encode(request)
        lengths = list(map(len, buffers))
        index = msgspec.msgpack.encode((control, lengths))
        head = _LENGTHS.pack(len(index), sum(lengths)) + index
        checksum = zlib.crc32(head, self.checksum)
        for buffer in buffers:
            checksum = zlib.crc32(buffer, checksum)
        head = (b"" if self.written else _MARK) + _CHECKSUM.pack(checksum) + head
        try:
            for part in (head, *buffers, _MARK):
                _write(self._file, part)
            self.written += len(head) + sum(lengths) + len(_MARK)
            self.checksum = checksum
        except OSError:
            try:
                os.ftruncate(self._file, self.written)
            except OSError as error:
                self.broken = error
            raise

    def sync(self, position: int) -> None:
        """Wait until the file up to a position is on the disk, or raise an `OSError`."""
        with self._syncing:
            if self._synced >= position:
                return
            if self.broken is not None:
                raise self.broken
            end = self.written
            try:
                os.fdatasync(self._file)
            except OSError as error:
                # The kernel may have dropped the data: the content is unknown.
                self.broken = error
                raise
            self._synced = end

    def close(self, *, covered: bool) -> None:
        """Close the file; `covered`: a snapshot contains it. A second call does nothing."""
        with self._syncing:
            self._synced = self.written if covered else self._synced
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


class Disk:
    """The snapshots and logs of a server, in a directory that no other process writes to."""

    def __init__(self, directory: str | os.PathLike[str], task: str, *, log: bool) -> None:
        self.store: Store  # The restored store, or a new one.
        self.resumed = self.replayed = False  # Whether a state, and a log, was restored.
        self.logs: list[UpdateLog] = []  # Logs that no snapshot covers; the last one is in use.
        self._directory, self._task = Path(directory), task
        self._stem = task.replace(":", "-")
        self._next = 1  # The number of the next log.
        self._first = 1  # The first log after the last snapshot.
        self._checksum = 0  # The checksum of the last request read from a log.
        self._claim = tensor_files.claim(self._directory, self._stem, _CLAIM_SECONDS)
        try:
            start = self._next_start()
            self._resume(start << _EPOCH_BITS)
            self.store.start = start
            if log or self.replayed:
                self.begin_log()
        except BaseException:
            self._claim.close()
            raise

    def begin_log(self) -> None:
        """Log all changes from now on; a snapshot must contain the changes before."""
        self.logs.append(UpdateLog(self._log_path(self._next), self._last_checksum))
        self._next += 1
        self.store.log = self._append

    def write(self, lock: Any) -> Totals:
        """Write a snapshot and drop the logs that it covers; `lock` is the lock of the store."""
        with lock:
            if self.logs and (self.logs[-1].written or self.logs[-1].broken):
                self.begin_log()
            replaced, logged = self.logs[:-1], bool(self.logs)
            first = self._next - 1 if logged else self._next
            totals, checksum = self.store.totals, self._last_checksum
            tensors, store = take(self.store)
        data = {"store": store, "log": first, "logged": logged, "checksum": checksum}
        path = tensor_files.write(self._directory, self._stem, tensors, data)
        with lock:
            self.logs = self.logs[len(replaced) :]
        for log in replaced:
            log.close(covered=True)
        # Keep the previous snapshot, and the logs after it.
        for number, old in self._log_paths().items():
            if number < self._first:
                with contextlib.suppress(OSError):  # The next snapshot deletes it.
                    old.unlink()
        self._first = first
        _log.info("%s wrote %s after %d transactions", self._task, path, totals.total)
        return totals

    def close(self) -> None:
        for log in self.logs:
            log.close(covered=False)
        self._claim.close()

    @property
    def _last_checksum(self) -> int:
        return self.logs[-1].checksum if self.logs else self._checksum

    def _append(self, request: Logged) -> None:
        log = self.logs[-1]
        try:
            log.append(request)
        except OSError as error:
            why = f"{self._task} cannot write {log.path}: {error}; nothing was changed."
            raise Refused(why, "full") from error

    def _next_start(self) -> int:
        """Return a number above those of all earlier starts, even starts without a snapshot."""
        # The number of the last start is kept, because the clock may have been set back since. The
        # clock helps if that number is missing, as in a directory restored from an old copy.
        series = f"{self._stem}.starts"
        last = tensor_files.newest(self._directory, series)
        damaged = len(tensor_files.paths(self._directory, series, ".broken"))  # Of later starts.
        start = max(int(time.time()), 0 if last is None else last.data + 1 + damaged)
        try:
            tensor_files.write(self._directory, series, {}, start)
        except OSError as error:  # A server continues while its disk is full.
            _log.error("%s could not write the number of this start: %s", self._task, error)
        return start

    def _resume(self, floor: int) -> None:
        saved = tensor_files.newest(self._directory, self._stem)
        paths = self._log_paths()
        self.store, first, logged = Store(floor), 1, bool(paths)
        if saved is None and not paths:
            return
        if saved is not None:
            try:
                self.store = restore(saved.tensors, saved.data["store"], floor)
                first, logged = int(saved.data["log"]), bool(saved.data["logged"])
                self._checksum = int(saved.data.get("checksum", 0))
            except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
                raise CheckpointCorruptError(
                    f"{saved.path} is complete, but another version of ndistribute wrote it "
                    f"({error}). Install that version, or move the file away to start from the "
                    "beginning."
                ) from error
            text = "%s continues from %s of %s UTC, which contains %d transactions"
            when = time.strftime("%F %T", time.gmtime(saved.saved_at))
            _log.warning(text, self._task, saved.path, when, self.store.total)
        numbers = [number for number in sorted(paths) if number >= first]
        if numbers != [*range(first, first + len(numbers))] or (logged and not numbers):
            raise CheckpointCorruptError(
                f"{self._task} needs {self._log_path(first).name} and those after it, but "
                f"{self._directory} has {[paths[number].name for number in numbers]}: "
                "acknowledged updates are missing. To start from the beginning, move the files "
                "of the directory away."
            )
        filled = [n for n in numbers if paths[n].lstat().st_size or not paths[n].is_file()]
        for number in filled:
            self._replay(paths[number], later=number < filled[-1])
        self.resumed, self.replayed = True, bool(numbers)
        self.store.began = self.store.total
        self._next, self._first = first + len(numbers), first

    def _replay(self, path: Path, *, later: bool) -> None:
        before = self.store.total
        try:
            for request, checksum in _requests(path, later, self._checksum):
                self._checksum = checksum
                for _, reply in self.store.handle("", 0, request):
                    if isinstance(reply, Failure):
                        raise MalformedError(reply.message)
        except MalformedError as error:
            raise CheckpointCorruptError(
                f"{path} does not fit the snapshot before it: {error} To start from the "
                "beginning, move both away."
            ) from error
        made = self.store.total - before
        _log.warning("%s repeated %d transactions of %s", self._task, made, path)

    def _log_path(self, number: int) -> Path:
        return self._directory / f"{self._stem}.{number:06d}.log"

    def _log_paths(self) -> dict[int, Path]:
        files = self._directory.glob(f"{self._stem}.*.log")
        return {int(n): path for path in files if (n := path.name.split(".")[-2]).isdecimal()}


def _requests(path: Path, later: bool, checksum: int) -> Iterator[tuple[Logged, int]]:
    """Yield the requests in a log and their checksums; `checksum` is the previous log's last.

    A request at its end that was never written completely is cut off.

    Raises:
        CheckpointCorruptError: a completely written request is damaged, or the log is incomplete
            although there are `later` logs.
    """
    decoder: Decoder[Logged] = Decoder(Logged)
    with tensor_files.open_regular(path, flags=os.O_RDWR) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = data[: len(_MARK)]
        start = len(_MARK) if begin == _MARK else 0
        while start and (request := _request_at(memoryview(data), start, checksum)):
            control, buffers, start, checksum = request
            yield decoder.decode(control, buffers), checksum
        if start == size:
            return
        if not start and not _MARK.startswith(begin.rstrip(b"\0")):
            raise MalformedError("it is damaged, or another version of ndistribute wrote it.")
        if later or data.find(_MARK, start) >= 0:
            raise CheckpointCorruptError(
                f"{path} is damaged at byte {start} of {size}: acknowledged updates after this "
                "byte cannot be read. The file is unchanged: restore it from a copy. To give "
                f"those updates up, run `truncate -s {start} {path}`, and move later logs away."
            )
        _log.warning("%s: the last %d bytes were incomplete, and are cut off", path, size - start)
        os.ftruncate(file.fileno(), start)
        os.fsync(file.fileno())


def _request_at(
    data: memoryview, start: int, checksum: int
) -> tuple[Buffer, list[memoryview], int, int] | None:
    """Return a request for the decoder, the position of the next one, and its checksum."""
    checked = start + _CHECKSUM.size
    body = checked + _LENGTHS.size
    if body > len(data):
        return None
    length, rest = _LENGTHS.unpack(data[checked:body])
    end = body + length + rest
    if end + len(_MARK) > len(data):
        return None
    checksum = zlib.crc32(data[checked:end], checksum)
    if _CHECKSUM.pack(checksum) != data[start:checked]:
        return None
    control, lengths = msgspec.msgpack.decode(data[body : body + length])
    ends = itertools.accumulate(lengths, initial=body + length)
    return control, [data[a:b] for a, b in itertools.pairwise(ends)], end + len(_MARK), checksum


def _write(file: int, buffer: Buffer) -> None:
    view = memoryview(buffer).cast("B")
    while view:
        view = view[os.write(file, view) :]
