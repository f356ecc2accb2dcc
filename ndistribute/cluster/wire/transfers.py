"""What a server keeps of messages that travel in parts: those that come in, and those that go out.

Room is counted before it is taken, and nothing here outlives its client: what one has begun and
left lying makes way for what it begins next. Pure bookkeeping: no thread, no clock of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ndistribute.cluster.wire.pieces import Pieces
from ndistribute.cluster.wire.tensors import PART_BYTES, Array, Buffer, MalformedError, parts
from ndistribute.cluster.wire.transport import NoRoomError, TransferLostError

__all__ = ["Inbox", "Limits", "Outbox"]


@dataclass(frozen=True)
class Limits:
    """Bound what clients can make a server hold.

    Args:
        message_bytes: the longest message.
        waiting_bytes: the most that all unfinished transfers of one direction take together.
        transfers: how many of one client may be unfinished; one more drops its oldest.
    """

    message_bytes: int = 4 << 30
    waiting_bytes: int = 8 << 30
    transfers: int = 16


@dataclass
class _Upload:
    data: Array
    part_bytes: int
    missing: set[int]  # Where the parts begin that have not come yet.


class Inbox:
    """Put messages together of which the parts come in any order, and some twice.

    >>> inbox = Inbox(Limits())
    >>> inbox.write("worker", 1, 5, 0, b"hello")
    >>> inbox.take("worker", 1, 5).tobytes()
    b'hello'
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._uploads: dict[str, OrderedDict[int, _Upload]] = {}
        self.waiting_bytes = 0

    def write(
        self,
        client: str,
        number: int,
        total: int,
        offset: int,
        data: Buffer,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Keep a part; the first that comes opens the transfer.

        Args:
            client: whose it is.
            number: the transfer's.
            total: how many bytes the whole message has.
            offset: where the part lies in it.
            data: the part.
            part_bytes: the most that a part of this transfer holds.

        Raises:
            MalformedError: it is no part of such a message, or the message is too long.
            NoRoomError: too much is waiting already.
        """
        part = _part(total, offset, self._limits.message_bytes, part_bytes)
        if len(data) != part.stop - part.start:
            raise MalformedError(f"{len(data)} bytes came as the part {part} of {total}.")
        with self._lock:
            upload = self._open(client, number, total, part_bytes)
        # Two copies of one part write the same bytes, and nobody reads before both have come.
        upload.data[part] = np.frombuffer(data, np.uint8)
        with self._lock:
            upload.missing.discard(offset)

    def take(self, client: str, number: int, total: int) -> Array:
        """Return a message that is complete, and keep it no more.

        Raises:
            TransferLostError: it is not here, or not all of it.
        """
        with self._lock:
            uploads = self._uploads.get(client)
            upload = uploads.get(number) if uploads else None
            if upload is None or upload.missing or len(upload.data) != total:
                missing = "all" if upload is None else len(upload.missing)
                raise TransferLostError(f"Of transfer {number} {missing} parts are missing.")
            self._drop(client, number)
            return upload.data

    def forget(self, client: str) -> None:
        """Drop all of a client."""
        with self._lock:
            for number in list(self._uploads.get(client, ())):
                self._drop(client, number)

    @contextlib.contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Count a message as on its way that comes whole.

        Raises:
            NoRoomError: too much is waiting already.
        """
        with self._lock:
            self._take_room(nbytes)
        try:
            yield
        finally:
            with self._lock:
                self.waiting_bytes -= nbytes

    def _take_room(self, nbytes: int) -> None:
        if self.waiting_bytes + nbytes > self._limits.waiting_bytes:
            raise NoRoomError(
                f"{self.waiting_bytes} bytes are on their way to this server, so {nbytes} more "
                f"do not fit its limit of {self._limits.waiting_bytes}."
            )
        self.waiting_bytes += nbytes

    def _open(self, client: str, number: int, total: int, part_bytes: int) -> _Upload:
        uploads = self._uploads.setdefault(client, OrderedDict())
        upload = uploads.get(number)
        if upload is None:
            while len(uploads) >= self._limits.transfers:
                self._drop(client, next(iter(uploads)))
            uploads = self._uploads.setdefault(client, OrderedDict())
            self._take_room(total)
            starts = {part.start for part in parts(total, part_bytes)}
            upload = _Upload(np.empty(total, np.uint8), part_bytes, starts)
            uploads[number] = upload
        if (len(upload.data), upload.part_bytes) != (total, part_bytes):
            raise MalformedError(f"Transfer {number} has {len(upload.data)} bytes, not {total}.")
        return upload

    def _drop(self, client: str, number: int) -> None:
        uploads = self._uploads[client]
        self.waiting_bytes -= len(uploads.pop(number).data)
        if not uploads:
            del self._uploads[client]


@dataclass
class _Download:
    pieces: Pieces
    part_bytes: int
    left: set[int] = field(default_factory=set)  # Where the parts begin that nobody fetched yet.


class Outbox:
    """Keep what is left of long answers until it has been fetched.

    >>> outbox = Outbox(Limits())
    >>> number = outbox.put("worker", Pieces([b"he", b"llo"]))
    >>> b"".join(outbox.read("worker", number, 0))
    b'hello'
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._downloads: OrderedDict[tuple[str, int], _Download] = OrderedDict()
        self._last = 0
        self.waiting_bytes = 0

    def put(self, client: str, pieces: Pieces, part_bytes: int = PART_BYTES) -> int:
        """Keep an answer, dropping older ones where there is no room, and return its number.

        Args:
            client: who fetches it.
            pieces: the answer.
            part_bytes: the most that a part holds.
        """
        with self._lock:
            own = [key for key in self._downloads if key[0] == client]
            for key in own[: max(0, len(own) + 1 - self._limits.transfers)]:
                self._drop(key)
            while self._downloads and (
                self.waiting_bytes + len(pieces) > self._limits.waiting_bytes
            ):
                self._drop(next(iter(self._downloads)))
            self._last += 1
            starts = {part.start for part in parts(len(pieces), part_bytes)}
            self._downloads[client, self._last] = _Download(pieces, part_bytes, starts)
            self.waiting_bytes += len(pieces)
            return self._last

    def read(self, client: str, number: int, offset: int) -> list[memoryview]:
        """Return a part of an answer; once each was read it is kept no more.

        Raises:
            MalformedError: no part begins there.
            TransferLostError: it is not here any more.
        """
        with self._lock:
            download = self._downloads.get((client, number))
            if download is None:
                raise TransferLostError(f"Answer {number} is not kept any more.")
            limit = self._limits.message_bytes
            part = _part(len(download.pieces), offset, limit, download.part_bytes)
            download.left.discard(offset)
            if not download.left:
                self._drop((client, number))
        return download.pieces.cut(part.start, part.stop)

    def forget(self, client: str) -> None:
        """Drop all of a client."""
        with self._lock:
            for key in [key for key in self._downloads if key[0] == client]:
                self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        self.waiting_bytes -= len(self._downloads.pop(key).pieces)


def _part(total: int, offset: int, limit: int, part_bytes: int) -> slice:
    """Return the part of a message that begins at an offset."""
    if total > limit:
        raise MalformedError(f"A message of {total} bytes: the limit is {limit}.")
    plan = parts(total, part_bytes)
    index = offset // (plan[0].stop or 1) if plan else 0
    if index >= len(plan) or plan[index].start != offset:
        raise MalformedError(f"No part of a message of {total} bytes begins at {offset}.")
    return plan[index]
