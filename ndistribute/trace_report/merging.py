"""One file for Chrome and Perfetto in which all ranks stand on one clock."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndistribute.trace_report.clocks import offsets
from ndistribute.trace_report.reading import Trace, read

__all__ = ["MERGED", "merge", "merged"]

MERGED = "merged.json"


def merge(directory: str | os.PathLike[str]) -> Path:
    """Merge the traces of all ranks into one file beside them, and return its path.

    Raises:
        FileNotFoundError: the directory has no trace.
    """
    path = Path(directory) / MERGED
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(json.dumps(merged(read(directory))))
    unfinished.replace(path)
    return path


def merged(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the merged trace; its times start at 0."""
    shifts = offsets(traces)
    start = min(
        event.start + shift
        for trace, shift in zip(traces, shifts, strict=True)
        for event in trace.events
    )
    events: list[dict[str, Any]] = []
    for trace, shift in zip(traces, shifts, strict=True):
        events += _names(trace)
        events += [
            {
                "ph": "X",
                "name": event.name,
                "pid": trace.rank,
                "tid": event.thread,
                "ts": round(event.start + shift - start, 3),
                "dur": round(event.end - event.start, 3),
                "args": {"title": event.title},
            }
            for event in trace.events
        ]
    about = {
        "ranks": [trace.rank for trace in traces],
        "clock_offsets_us": dict(zip((str(t.rank) for t in traces), shifts, strict=True)),
    }
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _names(trace: Trace) -> list[dict[str, Any]]:
    title = f"rank {trace.rank} on {trace.host}" if trace.host else f"rank {trace.rank}"
    named = [(0, "process_name", {"name": title})]
    named += [(number, "thread_name", {"name": name}) for number, name in trace.threads.items()]
    entries: list[dict[str, Any]] = [
        {"ph": "M", "pid": trace.rank, "tid": thread, "name": name, "args": args}
        for thread, name, args in named
    ]
    order = {"sort_index": trace.rank}
    return [
        *entries,
        {"ph": "M", "pid": trace.rank, "tid": 0, "name": "process_sort_index", "args": order},
    ]
