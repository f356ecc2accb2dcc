"""The benchmarks run from end to end, and the cost model returns what it was given.

What they measure is no test's business. The model behaves as networks do, and says where it errs.
"""

import json
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import all_reduce, cost_model, models, report
from benchmarks.cost_model import (
    INSIDE,
    NETWORKS,
    WIRE,
    between_hosts,
    checks,
    curves,
    speedups,
    time_of,
)
from benchmarks.harness import JAX, MPICH, OURS, TF, TORCH, Benchmark, Contender, Group, measure
from benchmarks.hosts_model import HostsModel, Network, predictions
from benchmarks.run_all import NAMES
from benchmarks.training import GRADIENT_BYTES
from tests.hosts.rig import skip_reason
from tests.processes import ROOT, python_says

QUICK = Namespace(quick=True, repetitions=1, only="", peers=False, cores=2, busy=1)
LOCAL = Contender("local", OURS, "all_reduce:in_steps", {"size": 4096, "calls": 1, "replicas": 2})
BROKEN = Contender("broken", OURS, "training:ours", {"batch": 1})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_benchmarks_run_and_write_their_results(tmp_path):
    python_says("-m", "benchmarks.run_all", "--quick", "--out", tmp_path, timeout=280)
    for name in NAMES:
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert written["results"]
        assert written["failures"] == []
    page = (tmp_path / "comparison.md").read_text()
    for part in ("run of an empty step", "| 4096 ", "staleness: updates", "max_staleness=4"):
        assert part in page


def test_calls_are_counted():
    said = python_says("-m", "benchmarks.overhead", "--calls")
    rows = [[cell.strip() for cell in line.split("|")] for line in said.splitlines()]
    assert all(int(calls) > 0 for calls in rows[2][2:4])
    assert rows[4][1] == "threads when idle"


def test_faults_are_measured_with_the_jobs_of_the_fault_tests(tmp_path):
    only = ("shared", "workers", "servers")
    python_says("-m", "benchmarks.faults", "--quick", "--out", tmp_path / "f.json", "--only", *only)
    rows = {row["what"]: row for row in json.loads((tmp_path / "f.json").read_text())["rows"]}
    assert rows["one worker raises"]["errors"] == ["WorkerLostError"]
    assert rows["one worker leaves a call out"]["errors"] == ["CollectiveMismatchError"]
    assert rows["one worker is late"]["errors"] == ["CollectiveTimeoutError"]
    assert rows["updates made twice"]["all"] == [0]


def test_a_benchmark_of_elastic_workers_notices_a_sample_that_is_left_out(tmp_path):
    python_says(
        "-m", "benchmarks.elastic", "--quick", "--out", tmp_path / "e.json", "--only", "control"
    )
    (row,) = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert row["wrong"] == []
    assert any("1 samples were lost" in fault for fault in row["said"])


def test_steps_of_pytorch_compute_the_same_as_those_of_ddp(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "t.json"
    python_says("-m", "benchmarks.torch_workers", "--quick", "--peers", "--out", path)
    written = json.loads(path.read_text())
    assert written["failures"] == []
    assert len(written["results"]) == 8


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
    said = python_says("-m", "benchmarks.all_reduce", *words)
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
            (JAX, "Keras", [{"grown_mb": 60.0}], {"figure": {"median": 7000.0}}),
            (TORCH, "DDP", [{"grown_mb": 20.0}] * 2, {"figure": {"median": 6000.0}}),
        )
    ]
    said = models.conclude(entries).splitlines()
    cells = [cell.strip() for cell in said[-1].split("|")[1:-1]]
    assert cells == ["MLP, MirroredStrategy", *"4 9 7 6 1.50 3 50 60 40".split()]


SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]
CURVE = [(float(size), 20e-6 + size * 4e-10) for size in SIZES]

sizes = st.floats(1, 1 << 30)


@given(sizes, st.floats(0, 1 << 20), st.integers(0, 11), st.sampled_from(sorted(NETWORKS)))
def test_more_bytes_or_hosts_never_take_less_time(size, more, power, network):
    assert time_of(CURVE, size) <= time_of(CURVE, size + more) * (1 + 1e-9)
    one, few, many = (
        between_hosts(CURVE, network, hosts, size) for hosts in (1, 2**power, 2 ** (power + 1))
    )
    assert one == 0
    assert few <= many * (1 + 1e-9)


def test_what_was_measured_is_returned_and_what_lies_between_is_between():
    assert [time_of(CURVE, size) for size, _ in CURVE] == pytest.approx([s for _, s in CURVE])
    assert CURVE[1][1] < time_of(CURVE, 128 << 10) < CURVE[2][1]
    assert time_of(CURVE, 512 << 20) == pytest.approx(2 * CURVE[-1][1])
    with pytest.raises(ValueError, match="1 size"):
        time_of(CURVE[:1], 1.0)


def test_a_faster_network_is_never_slower_and_curves_scale_as_they_must():
    times = [between_hosts(CURVE, name, 64, 1e8) for name in NETWORKS]
    assert times == sorted(times, reverse=True)
    assert between_hosts(CURVE, "2e-6,8e-11", 64, 1e8) == times[2]
    rows = curves(1e8, 0.1, CURVE, CURVE, "100Gb-IB", 8)
    assert [row["workers"] for row in rows] == [2**power for power in range(13)]
    assert rows[0]["weak_efficiency"] == rows[0]["strong_speedup"] == 1
    assert all(0 < row["weak_efficiency"] <= 1 for row in rows)
    assert all(row["strong_speedup"] <= row["workers"] for row in rows)


OF_TWO = HostsModel(
    SIZES, [20e-6 + size * 9e-10 for size in SIZES], [size * 2e-9 for size in SIZES]
)
networks = st.builds(Network, st.floats(0, 0.01), st.floats(1e-12, 1e-7))


@given(sizes, st.integers(2, 9), networks, st.integers(1, 8))
def test_hosts_that_share_cores_or_have_more_delay_or_a_slower_wire_are_never_faster(
    size, hosts, network, cores
):
    took = OF_TWO.predict(hosts, size, network)
    for worse in (
        replace(network, cores=cores),
        replace(network, delay=network.delay + 0.001),
        replace(network, byte=2 * network.byte),
    ):
        assert took <= OF_TWO.predict(hosts, size, worse)
    shared = [OF_TWO.predict(hosts, size, replace(network, cores=n)) for n in (1, cores, 64)]
    assert shared == sorted(shared, reverse=True)
    assert OF_TWO.predict(1, size, network) == 0


def test_the_wire_carries_headers_and_the_work_of_all_hosts_is_done_by_the_cores_they_share():
    size = float(64 << 20)
    slow = OF_TWO.predict(4, size, Network(0.0, 1e-8, cores=2))
    assert slow == pytest.approx(1.5 * size * 1e-8 * 1538 / 1448, rel=1e-3)
    fast = Network(0.0, 1e-11, cores=2)
    assert OF_TWO.predict(4, size, fast) == pytest.approx(3 * size * 2e-9 / 2)
    alone = OF_TWO.predict(4, size, replace(fast, cores=None))
    assert alone == pytest.approx(1.5 * size * 9e-10, rel=1e-3)
    # The transport's time over loopback leaves out the processor's work for frames.
    times = [between_hosts(CURVE, "1e-6,1e-12", 4, size, work) for work in (0.0, 1e-9)]
    assert times == pytest.approx([1.5 * size * 4e-10, 1.5 * size * 1e-9], rel=1e-2)


def measured_between(hosts, rate, size, seconds, work):
    what = {"side": "ours", "name": "ring over tcp", "hosts": hosts, "rate_mbit": rate, "cores": 2}
    what |= {"bytes": size, "delay_ms": 0.1, "switched": rate < 2000}
    what |= {"group": f"{hosts} hosts, {rate}, {size}", "figure": {"median": seconds * 1e6}}
    return {**what, "processor": {"own": work, "machine": 2 * work}}


def test_what_two_hosts_took_on_the_fastest_network_predicts_the_others(tmp_path, capsys):
    small, large = 4096, 64 << 20
    entries = [
        measured_between(2, 10000.0, large, 0.06, 0.12),
        measured_between(2, 10000.0, small, 0.0001, 0.0001),
        measured_between(2, 1000.0, small, 0.0003, 0.0003),
        measured_between(2, 1000.0, large, 0.571, 0.2),
        measured_between(4, 10000.0, large, 0.18, 0.36),
        measured_between(4, 1000.0, small, 0.0012, 0.0003),
        measured_between(3, 10000.0, small, 0.0005, 0.0009),
        measured_between(4, 10000.0, small, 0.0006, 0.0012),
    ]
    rows = {name: (took, predicted) for name, took, predicted in predictions(entries)}
    assert [float(name.split()[0]) for name in rows] == [2, 4, 4, 4]
    for took, predicted in rows.values():
        assert predicted == pytest.approx(took, rel=0.01)
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"results": entries}))
    cost_model.main(["--hosts-results", str(path)])
    said = capsys.readouterr().out
    assert said.count("hosts, ") == 4
    assert "not predicted" not in said
    assert predictions(entries[3:]) == []


def trained(workers, batch, seconds):
    what = {"side": "ours", "group": f"batch {batch}", "threads": 1, "workers": workers}
    return {**what, "batch": batch, "figure": {"median": batch / seconds}}


def written(directory, third):
    pair = {"side": "ours", "group": "2 processes"}
    results = [
        {**pair, "name": name, "bytes": size, "figure": {"median": seconds * 1e6}}
        for name in (INSIDE, WIRE)
        for size, seconds in CURVE
    ]
    (directory / "all_reduce.json").write_text(json.dumps({"results": results}))
    step = 0.002 + time_of(CURVE, GRADIENT_BYTES)
    steps = [trained(1, 32, 0.002), trained(1, 64, 0.004), trained(2, 64, step)]
    steps.append(trained(2, 32, third))
    (directory / "training.json").write_text(json.dumps({"results": steps}))


def test_steps_of_two_workers_are_predicted_and_what_is_not_is_said(tmp_path, capsys):
    written(tmp_path, third=1.0)
    rows = checks(json.loads((tmp_path / "training.json").read_text()), CURVE)
    assert rows[0][1] == pytest.approx(rows[0][2])
    cost_model.main(["--results", str(tmp_path), "--network", "25GbE"])
    said = capsys.readouterr().out
    (wrong,) = (line for line in said.splitlines() if line.startswith("| 2 workers, batch 32"))
    assert "not predicted" in wrong
    (right,) = (line for line in said.splitlines() if line.startswith("| 2 workers, batch 64"))
    assert "not predicted" not in right
    assert "| 4096 " in said
    assert "| 1       | 1.00, measured 1.00" in said
    assert len(json.loads((tmp_path / "cost_model.json").read_text())["curves"]) == 13


def test_speedups_of_one_to_eight_workers_stand_beside_those_that_were_measured(tmp_path):
    written(tmp_path, third=1.0)
    rows = speedups(json.loads((tmp_path / "training.json").read_text()), CURVE)
    found = {(row["workers"], row["batch"]): row for row in rows}
    assert found[1, 64]["predicted"] == found[1, 64]["measured"] == 1.0
    assert found[2, 64]["predicted"] == pytest.approx(found[2, 64]["measured"])
    assert found[8, 64]["measured"] is None
    took = 0.0005 + 4 * time_of(CURVE, GRADIENT_BYTES)  # Memory's bandwidth is shared by eight.
    assert found[8, 64]["predicted"] == pytest.approx(0.004 / took)


def test_the_command_says_what_it_needs(tmp_path, capsys):
    (tmp_path / "all_reduce.json").write_text('{"results": []}')
    with pytest.raises(SystemExit):
        cost_model.main(["--results", str(tmp_path)])
    assert "run benchmarks.all_reduce and benchmarks.training first" in capsys.readouterr().err
