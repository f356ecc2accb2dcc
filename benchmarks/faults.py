"""How soon a job knows of a fault in one of its processes, what is lost, and what checks cost.

The jobs and the faults are those of `tests/faults`: real processes and signals. A time runs from
the fault to what the table names: the exception in a step of the last of the other workers, or, for
jobs with parameter servers, work that goes on.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import importlib
import itertools
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import ndistribute as nd
from benchmarks.harness import add_options, options_of
from benchmarks.machine import machine
from benchmarks.report import markdown, shown, write_json
from tests.faults import steps
from tests.faults.commands import commanded, taking_part
from tests.faults.tasks import Tasks, wait_until
from tests.processes import Ranks

__all__ = ["main"]

Row = dict[str, Any]
WIRES = {"shared": (2, "tcp"), "ring": (3, "tcp"), "mpi": (3, "mpi")}
DEADLY = ("is killed", "exits", "is stopped", "has finished")
FAULTS = ("raises", "passes another shape", "asks for another op", "leaves a call out", "is late",
    *DEADLY)  # fmt: skip
LATE_SECONDS = 0.5
MARKS, PER_KILL, KILL_WITHIN = 1 << 18, 8, 0.003
DEADLINE = 120.0
_log = logging.getLogger("benchmarks")


def hit(rank: int, size: int, who: int, fault: str, note: str) -> tuple[float, str] | None:
    """Let a fault hit one worker; return when and what another one raised."""
    steps.worked(rank, size, 2)
    if rank != who:
        try:
            steps.until_told(rank, size, timeout=LATE_SECONDS if fault == "is late" else DEADLINE)
        except nd.DistributeError as error:
            return time.monotonic(), type(error).__name__
    deadly: dict[str, Callable[[], object]] = {
        "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exits": lambda: os._exit(1),
        "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "has finished": lambda: steps.strategy().close(),
    }

    def step() -> None:
        if fault == "raises":
            raise ValueError("a bad batch")
        if fault == "is late":
            steps.broken()
        if fault == "passes another shape":
            steps.context().all_reduce("sum", np.ones(steps.SMALL + 1))
        if fault == "asks for another op":
            steps.context().all_reduce("max", np.ones(steps.SMALL))

    Path(note).write_text(str(time.monotonic()))
    if fault in deadly:
        deadly[fault]()
        return None
    with contextlib.suppress(ValueError, nd.DistributeError):
        steps.strategy().run(step)
        steps.broken()
    return None


def detections(wire: str, repetitions: int, heartbeat: float) -> Iterator[Row]:
    """Yield for each fault after how many seconds the last of the others knew of it, each time."""
    for fault in FAULTS:
        _log.info("%s: one worker %s", wire, fault)
        seconds, errors = [], set()
        ranks: Ranks | None = None
        for number in range(repetitions):
            if ranks is None:
                ranks = _ranks(wire, heartbeat)
            with tempfile.NamedTemporaryFile() as note:
                who = number % ranks.size
                ranks.start(hit, who, fault, note.name)
                told = ranks.collect(DEADLINE, [rank for rank in range(ranks.size) if rank != who])
                others = [one.value for one in told if one.value is not None]
                # mpiexec may have ended the others before they knew.
                if others:
                    struck = float(Path(note.name).read_text())
                    seconds.append(max(when for when, _ in others) - struck)
                    errors |= {error for _, error in others}
            if fault in DEADLY:
                ranks = _ended(ranks)
            else:
                ranks.collect(DEADLINE, [who])
                [one.result() for one in ranks.run(steps.worked_again, timeout=DEADLINE)]
        if ranks is not None:
            _ended(ranks)
        yield {"wire": wire, "errors": sorted(errors), **_row(f"one worker {fault}", seconds)}


def _ranks(wire: str, heartbeat: float, size: int | None = None) -> Ranks:
    environ = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(heartbeat)}
    environ["FAULTS_WIRE"] = "auto" if wire == "shared" else "ring"
    # Else mpiexec ends all ranks when one dies, before they can say when they knew.
    with mock.patch.dict(os.environ, {"RANKS_MPIEXEC": "-disable-auto-cleanup"}):
        return Ranks(size or WIRES[wire][0], WIRES[wire][1], environ)


def _ended(ranks: Ranks) -> None:
    ranks.kill()
    with contextlib.suppress(AssertionError):
        ranks.close()


def timed(rank: int, size: int, nbytes: int, turns: int) -> tuple[list[float], list[float]]:
    """Time an all-reduce with the calls compared and without, in turns."""
    from ndistribute.collective.backend import Call
    from ndistribute.collective.reduce_op import ReduceOp

    backend: Any = steps.strategy()._workers.backend
    value = np.ones(nbytes // 4, np.float32)
    total, calls = np.empty_like(value), max(1, min(200, (4 << 20) // nbytes))
    call = Call(1, "all_reduce", "SUM", ((value.dtype, value.shape),))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * turns + 2):
        compared = number // 2 % 2 == number % 2
        with contextlib.nullcontext() if compared else _nothing_compared():
            start = time.perf_counter()
            for _ in range(calls):
                backend.all_reduce(call, [value], [total], ReduceOp.SUM, DEADLINE)
            seconds[compared].append((time.perf_counter() - start) / calls)
    return seconds[True][1:], seconds[False][1:]


@contextlib.contextmanager
def _nothing_compared() -> Iterator[None]:
    """Put a constant in the place of what is told of a call, and nothing in that of comparing."""
    from ndistribute.collective import header, ring, segment

    constant = bytes(header.HEADER_BYTES)

    def encode(*told: Any) -> bytes:
        return constant

    def compare(*told: Any) -> None:
        return None

    with (
        mock.patch.object(segment, "encode", encode),
        mock.patch.object(ring, "encode", encode),
        mock.patch.object(ring, "compare", compare),
    ):
        yield


def costs(wire: str, quick: bool) -> Iterator[list[str]]:
    """Yield what comparing the calls costs an all-reduce of two workers, by size."""
    ranks = _ranks(wire, 10.0, size=2)
    for power in range(12, 14 if quick else 27, 2):
        each = [one.result() for one in ranks.run(timed, 1 << power, 2 if quick else 60)]
        on, off = (
            [max(pair) for pair in zip(*way, strict=True)] for way in zip(*each, strict=True)
        )
        more = statistics.median(100 * (a / b - 1) for a, b in zip(on, off, strict=True))
        figures = 1e6 * statistics.median(on), 1e6 * statistics.median(off), more
        yield [wire, f"{(1 << power) >> 10:,}", *map(shown, figures)]
    _ended(ranks)


def lost_workers(environ: dict[str, str], repetitions: int, rng: random.Random) -> Iterator[Row]:
    """Measure what becomes of the function that a worker has which is killed, or stopped."""
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, _commanded(2, 1, environ) as (tasks, _, chief):
        for number in range(2 * repetitions):
            path = Path(folder, str(number))
            value = chief.schedule(_hang_once, args=(str(path),))
            wait_until(lambda path=path: path.exists() and bool(path.read_text()))
            victim, when = int(path.read_text()), time.monotonic()
            if number % 2:
                tasks.send("worker", victim, signal.SIGSTOP)
                value.fetch(timeout=DEADLINE)
                seconds["worker stopped: another has its function's result"].append(
                    time.monotonic() - when
                )
                path.with_suffix(".go").touch()
                tasks.send("worker", victim, signal.SIGCONT)
            else:
                tasks.kill("worker", victim)
                value.fetch(timeout=DEADLINE)
                seconds["worker killed: another has its function's result"].append(
                    time.monotonic() - when
                )
                tasks.start("worker", victim)
                again = _until_at_work(chief, victim) - when
                seconds["worker killed, started again: it has taken work"].append(again)
            _until_at_work(chief, victim)
    return (_row(what, each) for what, each in seconds.items())


def lost_servers(environ: dict[str, str], repetitions: int, rng: random.Random) -> Iterator[Row]:
    """Measure how soon updates go on when a server is killed, and how many are lost."""
    seconds, lost, times = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        saving = {"NDISTRIBUTE_SNAPSHOT_DIR": folder, "NDISTRIBUTE_SNAPSHOT_SECONDS": "1"}
        with _commanded(2, 1, environ | saving) as (tasks, strategy, chief):
            marks, mark = _marked(strategy, MARKS)
            strategy.save_snapshots()
            enough = threading.Event()

            def work() -> None:
                for number in range(MARKS):
                    chief.schedule(mark, args=(number,)).fetch(timeout=DEADLINE)
                    times.append(time.monotonic())
                    if enough.is_set():
                        return

            thread = threading.Thread(target=work)
            thread.start()
            for _ in range(repetitions):
                threading.Event().wait(rng.uniform(1, 2))
                when = time.monotonic()
                tasks.kill("ps", 0)
                before = len(times)
                tasks.start("ps", 0)
                # The next may be one that the old server made; the one after is not.
                wait_until(lambda before=before: len(times) > before + 1, DEADLINE)
                seconds.append(times[before + 1] - when)
                lost.append(int(np.sum(marks.numpy()[:before] == 0)) - sum(lost))
            enough.set()
            thread.join()
            twice = int(np.sum(marks.numpy() > 1))
    row = _row("server killed, started again: an update is acknowledged", seconds)
    yield {**row, "lost": lost, "twice": twice, "acknowledged": len(times)}


def lost_chiefs(environ: dict[str, str], repetitions: int, rng: random.Random) -> Iterator[Row]:
    """Measure how soon all is over when the chief is killed."""
    seconds = []
    for _ in range(repetitions):
        with Tasks(2, 2, **environ) as tasks:
            tasks.start_all()
            tasks.start("chief", 0, TASK_RUNS="command")
            with taking_part(tasks) as strategy:
                _until_moved(strategy)
            when = time.monotonic()
            tasks.kill("chief", 0)
            for job, index in [(job, k) for job in ("ps", "worker") for k in range(2)]:
                tasks.code(job, index)
            seconds.append(time.monotonic() - when)
    yield _row("chief killed: the last process of the job is gone", seconds)


def lost_members(environ: dict[str, str], repetitions: int, rng: random.Random) -> Iterator[Row]:
    """Measure how soon a worker in step with another ends when the other one was killed."""
    seconds = []
    for number in range(repetitions):
        together = {"TASK_RUNS": "train", "TASK_OPTIONS": '{"replicas_to_aggregate": 2}'}
        with Tasks(2, 1, chief=False, **environ) as tasks:
            tasks.start_all("ps")
            tasks.start_all("worker", **together)
            with taking_part(tasks) as strategy:
                _until_moved(strategy)
            when = time.monotonic()
            tasks.kill("worker", number % 2)
            tasks.code("worker", 1 - number % 2)  # The error ends it.
            seconds.append(time.monotonic() - when)
    yield _row("one of two synchronous workers killed: the other one ends", seconds)


def random_kills(environ: dict[str, str], kills: int, rng: random.Random) -> str:
    """Kill workers and servers at random moments while they make unique changes; count those."""
    count, killed = kills * PER_KILL, collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as runs:
        logging_to, path = (
            {"NDISTRIBUTE_SNAPSHOT_DIR": folder, "NDISTRIBUTE_DURABILITY": "log"},
            runs.name,
        )
        with _commanded(2, 2, environ | logging_to) as (tasks, strategy, chief):
            (first, mark_first), (second, mark_second) = (_marked(strategy, count) for _ in "ab")

            def mark_both(number: int) -> None:
                with open(path, "ab", buffering=0) as file:
                    file.write(b".")
                mark_first(number)
                first.numpy()  # What was changed goes out before it is read.
                mark_second(number)

            for start in range(0, count, PER_KILL):
                for number in range(start, start + PER_KILL):
                    chief.schedule(mark_both, args=(number,))
                threading.Event().wait(rng.uniform(0, KILL_WITHIN))
                job, victim = rng.choice(["worker", "ps"]), rng.randrange(2)
                tasks.kill(job, victim)
                tasks.start(job, victim)
                killed[job] += 1
                # Else most would die before they have begun anything.
                if job == "worker":
                    _until_at_work(chief, victim)
                else:
                    (first, second)[victim].numpy()
            chief.join(timeout=DEADLINE)
            found = np.stack([first.numpy(), second.numpy()])
        again = os.path.getsize(path) - count
    return (
        f"Random kills with a log: {killed['worker']} of workers and {killed['ps']} of servers, "
        f"{found.size} updates in {count} functions, {again} of them run again: "
        f"{np.sum(found == 0)} lost, "
        f"{np.sum(found > 1)} made twice."
    )


def log_costs(environ: dict[str, str], seconds: float) -> Iterator[list[str]]:
    """Yield updates a second with a log and without, of one client and of four."""
    ways = itertools.product((1 << 10, 1 << 18), (1, 4), ("snapshot", "log"))
    for elements, clients, durability in ways:
        with tempfile.TemporaryDirectory() as folder:
            saving = {"NDISTRIBUTE_SNAPSHOT_DIR": folder, "NDISTRIBUTE_DURABILITY": durability}
            with Tasks(1, 1, chief=False, **environ, **saving) as tasks:
                tasks.start_all("ps")
                rate = _updates_per_second(tasks, elements, clients, seconds)
        yield [
            f"{4 * elements:,}",
            str(clients),
            durability,
            shown(rate),
            shown(1e3 * clients / rate),
        ]


def _updates_per_second(tasks: Tasks, elements: int, clients: int, seconds: float) -> float:
    ones = np.ones(elements, np.float32)

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
        made = [stack.enter_context(taking_part(tasks)) for _ in range(clients)]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(clients))
        return sum(pool.map(work, made)) / seconds


@contextlib.contextmanager
def _commanded(
    workers: int, servers: int, environ: dict[str, str]
) -> Iterator[tuple[Tasks, Any, Any]]:
    with Tasks(workers, servers, **environ) as tasks:
        tasks.start_all()
        with commanded(tasks, timeout_seconds=DEADLINE) as (strategy, coordinator):
            for index in range(workers):
                _until_at_work(coordinator, index)
            yield tasks, strategy, coordinator


def _marked(strategy: Any, count: int) -> tuple[Any, Callable[[int], None]]:
    """Return a variable of zeros, and a function that adds one at a place of it."""
    with strategy.scope():
        marks = nd.Variable(np.zeros(count, np.int64))

    def mark(number: int) -> None:
        marks.scatter_add([number], [1])

    return marks, mark


def _until_at_work(coordinator: Any, worker: int) -> float:
    """Keep workers busy until a certain one has run something, and return when it did."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        done = coordinator.fetch([coordinator.schedule(_who) for _ in range(4)])
        times = [when for index, when in done if index == worker]
        if times:
            return float(min(times))
    raise TimeoutError(f"worker {worker} did not come")


def _until_moved(strategy: Any) -> None:
    """Wait until a job of `tests.faults.loops` trains."""
    from tests.faults.loops import Shared

    shared = Shared(strategy)
    wait_until(lambda: bool(shared.steps.numpy().any() or shared.weights.numpy().any()), DEADLINE)


def _who() -> tuple[int, float]:
    time.sleep(0.001)  # So that no worker takes all.
    return nd.cluster.worker_index(), time.monotonic()


def _hang_once(path: str) -> None:
    try:
        with open(path, "x") as file:
            file.write(str(nd.cluster.worker_index()))
    except FileExistsError:
        return
    wait_until(lambda: os.path.exists(f"{path}.go"), DEADLINE)


def _row(fault: str, seconds: Sequence[float]) -> Row:
    _log.info("%s: %s", fault, [round(each, 4) for each in seconds])
    median, most = (statistics.median(seconds), max(seconds)) if seconds else (0.0, 0.0)
    return {"fault": fault, "median": median, "max": most, "all": list(seconds)}


def _cells(row: Row) -> list[str]:
    lost = f"{min(row['lost'])} to {max(row['lost'])}" if "lost" in row else "-"
    figures = shown(1e3 * row["median"]), shown(1e3 * row["max"])
    where = row.get("wire", "servers")
    return [where, row["fault"], ", ".join(row.get("errors", [])), str(len(row["all"])), *figures,
        lost]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line, print tables and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--kills", type=int, help="at random; 100, quick 4")
    parser.add_argument("--heartbeat", type=float, default=2.0, help="timeout in seconds")
    of_servers = {
        "workers": lost_workers,
        "servers": lost_servers,
        "chief": lost_chiefs,
        "members": lost_members,
    }
    parts = [*WIRES, "cost", *of_servers, "kills", "log"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = options_of(parser, arguments)
    heartbeat = min(options.heartbeat, 1.5) if options.quick else options.heartbeat
    environ = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(heartbeat)}
    rng = random.Random(0)
    logging.getLogger("ndistribute").setLevel(logging.ERROR)  # That something is lost is expected.
    rows: list[Row] = []
    for wire in (wire for wire in WIRES if wire in options.only):
        rows += detections(wire, options.repetitions, heartbeat)
    for name, measure in of_servers.items():
        if name in options.only:
            rows += measure(environ, options.repetitions, rng)
    head = ["", "what", "raised", "times", "median ms", "max ms", "updates lost"]
    print(markdown(head, [_cells(row) for row in rows]))
    if "cost" in options.only:
        cost = [line for wire in ("shared", "ring") for line in costs(wire, options.quick)]
        print(markdown(["", "KiB", "us, calls compared", "us, not", "% more"], cost))
    if "kills" in options.only:
        print(random_kills(environ, options.kills or (4 if options.quick else 100), rng))
    if "log" in options.only:
        found = list(log_costs(environ, 0.1 if options.quick else 3.0))
        print(markdown(["bytes", "clients", "durability", "updates/s", "ms"], found))
    if options.out:
        write_json({"machine": machine(), "heartbeat": heartbeat, "rows": rows}, options.out)


if __name__ == "__main__":
    # Under this name processes find what they are to run.
    module = importlib.import_module("benchmarks.faults")
    module.main()
