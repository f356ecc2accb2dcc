"""Traces: a record of what each process does, and when.

If ``NDISTRIBUTE_TRACE`` names a directory when the package is imported, each process writes a trace
there, which Chrome (``chrome://tracing``) and Perfetto display. `ndistribute.trace_report` merges
and explains the traces of a job, and `ndistribute dashboard` shows them while it runs. Without the
variable, a span costs almost nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import math
import os
import platform
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("ndistribute")

_FLUSH_EVENTS = 4096
_FLUSH_NANOSECONDS = 500_000_000
_MAX_FILE_BYTES = 256 << 20
_MOST_NESTED = 1024
# What the file of a process begins with: the wait that it is in, padded to this number of bytes.
_NOW = b'{"now":"'
_NOW_BYTES = 120
_WAITS = ("wait", "pull")
_Event = tuple[str, str, int, int, int]  # name, title, start, end, thread


PROGRESS = "steps, and seconds in spans"
"""The name of a counter that each process writes every half second."""


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
    last_count = 0  # When counters were last due.

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
        # Of each thread: name, start, duration.
        self._ended: dict[int, deque[tuple[str, int, int]]] = {}
        self._steps: Counter[int] = Counter()  # The number of outermost compute spans by thread.
        self._progressed = 0  # When `PROGRESS` was written.
        self._counts: list[tuple[str, float, int]] = []  # Name, value, time.
        self._waits: dict[int, str] = {}  # The waits that did not end yet, by thread.
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

    def count(self, name: str, value: float) -> None:
        """Record the value of a counter."""
        with self._lock:
            self._counts.append((name, value, time.monotonic_ns()))

    def wait(self, title: str | None, start: int = 0) -> None:
        """Show at once, in the file, the wait that the calling thread begins, or (None) ends.

        Without this, a process that waits long writes nothing, since it records spans at their end.
        """
        with self._lock:
            self._waits.pop(threading.get_ident(), None)
            if title is not None:
                self._waits[threading.get_ident()] = f"{start // 1000} {title}"
            text = next(iter(self._waits.values()), "").encode("ascii", "replace")[:_NOW_BYTES]
            text = text.replace(b'"', b"'").replace(b"\\", b"/").ljust(_NOW_BYTES)
            with contextlib.suppress(OSError):  # The next span reports it.
                if self._file is None and not self._failed:
                    self._file = self._open()
                if self._file is not None:
                    os.pwrite(self._file.fileno(), text, len(_NOW))

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

    def flush(self, last: bool = False) -> None:
        """Write the buffered events, and if due or `last`, what they add up to."""
        with self._lock:
            self._progressed = 0 if last else self._progressed
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
        counts, self._counts = self._counts, []
        for name, _, start, end, thread in events:
            self._totals[name] = self._totals.get(name, 0) + self._own(name, start, end, thread)
        is_last = self._file is not None and not self._progressed
        if not (events or counts or is_last) or self._failed:
            return
        try:
            self._append(events, counts)
        except OSError as error:
            self._failed = True
            _log.warning("stopped tracing to %s: a write failed: %s", self._directory, error)

    def _own(self, name: str, start: int, end: int, thread: int) -> int:
        """Return the duration of a span without the spans nested in it, which ended before."""
        ended = self._ended.setdefault(thread, deque(maxlen=_MOST_NESTED))
        self_time = end - start
        self._steps[thread] += name == "compute"
        while ended and ended[-1][1] >= start:
            inner, _, duration = ended.pop()
            self_time -= duration
            self._steps[thread] -= name == inner == "compute"
        ended.append((name, start, end - start))
        return max(0, self_time)

    def _append(self, events: Sequence[_Event], counts: Sequence[tuple[str, float, int]]) -> None:
        if self._file is None:
            self._file = self._open()
        kept = events if self._end <= self._max_bytes else ()
        self._dropped += len(events) - len(kept)
        new = list(self._threads.values())[self._named :]
        self._named += len(new)
        names = [_metadata(number, "thread_name", name) for number, name in new]
        # Counters are few, and go on in a file that is full.
        lines = [*names, *map(self._line, kept), *self._counters(counts)]
        text = "".join(f"{line},\n" for line in lines).encode()
        self._file.seek(self._end)
        # The tail completes the JSON; the next flush overwrites it. It is one line without a comma
        # at its end, so who follows the file knows it.
        tail = _metadata(0, "process_name", f"{self._title} on {platform.node()}")
        if self._dropped:
            tail = f"{_metadata(0, 'dropped_events', self._dropped)}, {tail}"
        self._file.write(text + f"{tail}\n]}}\n".encode())
        self._end += len(text)

    def _counters(self, counts: Sequence[tuple[str, float, int]]) -> Iterator[str]:
        for name, value, moment in counts:
            # JSON has no number for NaN and infinity.
            yield _counter(name, {"value": value if math.isfinite(value) else None}, moment)
        if self._flushed - self._progressed >= _FLUSH_NANOSECONDS:
            self._progressed = self._flushed
            totals = {name: total / 1e9 for name, total in self._totals.items()}
            progress = {"steps": max(self._steps.values(), default=0), **totals}
            yield _counter(PROGRESS, progress, self._flushed)

    def _open(self) -> BinaryIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        boot = Path("/proc/sys/kernel/random/boot_id")
        job = os.environ.get("NDISTRIBUTE_JOB_ID", "")
        about = {
            "name": self._title,
            "names": self._names,
            "host": platform.node(),
            "job": job,
            "pid": os.getpid(),
            "ppid": os.getppid(),
            # Processes of one boot of a machine read the same monotonic clock.
            "clock": boot.read_text().strip() if boot.exists() else platform.node(),
            "wall_minus_clock_us": (time.time_ns() - time.monotonic_ns()) / 1000,
        }
        now = _NOW + b" " * _NOW_BYTES
        head = f'","displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
        file = self._free_path(job).open("wb", buffering=0)
        self._end = file.write(now + head.encode())
        self._named = 0
        return file

    def _free_path(self, job: str) -> Path:
        """Return a file that is not of an earlier process of this job, or its earlier group."""
        name = self._title.removeprefix("rank ").replace(":", "-").replace(" ", "-")
        while True:
            filename = f"trace-{name}.{self._jobs}.json" if self._jobs else f"trace-{name}.json"
            path = self._directory / filename
            if not job or not path.exists():
                return path
            with path.open("rb") as file:
                if json.dumps({"job": job})[1:-1].encode() not in file.readline():
                    return path
            self._jobs += 1

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


class _Wait(_Span):
    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        self._recorder.wait(f"{self._name} {self._title}", self._start)

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self._recorder.wait(None)


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
    if _recorder is None:
        return _NOTHING
    return (_Wait if name in _WAITS else _Span)(_recorder, name, title)


def counter(name: str, value: float) -> None:
    """Record a number that changes with time, such as a loss, if tracing is enabled.

    The dashboard draws it. `fit` records its metrics, and `nd.summary.scalar` what it writes.

    >>> counter("loss", 0.25)
    """
    if _recorder is not None:
        _recorder.count(name, float(value))


def counters_due() -> bool:
    """Return True if tracing is enabled, and half a second has passed since the last True.

    >>> counters_due()
    False
    """
    now = time.monotonic_ns()
    if _recorder is None or now - _recorder.last_count < _FLUSH_NANOSECONDS:
        return False
    _recorder.last_count = now
    return True


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


def _counter(name: str, values: Mapping[str, float | None], moment: int) -> str:
    place = {"ph": "C", "name": name, "pid": os.getpid(), "tid": 0, "ts": moment / 1000}
    return json.dumps({**place, "args": values})


def _from_environment() -> Recorder | None:
    directory = os.environ.get("NDISTRIBUTE_TRACE")
    if not directory:
        return None
    recorder = Recorder(directory)
    atexit.register(recorder.flush, last=True)
    os.register_at_fork(after_in_child=recorder.start_over)
    return recorder


_NOTHING = nullcontext()
_recorder = _from_environment()
