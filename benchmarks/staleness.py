"""How stale the updates of two workers are, and what they cost, by how tightly they are coupled.

An update's staleness is the number of updates of others between the pull of its variables and
itself. Each job trains the MLP of `benchmarks.mlp` by loops of its workers on one server.
"""

from __future__ import annotations

import argparse
import collections
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import mlp
from benchmarks.cluster import Cluster
from benchmarks.machine import machine
from benchmarks.report import markdown, shown, write_json
from benchmarks.workers import pinned

__all__ = ["main", "train"]

WORKERS, BATCH = 2, 32
# Asynchronous, at most so many steps ahead of the slowest, and all steps together.
PACES: dict[str, dict[str, int]] = {
    "asynchronous": {},
    "max_staleness=4": {"max_staleness": 4},
    "max_staleness=0": {"max_staleness": 0},
    "synchronous": {"replicas_to_aggregate": WORKERS},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a job for each pace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the counts there, as JSON")
    parser.add_argument("--plot", action="store_true", help="draw a PNG as well (matplotlib)")
    parser.add_argument("--steps", type=int, default=1000, help="of each worker; 1000")
    options = parser.parse_args(arguments)
    written = {**machine(), "steps": options.steps, "workers": WORKERS, "batch": BATCH}
    written["paces"] = {name: _job(name, options.steps) for name in PACES}
    if options.out:
        write_json(written, options.out)
    print(markdown(["", "examples/s", "mean", "staleness: updates"], _rows(written["paces"])))
    if options.plot:
        from benchmarks import plots

        path = (options.out or Path("staleness")).with_suffix(".png")
        plots.draw_staleness(written["paces"], path)


def _job(pace: str, steps: int) -> dict[str, Any]:
    """Return what the workers of a job counted, all together."""
    environ = {**pinned(1), "BENCHMARK_PACE": pace, "BENCHMARK_STEPS": str(steps)}
    with Cluster(WORKERS, 1, environ, chief=False) as cluster:
        cluster.start_all("ps")
        cluster.start_all("worker", "staleness")
        said = [cluster.answer("worker", index) for index in range(WORKERS)]
    counts: collections.Counter[int] = collections.Counter()
    for one in said:
        counts.update({int(staleness): count for staleness, count in one["staleness"].items()})
    examples = WORKERS * steps * BATCH
    return {
        "staleness": dict(sorted(counts.items())),
        "examples_per_second": examples / max(one["seconds"] for one in said),
    }


def train(answer: Callable[..., None]) -> None:
    """Train as a worker of a job, and answer what was counted."""
    import ndistribute as nd

    with nd.ParameterServerStrategy(**PACES[os.environ["BENCHMARK_PACE"]]) as strategy:
        with strategy.scope():
            variables = [nd.Variable(array) for array in mlp.initial_weights()]
            optimizer = nd.optimizers.SGD(mlp.RATE)
        images, labels = mlp.batch_of(BATCH)

        def step() -> None:
            with nd.GradientTape() as tape:
                loss = mlp.loss_of(variables, images, labels, BATCH)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        strategy.run(step)
        start = time.perf_counter()
        for _ in range(int(os.environ["BENCHMARK_STEPS"])):
            strategy.run(step)
        answer(staleness=strategy.staleness(), seconds=time.perf_counter() - start)


def _rows(paces: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name, one in paces.items():
        counts = one["staleness"]
        mean = sum(k * count for k, count in counts.items()) / max(1, sum(counts.values()))
        each = ", ".join(f"{k}: {count}" for k, count in counts.items())
        rows.append([name, shown(one["examples_per_second"]), shown(mean), each])
    return rows


if __name__ == "__main__":
    main()
