"""Event files, which TensorBoard displays: scalars, histograms and images by step, and graphs.

A file is a sequence of records, each framed by its length and checksums, with a message in the wire
format of Protocol Buffers. This file encodes both itself, because they need only two kinds of
fields and one table. A record is in the file when a method returns, so a killed process leaves
whole records.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from operator import length_hint
from pathlib import Path
from typing import Any, Self

import numpy as np

_POLYNOMIAL = 0x82F63B78  # The polynomial of Castagnoli, with its bits reversed.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # The wire types of fields.
_BINS = 30
_STRINGS = 7  # The kind of a tensor of strings.
_MOST = 1e300  # The differences of greater numbers may be infinite.
_files = itertools.count()


class EventFile:
    """A new event file in a directory; a context manager that closes it.

    Args:
        directory: the directory; created if it is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with EventFile(directory) as events:
    ...         events.scalars({"loss": 0.5}, step=1)
    ...     events.path.name.startswith("events.out.tfevents.")
    True
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        # The number makes names of one second and process differ; TensorBoard reads them in order.
        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self.path = folder / f"events.out.tfevents.{unique}"
        self._file = self.path.open("xb", buffering=0)
        self._write(_text(3, b"brain.Event:2"), 0)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers by their tags."""
        self.add(b"".join(scalar(tag, value) for tag, value in values.items()), step)

    def add(self, summary: bytes, step: int) -> None:
        """Write the joined results of `scalar`, `histogram` and `image`."""
        self._write(_text(5, summary), step)

    def graph(self, operations: Iterable[tuple[str, str, Sequence[str], str]]) -> None:
        """Write a graph: the name, type, inputs and device of each operation."""
        nodes = [
            _text(1, name.encode())
            + _text(2, kind.encode())
            + b"".join(_text(3, source.encode()) for source in inputs)
            + _text(4, device.encode())
            for name, kind, inputs, device in operations
        ]
        self._write(_text(4, b"".join(_text(1, node) for node in nodes)), 0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, content: bytes, step: int) -> None:
        event = _double(1, time.time()) + _integer(2, step) + content
        length = struct.pack("<Q", len(event))
        record = length + _checksum(length) + event + _checksum(event)
        self._file.write(record)


def read_scalars(directory: str | os.PathLike[str]) -> dict[int, dict[str, float]]:
    """Return the numbers in a directory's event files, by step and tag; the last number counts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with EventFile(directory) as events:
    ...         events.scalars({"loss": 0.5}, step=300)
    ...     read_scalars(directory)
    {300: {'loss': 0.5}}
    """
    steps: dict[int, dict[str, float]] = {}
    for path in sorted(Path(directory).glob("events.out.tfevents.*")):
        data, start = path.read_bytes(), 0
        while len(data) >= start + 8:  # A record may be incomplete while it is written.
            end = start + 12 + int.from_bytes(data[start : start + 8], "little")
            event = dict(_fields(data[start + 12 : end])) if end <= len(data) else {}
            start = end + 4
            for _, value in _fields(event.get(5, b"")):
                parts = dict(_fields(value))
                if 2 in parts:
                    numbers = steps.setdefault(event.get(2, 0), {})
                    numbers[parts[1].decode()] = struct.unpack("<f", parts[2])[0]
    return dict(sorted(steps.items()))


def scalar(tag: str, value: float) -> bytes:
    """Return a number under a tag, as event files contain it."""
    return _text(1, _tag(tag) + _float(2, value))


def histogram(tag: str, values: Any) -> bytes:
    """Return the distribution of the finite values of an array; empty if there are none."""
    flat = np.asarray(values, np.float64).ravel()
    flat = flat[np.abs(flat) < _MOST]
    if not flat.size:
        return b""
    low, high = flat.min(), flat.max()
    # If the values hardly differ, or not at all, the bins have the smallest width that floats can
    # represent.
    least = 2 * _BINS * np.spacing(max(abs(low), abs(high)))
    margin = 0.0 if high - low > least else max(0.5, least)
    counts, edges = np.histogram(flat, _BINS, (low - margin, high + margin))
    with np.errstate(over="ignore"):
        numbers = (low, high, flat.size, flat.sum(), np.square(flat).sum())
    message = b"".join(_double(field, number) for field, number in enumerate(numbers, 1))
    message += _text(6, edges[1:].astype("<f8").tobytes())
    message += _text(7, counts.astype("<f8").tobytes())
    return _text(1, _tag(tag) + _text(5, message))


def image(tag: str, pixels: Any) -> bytes:
    """Return an image of bytes, ``(height, width, channels)`` with 1, 3 or 4 channels."""
    message = b"".join(_integer(field, size) for field, size in enumerate(pixels.shape, 1))
    return _text(1, _tag(tag) + _text(4, message + _text(4, png(pixels))))


def text(tag: str, value: str) -> bytes:
    """Return text, which TensorBoard shows under a tag."""
    plugin = _text(9, _text(1, _text(1, b"text")))
    content = _text(8, _integer(1, _STRINGS) + _text(8, value.encode()))
    return _text(1, _tag(tag) + plugin + content)


def crc32c(data: bytes) -> int:
    """Return the CRC of Castagnoli, see RFC 3720, appendix B.4.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Return the masked checksum of a part of a record; data with their CRC have a weak CRC."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def png(pixels: Any) -> bytes:
    """Return a PNG file of an array of bytes, ``(height, width, channels)``.

    Raises:
        ValueError: the number of channels is not 1, 3 or 4, or the values are not bytes.
    """
    kinds = {1: 0, 3: 2, 4: 6}  # Grey, colours, colours with transparency.
    if pixels.ndim != 3 or pixels.dtype != np.uint8 or pixels.shape[2] not in kinds:
        raise ValueError(
            "an image must be uint8 of shape (height, width, channels) with 1, 3 or 4 channels, "
            f"got {pixels.dtype} of shape {pixels.shape}."
        )
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # Each row begins with a filter, 0.
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, kinds[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_row, range(256)))


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*octets, value])


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of the fields of a message; numbers of fixed size are bytes."""
    octets = iter(data)

    def varint() -> int:
        value = shift = 0
        for octet in octets:
            value |= (octet & 0x7F) << shift
            if octet < 0x80:
                break
            shift += 7
        return value

    while length_hint(octets):
        field, kind = divmod(varint(), 8)
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind) or varint()
        yield field, size if kind == _VARINT else bytes(itertools.islice(octets, size))


def _integer(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(int(value))


def _double(field: int, value: float) -> bytes:
    return _key(field, _FIXED64) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    # NumPy turns a number that is too large for float32 into infinity; `struct` raises.
    with np.errstate(over="ignore"):
        return _key(field, _FIXED32) + np.array(value, "<f4").tobytes()


def _text(field: int, value: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(value)) + value


def _tag(tag: str) -> bytes:
    return _text(1, tag.encode())
