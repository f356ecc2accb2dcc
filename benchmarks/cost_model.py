"""Predict the time of a training step on up to 4096 workers from what was measured on this host.

Fits the model of `benchmarks.costs` to the JSON of `benchmarks.all_reduce`, says how well it fits,
and applies it to a network. Where `benchmarks.scaling` was run, its steps are predicted too, and
the error on them is shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.costs import (
    ALGORITHMS,
    Fit,
    Point,
    Rates,
    best,
    described,
    errors,
    fit,
    hierarchical,
    leave_one_out,
    on_network,
    predict,
    step_time,
)
from benchmarks.report import markdown, shown, write_json

__all__ = ["Job", "fits", "main", "points", "predictions", "scaling_errors"]

WORKERS = tuple(2**power for power in range(13))
INSIDE, LOCAL = "shared_memory", "local"


@dataclass(frozen=True)
class Job:
    """What is to be predicted.

    Args:
        gradient_bytes: that every step reduces.
        compute_seconds: of a step on one worker.
        network: between hosts.
        per_host: workers that share a host's memory.
        overlap: the part of the computing behind which communication can hide.
    """

    gradient_bytes: int
    compute_seconds: float
    network: str
    per_host: int = 1
    overlap: float = 0.0


def points(written: Mapping[str, Any]) -> dict[str, list[Point]]:
    """Return what a JSON of all_reduce says of our algorithms, by the contender's name."""
    found: dict[str, list[Point]] = defaultdict(list)
    for entry in written["results"]:
        if entry["side"] == "ours" and entry.get("algorithm") in ALGORITHMS:
            size, seconds = entry["columns"]["bytes"], entry["figure"]["median"] / 1e6
            point = Point(entry["algorithm"], entry["processes"], size, seconds)
            found[entry["name"]].append(point)
    return dict(found)


def fits(measured: Mapping[str, Sequence[Point]]) -> dict[str, Fit]:
    """Fit each contender's rates; how fast a core adds, measured alone, is common to all.

    Raises:
        ValueError: a contender has too few points.
    """
    local = list(measured.get(LOCAL, ()))
    made = {}
    for name, own in measured.items():
        if name != LOCAL:
            if len(own) < 3:
                raise ValueError(f"{name}: {len(own)} sizes were measured; at least 3 are needed.")
            made[name] = fit([*own, *local])
    if not made:
        raise ValueError("the file holds no all-reduce between processes: run all_reduce first.")
    return made


def predictions(job: Job, inside: Rates, wire: Rates) -> list[dict[str, Any]]:
    """Return for each number of workers the best algorithm, and the steps of both scalings."""
    rates = on_network(wire, job.network)
    rows = []
    for workers in WORKERS:
        size = job.gradient_bytes
        times = {
            "ring": predict(rates, "ring", workers, size),
            "recursive_doubling": predict(rates, "recursive_doubling", workers, size),
        }
        if job.per_host > 1:
            times["hierarchical"] = hierarchical(inside, rates, workers, job.per_host, size)
        chosen = best(times)
        weak = step_time(job.compute_seconds, times[chosen], job.overlap)
        strong = step_time(job.compute_seconds / workers, times[chosen], job.overlap)
        rows.append(
            {
                "workers": workers,
                "algorithm": chosen,
                "all_reduce_seconds": times,
                "weak_step_seconds": weak,
                "weak_efficiency": job.compute_seconds / weak if weak else 1.0,
                "strong_step_seconds": strong,
                "strong_speedup": job.compute_seconds / strong if strong else float(workers),
            }
        )
    return rows


def scaling_errors(written: Mapping[str, Any], inside: Rates) -> list[dict[str, Any]]:
    """Compare the steps of several workers in a JSON of scaling with what one worker's predict."""
    ours = [entry for entry in written["results"] if entry["side"] == "ours"]
    alone = {
        (entry["group"]): entry
        for entry in ours
        if entry["workers"] == 1 and entry["single_threaded"]
    }
    rows = []
    for entry in ours:
        one = alone.get(entry["group"])
        if one is None or entry["workers"] == 1:
            continue
        # Strong scaling divides the batch of one worker, weak scaling repeats it.
        part = entry["global_batch"] / entry["workers"] / one["global_batch"]
        compute = part * one["global_batch"] / one["figure"]["median"]
        communicate = predict(inside, INSIDE, entry["workers"], entry["gradient_bytes"])
        predicted = step_time(compute, communicate)
        took = entry["global_batch"] / entry["figure"]["median"]
        rows.append(
            {
                "group": entry["group"],
                "workers": entry["workers"],
                "measured_seconds": took,
                "predicted_seconds": predicted,
                "relative_error": abs(predicted / took - 1),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and predict from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", type=Path, required=True, help="JSON of benchmarks.all_reduce")
    parser.add_argument("--scaling", type=Path, help="JSON of benchmarks.scaling")
    parser.add_argument("--network", default="100Gb-IB", help="a name, or ALPHA,BETA in seconds")
    parser.add_argument("--gradient-bytes", type=int, default=100 << 20)
    parser.add_argument("--compute-seconds", type=float, default=0.1)
    parser.add_argument("--workers-per-host", type=int, default=1)
    parser.add_argument("--overlap", type=float, default=0.0, help="part of computing that hides")
    parser.add_argument("--wire", default="ring over tcp", help="whose rates the network gets")
    parser.add_argument("--inside", default="shared memory, reduce_update", help="and a host's")
    parser.add_argument("--out", type=Path, help="folder for cost_model.json and cost_model.png")
    options = parser.parse_args(arguments)
    job = Job(
        options.gradient_bytes,
        options.compute_seconds,
        options.network,
        options.workers_per_host,
        options.overlap,
    )
    try:
        content = _content(job, options)
    except ValueError as error:
        parser.error(str(error))
    print(_tables(content))
    if options.out:
        write_json(content, options.out / "cost_model.json")
        if importlib.util.find_spec("matplotlib") is not None:
            from benchmarks import plots

            plots.draw_predictions(content, options.out / "cost_model.png")


def _content(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    made = fits(points(json.loads(options.fit.read_text())))
    for name in (options.wire, options.inside):
        if name not in made:
            raise ValueError(f"no contender {name!r} in {options.fit}; there are {list(made)}.")
    inside, wire = made[options.inside].rates, made[options.wire].rates
    content: dict[str, Any] = {
        "job": vars(job),
        "fits": {name: _fit_entry(one) for name, one in made.items()},
        "predictions": predictions(job, inside, wire),
    }
    if options.scaling:
        content["scaling"] = scaling_errors(json.loads(options.scaling.read_text()), inside)
    return content


def _fit_entry(one: Fit) -> dict[str, Any]:
    own = [point for point in one.points if point.algorithm != LOCAL]
    # Points of other algorithms lend their rates, but the error is that of this one.
    left_out = leave_one_out(one.points) if len(one.points) > 3 else []
    return {
        **one.rates._asdict(),
        "determined": one.determined,
        "points": [point._asdict() for point in one.points],
        "error": described(errors(one.rates, own)),
        "leave_one_out": described(left_out[: len(own)]) if left_out else None,
    }


def _tables(content: Mapping[str, Any]) -> str:
    head = ["", "alpha us", "beta ns/KiB", "gamma ns/KiB", "error", "largest", "left out"]
    rows = [
        [
            name + ("" if one["determined"] else " \\*"),
            *(shown(one[rate] * scale) for rate, scale in _SHOWN_RATES),
            *(f"{one['error'][key]:.0%}" for key in ("median", "max")),
            f"{one['leave_one_out']['median']:.0%}" if one["leave_one_out"] else "-",
        ]
        for name, one in content["fits"].items()
    ]
    steps = [
        [
            str(row["workers"]),
            row["algorithm"],
            shown(row["all_reduce_seconds"][row["algorithm"]] * 1e3),
            shown(row["weak_step_seconds"] * 1e3),
            f"{row['weak_efficiency']:.0%}",
            shown(row["strong_step_seconds"] * 1e3),
            f"{row['strong_speedup']:.1f}",
        ]
        for row in content["predictions"]
    ]
    names = ["workers", "", "all-reduce ms", "weak ms", "efficiency", "strong ms", "speedup"]
    unclear = any(not one["determined"] for one in content["fits"].values())
    parts = [markdown(head, rows), *([_NOTE] if unclear else []), markdown(names, steps)]
    if content.get("scaling"):
        compared = [
            [
                row["group"],
                str(row["workers"]),
                shown(row["measured_seconds"] * 1e3),
                shown(row["predicted_seconds"] * 1e3),
                f"{row['relative_error']:.0%}",
            ]
            for row in content["scaling"]
        ]
        parts.append(markdown(["", "workers", "measured ms", "predicted ms", "error"], compared))
    return "\n\n".join(parts)


_SHOWN_RATES = (("alpha", 1e6), ("beta", 1e9 * 1024), ("gamma", 1e9 * 1024))
_NOTE = "\\* beta and gamma can not be told apart: their sum is right, each alone is not."

if __name__ == "__main__":
    main()
