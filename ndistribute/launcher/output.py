"""The output of the processes of a job: printed line by line with the rank, and saved in files.

A line is printed when it is complete; lines of progress bars, which end in a carriage return, are
complete too. Only `close` waits for the reader of the launcher's output.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ndistribute.launcher.commands import MPIEXEC, parse_tagged

_BREAK = re.compile(rb"\r\n|\n|\r(?!\Z)")
_LONGEST_LINE = 1 << 16
_KEPT_LINES = 400
_SCREEN_LINES = 40
_HEADER = re.compile(rb"^\s*(?:\+ Exception Group )?Traceback \(most recent call last\):")
_CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_LOST_ANOTHER = re.compile(rb"^(?:[\w.]*\.)?WorkerLostError\b")
_WRITE_BYTES = 1 << 14


class Writer:
    """Writes on a thread and never blocks: if the reader stops, it drops the oldest data."""

    error: OSError | None = None

    def __init__(self, fd: int, most: int = 8 << 20) -> None:
        self._fd = fd
        self._most = most
        self._waiting: deque[bytes] = deque()
        self._bytes = self._lost = 0  # Bytes not written yet, and bytes dropped.
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ndistribute out", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        with self._changed:
            self._waiting.append(data)
            self._bytes += len(data)
            while self._bytes > self._most and len(self._waiting) > 1:
                self._lost += len(self._waiting[0])
                self._bytes -= len(self._waiting.popleft())
            self._changed.notify_all()

    def close(self, timeout: float = 10.0) -> int:
        """Write the rest while the reader reads; return the number of bytes that were not read."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while self._bytes and self.error is None:
                if not self._changed.wait(timeout):
                    return self._bytes + self._lost
        self._thread.join(timeout)
        return self._bytes + self._lost

    def _run(self) -> None:
        while self.error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
                if self._lost:
                    notice = f"{self._lost} bytes were dropped here: the reader was too slow."
                    line = f"ndistribute run: {notice}\n".encode()
                    self._bytes += len(line)
                    data, self._lost = line + data, 0
            while data and self.error is None:
                written = 0
                try:
                    written = os.write(self._fd, data[:_WRITE_BYTES])
                except OSError as error:
                    self.error = error
                data = data[written:]
                with self._changed:
                    self._bytes -= written
                    self._changed.notify_all()


class Console:
    """Prints lines with their rank or task, keeps the last lines of each, and writes logs."""

    # Whether a traceback that another rank has printed is shortened to one line.
    short = False
    # Records starts and ends of tasks for the dashboard, with one JSON object per line.
    journal: Path | None = None

    def __init__(self, out: Writer, err: Writer, log_dir: Path | None = None) -> None:
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        self._writers = {"stdout": out, "stderr": err}
        self._log_dir = log_dir
        self._logs: set[Path] = set()
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Start an attempt: drop the lines of the last one, and write to new files."""
        self._suffix = f".{attempt}.log" if attempt else ".log"
        self._logs = {path for path in self._logs if path == self.journal}
        self._full: set[Path] = set()
        self._rests: dict[tuple[str, str], bytes] = {}
        self._kept: dict[str, deque[bytes]] = {}
        self._begun: dict[str, list[bytes]] = {}  # The lines of unfinished tracebacks.
        self._first: dict[tuple[bytes, ...], str] = {}  # The first rank that printed a traceback.
        self._again = ""  # The rank whose traceback was shortened last.
        self.reported: list[str] = []
        self.in_sight = deque[str](maxlen=_SCREEN_LINES)  # The ranks of the last printed lines.

    @property
    def nobody_reads(self) -> bool:
        """Whether the reader of the output has gone, not only paused."""
        return any(isinstance(w.error, BrokenPipeError) for w in self._writers.values())

    def feed(self, label: str, stream: str, data: bytes) -> None:
        """Add data of a stream, and print complete lines; empty data ends the stream."""
        *lines, rest = _BREAK.split(self._rests.get((label, stream), b"") + data)
        rest = rest if data else rest.rstrip(b"\r")
        if rest and (not data or len(rest) > _LONGEST_LINE):
            lines.append(rest)
            rest = b""
        self._rests[label, stream] = rest
        if label == MPIEXEC:
            for rank, line in map(parse_tagged, lines):
                self.take(rank, stream, [line])
        else:
            self.take(label, stream, lines)
        if not data and stream == "stderr":
            for rank in [label] if label != MPIEXEC else [*self._begun]:
                self._print(rank, stream, self._begun.pop(rank, []))

    def take(self, rank: str, stream: str, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._log_dir is not None:
            name = f"rank-{rank}" if rank.isdigit() else rank.replace(":", "-")
            self._log(self._log_dir / (name + self._suffix), b"".join(b"%b\n" % x for x in lines))
        if stream == "stderr" or rank == MPIEXEC:
            self._kept.setdefault(rank, deque(maxlen=_KEPT_LINES)).extend(lines)
            if rank not in self.reported and any(_HEADER.match(line) for line in lines):
                self.reported.append(rank)
        if self.short and stream == "stderr":
            lines = [each for line in lines for each in self._shortened(rank, line)]
        self._print(rank, stream, lines)

    def _print(self, rank: str, stream: str, lines: list[bytes]) -> None:
        self.in_sight.extend([rank] * len(lines))
        self._writers[stream].write(b"".join(b"[%b] %b\n" % (rank.encode(), x) for x in lines))

    def _shortened(self, rank: str, line: bytes) -> list[bytes]:
        """Return the lines to print now; a traceback is complete with its exception's line."""
        lines = self._begun.setdefault(rank, [])
        if not lines and not line.startswith(b"Traceback (most recent call last):"):
            again, self._again = self._again == rank, ""
            return [] if again and line.startswith(b"raised in replica ") else [line]
        lines.append(line)
        if len(lines) == 1 or (line[:1].isspace() and len(lines) < _KEPT_LINES):
            return []
        self._begun[rank] = []
        if len(self._first) == _KEPT_LINES:
            self._first.clear()
        first = self._first.setdefault(tuple(lines), rank)
        if first == rank:
            return lines
        self._again = rank
        return [b"%b (as rank %b)" % (line, first.encode())]

    def say(self, message: str, report: Iterable[bytes] = ()) -> None:
        """Write a message of the launcher, and lines that belong to it, to standard error."""
        text = b"\n".join([f"ndistribute run: {message}".encode(), *report])
        self._writers["stderr"].write(text + b"\n")
        self.note(text=message)

    def note(self, **facts: Any) -> None:
        """Add a line to the journal, if there is one."""
        if self.journal is not None:
            line = json.dumps({"time": time.time(), **facts})
            self._log(self.journal, f"{line}\n".encode())

    def kept(self, rank: str) -> list[bytes]:
        """Return the last lines that a rank wrote to its standard error."""
        return list(self._kept.get(rank, ()))

    def forget(self, rank: str) -> None:
        """Drop the kept lines of a rank, before another process takes its place."""
        self._kept.pop(rank, None)

    def close(self) -> None:
        out, err = self._writers.values()
        lost = out.close()
        if err is not out:
            if lost and not self.nobody_reads:
                why = out.error or "the reader was too slow"
                self.say(f"{lost} bytes of output were dropped at the end: {why}.")
            err.close()

    def _log(self, path: Path, data: bytes) -> None:
        try:
            # Unbuffered: a buffer that a full disk refused would be written again later.
            with path.open("ab" if path in self._logs else "wb", buffering=0) as log:
                self._logs.add(path)
                while data:
                    data = data[log.write(data) :]
        except OSError as error:
            if path not in self._full:
                self._full.add(path)
                self.say(f"{path} is incomplete: {error.strerror}. The job continues.")


def last_report(lines: list[bytes], most: int = 200) -> list[bytes]:
    """Return the last traceback in the lines of a process, with its causes, or the last lines."""
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    # Tracebacks of a group are indented under that of the group.
    while len(headers) > 1 and lines[headers[-1]][:1].isspace():
        headers.pop()
    start = headers[-1] if headers else max(0, len(lines) - 20)
    while start >= 4 and lines[start - 2].strip() in _CHAINED:
        start = end = start - 4  # The last line of the cause, which may have no traceback.
        while start > 0 and lines[start - 1].strip() and not _HEADER.match(lines[start]):
            start -= 1
        start = start if _HEADER.match(lines[start]) else end
    report = lines[start:]
    return report if len(report) <= most else [*report[: most // 2], b"...", *report[-most // 2 :]]


def is_loss_report(lines: list[bytes]) -> bool:
    """Return True if a process ended because it lost another one."""
    return any(_LOST_ANOTHER.match(line) for line in last_report(lines))


def exit_text(code: int, host: str = "", silence: float = 0.0) -> str:
    """Return an exit code in words.

    `host` is the other machine on which ssh ran the process, and `silence` the seconds after which
    ssh counts it as lost.
    """
    if host and code == 255:
        return (
            f"exit code 255: ssh could not connect to {host}, or {host} did not answer for "
            f"{silence:g} s; check that {host} and its network are up and `ssh {host} true` works"
        )
    return f"signal {code - 128}" if 128 < code < 193 else f"exit code {code}"
