"""Where a rank's time went: each moment of each thread counts for the innermost span around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ndistribute.trace_report.reading import Event

__all__ = ["KINDS", "UNTRACED", "exclusive", "shares"]

KINDS = ("compute", "pack", "wait", "reduce", "update")
UNTRACED = "untraced"


def exclusive(events: Iterable[Event]) -> dict[str, float]:
    """Return the microseconds by name, of which a span does not count those of spans in it.

    What stands between the first and the last event of a thread and in no span is `UNTRACED`.
    """
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    total: dict[str, float] = defaultdict(float)
    for own in threads.values():
        _add_thread(own, total)
    return dict(total)


def shares(events: Iterable[Event]) -> dict[str, float]:
    """Return the same as parts of the whole, which add up to 1."""
    times = exclusive(events)
    whole = sum(times.values())
    return {name: time / whole for name, time in times.items()} if whole else {}


def _add_thread(events: Sequence[Event], total: dict[str, float]) -> None:
    open_spans: list[Event] = []
    now = min(event.start for event in events)

    def pass_until(moment: float) -> None:
        nonlocal now
        if moment > now:
            total[open_spans[-1].name if open_spans else UNTRACED] += moment - now
            now = moment

    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        while open_spans and open_spans[-1].end <= event.start:
            pass_until(open_spans[-1].end)
            open_spans.pop()
        pass_until(event.start)
        open_spans.append(event)
    while open_spans:
        pass_until(open_spans[-1].end)
        open_spans.pop()
