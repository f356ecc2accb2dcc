"""What the processes of a job print: shown line by line with whose it is, kept in files, quoted.

A line is shown when it is complete. Lines that end in a carriage return, as progress bars write
them, count as complete, so that they are seen while they are news.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

__all__ = ["MPIEXEC", "Console", "Lines", "ending", "last_report", "tells_of_another"]

# What stands for a rank in front of mpiexec's own lines, which it writes to either stream.
MPIEXEC = "mpiexec"

_BREAK = re.compile(rb"\r\n|\n|\r(?!\Z)")
_LONGEST_LINE = 1 << 16
_KEPT_LINES = 400
_HEADER = re.compile(rb"^\s*(?:\+ Exception Group )?Traceback \(most recent call last\):")
_CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_VICTIM = re.compile(rb"^(?:[\w.]*\.)?WorkerLostError\b")

Parse = Callable[[bytes], tuple[str, bytes]]


class Lines:
    """Cut a stream of bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now, without their ends."""
        *lines, self._rest = _BREAK.split(self._rest + data)
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def close(self) -> list[bytes]:
        """Return what was not ended by a line break."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []


class Console:
    """Show lines with the rank or task they came from, and keep the last ones of each.

    Args:
        stdout: where the processes' output goes.
        stderr: where their errors go.
        log_dir: a folder for a file of each rank or task, or None.
        attempt: how often the job was started before; later attempts get files of their own.
    """

    def __init__(
        self, stdout: BinaryIO, stderr: BinaryIO, log_dir: Path | None = None, attempt: int = 0
    ) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._log_dir = log_dir
        self._suffix = f".{attempt}.log" if attempt else ".log"
        self._logs: dict[str, BinaryIO] = {}
        self._kept: dict[str, deque[bytes]] = {}
        self.reported: list[str] = []

    def show(self, rank: str, stream: str, lines: Iterable[bytes]) -> None:
        """Write lines of a rank to where its stream goes.

        Raises:
            BrokenPipeError: nobody reads the launcher's output any more.
        """
        text = b"".join(b"[%b] %b\n" % (rank.encode(), line) for line in lines)
        if text:
            self._streams[stream].write(text)
            self._streams[stream].flush()

    def take(self, rank: str, stream: str, lines: list[bytes]) -> None:
        """Keep and show lines of a rank."""
        if not lines:
            return
        if self._log_dir is not None:
            log = self._log(rank)
            log.write(b"".join(line + b"\n" for line in lines))
            log.flush()
        if stream == "stderr" or rank == MPIEXEC:
            self._kept.setdefault(rank, deque(maxlen=_KEPT_LINES)).extend(lines)
            if rank not in self.reported and any(_HEADER.match(line) for line in lines):
                self.reported.append(rank)
        self.show(rank, stream, lines)

    def say(self, message: str, report: Iterable[bytes] = ()) -> None:
        """Write a message of the launcher's own to the errors, and lines that belong to it."""
        with contextlib.suppress(BrokenPipeError):
            text = b"\n".join([f"ndistribute run: {message}".encode(), *report])
            self._streams["stderr"].write(text + b"\n")
            self._streams["stderr"].flush()

    def kept(self, rank: str) -> list[bytes]:
        """Return the last lines of a rank's errors."""
        return list(self._kept.get(rank, ()))

    def forget(self, rank: str) -> None:
        """Keep no more lines of a rank, as another process takes its place."""
        self._kept.pop(rank, None)

    def close(self) -> None:
        """Close the files."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _log(self, rank: str) -> BinaryIO:
        if rank not in self._logs and self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            name = f"rank-{rank}" if rank.isdigit() else rank.replace(":", "-")
            self._logs[rank] = (self._log_dir / f"{name}{self._suffix}").open("wb")
        return self._logs[rank]


def last_report(lines: list[bytes], most: int = 200) -> list[bytes]:
    """Return the last traceback of what a process wrote, with those it was caused by.

    Where there is none, as after a syntax error, the last lines stand for it.

    >>> last_report([b"loading", b"Traceback (most recent call last):", b"ValueError: no"])
    [b'Traceback (most recent call last):', b'ValueError: no']
    """
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    # Those of a group stand indented under the group's own.
    while len(headers) > 1 and lines[headers[-1]][:1].isspace():
        headers.pop()
    report = lines[_first_of_chain(lines, headers[-1]) :] if headers else lines[-20:]
    return report if len(report) <= most else [*report[: most // 2], b"...", *report[-most // 2 :]]


def _first_of_chain(lines: list[bytes], header: int) -> int:
    """Return where a chain of tracebacks begins; a cause may be a line without a traceback."""
    before = _last_filled(lines, header)
    if before < 0 or lines[before].strip() not in _CHAINED:
        return header
    end = _last_filled(lines, before)
    start = end
    while start > 0 and lines[start - 1].strip() and not _HEADER.match(lines[start]):
        start -= 1
    return _first_of_chain(lines, start) if _HEADER.match(lines[start]) else max(end, 0)


def _last_filled(lines: list[bytes], end: int) -> int:
    """Return the last line before a place that is not blank, -1 if there is none."""
    return next((n for n in range(end - 1, -1, -1) if lines[n].strip()), -1)


def ending(code: int) -> str:
    """Return an exit code in words.

    >>> ending(3), ending(137)
    ('exit code 3', 'signal 9')
    """
    return f"signal {code - 128}" if code > 128 else f"exit code {code}"


def tells_of_another(lines: list[bytes]) -> bool:
    """Say whether a process ended because it lost another one, which is then the one to name."""
    return any(_VICTIM.match(line) for line in last_report(lines))
