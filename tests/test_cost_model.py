"""The cost model finds what made-up times were made from, and behaves as networks do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cost_model
from benchmarks.cost_model import Job, fits, points, predictions, scaling_errors
from benchmarks.costs import (
    ALGORITHMS,
    NETWORKS,
    Point,
    Rates,
    counts,
    errors,
    fit,
    hierarchical,
    leave_one_out,
    network,
    on_network,
    predict,
    step_time,
)

ROOT = Path(__file__).parents[1]
TRUE = Rates(alpha=20e-6, beta=4e-10, gamma=2e-10)
SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]

rates = st.builds(
    Rates,
    alpha=st.floats(1e-7, 1e-3),
    beta=st.floats(1e-12, 1e-8),
    gamma=st.floats(1e-12, 1e-8),
)
sizes = st.integers(1, 1 << 30)
workers = st.integers(2, 4096)
shared = st.sampled_from(sorted(ALGORITHMS.keys() - {"local"}))


def timed(algorithm: str, n: int, size: int, true: Rates = TRUE, noise: float = 1.0) -> Point:
    return Point(algorithm, n, size, predict(true, algorithm, n, size) * noise)


@given(rates)
def test_rates_are_found_again_where_the_points_tell_them_apart(true):
    made = [timed("ring", 2, size, true) for size in SIZES]
    made += [timed("local", 1, size, true) for size in SIZES]
    found = fit(made)
    assert found.determined
    assert max(errors(found.rates, made)) < 1e-6
    assert found.rates.beta == pytest.approx(true.beta, rel=1e-3)
    assert found.rates.gamma == pytest.approx(true.gamma, rel=1e-6)


def test_one_ring_of_two_can_not_tell_sending_from_adding_and_says_so():
    made = [timed("ring", 2, size) for size in SIZES]
    found = fit(made)
    assert not found.determined
    assert max(errors(found.rates, made)) < 1e-6
    # What it predicts for more workers is right all the same: both grow alike.
    more = [timed("ring", 64, size) for size in SIZES]
    assert max(errors(found.rates, more)) < 1e-6


@given(shared, st.lists(st.floats(0.5, 2.0), min_size=len(SIZES), max_size=len(SIZES)), rates)
def test_no_rate_is_below_zero_whatever_the_noise(algorithm, noise, true):
    made = [
        timed(algorithm, 2, size, true, factor) for size, factor in zip(SIZES, noise, strict=True)
    ]
    found = fit(made).rates
    assert min(found) >= 0
    # Not worse than the rates that the times were made from.
    squares = [sum(error**2 for error in errors(one, made)) for one in (found, true)]
    assert squares[0] <= squares[1] * (1 + 1e-6) + 1e-12


def test_errors_are_those_of_the_noise_and_a_point_left_out_is_judged_by_the_others():
    made = [timed("ring", 2, size) for size in SIZES]
    made += [timed("local", 1, size) for size in SIZES]
    made[2] = made[2]._replace(seconds=made[2].seconds * 1.5)
    left_out = leave_one_out(made)
    assert left_out[2] == pytest.approx(1 / 3, abs=0.01)
    assert left_out[2] > errors(fit(made).rates, made)[2]


def test_too_few_points_are_refused():
    made = [timed("ring", 2, size) for size in SIZES]
    with pytest.raises(ValueError, match="to 2 points: measure at least three sizes"):
        fit(made[:2])
    with pytest.raises(ValueError, match="leaving one of 3 points out"):
        leave_one_out(made[:3])
    with pytest.raises(ValueError, match="above zero"):
        fit([point._replace(seconds=0.0) for point in made])
    with pytest.raises(ValueError, match="ring over tcp: 2 sizes"):
        fits({"ring over tcp": made[:2]})
    with pytest.raises(ValueError, match="no all-reduce between processes"):
        fits({})


def test_unknown_names_say_what_there_is():
    with pytest.raises(ValueError, match="ring"):
        counts("butterfly", 2, 8)
    with pytest.raises(ValueError, match="10GbE"):
        network("token ring")
    with pytest.raises(ValueError, match="below zero"):
        network("-1,2")


@given(rates, shared, workers, sizes, st.integers(0, 1 << 20))
def test_more_bytes_never_take_less_time(true, algorithm, n, size, more):
    assert predict(true, algorithm, n, size) <= predict(true, algorithm, n, size + more)


@given(rates, shared, st.integers(0, 11), sizes)
def test_twice_the_workers_never_take_less_time(true, algorithm, power, size):
    n = 2**power
    assert predict(true, algorithm, n, size) <= predict(true, algorithm, 2 * n, size) * (1 + 1e-12)


@given(rates, sizes)
def test_one_worker_communicates_nothing(true, size):
    assert all(predict(true, name, 1, size) == 0 for name in ALGORITHMS if name != "local")
    assert hierarchical(true, true, 1, 8, size) == 0


@given(rates, workers)
def test_doubling_wins_for_a_few_bytes_and_the_ring_for_many(true, n):
    n = 1 << (n.bit_length() - 1)
    assert predict(true, "recursive_doubling", n, 1) <= predict(true, "ring", n, 1) * (1 + 1e-9)
    if n > 2:
        many = 1 << 60
        assert predict(true, "ring", n, many) < predict(true, "recursive_doubling", n, many)


@given(rates)
def test_a_faster_network_is_never_slower_and_never_beats_the_transport(true):
    size = 100 << 20
    order = [on_network(true, name) for name in ("10GbE", "25GbE", "100Gb-IB", "400Gb-IB")]
    times = [predict(one, "ring", 64, size) for one in order]
    assert times == sorted(times, reverse=True)
    assert all(one.beta >= true.beta for one in order)
    assert set(NETWORKS) == {"10GbE", "25GbE", "100Gb-IB", "400Gb-IB"}


def test_communication_hides_behind_at_most_what_there_is_to_hide_it():
    assert step_time(1.0, 0.5) == 1.5
    assert step_time(1.0, 0.5, overlap=0.25) == 1.25
    assert step_time(1.0, 0.5, overlap=1.0) == 1.0


def test_predictions_reach_4096_workers_and_scale_as_they_must():
    inside = Rates(alpha=1e-6, beta=1e-11, gamma=1e-11)
    rows = predictions(Job(100 << 20, 0.1, "100Gb-IB", per_host=8), inside, TRUE)
    assert [row["workers"] for row in rows] == [2**power for power in range(13)]
    assert rows[0]["weak_efficiency"] == rows[0]["strong_speedup"] == 1
    efficiency = [row["weak_efficiency"] for row in rows]
    assert all(0 < value <= 1 for value in efficiency)
    assert all(row["strong_speedup"] <= row["workers"] for row in rows)
    assert all(row["strong_step_seconds"] <= row["weak_step_seconds"] for row in rows)
    assert rows[-1]["algorithm"] == "hierarchical"


def written() -> dict[str, Any]:
    made = {
        "ring over tcp": [timed("ring", 2, size) for size in SIZES],
        "shared memory, reduce_update": [timed("shared_memory", 2, size) for size in SIZES],
        "local": [timed("local", 1, size) for size in SIZES],
    }
    entries = [
        {
            "side": "ours",
            "name": name,
            "algorithm": point.algorithm,
            "processes": point.workers,
            "columns": {"bytes": point.size},
            "figure": {"median": point.seconds * 1e6},
        }
        for name, some in made.items()
        for point in some
    ]
    other = {"side": "gloo", "name": "all_reduce", "columns": {}, "figure": {}}
    return {"results": [*entries, other]}


def step(workers: int, batch: int, seconds: float) -> dict[str, Any]:
    return {
        "side": "ours",
        "group": "batch 32, strong",
        "workers": workers,
        "single_threaded": True,
        "global_batch": batch,
        "gradient_bytes": 1 << 20,
        "figure": {"median": batch / seconds},
    }


def test_a_step_of_two_workers_is_predicted_from_that_of_one():
    half = 0.004 / 2 + predict(TRUE, "shared_memory", 2, 1 << 20)
    rows = scaling_errors({"results": [step(1, 32, 0.004), step(2, 32, half)]}, TRUE)
    assert [row["workers"] for row in rows] == [2]
    assert rows[0]["relative_error"] == pytest.approx(0, abs=1e-9)


def test_the_command_fits_predicts_and_writes(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path, scaling = tmp_path / "all_reduce.json", tmp_path / "scaling.json"
    path.write_text(json.dumps(written()))
    scaling.write_text(json.dumps({"results": [step(1, 32, 0.004), step(2, 32, 0.003)]}))
    command = [sys.executable, "-m", "benchmarks.cost_model", "--fit", str(path)]
    command += ["--scaling", str(scaling), "--out", str(tmp_path)]
    command += ["--network", "25GbE", "--workers-per-host", "4"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ring over tcp" in done.stdout
    assert "| 4096" in done.stdout
    content = json.loads((tmp_path / "cost_model.json").read_text())
    fitted = content["fits"]["ring over tcp"]
    assert fitted["alpha"] == pytest.approx(TRUE.alpha, rel=1e-6)
    assert fitted["error"]["max"] < 1e-6
    assert fitted["leave_one_out"]["max"] < 1e-6
    assert len(fitted["error"]["each"]) == len(SIZES)
    assert (tmp_path / "cost_model.png").stat().st_size > 10_000


def test_the_command_says_which_contenders_there_are(tmp_path: Path, capsys):
    path = tmp_path / "all_reduce.json"
    path.write_text(json.dumps(written()))
    with pytest.raises(SystemExit):
        cost_model.main(["--fit", str(path), "--wire", "carrier pigeon"])
    assert "ring over tcp" in capsys.readouterr().err


def test_other_contenders_are_not_fitted():
    assert set(points(written())) == {"ring over tcp", "shared memory, reduce_update", "local"}
