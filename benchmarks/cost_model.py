"""Predictions of the time of a training step on up to 4096 workers, from measurements on this host.

Bandwidth depends on the size, because of caches. So the time of an all-reduce of two processes is
interpolated between measured sizes. More processes send more messages, and send and add more bytes,
at the same rates. It checks the prediction of each measured all-reduce from the neighbouring sizes,
and of the steps of two workers from those of one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.hosts_model import HEADERS, fit, predictions
from benchmarks.report import markdown, shown, write_json
from benchmarks.training import GRADIENT_BYTES

Curve = Sequence[tuple[float, float]]  # Bytes and seconds of two processes, by rising size.

# Latency and seconds a byte in one direction, as vendors and MPI latency tests give them.
NETWORKS = {
    "10GbE": (30e-6, 1 / 1.25e9),
    "25GbE": (20e-6, 1 / 3.125e9),
    "100Gb-IB": (2e-6, 1 / 12.5e9),
    "400Gb-IB": (1.5e-6, 1 / 50e9),
}
WORKERS = tuple(2**power for power in range(13))
INSIDE, WIRE = "shared memory, reduce_update", "ring over tcp"
# What is predicted worse than this is said not to be predicted.
TOLERANCE = 0.25


def measured(written: Mapping[str, Any]) -> dict[str, Curve]:
    """Return what a JSON of all_reduce says of our all-reduces between two processes, by name."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in written["results"]:
        if one["side"] == "ours" and one["group"].startswith("2 processes"):
            found[one["name"]].append((one["bytes"], one["figure"]["median"] / 1e6))
    return {name: sorted(points) for name, points in found.items()}


def time_of(curve: Curve, size: float) -> float:
    """Return the seconds for a size: between two measured ones on a straight line.

    Below the smallest nothing gets cheaper, and above the largest a byte costs what it does there.

    Raises:
        ValueError: fewer than two sizes were measured.
    """
    if len(curve) < 2:
        raise ValueError(f"{len(curve)} size(s) were measured; at least 2 are needed.")
    measured_sizes, seconds = zip(*curve, strict=True)
    return float(np.interp(size, measured_sizes, seconds)) * max(1.0, size / measured_sizes[-1])


def held_out(curve: Curve) -> list[tuple[float, float, float]]:
    """Return each size between others, its time, and that which the others predict for it."""
    kept = [[*curve[:k], *curve[k + 1 :]] for k in range(1, len(curve) - 1)]
    return [(*one, time_of(rest, one[0])) for one, rest in zip(curve[1:-1], kept, strict=True)]


def steps_of(written: Mapping[str, Any], workers: int) -> dict[float, float]:
    """Return the seconds of a step of so many workers by batch, from a JSON of training."""
    return {
        one["batch"]: one["batch"] / one["figure"]["median"]
        for one in written["results"]
        if one["side"] == "ours" and one["threads"] == 1 and one["workers"] == workers
    }


def predicted_step(
    alone: Mapping[float, float], batch: float, workers: int, inside: Curve
) -> float:
    """Return the seconds of a step of the workers of one host, each with a core of its own.

    A step takes what one worker needs for its part of the batch, with what else its thread does,
    and the all-reduce of the gradients, update included.
    """
    part = batch / workers
    # A step takes a while for itself, and one for each example: a line through the nearest two.
    low, high = sorted(sorted(alone, key=lambda size: abs(math.log(size / part)))[:2])
    each = (alone[high] - alone[low]) / (high - low)
    compute = max(alone[low] + each * (part - low), 0.0)
    return compute + reduce_inside(inside, GRADIENT_BYTES, workers)


def reduce_inside(inside: Curve, size: float, workers: int) -> float:
    """Return the seconds of an all-reduce on one host, whose memory's bandwidth is shared."""
    return time_of(inside, size) * workers / 2 if workers > 1 else 0.0


def checks(written: Mapping[str, Any], inside: Curve) -> list[tuple[str, float, float]]:
    """Return the steps of two workers in a JSON of training, and their times as predicted."""
    alone, two = steps_of(written, 1), steps_of(written, 2)
    if len(alone) < 2:
        return []
    return [
        (f"2 workers, batch {batch}", took, predicted_step(alone, batch, 2, inside))
        for batch, took in two.items()
    ]


def speedups(written: Mapping[str, Any], inside: Curve) -> list[dict[str, float | None]]:
    """Return how much faster 1 to 8 workers are than one, predicted and measured, by batch."""
    alone, rows = steps_of(written, 1), []
    for workers in (1, 2, 4, 8):
        took = steps_of(written, workers)
        for batch in sorted(alone) if len(alone) > 1 else ():
            one = alone[batch]
            rows.append(
                {
                    "workers": workers,
                    "batch": batch,
                    "predicted": one / predicted_step(alone, batch, workers, inside),
                    "measured": one / took[batch] if batch in took else None,
                }
            )
    return rows


def between_hosts(
    curve: Curve, name: str, hosts: int, size: float, work_per_byte: float = 0.0
) -> float:
    """Return the seconds of an all-reduce of some hosts, by the better of ring and doubling.

    The transport's own work, measured over loopback with two processes, adds to the network's
    latency. A byte costs what the slowest takes: the wire with its headers, the transport, or a
    host's processor for a byte on a wire. Links are not shared.
    """
    if hosts == 1:
        return 0.0
    alpha, beta = NETWORKS[name] if name in NETWORKS else map(float, name.split(","))
    latency = alpha + curve[0][1] / 2  # Two messages in a row were measured.
    # Each of two sends and gets the array once.
    byte = max(beta * HEADERS, time_of(curve, size) / size, work_per_byte)
    ring = 2 * (hosts - 1) * latency + 2 * (hosts - 1) / hosts * size * byte
    doubling = math.ceil(math.log2(hosts)) * (latency + size * byte)
    return float(min(ring, doubling))


def curves(
    size: float,
    compute: float,
    inside: Curve,
    wire: Curve,
    network: str,
    per_host: int,
    work_per_byte: float = 0.0,
) -> list[dict[str, float]]:
    """Return for each number of workers the all-reduce, and the steps of both scalings."""
    rows = []
    for workers in WORKERS:
        here, hosts = min(workers, per_host), math.ceil(workers / per_host)
        reduce = reduce_inside(inside, size, here)
        reduce += between_hosts(wire, network, hosts, size, work_per_byte)
        weak, strong = compute + reduce, compute / workers + reduce
        rows.append(
            {
                "workers": workers,
                "all_reduce": reduce,
                "weak_efficiency": compute / weak,
                "strong_speedup": compute / strong,
            }
        )
    return rows


def _checked(rows: Sequence[tuple[str, float, float]]) -> str:
    cells = []
    for what, took, predicted in rows:
        error = abs(predicted / took - 1)
        verdict = "" if error <= TOLERANCE else "not predicted"
        cells.append([what, shown(1e3 * took), shown(1e3 * predicted), f"{error:.0%}", verdict])
    return markdown(["not fitted to", "measured ms", "predicted ms", "error", ""], cells)


def _speedup_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a column for each batch: the predicted speed-up, and the measured one."""
    batches = sorted({row["batch"] for row in rows})
    cells: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        known = "" if row["measured"] is None else f", measured {row['measured']:.2f}"
        cells[row["workers"]].append(f"{row['predicted']:.2f}{known}")
    columns = [f"batch {batch}: predicted" for batch in batches]
    return markdown(["workers", *columns], [[str(n), *each] for n, each in cells.items()])


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, help="folder of run_all")
    parser.add_argument("--hosts-results", type=Path, help="JSON of all_reduce --hosts")
    parser.add_argument("--network", default="100Gb-IB", help=f"{', '.join(NETWORKS)}; or "
        "ALPHA,BETA in seconds")  # fmt: skip
    parser.add_argument("--gradient-bytes", type=float, default=1e8)
    parser.add_argument("--compute-seconds", type=float, default=0.1)
    parser.add_argument("--workers-per-host", type=int, default=8)
    options = parser.parse_args(arguments)
    if not (options.results or options.hosts_results):
        parser.error("--results, --hosts-results or both are needed.")
    work_per_byte = 0.0
    if options.hosts_results:
        entries = json.loads(options.hosts_results.read_text())["results"]
        model = fit(entries)
        work_per_byte = model.work_per_byte if model else 0.0
        print(_checked(predictions(entries)), end="\n\n")
    if options.results:
        _predict(parser, options, work_per_byte)


def _predict(
    parser: argparse.ArgumentParser, options: argparse.Namespace, work_per_byte: float
) -> None:
    """Print and write what follows from the folder of `run_all`."""
    found = measured(json.loads((options.results / "all_reduce.json").read_text()))
    try:
        errors = [
            (f"{name}, {size / 1024:,.0f} KiB", took, predicted)
            for name, curve in found.items()
            for size, took, predicted in held_out(curve)
        ]
        inside, wire = found[INSIDE], found[WIRE]
        training = json.loads((options.results / "training.json").read_text())
        steps, faster = checks(training, inside), speedups(training, inside)
        job = (options.network, options.workers_per_host)
        rows = curves(
            options.gradient_bytes, options.compute_seconds, inside, wire, *job, work_per_byte
        )
    except (KeyError, ValueError) as error:
        parser.error(f"{error}: run benchmarks.all_reduce and benchmarks.training first; the "
            f"network is one of {', '.join(NETWORKS)}, or two numbers.")  # fmt: skip
    print(_checked([*errors, *steps]), end="\n\n")
    if errors:
        relative = [abs(predicted / took - 1) for _, took, predicted in errors]
        print(f"All-reduces left out: median error {median(relative):.0%}\n")
    print("Speed-up of the MLP of benchmarks.training by workers of one host, a core for each:\n")
    print(_speedup_table(faster), end="\n\n")
    cells = [[str(row["workers"]), *(shown(row[key]) for key in list(row)[1:])] for row in rows]
    print(markdown(["workers", "all-reduce s", "weak: efficiency", "strong: speedup"], cells))
    written = {"checks": [*errors, *steps], "speedups": faster, "curves": rows}
    write_json(written, options.results / "cost_model.json")
    if importlib.util.find_spec("matplotlib") is not None:
        from benchmarks import plots

        xs = [row["workers"] for row in rows]
        panels = {
            f"{name} scaling": {"predicted": (xs, [row[key] for row in rows])}
            for name, key in (("weak", "weak_efficiency"), ("strong", "strong_speedup"))
        }
        units = ("efficiency", "speedup")
        axes = {name: ("workers", unit) for name, unit in zip(panels, units, strict=True)}
        title = f"Predicted: {options.network}, {options.gradient_bytes:,.0f} bytes of gradients"
        plots.draw_curves(panels, axes, title, options.results / "cost_model.png")


if __name__ == "__main__":
    main()
