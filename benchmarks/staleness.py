"""How stale the updates of two workers are, and what they cost, by how tightly they are coupled.

An update's staleness is the number of updates of others between the pull of its variables and
itself. Each job trains the MLP of `benchmarks.mlp` by loops of its workers on one server.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import mlp
from benchmarks.machine import machine
from benchmarks.report import markdown, shown, write_json
from benchmarks.workers import ROOT, pinned

__all__ = ["main"]

WORKERS, BATCH = 2, 32
# Asynchronous, at most so many steps ahead of the slowest, and all steps together.
PACES: dict[str, dict[str, int]] = {
    "asynchronous": {},
    "max_staleness=4": {"max_staleness": 4},
    "max_staleness=0": {"max_staleness": 0},
    "synchronous": {"replicas_to_aggregate": WORKERS},
}
_SECONDS = 300.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a job for each pace, or be a task of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the counts there, as JSON")
    parser.add_argument("--plot", action="store_true", help="draw a PNG as well (matplotlib)")
    parser.add_argument("--steps", type=int, default=1000, help="of each worker; 1000")
    parser.add_argument("--pace", choices=PACES, help="be a task of a job of this pace")
    options = parser.parse_args(arguments)
    if options.pace:
        _serve_or_train(PACES[options.pace], options.steps)
        return
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
    launcher = [sys.executable, "-m", "ndistribute", "run", "--workers", str(WORKERS), "--ps", "1"]
    command = [*launcher, "-m", "benchmarks.staleness", "--pace", pace, "--steps", str(steps)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | pinned(1),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    said = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    counts: collections.Counter[int] = collections.Counter()
    for one in said:
        counts.update({int(staleness): count for staleness, count in one["staleness"].items()})
    examples = WORKERS * steps * BATCH
    return {
        "staleness": dict(sorted(counts.items())),
        "examples_per_second": examples / max(one["seconds"] for one in said),
    }


def _serve_or_train(pace: dict[str, int], steps: int) -> None:
    import ndistribute as nd

    resolver = nd.TFConfigClusterResolver()
    if resolver.task_type == "ps":
        nd.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return
    with nd.ParameterServerStrategy(resolver, **pace) as strategy:
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
        for _ in range(steps):
            strategy.run(step)
        seconds = time.perf_counter() - start
        print(json.dumps({"staleness": strategy.staleness(), "seconds": seconds}), flush=True)


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
