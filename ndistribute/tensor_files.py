"""Files of named tensors and JSON, in numbered generations that are written atomically.

A generation is a folder with `tensors.safetensors`, `data.json` and `SHA256SUMS`, which
`sha256sum --check SHA256SUMS` can read. It is written under a temporary name, synced and renamed,
so a process or machine that stops meanwhile leaves the earlier generations unchanged. Reading never
executes data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from ndistribute.dtypes import PORTABLE, dtype_named
from ndistribute.errors import CheckpointCorruptError, DistributeError
from ndistribute.timers import Attempts

Array = npt.NDArray[Any]

_FORMAT = 1
_TENSORS, _DATA, _SUMS = "tensors.safetensors", "data.json", "SHA256SUMS"
_GENERATION = re.compile(r".+\.\d{6,}", re.ASCII)
_HEAD = re.compile(rb'\{"format": \d+, "saved_at": (\d+\.?\d*), (?:"kind": "(\w*)", )?')
_POLL_SECONDS = 0.01
_TURN_SECONDS = 600.0  # How long to wait for other processes that write the same series.
# More than any of our files has. Tensors have a header, which tells their length.
_SUMS_LIMIT, _DATA_LIMIT = 1 << 12, 1 << 28
# A forked process would have the locks too, and keep them after this process was killed.
_claimed: weakref.WeakSet[BufferedReader] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [*map(BufferedReader.close, _claimed)])
_log = logging.getLogger("ndistribute")


@dataclass(frozen=True, eq=False)
class Saved:
    """A generation that was read."""

    path: Path
    saved_at: float  # In seconds since 1970.
    tensors: dict[str, Array]  # In the order of `write`; they are writable and own their memory.
    data: Any


def write(
    directory: str | os.PathLike[str],
    name: str,
    tensors: Mapping[str, Array],
    data: Any = None,
    keep: int | None = 2,
    kind: str = "",
) -> Path:
    """Write a generation, and return its folder once it is safely on the disk.

    Only tensors that are not contiguous, or not in this machine's byte order, are copied. If this
    raises, earlier generations are unchanged.

    Args:
        directory: the directory of the series; created, for this user alone, if it is missing.
        name: the name of the series. One process at a time may write to it, see `exclusive`.
        tensors: arrays that must not change meanwhile.
        data: data that JSON can represent.
        keep: the number of generations to keep of those that this kind wrote, with this one; None:
            all.
        kind: the kind of the writer, a word.
    """
    directory = Path(directory)
    stored = {key: _storable(key, tensor) for key, tensor in tensors.items()}
    # Later than all that are there, also if the clock was set back, or is another machine's. It
    # stands at the beginning, where `_head` looks for it.
    last = max((seconds for seconds, _ in _times(directory)), default=0.0)
    described = {
        "format": _FORMAT,
        "saved_at": max(time.time(), last + 1e-6),
        "kind": kind,
        "dtypes": {key: array.dtype.name for key, array in stored.items()},
        "data": data,
    }
    text = json.dumps(described, allow_nan=False).encode()
    if len(text) > _DATA_LIMIT:
        raise ValueError(
            f"{name!r} has {len(text)} bytes of plain values, more than {_DATA_LIMIT}: save them "
            "as arrays."
        )
    _make_directory(directory)
    clear(directory, re.escape(name), claimed=name)
    numbers = [_number(path) for end in ("", ".broken") for path in paths(directory, name, end)]
    path = directory / f"{name}.{max(numbers, default=0) + 1:06d}"
    temporary = _temporary(path)
    try:
        temporary.mkdir(mode=0o700)
        _write_tensors(temporary / _TENSORS, stored)
        (temporary / _DATA).write_bytes(text)
        with (temporary / _TENSORS).open("rb") as opened:
            (temporary / _SUMS).write_bytes(b"".join(_checksums(opened, text).values()))
        for file in temporary.iterdir():
            file.chmod(0o600)
            sync(file)
        sync(temporary)
        temporary.rename(path)
        sync(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    retention = Retention(kind, keep)
    retention.count({str(old): old for old in written_by(kind, directory, name)})
    retention.add(str(path), path)
    return path


class Retention:
    """Which generations a writer keeps: the newest, and one more each time that so long has passed.

    A writer of one series counts what its kind has written there; one that writes a series for each
    step counts what it wrote itself. Only what the kind wrote is deleted.

    Args:
        kind: the kind of the writer.
        keep: the number of the newest to keep; None or 0: all.
        spare_seconds: each time that these have passed, one more is kept.

    Raises:
        ValueError: `keep` is negative.
    """

    def __init__(self, kind: str, keep: int | None, spare_seconds: float = math.inf) -> None:
        if keep is not None and keep < 0:
            raise ValueError(f"the number of checkpoints to keep must be 0 or more, got {keep}.")
        self._kind, self._keep = kind, keep or 0
        self._spare_seconds, self._spare_after = spare_seconds, time.monotonic() + spare_seconds
        self._counted: dict[str, tuple[Path, float]] = {}

    @property
    def names(self) -> list[str]:
        """The names of those that count, the newest last."""
        return list(self._counted)

    def count(self, generations: Mapping[str, Path]) -> None:
        """Let these alone count, by their names: those so far, and some that were there before."""
        before = self._counted
        self._counted = {
            name: before.get(name, (path, -math.inf)) for name, path in generations.items()
        }

    def add(self, name: str, generation: Path) -> None:
        """Let one that was written now count, in place of that of its name; delete the oldest."""
        self._counted.pop(name, None)
        self._counted[name] = generation, time.monotonic()
        for old in self.names[: -self._keep if self._keep else 0]:
            path, added_at = self._counted.pop(old)
            if added_at > self._spare_after:
                self._spare_after += self._spare_seconds
            elif _is_by(self._kind, path):  # Another writer may have used the number since.
                delete(path)


def delete(path: Path) -> None:
    """Delete a generation, which no reader then finds in part."""
    temporary = _temporary(path)
    with contextlib.suppress(FileNotFoundError):  # Another process was faster.
        path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)  # A later `clear` removes the rest.


def clear(directory: Path, pattern: str, claimed: str = "") -> None:
    """Delete what killed processes have left of the series whose names a pattern matches.

    Series that others write now are left alone; the caller has the lock of the `claimed` one.
    """
    left = re.compile(rf"({pattern})(\.[0-9]{{6,}}(\.[0-9]+-[0-9a-f]+)?\.writing|\.writing\.lock)")
    for path in directory.glob("*.writing*"):
        if match := left.fullmatch(path.name):
            is_claimed = match[1] == claimed
            other = contextlib.nullcontext() if is_claimed else exclusive(directory, match[1], 0)
            with contextlib.suppress(OSError, CheckpointCorruptError), other:
                shutil.rmtree(path, ignore_errors=True)


def newest(directory: str | os.PathLike[str], name: str | None = None) -> Saved | None:
    """Return the newest intact generation of a series, or of all; None if there are none.

    Newer ones that are damaged are renamed to end in ``.broken``, with a warning.

    Raises:
        CheckpointCorruptError: there are generations, and all are damaged.
        DistributeError: a later version of the package wrote the generation.
    """
    broken: list[tuple[Path, CheckpointCorruptError]] = []
    folders = written(directory) if name is None else paths(Path(directory), name)
    for path in reversed(folders):
        try:
            saved = read(path)
        except CheckpointCorruptError as error:
            if not os.path.lexists(path):  # It was replaced meanwhile.
                return newest(directory, name)
            broken.append((path, error))
            continue
        for bad, reason in broken:
            _log.warning("%s is damaged, using %s instead: %s", bad, path.name, reason)
            with contextlib.suppress(OSError):  # Another was faster, or this one may only read.
                bad.rename(bad.with_name(f"{bad.name}.broken"))  # `keep` must not count it.
        return saved
    if broken:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in broken)
        raise CheckpointCorruptError(
            f"All generations {f'of {name!r}' if name else f'in {directory}'} are damaged. To "
            f"start from the beginning, move them away. {reasons}"
        )
    return None


def written(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of the generations of all series, in the order in which they were written.

    That is what their files say: copying changes the times of the folders.
    """
    return [folder for _, folder in sorted(_times(Path(directory)))]


def appearing(
    directory: str | os.PathLike[str],
    seen: set[Path],
    poll_seconds: float,
    timeout_seconds: float = math.inf,
    newest: bool = False,
) -> Iterator[Path]:
    """Yield the folders of generations that appear, each once, in the order of `written`.

    Args:
        directory: the directory, which need not exist yet.
        seen: the folders that are passed over, to which each is added.
        poll_seconds: how long to wait between two looks at the directory.
        timeout_seconds: how long to wait for the next one; then the iteration ends.
        newest: whether to pass over those that are followed by others already.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        new = [path for path in written(directory) if path not in seen]
        if new:
            seen.update(new if newest else new[:1])
            yield new[-1] if newest else new[0]
            deadline = time.monotonic() + timeout_seconds
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(poll_seconds, left))


def claim(directory: str | os.PathLike[str], name: str, seconds: float) -> BufferedReader:
    """Return a file that locks a series until it is closed or this process ends.

    Raises:
        CheckpointCorruptError: another file has the name of the lock.
        OSError: the directory cannot be used, or another process had the lock for `seconds`.
    """
    directory = Path(directory)
    _make_directory(directory)
    path = directory / f"{name}.lock"
    problem: Exception | None = None
    for _ in Attempts(time.monotonic() + seconds, _POLL_SECONDS):
        with contextlib.ExitStack() as on_error:
            file = on_error.enter_context(open_regular(path, 0, os.O_RDWR | os.O_CREAT))
            _claimed.add(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    on_error.pop_all()
                    return file
            except (BlockingIOError, FileNotFoundError) as error:
                problem = error
            except OSError as error:
                why = f"{error.strerror}. Use a directory on a file system with locks (flock)"
                raise OSError(error.errno, why, os.fspath(path)) from error
    raise OSError(
        f"Another process still used the files of {name!r} in {directory} after {seconds:g} s. "
        "Give each job its own directory."
    ) from problem


@contextlib.contextmanager
def exclusive(directory: Path, name: str, seconds: float = _TURN_SECONDS) -> Iterator[None]:
    """Let this thread alone write a series, and then remove the file of the lock.

    Raises:
        OSError: the directory cannot be used, or others did not leave the series for `seconds`.
    """
    name = f"{name}.writing"
    with claim(directory, name, seconds) as file:
        try:
            yield
        finally:
            if not file.closed:  # Else this process was forked meanwhile.
                (directory / f"{name}.lock").unlink(missing_ok=True)


def open_regular(path: Path, limit: int = sys.maxsize, flags: int = os.O_RDONLY) -> BufferedReader:
    """Return an open file, which has at most `limit` bytes; this waits for no other process.

    Raises:
        CheckpointCorruptError: it is longer, or it is a link, a pipe, a device or a folder.
    """
    why = "it is a link, a pipe or a device"
    try:
        guards = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        number = os.open(path, flags | guards, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            raise
    else:
        status = os.fstat(number)
        if stat.S_ISREG(status.st_mode):
            if status.st_size <= limit:
                return open(number, "rb")
            why = f"it has {status.st_size} bytes, more than {limit}"
        os.close(number)
    raise CheckpointCorruptError(f"ndistribute did not write {path}: {why}")


def _storable(name: str, tensor: Array) -> Array:
    """Return a tensor, contiguous and in this machine's byte order, copied if necessary."""
    tensor = np.asarray(tensor)
    if tensor.dtype.name not in PORTABLE:
        raise ValueError(
            f"Tensor {name!r} has the dtype {tensor.dtype}, which cannot be stored. Convert it "
            f"to one of {', '.join(sorted(PORTABLE))}."
        )
    return np.asarray(tensor, tensor.dtype.newbyteorder("="), order="C")


def _write_tensors(path: Path, tensors: dict[str, Array]) -> None:
    stored = {_key(name): tensor for name, tensor in tensors.items()}
    for name, tensor in stored.items():
        if tensor.dtype == np.complex128:
            # The format lacks this dtype: the last axis contains the real and imaginary parts.
            stored[name] = tensor.reshape(-1).view(np.float64).reshape(*tensor.shape, 2)
    try:
        safetensors.numpy.save_file(stored, path)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def read(path: Path) -> Saved:
    """Return the generation in a folder.

    Raises:
        CheckpointCorruptError: it is damaged; the message names the file.
        DistributeError: a later version of the package wrote it.
        MissingDependencyError: it contains bfloat16, and ml_dtypes is not installed.
        OSError: it cannot be read.
    """
    try:
        text = _read(path / _DATA, _DATA_LIMIT)
        with open_regular(path / _TENSORS) as file:
            held = Path(f"/proc/self/fd/{file.fileno()}")  # The path may have another file by now.
            name = held if held.exists() else path / _TENSORS
            with safetensors.safe_open(name, "numpy", backend="pread") as opened:  # And its length.
                _check(path, file, text)
                described = json.loads(text)
                if described["format"] > _FORMAT:
                    raise DistributeError(
                        f"{path} has format {described['format']}, but this version of "
                        f"ndistribute reads format {_FORMAT}. Install the version that wrote it. "
                        "To start from the beginning, move it away."
                    )
                tensors = dict(_loaded(opened, described["dtypes"]))
        return Saved(path, float(described["saved_at"]), tensors, described["data"])
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{error.filename} is missing") from error
    except safetensors.SafetensorError as error:
        raise CheckpointCorruptError(f"{path / _TENSORS} is damaged: {error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path}: its contents are invalid: {error!r}") from error


def _loaded(file: Any, dtypes: Mapping[str, str]) -> Iterator[tuple[str, Array]]:
    if "bfloat16" in dtypes.values():
        dtype_named("bfloat16")  # This makes the dtype known to NumPy.
    for name, dtype in dtypes.items():
        tensor = file.get_tensor(_key(name))
        if dtype == "complex128":
            tensor = tensor.reshape(-1).view(dtype).reshape(tensor.shape[:-1])
        yield name, tensor


def _key(name: str) -> str:
    """Return a tensor's name in the file: its own, if the format supports it, or in hex."""
    plain = not name.startswith(("%", "__")) and name.isprintable()
    return name if plain else "%" + name.encode("utf-8", "surrogatepass").hex()


def _check(folder: Path, tensors: BufferedReader, data: bytes) -> None:
    """Raise a `CheckpointCorruptError` that names the first file with a wrong checksum."""
    written, sums = _read(folder / _SUMS, _SUMS_LIMIT), _checksums(tensors, data)
    if written != b"".join(sums.values()):
        bad = next((name for name, line in sums.items() if line not in written), _SUMS)
        raise CheckpointCorruptError(
            f"{folder / bad} does not have the checksum that was written with it: it was changed, "
            "or the disk is damaged"
        )


def _checksums(tensors: BufferedReader, data: bytes) -> dict[str, bytes]:
    """Return a line for each file."""
    sums = {_TENSORS: hashlib.file_digest(tensors, "sha256"), _DATA: hashlib.sha256(data)}
    return {name: f"{digest.hexdigest()}  {name}\n".encode() for name, digest in sums.items()}


def _read(path: Path, limit: int, count: int = -1) -> bytes:
    with open_regular(path, limit) as file:
        return file.read(count)


def _temporary(path: Path) -> Path:
    """Return another name for a generation that is incomplete, which no process has used."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.writing")


def paths(directory: Path, name: str, kind: str = "") -> list[Path]:
    """Return a series' folders whose names end in `kind`, the newest last."""
    wanted = re.compile(rf"{re.escape(name)}\.\d{{6,}}{re.escape(kind)}", re.ASCII)
    return sorted(_matching(directory, wanted), key=_number)


def _matching(directory: Path, names: re.Pattern[str]) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if names.fullmatch(path.name)]
    except FileNotFoundError:
        return []


def written_by(kind: str, directory: Path, name: str) -> list[Path]:
    """Return the folders of a series that a kind of writer wrote, the newest last."""
    return [path for path in paths(directory, name) if _is_by(kind, path)]


def _is_by(kind: str, generation: Path) -> bool:
    head = _head(generation / _DATA)
    return head is not None and head[2] == kind.encode()


def _times(directory: Path) -> list[tuple[float, Path]]:
    """Return when each generation was written, and its folder."""
    folders, times = _matching(directory, _GENERATION), []
    for file in filter(os.path.lexists, (folder / _DATA for folder in folders)):
        with contextlib.suppress(FileNotFoundError):
            head = _head(file)
            times.append((float(head[1]) if head else file.lstat().st_mtime, file.parent))
    # If one was deleted meanwhile, the one that replaced it may not be among them.
    return times if all(map(os.path.lexists, folders)) else _times(directory)


def _head(file: Path) -> re.Match[bytes] | None:
    """Return when a generation was written and by which kind; None if it is damaged or gone."""
    with contextlib.suppress(CheckpointCorruptError, FileNotFoundError):
        return _HEAD.match(_read(file, _DATA_LIMIT, 100))  # The rest may be long.
    return None


def _number(path: Path) -> int:
    return int(re.findall(r"\d+", path.name, re.ASCII)[-1])


def _make_directory(directory: Path) -> None:
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in new:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is written to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
