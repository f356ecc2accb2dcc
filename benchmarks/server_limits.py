"""What parameter servers take as jobs grow: memory, threads and connections.

Nothing but real processes of this machine; each says itself what it holds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.cluster import Cluster, commanded
from benchmarks.machine import machine
from benchmarks.report import markdown, shown, write_json
from benchmarks.task import facts
from ndistribute.transport import failure_detector
from ndistribute.transport.failure_detector import SILENCE_SECONDS

__all__ = ["main"]

CLIENTS, PART_BYTES = 4, 64 << 20
WEEK_OF_BEATS = 7 * 24 * 3600 // 5
# What a process says of itself, see `task.facts`.
SAID = ("resident", "shared", "peak", "threads", "sockets")
Row = dict[str, Any]


def held(nbytes: int) -> list[Row]:
    """Let clients change all variables of a server, and hold what they read of them."""
    variables = f"2x{max(1, nbytes // PART_BYTES)}x{min(nbytes, PART_BYTES) // 4}"
    with Cluster(CLIENTS, 1, {"BENCHMARK_VARIABLES": variables}, chief=False) as cluster:
        cluster.start_all("ps")
        cluster.start_all("worker", "hold")
        found = [cluster.answer("worker", index)["held"] for index in range(CLIENTS)]
        what = f"{nbytes / 1e6:.0f} MB of variables, {CLIENTS} clients hold {sum(found) / 1e6:.0f}"
        return _rows(cluster, what)


def scheduled(count: int) -> list[Row]:
    """Let a chief schedule many functions, and see what all processes hold on the way."""
    rows = []
    cluster = Cluster(1, 1, {})
    with commanded(cluster) as (_, coordinator):
        for total in (count // 10, count):
            done = 0 if total < count else count // 10
            for number in range(done, total):
                coordinator.schedule(_next, args=(number,))
            coordinator.join()
            rows += [{"": f"{total} functions: chief"} | facts(), *_rows(cluster, "")]
    return rows


class _Beats:
    """What the failure detector watches beside connections, to count how often it does."""

    beat_within = SILENCE_SECONDS
    count = 0

    def tick(self, now: float, excused: bool) -> None:
        self.count += 1


def beaten(count: int) -> list[Row]:
    """Let heartbeats go as many times as in a week, and see what all processes hold on the way."""
    beats = 60_000  # In the time of silence that is allowed, 60 s: one each millisecond.
    rows, made = [], _Beats()
    cluster = Cluster(1, 1, {"BENCHMARK_BEATS": str(beats)})
    with mock.patch.object(failure_detector, "_BEATS", beats), commanded(cluster):
        failure_detector.detector.watch(made)
        for total in (count // 10, count):
            while made.count < total:
                time.sleep(0.1)
            rows += [{"": f"{made.count} heartbeats: chief"} | facts(), *_rows(cluster, "")]
        failure_detector.detector.forget(made)
    return rows


def scaled(workers: int, servers: int) -> list[Row]:
    """Let workers of one job train a tiny model on servers, until all have finished."""
    cluster = Cluster(workers, servers, {"BENCHMARK_VARIABLES": "20x4x1000"}, chief=False)
    with cluster:
        began = time.monotonic()
        cluster.start_all("ps")
        cluster.start_all("worker", "hold")
        for index in range(workers):
            cluster.answer("worker", index)
        trained = time.monotonic() - began
        said = {task: cluster.facts(*task) for task in cluster.processes}
        for task in cluster.processes:
            if task[0] == "worker":
                cluster.tell(*task, "end")
        ended = cluster.ended() - began
        failed = [task for task, one in cluster.processes.items() if one.returncode]
    if failed:
        raise RuntimeError(f"{failed} ended with an error")
    name = f"{workers} workers, {servers} servers"
    totals = {fact: sum(one[fact] for one in said.values()) for fact in SAID}
    return [
        {"": f"{name}: all", "seconds": [trained, ended]} | totals,
        {"": f"{name}: a server"} | said["ps", 0],
        {"": f"{name}: a worker"} | said["worker", 0],
    ]


def _rows(cluster: Cluster, when: str) -> list[Row]:
    return [
        {"": f"{when} {job}:{index}"} | cluster.facts(job, index)
        for job, index in cluster.processes
    ]


def _next(number: int) -> int:
    return number + 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line, print a table and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--only", choices=["held", "scheduled", "beaten", "scaled"])
    options = parser.parse_args(arguments)
    quick = options.quick
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    measure: dict[str, Callable[[], list[Row]]] = {
        "held": lambda: held(1 << 20 if quick else 1 << 30),
        "scheduled": lambda: scheduled(1000 if quick else 100_000),
        "beaten": lambda: beaten(200 if quick else WEEK_OF_BEATS),
        "scaled": lambda: [
            row for n in ((1, 2) if quick else (16, 32, 64)) for row in scaled(n, 2 if quick else 4)
        ],
    }
    rows = [row for name, make in measure.items() if options.only in (None, name) for row in make()]
    cells = []
    for row in rows:
        seconds = ", ".join(map(shown, row.get("seconds", ())))
        cells.append([row[""], *(shown(row[fact]) for fact in SAID), seconds])
    head = ["", *(f"{fact} MB" for fact in SAID[:3]), *SAID[3:], "s until trained, until gone"]
    print(markdown(head, cells))
    if options.out:
        write_json({"benchmark": "server_limits", "machine": machine(), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
