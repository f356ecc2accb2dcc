"""What becomes of a job with parameter servers when its processes are killed or stopped.

Every figure is of real processes of this machine, which are started again as a launcher would: by
running Python anew. A time runs from the signal until what the table names has happened.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.faulty_cluster import DEADLINE, Cluster
from benchmarks.machine import machine
from benchmarks.report import markdown, shown, write_json

__all__ = ["main"]

PLACES = 1 << 18
PER_KILL = 8
KILL_WITHIN = 0.003  # Seconds; about as long as that many functions take.
_log = logging.getLogger("benchmarks")
Row = dict[str, Any]


@contextlib.contextmanager
def commanded(cluster: Cluster) -> Iterator[tuple[Any, Any]]:
    """Start servers and workers, and yield the strategy and coordinator of their chief."""
    import ndistribute as nd

    with mock.patch.dict(os.environ, cluster.environ), cluster:
        cluster.start_all("ps")
        cluster.start_all("worker")
        resolver = nd.SimpleClusterResolver(cluster.addresses, task_type="chief", task_id=0)
        with (
            nd.ParameterServerStrategy(resolver, timeout_seconds=DEADLINE) as strategy,
            nd.ClusterCoordinator(strategy) as coordinator,
        ):
            for index in range(len(cluster.addresses["worker"])):
                until_at_work(coordinator, index)
            yield strategy, coordinator


def lost_workers(environ: dict[str, str], repetitions: int) -> list[Row]:
    """Measure what becomes of the function that a worker has which is killed, or stopped."""
    elsewhere, again, stopped = [], [], []
    cluster = Cluster(2, 1, environ)
    with tempfile.TemporaryDirectory() as folder, commanded(cluster) as (_, coordinator):
        for number in range(repetitions):
            value, victim = hanging(coordinator, Path(folder, f"killed-{number}"))
            killed = cluster.kill("worker", victim)
            value.fetch(timeout=DEADLINE)
            elsewhere.append(time.monotonic() - killed)
            cluster.start("worker", victim)
            again.append(until_at_work(coordinator, victim) - killed)
        for number in range(repetitions):
            path = Path(folder, f"stopped-{number}")
            value, victim = hanging(coordinator, path)
            when = cluster.send("worker", victim, signal.SIGSTOP)
            value.fetch(timeout=DEADLINE)
            stopped.append(time.monotonic() - when)
            path.with_suffix(".go").touch()
            cluster.send("worker", victim, signal.SIGCONT)
            until_at_work(coordinator, victim)
    return [
        row("worker killed", "its function's result is there, from another worker", elsewhere),
        row("worker killed, started again", "it has taken work", again),
        row("worker stopped", "its function's result is there, from another worker", stopped),
    ]


def lost_servers(
    environ: dict[str, str], repetitions: int, snapshot_seconds: float, rng: random.Random
) -> Row:
    """Measure how soon updates go on when a server is killed, and how many are lost."""
    seconds, lost, known = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        saving = {
            "NDISTRIBUTE_SNAPSHOT_DIR": folder,
            "NDISTRIBUTE_SNAPSHOT_SECONDS": str(snapshot_seconds),
        }
        cluster = Cluster(2, 1, {**environ, **saving})
        with commanded(cluster) as (strategy, coordinator):
            marks, mark = marked(strategy, PLACES)
            strategy.save_snapshots()
            with acknowledged_meanwhile(coordinator, mark) as times:
                for _ in range(repetitions):
                    threading.Event().wait(rng.uniform(1, 2) * snapshot_seconds)
                    killed = cluster.kill("ps", 0)
                    before = len(times)
                    cluster.start("ps", 0)
                    # The next may be one that the old server made; the one after is not.
                    wait_until(lambda before=before: len(times) > before + 1)
                    seconds.append(times[before + 1] - killed)
                    made = marks.numpy()[:before]
                    lost.append(int(np.sum(made == 0)) - sum(lost))
                    known.append(strategy.lost_updates - sum(known))
            twice = int(np.sum(marks.numpy() > 1))
    what = f"an update is acknowledged again; snapshots every {snapshot_seconds:g} s"
    return row("server killed, started again", what, seconds) | {
        "lost": lost,
        "known": known,
        "twice": twice,
        "acknowledged": len(times),
    }


def lost_chiefs(environ: dict[str, str], repetitions: int) -> Row:
    """Measure how soon all is over when the chief is killed."""
    seconds = []
    for _ in range(repetitions):
        with Cluster(2, 2, environ) as cluster:
            cluster.start_all("ps")
            cluster.start_all("worker")
            cluster.start("chief", 0, "command")
            cluster.answer("chief", 0)
            killed = cluster.kill("chief", 0)
            seconds.append(cluster.ended() - killed)
    return row("chief killed", "the last process of the job is gone", seconds)


def lost_members(environ: dict[str, str], repetitions: int) -> Row:
    """Measure how soon a worker in step with another knows that the other one was killed."""
    seconds = []
    for number in range(repetitions):
        with Cluster(2, 1, environ, chief=False) as cluster:
            cluster.start_all("ps")
            cluster.start_all("worker", "loop")
            for index in range(2):
                cluster.answer("worker", index)
            victim = number % 2
            killed = cluster.kill("worker", victim)
            told = cluster.answer("worker", 1 - victim)
            if told["error"] != "WorkerLostError":
                raise RuntimeError(f"the other worker raised {told['error']}")
            seconds.append(told["when"] - killed)
    return row("one of two synchronous workers killed", "the other one raises", seconds)


def random_kills(environ: dict[str, str], kills: int, rng: random.Random) -> Row:
    """Kill workers at random moments while they make unique changes, and count those."""
    count = kills * PER_KILL
    began = time.monotonic()
    cluster = Cluster(2, 2, environ)
    with tempfile.NamedTemporaryFile() as runs, commanded(cluster) as (strategy, coordinator):
        (first, mark_first), (second, mark_second) = (marked(strategy, count) for _ in range(2))
        path = runs.name

        def mark_both(number: int) -> None:
            with open(path, "ab", buffering=0) as file:
                file.write(b".")
            mark_first(number)
            first.numpy()  # What was changed goes out before it is read.
            mark_second(number)

        for start in range(0, count, PER_KILL):
            for number in range(start, start + PER_KILL):
                coordinator.schedule(mark_both, args=(number,))
            threading.Event().wait(rng.uniform(0, KILL_WITHIN))
            victim = rng.randrange(2)
            cluster.kill("worker", victim)
            cluster.start("worker", victim)
            # Else most would die before they have begun anything.
            until_at_work(coordinator, victim)
        coordinator.join(timeout=DEADLINE)
        found = np.stack([first.numpy(), second.numpy()])
        again = os.path.getsize(path) - count
    return {
        "kills": kills,
        "updates": found.size,
        "functions": count,
        "run_again": again,
        "lost": int(np.sum(found == 0)),
        "twice": int(np.sum(found > 1)),
        "seconds": time.monotonic() - began,
    }


def row(fault: str, until: str, seconds: Sequence[float]) -> Row:
    """Return the figures of a fault."""
    _log.info("server faults: %s", fault)
    return {
        "fault": fault,
        "until": until,
        "median": statistics.median(seconds),
        "max": max(seconds),
        "all": list(seconds),
    }


def marked(strategy: Any, places: int) -> tuple[Any, Callable[[int], None]]:
    """Return a variable of zeros, and a function that adds one at a place of it."""
    import ndistribute as nd

    with strategy.scope():
        marks = nd.Variable(np.zeros(places, np.int64))

    def mark(number: int) -> None:
        marks.scatter_add([number], [1])

    return marks, mark


@contextlib.contextmanager
def acknowledged_meanwhile(coordinator: Any, mark: Callable[[int], None]) -> Iterator[list[float]]:
    """Make one change after the other, and yield the times at which they were acknowledged."""
    times: list[float] = []
    enough = threading.Event()

    def work() -> None:
        for number in range(PLACES):
            coordinator.schedule(mark, args=(number,)).fetch(timeout=DEADLINE)
            times.append(time.monotonic())
            if enough.is_set():
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield times
    finally:
        enough.set()
        thread.join()


def hanging(coordinator: Any, path: Path) -> tuple[Any, int]:
    """Schedule a function that hangs where it runs first; return its result, and that worker."""
    value = coordinator.schedule(_hang_once, args=(str(path),))
    wait_until(lambda: path.exists() and path.read_text())
    return value, int(path.read_text())


def until_at_work(coordinator: Any, worker: int) -> float:
    """Keep workers busy until a certain one has run something, and return when it did."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        done = coordinator.fetch([coordinator.schedule(_who) for _ in range(4)])
        times = [when for index, when in done if index == worker]
        if times:
            return min(times)
    raise TimeoutError(f"worker {worker} did not come")


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for what no event tells of."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it has not come about in {DEADLINE:g} s")
        threading.Event().wait(timeout=0.0005)


def _who() -> tuple[int, float]:
    import ndistribute as nd

    time.sleep(0.001)  # So that no worker takes all.
    return nd.cluster.worker_index(), time.monotonic()


def _hang_once(path: str) -> None:
    import ndistribute as nd

    try:
        with open(path, "x") as file:
            file.write(str(nd.cluster.worker_index()))
    except FileExistsError:
        return
    wait_until(lambda: os.path.exists(f"{path}.go"))


def tables(written: Row) -> str:
    """Return the figures as markdown."""
    note = " (quick: the figures mean nothing)" if written["quick"] else ""
    found = [
        [
            one["fault"],
            one["until"],
            str(len(one["all"])),
            shown(one["median"]),
            shown(one["max"]),
            " to ".join(map(str, (min(one["lost"]), max(one["lost"])))) if "lost" in one else "0",
        ]
        for one in written["faults"]
    ]
    lines = [
        f"What is lost and when work goes on; heartbeat {written['heartbeat']:g} s{note}",
        "",
        markdown(["", "until", "times", "median s", "max s", "updates lost"], found),
    ]
    lines += [
        f"\n{kills['kills']} random kills of workers, {kills['updates']} updates in "
        f"{kills['functions']} functions, {kills['run_again']} of them run again: "
        f"{kills['lost']} updates lost, {kills['twice']} made twice{note}"
        for kills in written["kills"]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line, print tables and write what was asked for."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--repetitions", type=int, help="of each fault; 10, quick 1")
    parser.add_argument("--kills", type=int, help="of workers at random; 100, quick 2")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--heartbeat", type=float, default=2.0, help="timeout in seconds")
    parser.add_argument("--snapshot-seconds", type=float, default=1.0, help="between snapshots")
    parser.add_argument("--only", choices=["workers", "servers", "chief", "members", "kills"])
    options = parser.parse_args(arguments)
    repetitions = options.repetitions or (1 if options.quick else 10)
    kills = options.kills or (2 if options.quick else 100)
    heartbeat = min(options.heartbeat, 0.5) if options.quick else options.heartbeat
    between = min(options.snapshot_seconds, 0.2) if options.quick else options.snapshot_seconds
    environ = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(heartbeat)}
    rng = random.Random(options.seed)
    logging.getLogger("ndistribute").setLevel(logging.ERROR)  # That something is lost is expected.
    described = machine()
    measure: dict[str, Callable[[], list[Row]]] = {
        "workers": lambda: lost_workers(environ, repetitions),
        "servers": lambda: [lost_servers(environ, repetitions, between, rng)],
        "chief": lambda: [lost_chiefs(environ, repetitions)],
        "members": lambda: [lost_members(environ, repetitions)],
        "kills": lambda: [random_kills(environ, kills, rng)],
    }
    measured = {
        name: make() if options.only in (None, name) else [] for name, make in measure.items()
    }
    written = {
        "benchmark": "server_faults",
        "quick": options.quick,
        "seed": options.seed,
        "heartbeat": heartbeat,
        "snapshot_seconds": between,
        "machine": described,
        "kills": measured.pop("kills"),
        "faults": [one for rows in measured.values() for one in rows],
    }
    print(tables(written))
    if options.out:
        write_json(written, options.out)


if __name__ == "__main__":
    main()
