"""What this process did when, for whoever wonders where the time goes.

With ``NDISTRIBUTE_TRACE`` set to a directory when the package is imported, each process writes a
trace there that Chrome (``chrome://tracing``) and Perfetto show; `ndistribute.trace_report` merges
and explains them. Without it a span costs next to nothing.
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

__all__ = ["Recorder", "enabled", "flush", "identify", "recorded", "span"]

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("ndistribute")

_FLUSH_EVENTS = 4096
_FLUSH_NANOSECONDS = 500_000_000
_MAX_FILE_BYTES = 256 << 20
_Event = tuple[str, str, int, int, int]  # name, title, start, end, thread


class Recorder:
    """Keep a process's events, and write them to a file now and then.

    The file is whole JSON after each flush; a process killed while it writes leaves one that
    `ndistribute.trace_report` still reads. Beyond its size limit events are counted, no longer
    kept. A file that can not be written is logged once and ends the recording, not the program.

    Args:
        directory: where the file goes; made when the first event is written.
        max_bytes: how large the file may grow.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int = _MAX_FILE_BYTES) -> None:
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._name = ""
        self._names: tuple[str, ...] = ()
        self._file: BinaryIO | None = None
        self._start_over()

    def add(self, name: str, title: str, start: int, end: int) -> None:
        """Keep one event of the calling thread; times are of ``time.monotonic_ns``."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._introduce(thread)
        self._events.append((name, title, start, end, thread))
        if len(self._events) >= _FLUSH_EVENTS or end - self._flushed > _FLUSH_NANOSECONDS:
            self.flush()

    def identify(self, name: str, names: Sequence[str]) -> None:
        """Say who this process is, and among whom; what it recorded before stays in that file."""
        with self._lock:
            if self._file is not None and (name, tuple(names)) != (self._name, self._names):
                self._write()
                self._file.close()
                self._file = None
                self._jobs += bool(self._names)
            self._name, self._names = name, tuple(names)

    def flush(self) -> None:
        """Write what is kept in memory."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write what is kept in memory, and close the file."""
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None

    def forget(self) -> None:
        """Start over in a forked child: the parent's events and file are the parent's."""
        self._lock = threading.Lock()
        self._name, self._names = "", ()
        if self._file is not None:
            self._file.close()  # Everything was written through, so nothing is written twice.
            self._file = None
        self._start_over()

    def _start_over(self) -> None:
        self._events: list[_Event] = []
        self._threads: dict[int, tuple[int, str]] = {}  # By identity: number and name.
        self._flushed = time.monotonic_ns()
        self._failed = False
        self._end = 0
        self._dropped = 0
        self._named = 0
        self._jobs = 0  # That this process recorded and left, such as before a recovery.

    def _introduce(self, thread: int) -> None:
        with self._lock:
            name = threading.current_thread().name
            self._threads.setdefault(thread, (len(self._threads) + 1, name))

    def _write(self) -> None:
        # Other threads append meanwhile: take what is there now, and leave the rest.
        events = self._events[: len(self._events)]
        del self._events[: len(events)]
        self._flushed = time.monotonic_ns()
        if not events or self._failed:
            return
        try:
            self._append(events)
        except OSError as error:
            self._failed = True
            _log.warning("no trace is written to %s any more: %s", self._directory, error)

    def _append(self, events: Sequence[_Event]) -> None:
        if self._file is None:
            self._file = self._open()
        if self._end > self._max_bytes:
            self._dropped += len(events)
            lines: Iterable[str] = [_metadata(0, "dropped_events", self._dropped)]
        else:
            lines = [*self._new_thread_names(), *map(self._line, events)]
        text = "".join(f"{line},\n" for line in lines).encode()
        self._file.seek(self._end)
        # The tail makes the file whole; the next flush writes over it.
        self._file.write(text + f"{self._process_name()}\n]}}\n".encode())
        if self._end <= self._max_bytes:
            self._end += len(text)

    def _open(self) -> BinaryIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        about = {
            "name": self._title,
            "names": self._names,
            "host": platform.node(),
            "clock": _clock(),
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

    def _process_name(self) -> str:
        return _metadata(0, "process_name", f"{self._title} on {platform.node()}")

    def _new_thread_names(self) -> list[str]:
        threads = list(self._threads.values())[self._named :]
        self._named += len(threads)
        return [_metadata(number, "thread_name", name) for number, name in threads]

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._recorder.add(self._name, self._title, self._start, time.monotonic_ns())


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def span(name: str, title: str = "") -> AbstractContextManager[None]:
    """Return a context manager that records how long its block took, where a trace is asked for.

    Args:
        name: one of ``input compute pull push pack wait reduce update``, or another word.
        title: which call it belongs to, such as ``all_reduce #12``: the calls of the ranks that
            have one title are taken for one collective.

    >>> with span("compute", "step #1"):
    ...     total = sum(range(10))
    """
    return _NOTHING if _recorder is None else _Span(_recorder, name, title)


def recorded(describe: Callable[..., tuple[str, str]]) -> Callable[[F], F]:
    """Return a decorator that records each call of a function, where a trace is asked for.

    Without a trace it returns the function as it is, so that calls cost nothing more.

    Args:
        describe: called with what the function returned and its arguments, returns the name and
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
    """Return whether a trace is written."""
    return _recorder is not None


def identify(name: str, names: Sequence[str]) -> None:
    """Say which process of a job this is, such as ``"rank 0"`` or ``"ps:1"``, and all there are."""
    if _recorder is not None:
        _recorder.identify(name, names)


def flush() -> None:
    """Write what was recorded so far; it is done now and then, and when the process ends."""
    if _recorder is not None:
        _recorder.flush()


def _metadata(tid: int, name: str, value: Any) -> str:
    args = {"name": value}
    return json.dumps({"ph": "M", "pid": os.getpid(), "tid": tid, "name": name, "args": args})


def _clock() -> str:
    # Processes that were booted together read one monotonic clock.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def _from_environment() -> Recorder | None:
    directory = os.environ.get("NDISTRIBUTE_TRACE")
    if not directory:
        return None
    recorder = Recorder(directory)
    atexit.register(recorder.flush)
    os.register_at_fork(after_in_child=recorder.forget)
    return recorder


_NOTHING = _Nothing()
_recorder = _from_environment()
