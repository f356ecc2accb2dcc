"""The benchmarks run from end to end; what they measure is no test's business."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import all_reduce, report, scaling
from benchmarks.case import MPICH, OURS, PEER, TORCH, Benchmark, Contender, Group
from benchmarks.harness import MAX_FAILURES, Settings, measure
from benchmarks.operands import PERIOD, contribution, error_of
from benchmarks.run_all import NAMES
from benchmarks.team import Team
from benchmarks.workers import WorkerError
from tests.processes import AT_ONCE

ROOT = Path(__file__).parents[1]
QUICK = Settings(1, 1e-4, quick=True, cores=2, pythons={OURS: sys.executable})
LOCAL = Contender("local", OURS, "all_reduce_ours:local", {"size": 4096}, blas_threads=1)
BROKEN = Contender("broken", OURS, "mlp:ours", {"batch": 1}, process="broken")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_benchmarks_run_and_write_their_results(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run_all", "--quick", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert written["results"]
        assert written["failures"] == []
    for entry in json.loads((tmp_path / "all_reduce.json").read_text())["results"]:
        assert float(entry["columns"]["error"]) < 1e-6
    assert json.loads((tmp_path / "machine.json").read_text())["ours"]
    assert len(json.loads((tmp_path / "cost_model.json").read_text())["predictions"]) == 13
    assert "run of an empty step" in (tmp_path / "comparison.md").read_text()


def of(*groups: Group) -> Benchmark:
    return Benchmark("made_up", "Made up", "us", lambda quick, cores: list(groups), rate=False)


def test_a_contender_that_fails_is_reported_and_the_others_are_measured() -> None:
    groups = [Group(f"group {number}", (BROKEN, LOCAL)) for number in range(3)]
    saved: list[dict[str, Any]] = []
    written = measure(of(*groups), QUICK, saved.append)
    assert [entry["name"] for entry in written["results"]] == ["local"] * 3
    # It gets a fresh process, but not for ever.
    assert [failure["group"] for failure in written["failures"]] == ["group 0", "group 1"]
    assert len(written["failures"]) == MAX_FAILURES
    assert "FAILED: group 0, ours: broken: TypeError" in report.table(written)
    assert [len(one["results"]) for one in saved] == [1, 2, 3]


def test_a_side_or_a_package_that_is_not_there_is_left_out() -> None:
    absent = Contender("absent", OURS, "mlp:ours", {}, needs="no-such-package")
    peer = Contender("peer", PEER, "mlp:tensorflow", {})
    written = measure(of(Group("group", (absent, peer, LOCAL))), QUICK)
    assert [entry["name"] for entry in written["results"]] == ["local"]
    assert written["failures"] == []


def test_a_benchmark_that_is_told_to_end_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.all_reduce", "--only", "processes, 4 KiB"]
    with subprocess.Popen(
        [*command, "--repetitions", "1000"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        assert "reduce_update" in running.stderr.readline()
        assert "all_reduce" in running.stderr.readline()  # Now a team is at work.
        running.terminate()
        running.communicate(timeout=30)
    # What it leaves behind is found by the check that every test ends with.
    assert running.returncode == 128 + signal.SIGTERM


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team(sys.executable, 2, "inherited", 2, 1)
    yield made
    made.kill()
    made.close()


def test_a_team_answers_as_one(team: Team) -> None:
    team.ask(
        do="open",
        case="0",
        module="benchmarks.all_reduce_ours",
        maker="all_reduce",
        params={"size": 1 << 20, "way": "shared"},
    )
    ran = team.ask(do="run", case="0", steps=3)
    assert set(ran) == {"seconds", "own_cpu", "others_cpu"}
    with pytest.raises(WorkerError, match=r"rank 0:\n.*Traceback"):
        team.ask(do="dance")


def test_a_team_that_loses_a_process_ends_at_once(team: Team) -> None:
    os.kill(team.pids[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError):
        team.ask(do="describe", packages=["numpy"])
    assert time.monotonic() - start < AT_ONCE


def test_a_process_that_does_not_answer_is_not_waited_for_beyond_the_deadline(team: Team) -> None:
    os.kill(team.pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerError, match="no answer in time"):
        team.ask(do="describe", packages=["numpy"], timeout=0.3)


def test_a_process_that_does_not_start_is_said_with_its_last_words(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such thing >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(WorkerError, match="no such thing"):
        Team(str(python), 2, "tcp", 2, 1)


@pytest.mark.parametrize("count", [1, 100, PERIOD, 3 * PERIOD + 5])
def test_the_error_column_sees_one_wrong_element(count: int) -> None:
    total = contribution(0, count) + contribution(1, count)
    assert error_of(total, 2) < 1e-6
    total[-1] += 0.5
    assert error_of(total, 2) == pytest.approx(0.5, abs=1e-6)


def timed(side: str, name: str, times: dict[int, float]) -> list[dict[str, Any]]:
    return [
        {
            "group": f"2 processes, {size}",
            "processes": 2,
            "side": side,
            "name": name,
            "columns": {"bytes": size},
            "figure": {"median": time},
        }
        for size, time in times.items()
    ]


def test_all_reduces_are_compared_by_the_geometric_mean_of_the_large_sizes() -> None:
    ours = timed(OURS, "shared memory, reduce_update", {4096: 30.0, 1 << 20: 10.0, 1 << 22: 10.0})
    theirs = timed(MPICH, "Allreduce", {4096: 20.0, 1 << 20: 20.0, 1 << 22: 80.0, 1 << 24: 1.0})
    (row,) = all_reduce.conclude([*ours, *theirs])
    assert list(row.values())[2:] == [
        pytest.approx(4.0),
        2.0,
        1.5,
        "3.0, 4 KiB 1.5",
        "yes, yes",
    ]
    slow = timed(OURS, "ring over mpi", {1 << 20: 10.0, 1 << 22: 160.0})
    (row,) = all_reduce.conclude([*slow, *theirs])
    assert list(row.values())[2:] == [pytest.approx(1.0), 0.5, "-", "least 1.0", "no"]


def trained(side: str, workers: int, batch: int, figure: float, weak: bool) -> dict[str, Any]:
    return {
        "group": f"batch {batch}, {weak}",
        "side": side,
        "name": "one",
        "workers": workers,
        "batch": batch,
        "weak": weak,
        "figure": {"median": figure},
    }


def test_two_workers_are_compared_within_their_group() -> None:
    entries = [
        trained(OURS, 1, 2048, 100.0, False),
        trained(OURS, 2, 2048, 180.0, False),
        trained(TORCH, 2, 2048, 150.0, False),
        trained(OURS, 1, 2048, 100.0, True),
        trained(OURS, 2, 2048, 150.0, True),
    ]
    rows = [list(row.values())[2:] for row in scaling.conclude(entries)]
    assert rows == [[1.8, 1.7, "yes"], [1.2, 1.5, "no"], [1.5, "-", "-"]]
