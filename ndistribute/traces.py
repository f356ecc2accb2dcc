"""Reading the traces of a job's processes, and aligning their clocks.

`ndistribute.timeline` writes one trace per process, with one event per line. All processes leave a
collective at about the same time, after the last one has entered it. So the median difference of
the times at which two processes left their common calls is the offset between their clocks.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

__all__ = ["Event", "Trace", "calls", "merge", "merged", "offsets", "read"]

# The times of entering and leaving each collective, by its title and the number of its step.
Calls = dict[tuple[str, int], tuple[float, float]]


class Event(NamedTuple):
    """A span; its times are in microseconds of the process's clock."""

    name: str  # The kind of work, such as "compute".
    title: str  # The call that it belongs to, or the server of a request; may be empty.
    start: float
    end: float
    thread: int  # The thread's number in the process.


@dataclass(frozen=True)
class Trace:
    """The events of one process, or of one of its replicas."""

    name: str  # For example "rank 0" or "ps:1".
    names: tuple[str, ...] = ()  # The processes of the job; empty if it never joined one.
    clock: str = ""  # Processes with the same name here share a clock.
    wall: float = 0.0  # Added to a time, gives the microseconds since 1970.
    host: str = ""
    events: tuple[Event, ...] = ()  # In the order in which they ended.
    threads: Mapping[int, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The time between the first and the last event."""
        return (max(e.end for e in self.events) - min(e.start for e in self.events)) / 1e6


def read(directory: str | os.PathLike[str]) -> list[Trace]:
    """Return the traces of the newest job in a directory, in the order of its processes.

    Raises:
        FileNotFoundError: the directory has no trace with events.
    """
    found = [_read_file(path) for path in sorted(Path(directory).glob("trace-*.json"))]
    traces = [trace for trace in found if trace is not None and trace.events]
    if not traces:
        raise FileNotFoundError(
            f"{os.fspath(directory)} contains no trace with events. Set NDISTRIBUTE_TRACE to this "
            "directory and run the program again; it records the calls of strategy.run."
        )
    # A process that never joined a job may only start others, so its trace is used last, unless it
    # computed after all jobs had ended.
    jobs = [trace for trace in traces if trace.names]
    ended = max((trace.wall + trace.events[-1].end for trace in jobs), default=0.0)
    alone = [trace for trace in traces if not trace.names and trace.wall + _computed(trace) > ended]
    chosen = alone or jobs or traces
    newest = max(chosen, key=lambda trace: trace.wall + trace.events[-1].end)
    if not newest.names:
        return [newest]
    # The newest trace of each process, because a recovery starts another file.
    chosen.sort(key=lambda trace: trace.wall + trace.events[-1].end)
    same_job = {trace.name: trace for trace in chosen if trace.names == newest.names}
    return [same_job[name] for name in newest.names if name in same_job]


def _computed(trace: Trace) -> float:
    """Return the start time of the last step of a process."""
    return max((event.start for event in trace.events if event.name == "compute"), default=-inf)


def _read_file(path: Path) -> Trace | None:
    """Return the trace in a file; None if its first line is incomplete."""
    first, *lines = path.read_text(errors="replace").splitlines() or [""]
    try:
        about = json.loads(first + "]}")["otherData"]
    except (ValueError, KeyError):
        return None
    events: list[Event] = []
    threads: dict[int, str] = {}
    for entry in _entries(lines):
        if entry["ph"] == "X":
            start, title = entry["ts"], entry.get("args", {}).get("title", "")
            events.append(Event(entry["name"], title, start, start + entry["dur"], entry["tid"]))
        elif entry["name"] == "thread_name":
            threads[entry["tid"]] = entry["args"]["name"]
    who = about["name"], tuple(about["names"])
    when = about["clock"], about["wall_minus_clock_us"]
    return Trace(*who, *when, about["host"], tuple(events), threads)


def _entries(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            entry = json.loads(line.rstrip(","))
        except ValueError:  # The file's tail, or the last line of a killed process.
            continue
        if isinstance(entry, dict) and "ph" in entry:
            yield entry


def calls(events: Sequence[Event], shift: float = 0.0) -> Calls:
    """Return the collectives of one process: the events whose title has a number.

    The numbers restart with each step, which is a span named ``compute``. A process with several
    replicas enters a collective when its last replica does. `shift` is added to the times.
    """
    steps = _steps(events)
    came: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)  # Times by thread.
    left: dict[tuple[str, int], float] = {}
    for event in sorted(events, key=lambda e: e.start):
        # A thread without steps works for the steps of the first thread that has some.
        own = steps.get(event.thread) or (steps[min(steps)] if steps else ())
        number = bisect_right(own, event.start, key=lambda step: step[0])
        is_inside = number > 0 and event.start < own[number - 1][1]
        if "#" in event.title and is_inside:
            key = event.title, number
            came[key].setdefault(event.thread, event.start + shift)
            left[key] = max(left.get(key, event.end + shift), event.end + shift)
    found = {}
    for key, threads in came.items():
        replicas = [moment for thread, moment in threads.items() if thread in steps]
        found[key] = (max(replicas) if replicas else min(threads.values()), left[key])
    return found


def _steps(events: Sequence[Event]) -> dict[int, list[tuple[float, float]]]:
    """Return the start and end times of the steps of each thread."""
    steps: dict[int, list[tuple[float, float]]] = {}
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        if event.name == "compute":
            own = steps.setdefault(event.thread, [])
            if not own or event.start >= own[-1][1]:
                own.append((event.start, event.end))
    return steps


def offsets(traces: Sequence[Trace]) -> list[float]:
    """Return the offsets that convert each trace's times to the clock of the first trace.

    Traces with the same clock get the same offset. For clocks without a call in common with the
    first trace, the offset follows from their wall-clock times.
    """
    reference = calls(traces[0].events)
    clocks = [trace.clock or f"of trace {number}" for number, trace in enumerate(traces)]
    differences: dict[str, list[float]] = defaultdict(list)
    for clock, trace in zip(clocks, traces, strict=True):
        own = calls(trace.events)
        differences[clock] += [reference[k][1] - own[k][1] for k in reference.keys() & own.keys()]
    return [
        0.0 if clock == clocks[0] else median(differences[clock] or [trace.wall - traces[0].wall])
        for clock, trace in zip(clocks, traces, strict=True)
    ]


def merge(directory: str | os.PathLike[str]) -> Path:
    """Merge the traces of a job into ``merged.json`` beside them, and return its path.

    Raises:
        FileNotFoundError: the directory has no trace.
    """
    path = Path(directory) / "merged.json"
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(json.dumps(merged(read(directory))))
    unfinished.replace(path)
    return path


def merged(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return one trace of all processes, for Chrome and Perfetto; its times start at 0."""
    moved = list(zip(traces, offsets(traces), strict=True))
    zero = min(event.start + shift for trace, shift in moved for event in trace.events)
    entries: list[dict[str, Any]] = []
    for pid, (trace, shift) in enumerate(moved):
        names = [(0, "process_name", f"{trace.name} on {trace.host}".removesuffix(" on "))]
        names += [(number, "thread_name", name) for number, name in trace.threads.items()]
        for thread, kind, name in names:
            place = {"ph": "M", "pid": pid, "tid": thread, "name": kind}
            entries.append({**place, "args": {"name": name}})
        for event in trace.events:
            place = {"ph": "X", "pid": pid, "tid": event.thread, "name": event.name}
            times = {"ts": event.start + shift - zero, "dur": event.end - event.start}
            rounded = {key: round(time, 3) for key, time in times.items()}
            entries.append({**place, **rounded, "args": {"title": event.title}})
    about = {"clock_offsets_us": {trace.name: shift for trace, shift in moved}}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": entries}
