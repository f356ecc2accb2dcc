"""The cost model returns what it was given, behaves as networks do, and says where it is wrong."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cost_model
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
from benchmarks.hosts_model import HostsModel, Network, predictions
from benchmarks.training import GRADIENT_BYTES

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
