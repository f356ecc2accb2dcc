"""What a report says about traces that were made up, so that the answer is known."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute import trace_report
from ndistribute.trace_report import Event, Trace, calls, exclusive, explain, lateness, offsets

STEP = 10_000.0


def job(
    computing: list[float], steps: int = 20, skews: list[float] | None = None, reducing: float = 1e3
) -> list[Trace]:
    """Return the traces of ranks that compute so long a step, wait for the last, and reduce."""
    skews = skews or [0.0] * len(computing)
    events: list[list[Event]] = [[] for _ in computing]
    now = 0.0
    for step in range(steps):
        title = f"all_reduce #{step + 1}"
        meet = now + max(computing)
        for own, busy, skew in zip(events, computing, skews, strict=True):
            start = now - skew
            came, all_there = start + busy, meet - skew
            own.append(Event("compute", "", start, all_there + reducing, 1))
            own.append(Event("wait", title, came, all_there, 1))
            own.append(Event("reduce", title, all_there, all_there + reducing, 1))
        now = meet + reducing
    return [
        Trace(f"rank {rank}", _names(len(computing)), clock=f"of {rank}", events=tuple(own))
        for rank, own in enumerate(events)
    ]


def _names(size: int) -> tuple[str, ...]:
    return tuple(f"rank {rank}" for rank in range(size))


def test_a_span_does_not_count_what_stands_in_it():
    events = [
        Event("update", "", 0, 100, 1),
        Event("wait", "", 10, 40, 1),
        Event("pack", "", 20, 30, 1),
        Event("compute", "", 120, 130, 1),
        Event("compute", "", 0, 50, 2),
    ]
    expected = {"update": 70, "wait": 20, "pack": 10, trace_report.UNTRACED: 20, "compute": 60}
    assert exclusive(events) == expected


NAMES, TIMES = st.sampled_from(["compute", "wait", "pack"]), st.integers(0, 1000)


@given(st.lists(st.tuples(NAMES, TIMES, TIMES, st.integers(1, 3)), min_size=1))
def test_shares_add_up_to_the_time_between_the_first_and_the_last_event(spans):
    events = [Event(name, "", start, start + took, thread) for name, start, took, thread in spans]
    whole = 0
    for thread in {event.thread for event in events}:
        own = [event for event in events if event.thread == thread]
        whole += max(event.end for event in own) - min(event.start for event in own)
    assert sum(exclusive(events).values()) == pytest.approx(whole)
    assert sum(trace_report.shares(events).values()) == pytest.approx(1 if whole else 0)


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_clocks_are_told_apart_to_within_the_jitter_of_leaving(skews, random):
    traces = []
    for trace in job([STEP] * len(skews), skews=skews):
        jittered = [event._replace(end=event.end + random.uniform(0, 50)) for event in trace.events]
        traces.append(replace(trace, events=tuple(jittered)))
    expected = [skew - skews[0] for skew in skews]
    assert offsets(traces) == pytest.approx(expected, abs=50.1)


def test_one_late_leave_in_three_does_not_move_a_clock():
    first, second = job([STEP, STEP], steps=30, skews=[0, 5e6])
    late = [
        e._replace(end=e.end + 1e6) if e.name == "reduce" and i % 3 == 0 else e
        for i, e in enumerate(second.events)
    ]
    second = replace(second, events=tuple(late))
    assert offsets([first, second]) == pytest.approx([0, 5e6], abs=1)


def test_one_clock_is_not_moved_and_without_common_calls_the_wall_decides():
    first, second = job([STEP, 3 * STEP])
    assert offsets([replace(first, events=first.events[1:]), replace(second, clock="of 0")]) == [
        0,
        0,
    ]
    events = (Event("compute", "", 0, 1, 1),)
    walls = {"a": 1000.0, "b": 1500.0}
    traces = [Trace("", (), clock, wall=wall, events=events) for clock, wall in walls.items()]
    assert offsets(traces) == [0, 500]


def test_titles_that_come_back_in_each_step_are_told_apart():
    spans = []
    for step in range(3):
        start = 100 * step
        spans.append(Event("compute", "", start, start + 50, 1))
        # In a step two calls may be under way together, the second by a thread without steps.
        for name, at in (("pack", 10), ("wait", 20), ("reduce", 30)):
            spans.append(Event(name, "all_reduce #1", start + at, start + at + 5, 1))
            spans.append(Event(name, "all_reduce #2", start + at + 2, start + at + 8, 2))
        spans.append(Event("wait", "broadcast #1", start + 60, start + 65, 1))
    found = trace_report.calls(spans)
    assert len(found) == 3 * 2
    assert found["all_reduce #1", 2] == (110, 135)
    assert found["all_reduce #2", 2] == (112, 138)


def test_steps_count_from_a_change_of_members_and_the_report_names_each_change():
    def steps(first: float, count: int) -> list[Event]:
        times = [first + 10.0 * number for number in range(count)]
        of_each = [
            (Event("compute", "", t, t + 9, 1), Event("wait", "sum #1", t + 5, t + 8, 1))
            for t in times
        ]
        return [event for both in of_each for event in both]

    text = "membership 2: worker:1 joined: 2 workers in the job"
    here = [*steps(0.0, 3), Event("members", text, 30.0, 45.0, 1), *steps(50.0, 2)]
    newcomer = [Event("members", "membership 2", 10.0, 45.0, 1), *steps(50.0, 2)]
    both = [calls(events) for events in (here, newcomer)]
    assert len(both[0]) == 5
    assert both[0].keys() & both[1].keys() == both[1].keys()
    assert len(both[1]) == 2
    said = explain(
        [Trace("worker 0", events=tuple(here)), Trace("worker 1", events=tuple(newcomer))]
    )
    assert "Membership 2: worker:1 joined: 2 workers in the job; it took 15 us." in said


def test_a_process_has_come_when_the_last_of_its_replicas_has():
    spans = [Event("compute", "", 0, 50, thread) for thread in (1, 2)]
    spans += [Event("wait", "all_reduce #1", 10, 40, 1), Event("wait", "all_reduce #1", 30, 41, 2)]
    spans.append(Event("pack", "all_reduce #1", 31, 32, 3))
    assert trace_report.calls(spans) == {("all_reduce #1", 1): (30, 41)}


def test_the_late_rank_is_named_with_what_it_costs():
    traces = job([STEP, STEP, STEP + 4000], skews=[0, 1e6, -3e6])
    late = lateness(traces)[2]
    assert (late.name, late.calls, late.last) == ("rank 2", 20, 20)
    assert late.behind == pytest.approx(4000, rel=1e-6)
    assert late.cost == pytest.approx(20 * 4000, rel=1e-6)
    said = trace_report.explain(traces)
    assert "Rank 2 is late: it comes last to 100% of 20 calls, 4.0 ms after" in said
    assert "computes 4.0 ms a step more" in said


def test_a_late_rank_that_does_something_untraced_is_told_to_look_at_its_input():
    first, second = job([STEP, STEP + 4000])
    idle = [e._replace(start=e.start + 4000) if e.name == "compute" else e for e in second.events]
    said = trace_report.explain([first, replace(second, events=tuple(idle))])
    assert "Rank 1 is late" in said
    assert "in no span" in said


def replicas(reading: float, computing: list[float], steps: int = 20) -> Trace:
    """Return the trace of a process whose first thread reads the input of all its replicas."""
    events, meet = [], 0.0
    for step in range(steps):
        start = meet + reading
        events.append(Event("input", "", meet, start, 1))
        meet = start + max(computing)
        for thread, busy in enumerate(computing, 1):
            title = f"all_reduce #{step}"
            # The threads of the other replicas start a little later and end a little later.
            late = 10.0 * (thread - 1)
            events.append(Event("wait", title, start + busy, meet, thread))
            events.append(Event("compute", "", start + late, meet + late, thread))
    names = {n: "MainThread" if n == 1 else f"replicas:{n - 1}" for n in range(1, 9)}
    return Trace("process 1", events=tuple(events), threads=names)


def test_a_late_replica_is_not_blamed_for_the_input_that_replica_0_reads():
    said = explain([replicas(7 * STEP, [1000.0, STEP + 1000])])
    assert "Replica 1 is late" in said
    assert "It computes 10.0 ms a step more than the others" in said
    assert "Input takes 86%" in said
    assert "in no span" not in said


def test_time_of_all_replicas_in_no_span_stays_in_no_span():
    trace = replicas(7 * STEP, [STEP, STEP])
    unread = tuple(event for event in trace.events if event.name != "input")
    said = explain([replace(trace, events=unread)])
    assert "87% of the time is in no span" in said
    assert "Input takes" not in said


def test_a_late_rank_is_found_also_where_others_come_last_to_small_calls():
    ranks = []
    for rank, trace in enumerate(job([STEP, STEP + 4000])):
        more = []
        for event in trace.events:
            if event.name == "reduce":
                start = event.end + (20 if rank == 0 else 0)
                more.append(Event("wait", f"small {event.title}", start, event.end + 30, 1))
                more.append(Event("compute", "", event.end, event.end + 30, 1))
        ranks.append(replace(trace, events=(*trace.events, *more)))
    assert [one.last for one in lateness(ranks)] == [20, 20]
    assert "Rank 1 is late: it comes last to 50% of 40 calls" in trace_report.explain(ranks)


def test_ranks_that_are_late_in_turn_are_not_blamed():
    ranks = []
    first, second = job([STEP, STEP + 3000], steps=10), job([STEP + 3000, STEP], steps=10)
    for early, late in zip(first, second, strict=True):
        moved = [
            Event(e.name, e.title and f"again {e.title}", e.start + 1e6, e.end + 1e6, 1)
            for e in late.events
        ]
        ranks.append(replace(early, events=(*early.events, *moved)))
    assert "None is late: over 20 calls" in trace_report.explain(ranks)


def test_ranks_in_step_are_not_blamed_and_the_wire_is():
    said = trace_report.explain(job([STEP, STEP], reducing=0.0))
    assert "None is late" in said
    assert "Computing takes 100%" in said
    slow = job([STEP, STEP], reducing=STEP)
    for rank, trace in enumerate(slow):
        waits = [e._replace(name="wait") if e.name == "reduce" else e for e in trace.events]
        slow[rank] = replace(trace, events=tuple(waits))
    assert "Waiting takes 50%, but nobody is late" in trace_report.explain(slow)


def test_merged_times_start_at_zero_and_put_a_call_of_all_ranks_at_one_place():
    entries = trace_report.merged(job([STEP, STEP / 2], skews=[0, 7e8]))["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X"]
    assert min(entry["ts"] for entry in spans) == 0
    left = [
        entry["ts"] + entry["dur"]
        for entry in spans
        if entry["name"] == "reduce" and entry["args"]["title"] == "all_reduce #3"
    ]
    assert left[0] == pytest.approx(left[1], abs=0.01)


def test_a_directory_without_traces_says_how_to_get_some(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="NDISTRIBUTE_TRACE"):
        trace_report.report(tmp_path)
    (tmp_path / "trace-0.json").write_text("")
    with pytest.raises(FileNotFoundError, match="no trace with events"):
        trace_report.merge(tmp_path)


def written(directory: Path, rank: int, size: int, wall: float = 0.0, event: str = "wait") -> Path:
    name = f"rank {rank}" if size else "process 1"
    about = {"name": name, "names": _names(size), "host": "h", "clock": "c"}
    head = json.dumps({"otherData": {**about, "wall_minus_clock_us": wall}, "traceEvents": []})
    lines = [head[:-2]]
    for number in range(3):
        entry = {"ph": "X", "name": event, "pid": rank, "tid": 1, "ts": number, "dur": 1.0}
        lines.append(json.dumps(entry) + ",")
    path = directory / f"trace-{rank}.json"
    path.write_text("\n".join(lines))
    return path


def test_a_file_cut_anywhere_is_read_up_to_there(tmp_path: Path):
    path = written(tmp_path, 0, 1)
    text = path.read_text()
    seen = set()
    for end in range(len(text), 0, -7):
        path.write_text(text[:end])
        try:
            seen.add(len(trace_report.read(tmp_path)[0].events))
        except FileNotFoundError:
            seen.add(0)
    assert seen == {0, 1, 2, 3}


def test_ranks_of_an_earlier_larger_run_are_left_out(tmp_path: Path):
    for rank in range(4):
        written(tmp_path, rank, 4, wall=1e6)
    for rank in range(2):
        written(tmp_path, rank, 2, wall=9e6)
    assert [trace.name for trace in trace_report.read(tmp_path)] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    ("wall", "event", "names"),
    [
        (9e6, "compute", ["process 1"]),
        (9e6, "wait", ["rank 0", "rank 1"]),
        (1e6, "compute", ["rank 0", "rank 1"]),
    ],
    ids=["later", "launcher", "earlier"],
)
def test_a_single_process_that_computed_after_a_job_is_the_newest(
    tmp_path: Path, wall: float, event: str, names: list[str]
):
    for rank in range(2):
        written(tmp_path, rank, 2, wall=5e6, event="compute")
    written(tmp_path, 7, 0, wall, event=event)
    assert [trace.name for trace in trace_report.read(tmp_path)] == names
