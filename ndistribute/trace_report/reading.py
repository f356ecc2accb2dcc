"""The traces of a directory as values, as far as they were written.

Every event stands on a line of its own, so a file that ends in the middle of one is read up to the
line before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Event", "Trace", "read", "read_file"]


class Event(NamedTuple):
    """One span.

    Args:
        name: what the thread did: ``compute pack wait reduce update``, or another word.
        title: the call that it belongs to, or nothing.
        start: in microseconds of the process's clock.
        end: likewise.
        thread: its number in the process.
    """

    name: str
    title: str
    start: float
    end: float
    thread: int


@dataclass(frozen=True)
class Trace:
    """What one process recorded.

    Args:
        rank: its rank, or the number of the process where it never had one.
        size: how many ranks there were.
        clock: processes that name the same clock read the same times from it.
        wall: what to add to a time for the microseconds since 1970, as the process saw them.
        host: where it ran.
        events: in the order in which they ended.
        threads: their names.
    """

    rank: int
    size: int = 1
    clock: str = ""
    wall: float = 0.0
    host: str = ""
    events: tuple[Event, ...] = ()
    threads: Mapping[int, str] = field(default_factory=dict)


def read(directory: str | os.PathLike[str]) -> list[Trace]:
    """Return the traces in a directory, by rank; those of an earlier, larger run are left out.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [read_file(path) for path in sorted(Path(directory).glob("trace-*.json"))]
    traces = [trace for trace in found if trace is not None and trace.events]
    if not traces:
        raise FileNotFoundError(
            f"{os.fspath(directory)} holds no trace with events. Run the program with "
            "NDISTRIBUTE_TRACE set to this directory first."
        )
    # Processes that never had a rank, such as one that only starts others, are a last resort.
    chosen = [trace for trace in traces if trace.rank < trace.size] or traces
    newest = max(chosen, key=lambda trace: trace.wall + trace.events[-1].end)
    same_run = [trace for trace in chosen if trace.size == newest.size]
    return sorted(same_run, key=lambda trace: trace.rank)


def read_file(path: Path) -> Trace | None:
    """Return what a file holds, None where not even its first line was written."""
    lines = path.read_text(errors="replace").splitlines()
    try:
        about = json.loads(lines[0] + "]}")["otherData"]
    except (IndexError, ValueError, KeyError):
        return None
    events: list[Event] = []
    threads: dict[int, str] = {}
    for line in lines[1:]:
        entry = _entry(line)
        if entry.get("ph") == "X":
            start, title = entry["ts"], entry.get("args", {}).get("title", "")
            events.append(
                Event(entry["name"], title, start, start + entry["dur"], int(entry["tid"]))
            )
        elif entry.get("name") == "thread_name":
            threads[entry["tid"]] = entry["args"]["name"]
    return Trace(
        rank=about["process"] if about["rank"] is None else about["rank"],
        size=about["size"],
        clock=about["clock"],
        wall=about["wall_minus_clock_us"],
        host=about["host"],
        events=tuple(events),
        threads=threads,
    )


def _entry(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line.rstrip(","))
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
