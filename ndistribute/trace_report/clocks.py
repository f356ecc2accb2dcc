"""Which calls of the ranks are one collective, and by how much the ranks' clocks differ.

No rank can leave a collective before the last has come, and all leave at about the same time. So
the median difference of the times at which two ranks left their common calls is that of their
clocks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ndistribute.trace_report.reading import Event, Trace

__all__ = ["Call", "Key", "calls", "common", "offsets"]

# A title comes back when a group starts over and counts from 1. It is another call then: titles
# that many events apart can not be in flight together.
_SAME_CALL_EVENTS = 256

Key = tuple[str, int]  # A title, and how often it was seen before.

_NUMBERED = re.compile(r"#\d+")


class Call(NamedTuple):
    """When a rank came to a collective and when it left, on one clock."""

    came: float
    left: float


def calls(events: Sequence[Event], shift: float = 0.0) -> dict[Key, Call]:
    """Return the collectives of one rank, those whose title has a number.

    Args:
        events: what it recorded; what it computed does not count.
        shift: is added to the times.
    """
    found: dict[Key, Call] = {}
    occurrence: dict[str, int] = {}
    last: dict[str, int] = {}
    chosen = [e for e in events if e.name != "compute" and _NUMBERED.search(e.title)]
    for index, event in enumerate(sorted(chosen, key=lambda e: e.start)):
        if event.title not in last:
            occurrence[event.title] = 0
        elif index - last[event.title] > _SAME_CALL_EVENTS:
            occurrence[event.title] += 1
        last[event.title] = index
        key = (event.title, occurrence[event.title])
        start, end = event.start + shift, event.end + shift
        known = found.get(key, Call(start, end))
        found[key] = Call(min(known.came, start), max(known.left, end))
    return found


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
