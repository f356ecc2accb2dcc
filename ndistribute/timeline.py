"""Traces: a record of what each process does, and when.

If ``NDISTRIBUTE_TRACE`` names a directory when the package is imported, each process writes a trace
there, which Chrome (``chrome://tracing``) and Perfetto display. `ndistribute.trace_report` merges
and explains the traces of a job. Without the variable, a span costs almost nothing.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("ndistribute")

_FLUSH_EVENTS = 4096
_FLUSH_NANOSECONDS = 500_000_000
_MAX_FILE_BYTES = 256 << 20
_MOST_NESTED = 1024
_Event = tuple[str, str, int, int, int]  # name, title, start, end, thread


class Recorder:
    """A recorder of the events of a process, which it writes to a file periodically.

    The file is complete JSON after each flush; `ndistribute.trace_report` also reads the file of a
    process that was killed during a write. Beyond the size limit events are only counted. If the
    file cannot be written, the recorder logs a warning once and stops recording.

    Args:
        directory: the directory of the file, created when the first event is written.
        max_bytes: the size limit of the file in bytes.
    """

    _file: BinaryIO | None = None
    _is_settled = False

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int = _MAX_FILE_BYTES) -> None:
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self.start_over()

    def start_over(self) -> None:
        """Drop the events and the file; in a forked child, they belong to the parent."""
        self._lock = threading.RLock()
        if self._file is not None:
            self._file.close()  # It is unbuffered, so nothing is written twice.
            self._file = None
        self._name = ""
        self._names: tuple[str, ...] = ()
        self._jobs = 0  # The number of earlier jobs, for example before a recovery.
        self._events: list[_Event] = []
        self._threads: dict[int, tuple[int, str]] = {}  # Number and name by identifier.
        self._named = 0  # The number of threads whose names are in the file.
        self._totals: dict[str, int] = {}  # The nanoseconds in spans, without nested ones.
        self._ended: dict[int, deque[tuple[int, int]]] = {}  # Of each thread: start, duration.
        self._flushed = time.monotonic_ns()
        self._failed = False
        self._end = 0
        self._dropped = 0

    def add(self, name: str, title: str, start: int, end: int) -> None:
        """Record an event of the calling thread, with times of ``time.monotonic_ns``."""
        thread = threading.get_ident()
        if thread not in self._threads:
            with self._lock:
                known = len(self._threads) + 1, threading.current_thread().name
                self._threads.setdefault(thread, known)
        self._events.append((name, title, start, end, thread))
        if len(self._events) >= _FLUSH_EVENTS or end - self._flushed > _FLUSH_NANOSECONDS:
            self.flush()

    def identify(self, name: str, names: Sequence[str], settles: bool = False) -> None:
        """Set the names of this process and of all processes; earlier events stay in their file.

        After a call that `settles` the name, later calls have no effect.
        """
        if self._is_settled:
            return
        self._is_settled = settles
        with self._lock:
            if self._file is not None and (name, tuple(names)) != (self._name, self._names):
                self.close()
                self._jobs += bool(self._names)
            self._name, self._names = name, tuple(names)

    def flush(self) -> None:
        """Write the buffered events."""
        with self._lock:
            self._write()

    def totals(self) -> dict[str, float]:
        """Return the seconds in spans of each name so far, without those in nested spans."""
        with self._lock:
            self._write()
            return {name: total / 1e9 for name, total in self._totals.items()}

    def close(self) -> None:
        """Write the buffered events, and close the file."""
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self) -> None:
        # Other threads append meanwhile, so take only the events that are there now.
        events = self._events[: len(self._events)]
        del self._events[: len(events)]
        self._flushed = time.monotonic_ns()
        for name, _, start, end, thread in events:
            self._totals[name] = self._totals.get(name, 0) + self._own(start, end, thread)
        if not events or self._failed:
            return
        try:
            self._append(events)
        except OSError as error:
            self._failed = True
            _log.warning("tracing to %s stopped, as a write failed: %s", self._directory, error)

    def _own(self, start: int, end: int, thread: int) -> int:
        """Return the duration of a span without the spans nested in it, which ended before."""
        ended = self._ended.setdefault(thread, deque(maxlen=_MOST_NESTED))
        self_time = end - start
        while ended and ended[-1][0] >= start:
            self_time -= ended.pop()[1]
        ended.append((start, end - start))
        return max(0, self_time)

    def _append(self, events: Sequence[_Event]) -> None:
        if self._file is None:
            self._file = self._open()
        if self._end > self._max_bytes:
            self._dropped += len(events)
            lines: Iterable[str] = [_metadata(0, "dropped_events", self._dropped)]
        else:
            new = list(self._threads.values())[self._named :]
            self._named += len(new)
            names = [_metadata(number, "thread_name", name) for number, name in new]
            lines = [*names, *map(self._line, events)]
        text = "".join(f"{line},\n" for line in lines).encode()
        self._file.seek(self._end)
        # The tail completes the JSON; the next flush overwrites it.
        tail = _metadata(0, "process_name", f"{self._title} on {platform.node()}")
        self._file.write(text + f"{tail}\n]}}\n".encode())
        if self._end <= self._max_bytes:
            self._end += len(text)

    def _open(self) -> BinaryIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        boot = Path("/proc/sys/kernel/random/boot_id")
        about = {
            "name": self._title,
            "names": self._names,
            "host": platform.node(),
            # Processes of one boot of a machine read the same monotonic clock.
            "clock": boot.read_text().strip() if boot.exists() else platform.node(),
            "wall_minus_clock_us": (time.time_ns() - time.monotonic_ns()) / 1000,
        }
        head = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
        name = self._title.removeprefix("rank ").replace(":", "-").replace(" ", "-")
        name += f".{self._jobs}" if self._jobs else ""
        file = (self._directory / f"trace-{name}.json").open("wb", buffering=0)
        self._end = file.write(head.encode())
        self._named = 0
        return file

    @property
    def _title(self) -> str:
        return self._name or f"process {os.getpid()}"

    def _line(self, event: _Event) -> str:
        name, title, start, end, thread = event
        args = f',"args":{{"title":{json.dumps(title)}}}' if title else ""
        return (
            f'{{"ph":"X","name":{json.dumps(name)},"pid":{os.getpid()},'
            f'"tid":{self._threads[thread][0]},"ts":{start / 1000:.3f},'
            f'"dur":{(end - start) / 1000:.3f}{args}}}'
        )


class _Span:
    __slots__ = ("_name", "_recorder", "_start", "_title")

    def __init__(self, recorder: Recorder, name: str, title: str) -> None:
        self._recorder, self._name, self._title = recorder, name, title

    def __enter__(self) -> None:
        self._start = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        self._recorder.add(self._name, self._title, self._start, time.monotonic_ns())


def span(name: str, title: str = "") -> AbstractContextManager[None]:
    """Return a context manager that records the duration of its block, if tracing is enabled.

    Args:
        name: ``input``, ``compute``, ``pull``, ``push``, ``pack``, ``wait``, ``reduce``,
            ``update``, or another word.
        title: the call that the block belongs to, such as ``all_reduce #12``. Calls of several
            ranks with the same title are treated as one collective.

    >>> with span("compute", "step #1"):
    ...     total = sum(range(10))
    """
    return _NOTHING if _recorder is None else _Span(_recorder, name, title)


def recorded(describe: Callable[..., tuple[str, str]]) -> Callable[[F], F]:
    """Return a decorator that records each call of a function, if tracing is enabled.

    Otherwise it returns the function unchanged, so that calls cost nothing extra.

    Args:
        describe: called with the result and the arguments of the function; returns the name and
            the title of the span. A call that raises is not recorded.
    """

    def decorate(function: F) -> F:
        recorder = _recorder
        if recorder is None:
            return function

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.monotonic_ns()
            result = function(*args, **kwargs)
            recorder.add(*describe(result, *args, **kwargs), start, time.monotonic_ns())
            return result

        return timed  # type: ignore[return-value]

    return decorate


def enabled() -> bool:
    """Return True if tracing is enabled."""
    return _recorder is not None


def identify(name: str, names: Sequence[str], settles: bool = False) -> None:
    """Set the names of this process, such as ``"rank 0"`` or ``"ps:1"``, and of all processes.

    After a call that `settles` the name, later calls have no effect, so the name no longer follows
    the rank.
    """
    if _recorder is not None:
        _recorder.identify(name, names, settles)


def totals() -> dict[str, float]:
    """Return the seconds that all threads of this process spent in spans of each name.

    Time in a nested span counts for the nested span only. Without tracing, the result is empty.
    """
    return {} if _recorder is None else _recorder.totals()


def flush() -> None:
    """Write the buffered events; this also happens periodically, and when the process ends."""
    if _recorder is not None:
        _recorder.flush()


def _metadata(tid: int, name: str, value: Any) -> str:
    args = {"name": value}
    return json.dumps({"ph": "M", "pid": os.getpid(), "tid": tid, "name": name, "args": args})


def _from_environment() -> Recorder | None:
    directory = os.environ.get("NDISTRIBUTE_TRACE")
    if not directory:
        return None
    recorder = Recorder(directory)
    atexit.register(recorder.flush)
    os.register_at_fork(after_in_child=recorder.start_over)
    return recorder


_NOTHING = nullcontext()
_recorder = _from_environment()
