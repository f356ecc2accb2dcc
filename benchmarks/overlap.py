"""Whether gradients that travel while others are computed make a step shorter, by network.

Two workers train the MLP of `benchmarks.mlp` in network namespaces of their own, like two hosts,
over a link of a given rate; `apply_gradients` and `minimize` take turns in one process pair. Needs
Linux, root, and iproute2 (`ip`, `tc`); without them it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import mlp
from benchmarks.machine import machine
from benchmarks.report import markdown, write_json

__all__ = ["main"]

RATES = ("unlimited", "10gbit", "1gbit")
BATCHES = (256, 2048)
DEADLINE_SECONDS = 300.0
PORT = 12345  # Free in a namespace of its own.
WAYS = ("apply_gradients", "minimize")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON where ``--out`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="show that it runs; measure nothing")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--worker", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _train(*options.worker)
        return
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        sys.exit("this needs root, and the programs ip and tc (Debian: apt-get install iproute2)")
    rates, batches, repeats = (RATES[:1], (64,), 1) if options.quick else (RATES, BATCHES, 9)
    rows: list[dict[str, Any]] = [
        {"rate": rate, "batch": batch, **_measured(rate, batch, repeats)}
        for rate in rates
        for batch in batches
    ]
    head = ["link", "batch", *(f"{way}, ms" for way in WAYS), "ratio"]
    lines = [
        [
            str(row["rate"]),
            str(row["batch"]),
            *(f"{1e3 * statistics.median(row[way]):.2f}" for way in WAYS),
            f"{statistics.median(row[WAYS[0]]) / statistics.median(row[WAYS[1]]):.2f}",
        ]
        for row in rows
    ]
    sys.stdout.write(markdown(head, lines) + "\n")
    if options.out:
        write_json({"machine": machine(), "rows": rows}, options.out)


def _measured(rate: str, batch: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of a step, for each way and repetition."""
    with _hosts(rate) as hosts:
        addresses = [f"10.77.0.{number}:{PORT}" for number in (1, 2)]
        workers = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, "-m", "benchmarks.overlap"]
                + ["--worker", str(batch), str(repeats)],
                env={
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                    "NDISTRIBUTE_HOST_ID": host,
                    "NDISTRIBUTE_SECRET": "of a benchmark on this machine",
                    "TF_CONFIG": json.dumps(
                        {
                            "cluster": {"worker": addresses},
                            "task": {"type": "worker", "index": index},
                        }
                    ),
                },
                stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
                text=True,
            )
            for index, host in enumerate(hosts)
        ]
        try:
            told, _ = workers[0].communicate(timeout=DEADLINE_SECONDS)
            for worker in workers:
                if worker.wait(timeout=DEADLINE_SECONDS):
                    raise RuntimeError(f"a worker ended with {worker.returncode}")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(timeout=10.0)
    figures: dict[str, list[float]] = json.loads(told)
    return figures


@contextlib.contextmanager
def _hosts(rate: str) -> Iterator[tuple[str, str]]:
    """Make two network namespaces with a link between them, and take them away again."""
    names = (f"nd{os.getpid()}a", f"nd{os.getpid()}b")
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip(
            "link",
            "add",
            "up0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "up0",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, start=1):
            _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "up0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "up0", "up")
            if rate != "unlimited":
                shaping = f"qdisc add dev up0 root tbf rate {rate} burst 256kb latency 100ms"
                subprocess.run(["tc", "-n", name, *shaping.split()], check=True, timeout=10.0)
        yield names
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10.0)


def _train(batch: int, repeats: int) -> None:
    """Be a worker: take the two ways in turns, and let the chief tell the times."""
    import ndistribute as nd

    with nd.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        resolver = strategy.cluster_resolver
        index = 0 if resolver is None else int(resolver.worker_index or 0)
        variables = [nd.Variable(array) for array in mlp.initial_weights()]
        optimizer = nd.optimizers.SGD(mlp.RATE)
        size = strategy.num_replicas_in_sync
        x, y = (nd.PerReplica([np.split(part, size)[index]]) for part in mlp.batch_of(batch))

        def train(images: Any, labels: Any, way: str) -> Any:
            with nd.GradientTape() as tape:
                loss = mlp.loss_of(variables, images, labels, batch)
            if way == "minimize":
                optimizer.minimize(loss, variables, tape)
            else:
                gradients = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        def seconds(way: str, steps: int) -> float:
            start = time.perf_counter()
            for _ in range(steps):
                strategy.run(train, args=(x, y, way))
            return (time.perf_counter() - start) / steps

        for way in WAYS:
            seconds(way, 5)
        steps = 10 if repeats > 1 else 1
        figures: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way in WAYS:
                figures[way].append(seconds(way, steps))
    if index == 0:
        sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main()
