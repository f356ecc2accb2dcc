"""Reads what processes write, as it comes, and hands it to the console in whole lines."""

from __future__ import annotations

import os
import selectors
import time
from dataclasses import dataclass, field

from ndistribute.cluster.launcher.output import Console, Lines, Parse

__all__ = ["Relay"]

_LEAST_DRAIN_SECONDS = 0.1


@dataclass
class _Source:
    """One pipe: whose it is, and the line that is not complete yet."""

    label: str
    stream: str
    parse: Parse | None
    lines: Lines = field(default_factory=Lines)


class Relay:
    """Relay pipes of which a selector tells that there is something to read.

    Args:
        console: where lines go.
        selector: what waits; the pipes are registered there.
    """

    def __init__(self, console: Console, selector: selectors.BaseSelector) -> None:
        self._console = console
        self._selector = selector
        self._sources: dict[int, _Source] = {}
        self.nobody_reads = False

    def add(self, fd: int, label: str, stream: str, parse: Parse | None) -> None:
        """Take the read end of a pipe; whoever opened it closes it.

        Args:
            fd: the read end.
            label: whose lines they are.
            stream: stdout or stderr.
            parse: finds out whose a line is, where several write to one pipe.
        """
        os.set_blocking(fd, False)
        self._sources[fd] = _Source(label, stream, parse)
        self._selector.register(fd, selectors.EVENT_READ, None)

    def read(self, fd: int) -> None:
        """Relay what can be read now."""
        if fd not in self._sources:
            return  # It ended while another event of the same turn was handled.
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if data:
            self._take(self._sources[fd], self._sources[fd].lines.feed(data))
        else:
            self._finish(fd)

    def drain(self, seconds: float) -> None:
        """Relay what has been written, for a time, since an end of file may never come.

        Nor may a pause: what goes on writing is not waited for either.
        """
        start = time.monotonic()
        while self._sources and time.monotonic() < start + max(seconds, _LEAST_DRAIN_SECONDS):
            left = max(0.0, start + seconds - time.monotonic())
            ready = [k.fd for k, _ in self._selector.select(left) if k.fd in self._sources]
            if not ready:
                return
            for fd in ready:
                self.read(fd)

    def finish(self, label: str | None = None) -> None:
        """Let go of the pipes of a process, or of all; lines that were not ended are shown."""
        for fd, source in list(self._sources.items()):
            if label is None or source.label == label:
                self._finish(fd)

    def _finish(self, fd: int) -> None:
        self._selector.unregister(fd)
        source = self._sources.pop(fd)
        self._take(source, source.lines.close())

    def _take(self, source: _Source, lines: list[bytes]) -> None:
        try:
            if source.parse is None:
                self._console.take(source.label, source.stream, lines)
                return
            for line in lines:
                rank, text = source.parse(line)
                self._console.take(rank, source.stream, [text])
        except BrokenPipeError:
            self.nobody_reads = True
