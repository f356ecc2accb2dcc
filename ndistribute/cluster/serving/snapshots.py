"""Snapshots of a server on disk: whole or not there, and known to be what was written.

A snapshot is written beside its final name, brought to the disk, and renamed; a checksum at its
end tells a file that was cut short or changed. The last two are kept. Nothing in one is ever run:
it holds JSON and tensors, as messages do.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from ndistribute.cluster.wire.tensors import Array, MalformedError, pack, unpack
from ndistribute.errors import CheckpointCorruptError

__all__ = ["Snapshot", "Snapshots"]

KEPT = 2
_DIGEST_BYTES = 32
_HEAD_LIMIT_BYTES = 1 << 30
_CLAIM_SECONDS = 30.0  # A process that is being stopped still writes its last one.
_LOOK_SECONDS = 0.05
_log = logging.getLogger("ndistribute")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a file holds.

    Args:
        path: of the file.
        saved_at: when it was taken, in seconds since 1970.
        head: what JSON can hold.
        tensors: the arrays, which are views of memory of their own.
    """

    path: Path
    saved_at: float
    head: Any
    tensors: list[Array]


class Snapshots:
    """Keep the snapshots of one task in a directory, which others may share.

    Args:
        directory: made if it is not there.
        task: whose they are, such as ``"ps:0"``.
        claim_seconds: how long to wait for another process of the same task to be gone.

    Raises:
        OSError: the directory can not be used, or is used for this task by another process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory, Snapshots(directory, "ps:0") as files:
    ...     path = files.write({"step": 7}, [np.arange(3)])
    ...     path.name, files.newest().head, files.newest().tensors
    ('ps-0.000001.snapshot', {'step': 7}, [array([0, 1, 2])])
    """

    def __init__(
        self, directory: str | os.PathLike[str], task: str, claim_seconds: float = _CLAIM_SECONDS
    ) -> None:
        self._directory = Path(directory)
        self._stem = task.replace(":", "-")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._claim = _claim(self._directory / f"{self._stem}.lock", task, claim_seconds)
        for left_over in self._directory.glob(f"{self._stem}.*.writing"):
            left_over.unlink()

    def newest(self) -> Snapshot | None:
        """Return the newest whole snapshot, None where there never was one.

        Raises:
            CheckpointCorruptError: there are some, none of them whole.
            OSError: one can not be read.
        """
        broken: list[tuple[Path, MalformedError]] = []
        found = None
        for path in reversed(self._paths()):
            try:
                found = _read(path)
                break
            except MalformedError as error:
                broken.append((path, error))
        if found is None and broken:
            names = ", ".join(f"{path} ({error})" for path, error in broken)
            raise CheckpointCorruptError(
                f"No snapshot of this server is whole: {names}. Move them away to start anew."
            )
        for path, reason in broken:
            _log.warning("%s is set aside, the one before is taken: %s", path, reason)
            path.rename(path.with_suffix(".broken"))  # It must not count among those kept.
        return found

    def write(self, head: Any, tensors: Sequence[Array]) -> Path:
        """Write a snapshot, and return where it is once it would outlast a power cut.

        Args:
            head: what JSON can hold.
            tensors: arrays that do not change meanwhile.

        Raises:
            OSError: it could not be written; those before it are as they were.
        """
        earlier = self._paths()
        number = _number(earlier[-1]) + 1 if earlier else 1
        path = self._directory / f"{self._stem}.{number:06d}.snapshot"
        temporary = path.with_suffix(".writing")
        try:
            with temporary.open("wb") as file:
                _write(file, {"saved_at": time.time(), "head": head}, tensors)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._sync_directory()
        for old in [*earlier, path][:-KEPT]:
            old.unlink(missing_ok=True)
        return path

    def close(self) -> None:
        """Let another process have the task's snapshots; a second call does nothing."""
        self._claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _paths(self) -> list[Path]:
        """Return the files of this task, the newest last."""
        return sorted(self._directory.glob(f"{self._stem}.*.snapshot"), key=_number)

    def _sync_directory(self) -> None:
        number = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _claim(path: Path, task: str, seconds: float) -> IO[bytes]:
    """Return a file that is locked as long as it is open, and no longer than its process lives."""
    file = path.open("ab")
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                file.close()
                raise OSError(
                    f"Another process uses the snapshots of {task} in {path.parent}, and still "
                    f"did after {seconds:g} s. Give each job a snapshot directory of its own."
                ) from error
        time.sleep(_LOOK_SECONDS)


def _number(path: Path) -> int:
    """Return the number in a file's name; 0 where somebody named it otherwise."""
    number = path.name.split(".")[-2]
    return int(number) if number.isdecimal() else 0


def _write(file: IO[bytes], head: Any, tensors: Sequence[Array]) -> None:
    digest = hashlib.sha256()
    text = json.dumps(head, allow_nan=False, separators=(",", ":")).encode()
    for buffer in pack(text, tensors, _HEAD_LIMIT_BYTES):
        digest.update(buffer)
        file.write(buffer)
    file.write(digest.digest())
    file.flush()
    os.fsync(file.fileno())


def _read(path: Path) -> Snapshot:
    data = np.fromfile(path, np.uint8)
    body, digest = data[:-_DIGEST_BYTES].data, data[-_DIGEST_BYTES:].tobytes()
    if hashlib.sha256(body).digest() != digest:
        raise MalformedError(f"the checksum of its {len(data)} bytes is wrong")
    head, tensors = unpack(body, len(body), _HEAD_LIMIT_BYTES)
    try:
        parsed = json.loads(head)
        return Snapshot(path, float(parsed["saved_at"]), parsed["head"], tensors)
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise MalformedError("its head is not that of a snapshot") from error
