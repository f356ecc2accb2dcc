"""What becomes of a job with parameter servers when its processes are killed or stopped.

Every figure is of real processes of this machine, which are started again as a launcher would: by
running Python anew. A time runs from the signal until what the table names has happened.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
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

import numpy as np

from benchmarks.cluster import DEADLINE, Cluster, commanded, until_at_work
from benchmarks.machine import machine
from benchmarks.report import markdown, shown, write_json

__all__ = ["main"]

PLACES = 1 << 18
PER_KILL = 8
LOGGED = (1 << 10, 1 << 18)  # Places of float32.
KILL_WITHIN = 0.003  # Seconds; about as long as that many functions take.
_log = logging.getLogger("benchmarks")
NAMES = ("workers", "servers", "chief", "members", "kills", "log")
Row = dict[str, Any]


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
    """Kill workers and servers at random moments while they make unique changes; count those."""
    count = kills * PER_KILL
    began = time.monotonic()
    killed = {"worker": 0, "ps": 0}
    with tempfile.NamedTemporaryFile() as runs, tempfile.TemporaryDirectory() as folder:
        path = runs.name
        cluster = Cluster(2, 2, {**environ, **_logging_to(folder, "log")})
        with commanded(cluster) as (strategy, coordinator):
            (first, mark_first), (second, mark_second) = (marked(strategy, count) for _ in range(2))

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
                job, victim = rng.choice(["worker", "ps"]), rng.randrange(2)
                cluster.kill(job, victim)
                cluster.start(job, victim)
                killed[job] += 1
                # Else most would die before they have begun anything.
                if job == "worker":
                    until_at_work(coordinator, victim)
                else:
                    (first, second)[victim].numpy()
            coordinator.join(timeout=DEADLINE)
            found = np.stack([first.numpy(), second.numpy()])
            again = os.path.getsize(path) - count
            known = strategy.lost_updates
    return {
        "killed": killed,
        "updates": found.size,
        "functions": count,
        "run_again": again,
        "lost": int(np.sum(found == 0)),
        "known_lost": known,
        "twice": int(np.sum(found > 1)),
        "seconds": time.monotonic() - began,
    }


def log_costs(environ: dict[str, str], repetitions: int, seconds: float) -> list[Row]:
    """Measure updates a second with a log and without, of one client and of 4."""
    rates: dict[tuple[int, int, str], list[float]] = {}
    for _ in range(repetitions):
        for durability in ("snapshot", "log"):
            with tempfile.TemporaryDirectory() as folder:
                cluster = Cluster(1, 1, {**environ, **_logging_to(folder, durability)})
                with commanded(cluster):
                    for places, clients in itertools.product(LOGGED, (1, 4)):
                        found = updates_per_second(cluster, places, clients, seconds)
                        rates.setdefault((places, clients, durability), []).append(found)
    return [
        {
            "bytes": places * 4,
            "clients": clients,
            "durability": durability,
            "updates_per_second": statistics.median(found),
            "ms": 1e3 * clients / statistics.median(found),
            "all": found,
        }
        for (places, clients, durability), found in sorted(rates.items())
    ]


def updates_per_second(cluster: Cluster, places: int, clients: int, seconds: float) -> float:
    """Return how many updates, of a variable each, are acknowledged to clients all together."""
    import ndistribute as nd

    ones = np.ones(places, np.float32)
    resolver = nd.SimpleClusterResolver(cluster.addresses, task_type="evaluator", task_id=0)

    def work(strategy: Any) -> int:
        with strategy.scope():
            variable = nd.Variable(np.zeros_like(ones))
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            variable.assign_add(ones)
            count += 1
        return count

    with contextlib.ExitStack() as stack:
        # One each, for the updates of a connection are made, and synced, one after the other.
        made = [
            stack.enter_context(contextlib.closing(nd.ParameterServerStrategy(resolver)))
            for _ in range(clients)
        ]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(clients))
        return sum(pool.map(work, made)) / seconds


def _logging_to(folder: str, durability: str) -> dict[str, str]:
    return {"NDISTRIBUTE_SNAPSHOT_DIR": folder, "NDISTRIBUTE_DURABILITY": durability}


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


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for what no event tells of."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it has not come about in {DEADLINE:g} s")
        threading.Event().wait(timeout=0.0005)


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
        f"\nRandom kills with a log: {kills['killed']['worker']} of workers and "
        f"{kills['killed']['ps']} of servers, {kills['updates']} updates in {kills['functions']} "
        f"functions, {kills['run_again']} of them run again: {kills['lost']} updates lost, "
        f"{kills['twice']} made twice{note}"
        for kills in written["kills"]
    ]
    costs = [
        [str(one["bytes"]), str(one["clients"]), one["durability"], *map(shown, figures)]
        for one in written["log"]
        for figures in [(one["updates_per_second"], one["ms"])]
    ]
    if costs:
        lines += ["", markdown(["bytes", "clients", "durability", "updates/s", "ms"], costs)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line, print tables and write what was asked for."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--repetitions", type=int, help="of each fault; 10, quick 1")
    parser.add_argument("--kills", type=int, help="at random; 100, quick 4")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--heartbeat", type=float, default=2.0, help="timeout in seconds")
    parser.add_argument("--snapshot-seconds", type=float, default=1.0, help="between snapshots")
    parser.add_argument("--only", choices=NAMES)
    options = parser.parse_args(arguments)
    repetitions = options.repetitions or (1 if options.quick else 10)
    kills = options.kills or (4 if options.quick else 100)
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
        "log": lambda: log_costs(environ, min(repetitions, 3), 0.1 if options.quick else 3.0),
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
        "log": measured.pop("log"),
        "faults": [one for rows in measured.values() for one in rows],
    }
    print(tables(written))
    if options.out:
        write_json(written, options.out)


if __name__ == "__main__":
    main()
