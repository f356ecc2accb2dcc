"""Traces that real processes write, and what is left of them when one is killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ndistribute import timeline, trace_report

PROGRAM = """
import sys, threading
from ndistribute import timeline

rank, size, steps, last = map(int, sys.argv[1:])
timeline.identify(f"rank {rank}", [f"rank {k}" for k in range(size)])
for step in range(1, steps + 1):
    with timeline.span("compute"):
        sum(range(20_000))
    with timeline.span("wait", f"all_reduce #{step}"):
        pass
thread = threading.Thread(target=lambda: timeline.span("pack").__enter__(), name="idle")
thread.start()
thread.join(40)
if last:
    timeline.flush()
    print("flushed", flush=True)
    sys.stdin.read()
"""


def start(directory: Path, *arguments: int, program: str = PROGRAM) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "NDISTRIBUTE_TRACE": str(directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    with process:
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_each_rank_writes_a_whole_file_when_it_ends(tmp_path: Path):
    ranks = [start(tmp_path, rank, 2, 5, 0) for rank in range(2)]
    for process in ranks:
        finish(process)
    for rank in range(2):
        entries = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        spans = [entry["name"] for entry in entries if entry["ph"] == "X"]
        assert spans == ["compute", "wait"] * 5
        names = {
            (e["name"], e["args"]["name"].partition(" on ")[0]) for e in entries if e["ph"] == "M"
        }
        assert names == {("process_name", f"rank {rank}"), ("thread_name", "MainThread")}
    merged = json.loads(trace_report.merge(tmp_path).read_text())
    assert merged["otherData"]["clock_offsets_us"] == {"rank 0": 0.0, "rank 1": 0.0}
    assert "2 processes" in trace_report.report(tmp_path)


def test_a_killed_process_leaves_what_it_had_flushed(tmp_path: Path):
    process = start(tmp_path, 0, 1, 3, 1)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flushed\n"
        os.kill(process.pid, signal.SIGKILL)
    assert len(trace_report.read(tmp_path)[0].events) == 6


def test_without_a_directory_nothing_is_recorded_and_a_span_costs_three_calls():
    assert not timeline.enabled()
    timeline.identify("rank 0", ["rank 0"])
    timeline.flush()
    assert timeline.recorded(lambda *_: ("wait", ""))(len) is len
    assert timeline.span("wait") is timeline.span("compute", "step #1")

    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(event))
    with timeline.span("wait", "all_reduce #1"):
        pass
    sys.setprofile(None)
    assert called.count("call") == 3, called  # It is made, entered and left.


def test_many_threads_lose_no_event(tmp_path: Path):
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait(40)
        for step in range(3000):
            recorder.add("compute", f"{number}.{step}", step, step + 1)

    with contextlib.closing(timeline.Recorder(tmp_path)) as recorder:
        threads = [threading.Thread(target=work, args=(n,), name=f"replica {n}") for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    (trace,) = trace_report.read(tmp_path)
    titles = {event.title for event in trace.events}
    assert titles == {f"{n}.{step}" for n in range(4) for step in range(3000)}
    assert set(trace.threads.values()) == {f"replica {n}" for n in range(4)}


def test_the_file_is_whole_after_each_flush_and_titles_may_hold_anything(tmp_path: Path):
    with contextlib.closing(timeline.Recorder(tmp_path)) as recorder:
        for number, title in enumerate(['quote "', "line\nbreak", "é #1"], start=1):
            recorder.add("wait", title, 0, 10)
            recorder.flush()
            (path,) = tmp_path.glob("trace-*.json")
            events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
            assert len(events) == number
            assert events[-1]["args"]["title"] == title


def test_those_who_are_left_after_a_recovery_are_reported_together(tmp_path: Path):
    recorders = {rank: timeline.Recorder(tmp_path) for rank in range(3)}
    for second, survivors in enumerate(([0, 1, 2], [0, 2], [2])):
        start = second * 10**9
        names = [f"rank {rank}" for rank, _ in enumerate(survivors)]
        for rank, old in enumerate(survivors):
            recorders[old].identify(f"rank {rank}", names)
            recorders[old].add("wait", f"{old} of {len(names)}", start, start + 1)
            recorders[old].flush()
        found = trace_report.read(tmp_path)
        assert [trace.name for trace in found] == names
        titles = [[event.title for event in trace.events] for trace in found]
        assert titles == [[f"{old} of {len(names)}"] for old in survivors]
    for recorder in recorders.values():
        recorder.close()
    assert len(list(tmp_path.iterdir())) == 6  # Those of earlier jobs are still there.


def test_an_elastic_worker_keeps_its_file_when_its_rank_changes(tmp_path: Path):
    recorder = timeline.Recorder(tmp_path)
    recorder.identify("worker 1", ["worker 0", "worker 1"], settles=True)
    for rank in (1, 0):
        recorder.identify(f"rank {rank}", ["rank 0", "rank 1"])
        recorder.add("wait", "", rank, 2)
        recorder.flush()
    recorder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["trace-worker-1.json"]
    assert len(trace_report.read(tmp_path)[0].events) == 2


def test_a_process_that_starts_again_in_its_job_keeps_what_it_had_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for job, files in (("a", 1), ("a", 2), ("b", 2), ("b", 2)):
        monkeypatch.setenv("NDISTRIBUTE_JOB_ID", job)
        with contextlib.closing(timeline.Recorder(tmp_path)) as recorder:
            recorder.identify("rank 0", ["rank 0"])
            recorder.add("compute", "", 0, 1)
        assert len(list(tmp_path.iterdir())) == files
    assert len(trace_report.read(tmp_path)) == 1


def test_a_file_that_is_full_counts_what_it_leaves_out(tmp_path: Path):
    with contextlib.closing(timeline.Recorder(tmp_path, max_bytes=2000)) as recorder:
        for _ in range(100):
            recorder.add("wait", "all_reduce #1", 0, 1)
            recorder.flush()
    (path,) = tmp_path.glob("trace-*.json")
    assert path.stat().st_size < 4000
    entries = json.loads(path.read_text())["traceEvents"]
    kept = sum(entry["ph"] == "X" for entry in entries)
    (dropped,) = [e["args"]["name"] for e in entries if e["name"] == "dropped_events"]
    assert kept + dropped == 100


def test_a_forked_child_writes_a_file_of_its_own(tmp_path: Path):
    program = (
        "import os\nfrom ndistribute import timeline\ntimeline.identify('rank 0', ['rank 0'])\n"
        "with timeline.span('compute', 'parent'): pass\n"
        "timeline.flush()\n"
        "with timeline.span('compute', 'parent'): pass\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    with timeline.span('compute', 'child'): pass\n"
        "    timeline.flush()\n    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    finish(start(tmp_path, program=program))
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(found) == 2
    assert found.pop("trace-0.json").count('"parent"') == 2
    (text,) = found.values()
    assert text.count('"child"') == 1
    assert '"parent"' not in text


def test_a_trace_that_can_not_be_written_is_logged_once_and_harms_nobody(tmp_path: Path, caplog):
    (tmp_path / "file").write_text("in the way")
    recorder = timeline.Recorder(tmp_path / "file" / "traces")
    for _ in range(2):
        recorder.add("wait", "", 0, 1)
        recorder.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a write failed" in caplog.text
