"""Whom the ranks wait for: who came last to their common calls, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ndistribute.trace_report.clocks import calls, common, offsets
from ndistribute.trace_report.reading import Trace

__all__ = ["Lateness", "lateness"]


@dataclass(frozen=True)
class Lateness:
    """How a rank came to the calls that all share.

    Args:
        rank: which.
        calls: how many there are.
        steps: to how many steps they belong.
        last: to how many it came last.
        behind: by how many microseconds after the one before it, in the median of those.
        cost: for how many microseconds the others waited for nobody but it, in all calls.
    """

    rank: int
    calls: int
    steps: int
    last: int
    behind: float
    cost: float


def lateness(traces: Sequence[Trace]) -> list[Lateness]:
    """Return how each rank came to the common calls, in the order of the traces."""
    shifts = offsets(traces)
    seen = [calls(trace.events, shift) for trace, shift in zip(traces, shifts, strict=True)]
    keys = common(seen) if len(traces) > 1 else []
    gaps: list[list[float]] = [[] for _ in traces]
    for key in keys:
        came = [own[key].came for own in seen]
        *_, second, last = sorted(came)
        gaps[came.index(last)].append(last - second)
    steps = len({step for _, step, _ in keys})
    return [
        Lateness(trace.rank, len(keys), steps, len(own), median(own) if own else 0.0, sum(own))
        for trace, own in zip(traces, gaps, strict=True)
    ]
