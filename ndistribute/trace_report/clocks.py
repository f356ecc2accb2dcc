"""Which calls of the ranks are one collective, and by how much the ranks' clocks differ.

No rank can leave a collective before the last has come, and all leave at about the same time. So
the median difference of the times at which two ranks left their common calls is that of their
clocks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ndistribute.trace_report.reading import Event, Trace

__all__ = ["Call", "Key", "calls", "common", "offsets"]

# A title, the step that it stands in or behind, and how often it was seen there before.
Key = tuple[str, int, int]

_NUMBERED = re.compile(r"#\d+")


class Call(NamedTuple):
    """When a rank came to a collective and when it left, on one clock."""

    came: float
    left: float


def calls(events: Sequence[Event], shift: float = 0.0) -> dict[Key, Call]:
    """Return the collectives of one rank, those whose title has a number.

    Numbers start again with each step, which is a span named ``compute``; so a call is told by its
    title and its step. Steps have odd numbers, and what stands between two of them an even one.
    There, a title that comes back after another one is another call.

    Args:
        events: what it recorded; what it computed does not count.
        shift: is added to the times.
    """
    steps = _steps(events)
    found: dict[Key, Call] = {}
    repeats: dict[tuple[str, int], int] = {}
    latest: dict[int, str] = {}
    chosen = [e for e in events if e.name != "compute" and _NUMBERED.search(e.title)]
    for event in sorted(chosen, key=lambda e: e.start):
        step = _step_of(event, steps)
        place = (event.title, step)
        if place in repeats and step % 2 == 0 and latest[step] != event.title:
            repeats[place] += 1
        latest[step] = event.title
        key = (*place, repeats.setdefault(place, 0))
        start, end = event.start + shift, event.end + shift
        known = found.get(key, Call(start, end))
        found[key] = Call(min(known.came, start), max(known.left, end))
    return found


def _steps(events: Sequence[Event]) -> dict[int, list[tuple[float, float]]]:
    """Return when the steps of each thread began and ended."""
    steps: dict[int, list[tuple[float, float]]] = {}
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        if event.name == "compute":
            own = steps.setdefault(event.thread, [])
            if not own or event.start >= own[-1][1]:
                own.append((event.start, event.end))
    return steps


def _step_of(event: Event, steps: Mapping[int, Sequence[tuple[float, float]]]) -> int:
    # A thread that runs no steps of its own works for those of the first that does.
    own = steps.get(event.thread) or (steps[min(steps)] if steps else ())
    begun = bisect_right(own, event.start, key=lambda step: step[0])
    inside = begun > 0 and event.start < own[begun - 1][1]
    return 2 * begun - inside


def common(of_ranks: Sequence[Mapping[Key, Call]]) -> list[Key]:
    """Return the collectives that all ranks recorded, in the order of the first."""
    return [key for key in of_ranks[0] if all(key in other for other in of_ranks[1:])]


def offsets(traces: Sequence[Trace]) -> list[float]:
    """Return what to add to each trace's times so that they are those of the first one's clock.

    Processes that read one clock get one offset. Where no call is shared with the first trace, the
    clocks on the wall have to do.
    """
    reference = calls(traces[0].events)
    differences: dict[str, list[float]] = defaultdict(list)
    for number, trace in enumerate(traces):
        own = calls(trace.events)
        differences[_clock(trace, number)] += [
            reference[key].left - own[key].left for key in common([reference, own])
        ]
    return [
        0.0
        if _clock(trace, number) == _clock(traces[0], 0)
        else median(differences[_clock(trace, number)] or [trace.wall - traces[0].wall])
        for number, trace in enumerate(traces)
    ]


def _clock(trace: Trace, number: int) -> str:
    return trace.clock or f"of trace {number}"
