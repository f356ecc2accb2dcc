"""The benchmarks run from end to end; what they measure is no test's business."""

import json
import signal
import subprocess
import sys
from argparse import Namespace

import pytest

from benchmarks import all_reduce, models, report
from benchmarks.harness import MPICH, OURS, TF, TORCH, Benchmark, Contender, Group, measure
from benchmarks.run_all import NAMES
from tests.hosts.rig import skip_reason
from tests.processes import ROOT

QUICK = Namespace(quick=True, repetitions=1, only="", peers=False, cores=2, busy=1)
LOCAL = Contender("local", OURS, "all_reduce:in_steps", {"size": 4096, "calls": 1, "replicas": 2})
BROKEN = Contender("broken", OURS, "training:ours", {"batch": 1})


def command(*words, timeout=100.0):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_benchmarks_run_and_write_their_results(tmp_path):
    command("benchmarks.run_all", "--quick", "--out", tmp_path, timeout=280)
    for name in NAMES:
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert written["results"]
        assert written["failures"] == []
    page = (tmp_path / "comparison.md").read_text()
    for part in ("run of an empty step", "| 4096 ", "staleness: updates", "max_staleness=4"):
        assert part in page


def test_calls_are_counted():
    said = command("benchmarks.overhead", "--calls")
    rows = [[cell.strip() for cell in line.split("|")] for line in said.splitlines()]
    assert all(int(calls) > 0 for calls in rows[2][2:4])
    assert rows[4][1] == "threads when idle"


def test_each_worker_is_one_more_connection_and_thread_of_a_server():
    said = command("benchmarks.servers", "--limits", "--quick")
    servers = [line.split("|") for line in said.splitlines() if "a ps" in line]
    few, more = (
        [float(cell) for cell in line[-3:-1]] for line in servers if "2 servers" in line[1]
    )
    assert [b - a for a, b in zip(few, more, strict=True)] == [1, 1]


def test_faults_are_measured_with_the_jobs_of_the_fault_tests(tmp_path):
    only = ("shared", "workers", "servers")
    command("benchmarks.faults", "--quick", "--out", tmp_path / "f.json", "--only", *only)
    rows = {row["what"]: row for row in json.loads((tmp_path / "f.json").read_text())["rows"]}
    assert rows["one worker raises"]["errors"] == ["WorkerLostError"]
    assert rows["one worker leaves a call out"]["errors"] == ["CollectiveMismatchError"]
    assert rows["one worker is late"]["errors"] == ["CollectiveTimeoutError"]
    assert rows["updates made twice"]["all"] == [0]


def of(*groups):
    return Benchmark("made_up", "Made up", "us", lambda quick: list(groups), rate=False)


def test_a_contender_that_fails_is_reported_and_the_others_are_measured():
    groups = [Group(f"group {number}", (BROKEN, LOCAL)) for number in range(3)]
    saved = []
    written = measure(of(*groups), QUICK, lambda one: saved.append(len(one["results"])))
    assert [entry["name"] for entry in written["results"]] == ["local"] * 3
    # It gets a fresh process, but not for ever.
    assert [failure["group"] for failure in written["failures"]] == ["group 0", "group 1"]
    assert "FAILED: group 0, ours: broken: TypeError" in report.table(written)
    assert saved == [1, 2, 3]


def test_a_side_that_is_not_there_is_left_out():
    peer = Contender("peer", TF, "training:tensorflow", {})
    written = measure(of(Group("group", (peer, LOCAL))), QUICK)
    assert [entry["name"] for entry in written["results"]] == ["local"]
    assert written["failures"] == []


def test_contenders_that_compute_different_things_are_not_compared():
    other = Contender("other", OURS, "training:ours", {"batch": 32, "strategy": "one"})
    with pytest.raises(RuntimeError, match="compute different things"):
        measure(of(Group("group", (other, LOCAL))), QUICK)


def test_a_benchmark_that_is_told_to_end_leaves_no_process():
    words = [sys.executable, "-m", "benchmarks.all_reduce", "--only", "processes, 4 KiB"]
    with subprocess.Popen(
        [*words, "--repetitions", "1000"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        try:
            # What slows this machine may be said first.
            assert any("reduce_update" in line for line in running.stderr)
            assert "all_reduce" in running.stderr.readline()  # Now processes are at work.
            running.terminate()
            running.communicate(timeout=60)
        finally:
            running.kill()
    # What it leaves behind is found by the check that every test ends with.
    assert running.returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-")
def test_all_reduces_between_hosts_are_measured_beside_the_limit(tmp_path):
    words = ("--hosts", "2", "--quick", "--only", "10 Gbit", "--out", tmp_path / "h.json")
    said = command("benchmarks.all_reduce", *words)
    assert "| 2 hosts at 10 Gbit/s, 4 KiB | 0.00328 |" in said
    written = json.loads((tmp_path / "h.json").read_text())
    (entry,) = written["results"]
    assert written["failures"] == []
    assert (entry["hosts"], entry["check"]) == (2, 1.0)


@pytest.mark.parametrize("count", [1, 100, all_reduce.PERIOD, 3 * all_reduce.PERIOD + 5])
def test_the_check_sees_one_wrong_element(count):
    total = all_reduce.contribution(0, count) + all_reduce.contribution(1, count)
    assert all_reduce.check(total, 2) == 1.0
    total[-1] += 0.5
    assert all_reduce.check(total, 2) == pytest.approx(1.5, abs=1e-6)


def test_all_reduces_are_compared_by_the_geometric_mean_of_the_large_sizes():
    ours = {4096: 30.0, 1 << 20: 10.0, 1 << 22: 10.0}
    theirs = {4096: 20.0, 1 << 20: 20.0, 1 << 22: 80.0, 1 << 24: 1.0}
    entries = [
        {"side": side, "name": name, "bytes": size, "figure": {"median": time}}
        for side, name, times in ((OURS, "reduce_update", ours), (MPICH, "Allreduce", theirs))
        for size, time in times.items()
    ]
    said = all_reduce.conclude([{**one, "group": "2 processes"} for one in entries]).splitlines()
    cells = [cell.strip() for cell in said[-1].split("|")[1:-1]]
    assert cells == ["reduce_update", "MPICH: Allreduce", "4", "2", "1.5"]


def test_models_are_compared_with_the_better_peer_and_their_memory_is_that_of_all_processes():
    entries = [
        {"side": side, "name": name, "group": "MLP: two replicas", "told": told, **figure}
        for side, name, told, figure in (
            (OURS, "MirroredStrategy", [{"grown_mb": 3.0}], {"figure": {"median": 4000.0}}),
            (TF, "Keras", [{"grown_mb": 50.0}], {"figure": {"median": 9000.0}}),
            (TORCH, "DDP", [{"grown_mb": 20.0}] * 2, {"figure": {"median": 6000.0}}),
        )
    ]
    said = models.conclude(entries).splitlines()
    cells = [cell.strip() for cell in said[-1].split("|")[1:-1]]
    assert cells == ["MLP, MirroredStrategy", "4", "9", "6", "1.50", "3", "50", "40"]
