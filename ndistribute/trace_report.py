"""Merges a job's traces on one clock, and reports how its time is used and who is late.

`ndistribute.timeline` writes one trace per process, with one event per line. All processes leave a
collective at about the same time, after the last process has entered it. So the clock offset of two
processes is the median difference of the times at which they left their common calls.
"""

from __future__ import annotations

import json
import os
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# The times of entering and leaving each collective, by its title and the number of its step.
Calls = dict[tuple[str, int], tuple[float, float]]

UNTRACED = "untraced"
_COLUMNS = "input compute pull push pack wait reduce update serve members".split()

# A process is late if the cost of waiting for it exceeds its fair share by the first figure, as a
# fraction of the rest, and exceeds the second figure, as a fraction of the run. Smaller differences
# may be chance.
_MORE_THAN_SHARE = 0.3
_LATE_COST = 0.02

# For each kind of work: the share of time above which the report has a sentence, and this sentence.
_ADVICE = {
    "wait": (0.2, "Waiting takes {:.0%}, but nobody is late: a larger batch makes fewer calls."),
    "input": (0.15, "Input takes {:.0%}: `prefetch` prepares batches while steps compute."),
    "pull": (0.2, "Pulling variables takes {:.0%}: a larger batch pulls less often."),
    "push": (0.2, "Pushing gradients takes {:.0%}: a larger batch pushes less often."),
    "pack": (0.15, "Copying gradients takes {:.0%}: a larger batch copies them less often."),
    "reduce": (0.2, "Adding takes {:.0%}, bound by memory: a larger batch adds less often."),
    "update": (0.25, "Updating variables takes {:.0%}: a larger batch updates less often."),
    "compute": (0.7, "Computing takes {:.0%}: little of the time is lost."),
    UNTRACED: (0.3, "{:.0%} of the time is in no span: add `timeline.span` around parts of it."),
}

_SERVER = re.compile(r"ps:\d+")
_MEMBERSHIP = re.compile(r"membership (\d+)(: .+)?")
_STEPS = 10**9  # More than a job has between two changes of its members.
_REPLICA = re.compile(r":(\d+)$")


class Event(NamedTuple):
    """A span; its times are in microseconds of the process's clock."""

    name: str  # The kind of work, such as "compute".
    title: str  # The call that the span belongs to, or a request's server; may be empty.
    start: float
    end: float
    thread: int  # The thread's number in the process.


@dataclass(frozen=True)
class Trace:
    """The events of one process, or of one of its replicas."""

    name: str  # For example "rank 0" or "ps:1".
    names: tuple[str, ...] = ()  # The processes of the job; empty if it never joined one.
    clock: str = ""  # Processes with the same name here share a clock.
    wall: float = 0.0  # Added to an event's time, gives microseconds since 1970.
    host: str = ""
    events: tuple[Event, ...] = ()  # In the order in which they ended.
    threads: Mapping[int, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The time between the first and the last event."""
        return (max(e.end for e in self.events) - min(e.start for e in self.events)) / 1e6


class Lateness(NamedTuple):
    """The lateness of a process, or of a replica, in the calls that all have in common."""

    name: str
    calls: int  # The number of common calls.
    steps: int  # The number of steps with such calls.
    last: int  # The number of calls that it entered last.
    behind: float  # Median delay after the previous one in those calls, in microseconds.
    cost: float  # Time for which all others waited for it alone, in microseconds, in all calls.


def read(directory: str | os.PathLike[str]) -> list[Trace]:
    """Return the traces of the newest job in a directory, in the order of its processes.

    Raises:
        FileNotFoundError: the directory has no trace with events.
    """
    contents = map(read_file, sorted(Path(directory).glob("trace-*.json")))
    traces = [trace for trace in contents if trace is not None and trace.events]
    if not traces:
        raise FileNotFoundError(
            f"{os.fspath(directory)} contains no trace with events. Set NDISTRIBUTE_TRACE to this "
            "directory and run the program again; it records the calls of strategy.run."
        )
    traces.sort(key=_ended)
    # A process that never joined a job may only start others, so its trace is used only if there is
    # no other, or if it computed after all jobs had ended.
    jobs = [trace for trace in traces if trace.names]
    last = _ended(jobs[-1]) if jobs else 0.0
    alone = [trace for trace in traces if not trace.names and _computed(trace) > last]
    *_, newest = alone or jobs or traces
    if not newest.names:
        return [newest]
    # Each process's newest trace, because a process that recovers starts another file.
    same_job = {trace.name: trace for trace in jobs if trace.names == newest.names}
    return [same_job[name] for name in newest.names if name in same_job]


def _ended(trace: Trace) -> float:
    return trace.wall + trace.events[-1].end


def _computed(trace: Trace) -> float:
    """Return the start time of the last step of a process."""
    return trace.wall + max((e.start for e in trace.events if e.name == "compute"), default=-inf)


def read_file(path: Path, last_bytes: int = sys.maxsize) -> Trace | None:
    """Return the trace in a file, or its last part; None if its first line is incomplete."""
    with path.open("rb") as file:
        first = file.readline()
        file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - last_bytes))
        lines = file.read().splitlines()
    try:
        about = json.loads(first + b"]}")["otherData"]
    except (ValueError, KeyError):
        return None
    events: list[Event] = []
    threads: dict[int, str] = {}
    for line in lines:
        try:
            entry = json.loads(line.rstrip(b","))
        except ValueError:  # The end of the file, or a cut line.
            continue
        if entry["ph"] == "X":
            start, title = entry["ts"], entry.get("args", {}).get("title", "")
            events.append(Event(entry["name"], title, start, start + entry["dur"], entry["tid"]))
        elif entry["ph"] == "M" and entry["name"] == "thread_name":
            threads[entry["tid"]] = entry["args"]["name"]
    who = about["name"], tuple(about["names"])
    when = about["clock"], about["wall_minus_clock_us"]
    return Trace(*who, *when, about["host"], tuple(events), threads)


def calls(events: Sequence[Event], shift: float = 0.0) -> Calls:
    """Return the collectives of one process: the events whose title has a number.

    The numbers restart with each step, which is a span named ``compute``; steps are counted from
    each change of members, a span named ``members``. A process with several replicas enters a
    collective when its last replica does. `shift` is added to the times.
    """
    computing = {event.thread for event in events if event.name == "compute"}
    steps = dict.fromkeys(computing, (0, -inf))  # Number and end of the last step, by thread.
    came: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)  # Times by thread.
    left: dict[tuple[str, int], float] = {}
    for event in sorted(events, key=lambda e: (e.start, e.name != "compute", -e.end)):
        # A thread without steps works for the first thread that has steps.
        worker = event.thread if event.thread in computing else min(computing, default=0)
        number, end = steps.get(worker, (0, -inf))
        if event.name == "members" and (match := _MEMBERSHIP.match(event.title)):
            steps = dict.fromkeys(computing, (_STEPS * int(match[1]), -inf))
        if event.name == "compute" and event.start >= end:
            number, end = steps[worker] = number + 1, event.end
        if "#" in event.title and event.start < end:
            key = event.title, number
            came[key].setdefault(event.thread, event.start + shift)
            left[key] = max(left.get(key, -inf), event.end + shift)
    moments = {}
    for key, threads in came.items():
        replicas = [moment for thread, moment in threads.items() if thread in computing]
        moments[key] = (max(replicas) if replicas else min(threads.values()), left[key])
    return moments


def offsets(traces: Sequence[Trace]) -> list[float]:
    """Return the offsets that convert each trace's times to the clock of the first trace."""
    reference = calls(traces[0].events)
    clocks = [trace.clock or f"of trace {number}" for number, trace in enumerate(traces)]
    differences: dict[str, list[float]] = defaultdict(list)
    for clock, trace in zip(clocks, traces, strict=True):
        here = calls(trace.events)
        differences[clock] += [reference[k][1] - here[k][1] for k in reference.keys() & here.keys()]
    # Without a common call, the wall clocks give the offset.
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


def exclusive(events: Iterable[Event]) -> dict[str, float]:
    """Return the microseconds in spans of each name, without the time in nested spans.

    `UNTRACED` is the time outside all spans, between the first and last event of each thread.
    """
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        threads[event.thread].append(event)
    total: dict[str, float] = defaultdict(float)
    for sequence in threads.values():
        now = sequence[0].start
        around = [Event(UNTRACED, "", now, inf, 0)]
        for event in [*sequence, Event("", "", inf, inf, 0)]:
            while around[-1].end <= event.start and len(around) > 1:
                inner = around.pop()
                total[inner.name] += max(0.0, inner.end - now)
                now = max(now, inner.end)
            if event.name:
                total[around[-1].name] += event.start - now
                now = event.start
                around.append(event)
    return {name: time for name, time in total.items() if time}


def shares(events: Iterable[Event]) -> dict[str, float]:
    """Return the result of `exclusive` as fractions that add up to 1."""
    times = exclusive(events)
    return {name: time / sum(times.values()) for name, time in times.items()}


def lateness(traces: Sequence[Trace]) -> list[Lateness]:
    """Return the lateness of each process with collective calls."""
    made = [calls(*pair) for pair in zip([t.events for t in traces], offsets(traces), strict=True)]
    callers = [(trace.name, each) for trace, each in zip(traces, made, strict=True) if each]
    keys = set.intersection(*(set(each) for _, each in callers)) if len(callers) > 1 else set()
    gaps: list[list[float]] = [[] for _ in callers]
    for key in keys:
        came = [each[key][0] for _, each in callers]
        *_, second, last = sorted(came)
        gaps[came.index(last)].append(last - second)
    steps = len({step for _, step in keys})
    return [
        Lateness(name, len(keys), steps, len(behind), median(behind or [0.0]), sum(behind))
        for (name, _), behind in zip(callers, gaps, strict=True)
    ]


def report(directory: str | os.PathLike[str]) -> str:
    """Return a report on the traces in a directory.

    Raises:
        FileNotFoundError: the directory has no trace.
    """
    return explain(read(directory))


def explain(traces: Sequence[Trace]) -> str:
    """Return a report on traces: the use of time, late processes, and possible remedies.

    >>> from ndistribute.trace_report import Event, Trace
    >>> print(explain([Trace("rank 0", events=(Event("compute", "", 0, 3e6, 1),))]))
    1 process, 3.0 s.
    <BLANKLINE>
            compute  other
    rank 0     100%     0%
    <BLANKLINE>
    The job has one process with one replica, which never waits for another.
    Computing takes 100%: little of the time is lost.
    """
    seconds = max(trace.seconds for trace in traces)
    members = _replicas(traces[0]) if len(traces) == 1 else list(traces)
    late = lateness(members)
    worst = _latest({each.name: each.cost for each in late}, seconds)
    lines = [f"{len(traces)} process{'es' * (len(traces) > 1)}, {seconds:.1f} s."]
    absent = [name for name in traces[0].names if name not in {trace.name for trace in traces}]
    lines += [f"There is no trace of {', '.join(absent)}."] if absent else []
    every = {trace.name: shares(trace.events) for trace in members}
    lines += ["", *_table(every), ""]
    lines += list(_servers(members, every, seconds)) or _who_is_late(members, late, worst, seconds)
    lines += _changes(traces)
    # Only processes that compute; neither servers nor a chief.
    mean = _mean([each for each in every.values() if "compute" in each] or list(every.values()))
    for kind, (large, advice) in _ADVICE.items():
        if mean.get(kind, 0.0) > large and not (kind == "wait" and worst):
            lines.append(advice.format(mean[kind]))
    return "\n".join(lines)


def _replicas(trace: Trace) -> list[Trace]:
    """Return a trace for each replica of a process, or the same trace if it has one replica.

    Between two steps, all replicas wait for the thread of replica 0, which reads the input. So
    this work of replica 0 fills the idle time of the others.
    """
    parts: dict[int, list[Event]] = defaultdict(list)
    computing = {event.thread for event in trace.events if event.name == "compute"}
    for event in trace.events:
        if event.thread in computing:
            match = _REPLICA.search(trace.threads.get(event.thread, ""))
            parts[int(match[1]) if match else 0].append(event)
    steps = _gaps(event for event in parts.get(0, ()) if event.name == "compute")
    between = [part for event in parts.get(0, ()) for part in _within(event, steps)]
    for number in parts.keys() - {0}:
        events, idle = parts[number], _gaps(parts[number])
        copies = [part for event in between for part in _within(event, idle)]
        parts[number] = events + [copy._replace(thread=events[0].thread) for copy in copies]
    replicas = [replace(trace, name=f"replica {k}", events=tuple(parts[k])) for k in sorted(parts)]
    return replicas if len(replicas) > 1 else [trace]


def _gaps(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Return the start and end of each time that is in none of the events, in order."""
    gaps, end = [], -inf
    for event in sorted(events, key=lambda e: e.start):
        if event.start > end:
            gaps.append((end, event.start))
        end = max(end, event.end)
    return [*gaps, (end, inf)]


def _within(event: Event, gaps: Sequence[tuple[float, float]]) -> Iterator[Event]:
    """Yield the parts of an event that are in the gaps."""
    first = max(0, bisect_right(gaps, (event.start, inf)) - 1)
    for start, end in islice(gaps, first, None):
        if start >= event.end:
            break
        if end > event.start:
            yield event._replace(start=max(start, event.start), end=min(end, event.end))


def _table(every: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    kinds = [kind for kind in _COLUMNS if any(kind in part for part in every.values())]
    rows = [["", *kinds, "other"]]
    for name, part in every.items():
        rest = abs(1 - sum(part.get(kind, 0.0) for kind in kinds))
        known = [f"{part[kind]:.0%}" if kind in part else "-" for kind in kinds]
        rows.append([name, *known, f"{rest:.0%}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def _latest(cost: Mapping[str, float], seconds: float) -> str:
    """Return the name of the late process or server; '' if no cost exceeds the thresholds."""
    if len(cost) < 2:
        return ""
    worst = max(cost, key=lambda name: cost[name])
    most = _MORE_THAN_SHARE + (1 - _MORE_THAN_SHARE) / len(cost)
    stands_out = cost[worst] > most * sum(cost.values())
    return worst if stands_out and cost[worst] > _LATE_COST * seconds * 1e6 else ""


def _who_is_late(
    members: Sequence[Trace], late: Sequence[Lateness], worst: str, seconds: float
) -> Iterator[str]:
    """Yield sentences on the late process, and on the kind of work in which it is slower."""
    if len(members) == 1:
        yield "The job has one process with one replica, which never waits for another."
    elif not late or late[0].calls == 0:
        yield "They made no common collective, so the trace cannot show which of them is late."
    elif not worst:
        yield f"None is late: over {late[0].calls} calls they wait for each other in turn."
    else:
        lag = next(lag for lag in late if lag.name == worst)
        yield (
            f"{worst.capitalize()} is late: it comes last to {lag.last / lag.calls:.0%} of "
            f"{lag.calls} calls, {_time(lag.behind)} after the others in the median. Waiting for "
            f"it takes {_time(lag.cost / lag.steps)} a step, {lag.cost / 1e6 / seconds:.0%} of the "
            "run."
        )
        times = {trace.name: exclusive(trace.events) for trace in members}
        its, others = times.pop(worst), _mean(list(times.values()))
        more = {k: its.get(k, 0.0) - others.get(k, 0.0) for k in {**its, **others} if k != "wait"}
        kind = max(more, key=lambda name: more[name], default=UNTRACED)
        host = next(trace.host for trace in members if trace.name == worst) or "its host"
        per_step = f"{_time(max(0.0, more.get(kind, 0.0)) / lag.steps)} a step more"
        known = {
            "compute": f"It computes {per_step} than the others: look at what else runs on {host}, "
            "at its cores and BLAS threads (`ndistribute doctor`), or give it a smaller batch.",
            UNTRACED: f"It spends {per_step} than the others in no span: its input, its logging or "
            "its checkpoints. Prefetch the input, or log and save less often on all processes.",
        }
        yield known.get(kind, f"It spends {per_step} than the others in `{kind}`.")


def _servers(
    members: Sequence[Trace], every: Mapping[str, Mapping[str, float]], seconds: float
) -> Iterator[str]:
    """Yield sentences on the response times of the servers, and on a late server."""
    waits: dict[str, list[float]] = defaultdict(list)
    for event in (event for trace in members for event in trace.events):
        if event.name in ("pull", "push") and _SERVER.fullmatch(event.title):
            waits[event.title].append(event.end - event.start)
    cost = {name: sum(times) for name, times in sorted(waits.items())}
    if cost:
        each = [f"{name} {_time(cost[name] / len(waits[name]))}" for name in cost]
        yield f"Mean time that a client waits for an answer: {', '.join(each)}."
    worst = _latest(cost, seconds * sum("pull" in row for row in every.values()))
    if worst:
        part = cost[worst] / sum(cost.values())
        yield f"Server {worst} is late: clients spend {part:.0%} of their waiting time on it."
    if worst in every:
        yield (
            f"It works for {every[worst].get('serve', 0.0):.0%} of the time. If that is much, "
            "give it fewer variables (`nd.partitioners`) or a faster host; otherwise, check its "
            "network."
        )


def _changes(traces: Sequence[Trace]) -> Iterator[str]:
    """Yield a sentence on each change of members, and how long earlier members waited."""
    costs: dict[str, list[float]] = defaultdict(list)
    for event in (event for trace in traces for event in trace.events if event.name == "members"):
        costs[event.title].append(event.end - event.start)
    for title in sorted(costs, key=lambda title: int(_MEMBERSHIP.findall(title)[0][0])):
        if ":" in title:  # A newcomer's span includes its wait for the others.
            yield f"{title.capitalize()}; it took {_time(max(costs[title]))}."


def _mean(of_many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for times in of_many for name in times)
    return {name: sum(times.get(name, 0.0) for times in of_many) / len(of_many) for name in names}


def _time(microseconds: float) -> str:
    """Return a time as text, in us, ms or s.

    >>> _time(12.34), _time(4_321.0), _time(2_500_000.0)
    ('12 us', '4.3 ms', '2.5 s')
    """
    if microseconds < 1e3:
        return f"{microseconds:.0f} us"
    return f"{microseconds / 1e3:.1f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.1f} s"
