"""The time until a job detects a fault in one of its processes, and what is lost.

The jobs and faults are those of `tests/faults`: real processes and signals. Times start at the
fault and end at the event in the table: the exception in a step of the last of the other workers,
or, for jobs with parameter servers, the first work after it. `tests/faults/test_kills.py` kills at
random moments; ``FAULTS_KILLS`` says how often.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
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
from tests.jobs import steps
from tests.jobs.clusters import commanded, taking_part
from tests.jobs.loops import Shared
from tests.processes import Ranks, Tasks, wait_until

Row = dict[str, Any]
WIRES = {"shared": (2, "tcp"), "ring": (3, "tcp"), "mpi": (3, "mpi")}
DEADLY: dict[str, Callable[[], object]] = {
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(1),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "has finished": lambda: steps.strategy().close(),
}
FAULTS = ("raises", "passes another shape", "asks for another op", "leaves a call out", "is late",
    *DEADLY)  # fmt: skip
LATE_SECONDS = 0.5
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

    def step() -> None:
        if fault == "raises":
            raise ValueError("a bad batch")
        if fault == "is late":
            steps.broken()
        if fault.startswith(("passes", "asks")):
            other = fault.startswith("passes")
            op, length = ("sum", steps.SMALL + 1) if other else ("max", steps.SMALL)
            steps.context().all_reduce(op, np.ones(length))

    Path(note).write_text(str(time.monotonic()))
    if fault in DEADLY:
        DEADLY[fault]()
        return None
    with contextlib.suppress(ValueError, nd.DistributeError):
        steps.strategy().run(step)
        steps.broken()
    return None


def struck(wire: str, fault: str, number: int, heartbeat: float) -> tuple[float, set[str]] | None:
    """Return how soon the last of the others knew of a fault, and what they raised."""
    environ = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(heartbeat)}
    environ["FAULTS_WIRE"] = "auto" if wire == "shared" else "ring"
    size, transport = WIRES[wire]
    who = number % size
    # Else mpiexec ends all ranks when one dies, before they can say when they knew.
    with mock.patch.dict(os.environ, {"RANKS_MPIEXEC": "-disable-auto-cleanup"}):
        ranks = Ranks(size, transport, environ)
    try:
        with tempfile.NamedTemporaryFile() as note:
            ranks.start(hit, who, fault, note.name)
            others = ranks.collect(DEADLINE, [rank for rank in range(size) if rank != who])
            told = [one.value for one in others if one.value is not None]
            when = float(Path(note.name).read_text())
        if fault not in DEADLY:
            ranks.collect(DEADLINE, [who])
            [one.result() for one in ranks.run(steps.worked_again, timeout=DEADLINE)]
    finally:
        ranks.kill()
        with contextlib.suppress(AssertionError):
            ranks.close()
    # mpiexec may have ended the others before they knew.
    return (max(moment for moment, _ in told) - when, {e for _, e in told}) if told else None


def detections(wire: str, repetitions: int, heartbeat: float) -> Iterator[Row]:
    """Yield for each fault how soon the others knew of it, each time."""
    for fault in FAULTS:
        found = [struck(wire, fault, number, heartbeat) for number in range(repetitions)]
        known = [one for one in found if one is not None]
        row = _row(f"one worker {fault}", [seconds for seconds, _ in known])
        yield {**row, "wire": wire, "errors": sorted(set().union(*(errors for _, errors in known)))}


def lost_worker(environ: dict[str, str], number: int) -> Iterator[tuple[str, float]]:
    """Yield what becomes of the function that a worker has which is killed, or stopped."""
    with tempfile.TemporaryDirectory() as folder, _commanded(2, 1, environ) as (tasks, _, chief):
        for fault in ("killed", "stopped"):
            path = Path(folder, fault)
            value = chief.schedule(_hang_once, args=(str(path),))
            wait_until(lambda path=path: path.exists() and bool(path.read_text()))
            victim, when = int(path.read_text()), time.monotonic()
            if fault == "stopped":
                tasks.send("worker", victim, signal.SIGSTOP)
            else:
                tasks.kill("worker", victim)
            value.fetch(timeout=DEADLINE)
            yield f"worker {fault}: another has its function's result", time.monotonic() - when
            if fault == "killed":
                tasks.start("worker", victim)
                again = _until_at_work(chief, victim) - when
                yield "worker killed, started again: it has taken work", again


def lost_server(environ: dict[str, str], number: int) -> Iterator[tuple[str, float]]:
    """Yield how soon updates go on when a server is killed, and how many are lost."""
    with tempfile.TemporaryDirectory() as folder:
        saving = {"NDISTRIBUTE_SNAPSHOT_DIR": folder, "NDISTRIBUTE_SNAPSHOT_SECONDS": "1"}
        with _commanded(2, 1, environ | saving) as (tasks, strategy, chief):
            with strategy.scope():
                marks = nd.Variable(np.zeros(1 << 18, np.int64))

            def mark(number: int) -> None:
                marks.scatter_add([number], [1])

            strategy.save_snapshots()
            times: list[float] = []
            killed: list[tuple[float, int]] = []

            def strike() -> None:
                threading.Event().wait(random.Random(number).uniform(1, 2))
                killed.append((time.monotonic(), len(times)))
                tasks.kill("ps", 0)
                tasks.start("ps", 0)

            thread = threading.Thread(target=strike)
            thread.start()
            # The first one after the kill may be one that the old server made.
            while not killed or len(times) < killed[0][1] + 3:
                chief.schedule(mark, args=(len(times),)).fetch(timeout=DEADLINE)
                times.append(time.monotonic())
            thread.join()
            when, before = killed[0]
            made = marks.numpy()
            yield "server killed, started again: an update is acknowledged", times[-1] - when
            yield "updates that a killed server lost", float(np.sum(made[:before] == 0))
            yield "updates made twice", float(np.sum(made > 1))


def lost_task(environ: dict[str, str], number: int) -> Iterator[tuple[str, float]]:
    """Yield how soon the others end when the chief is killed, or a worker in step with another."""
    with Tasks(2, 2, **environ) as tasks:
        tasks.start_all()
        tasks.start("chief", 0, TASK_RUNS="command")
        rest = [(job, index) for job in ("ps", "worker") for index in range(2)]
        what = "chief killed: the last process of the job is gone"
        yield what, _ends_after(tasks, ("chief", 0), rest)
    with Tasks(2, 1, chief=False, **environ) as tasks:
        tasks.start_all("ps")
        options = '{"replicas_to_aggregate": 2}'
        tasks.start_all("worker", TASK_RUNS="train", TASK_OPTIONS=options)
        what = "one of two synchronous workers killed: the other one ends"
        yield what, _ends_after(tasks, ("worker", number % 2), [("worker", 1 - number % 2)])


def _ends_after(tasks: Tasks, victim: tuple[str, int], rest: Sequence[tuple[str, int]]) -> float:
    """Kill a task of a job that trains, and return how soon some others end."""
    with taking_part(tasks) as strategy:
        shared = Shared(strategy)
        wait_until(lambda: bool(shared.steps.numpy().any() or shared.weights.numpy().any()))
    when = time.monotonic()
    tasks.kill(*victim)
    for task in rest:
        tasks.code(*task)
    return time.monotonic() - when


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


def _until_at_work(coordinator: Any, worker: int) -> float:
    """Keep workers busy until a certain one has run something, and return when it did."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        done = coordinator.fetch([coordinator.schedule(_who) for _ in range(4)])
        times = [when for index, when in done if index == worker]
        if times:
            return float(min(times))
    raise TimeoutError(f"worker {worker} did not come")


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


def _row(what: str, figures: Sequence[float]) -> Row:
    _log.info("%s: %s", what, [round(each, 4) for each in figures])
    median, most = (statistics.median(figures), max(figures)) if figures else (0.0, 0.0)
    return {"what": what, "median": median, "max": most, "all": list(figures)}


def _cells(row: Row) -> list[str]:
    scale, unit = (1.0, "") if row["what"].startswith("updates") else (1e3, " ms")
    figures = [shown(scale * row[which]) + unit for which in ("median", "max")]
    return [row.get("wire", "servers"), row["what"], ", ".join(row.get("errors", [])), *figures]


SERVERS = {"workers": lost_worker, "servers": lost_server, "tasks": lost_task}
PARTS = [*WIRES, *SERVERS]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line, print tables and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--heartbeat", type=float, default=2.0, help="timeout in seconds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = options_of(parser, arguments)
    only = options.only
    environ = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(options.heartbeat)}
    logging.getLogger("ndistribute").setLevel(logging.ERROR)  # That something is lost is expected.
    rows: list[Row] = []
    for wire in (wire for wire in WIRES if wire in only):
        rows += detections(wire, options.repetitions, options.heartbeat)
    for name in (name for name in SERVERS if name in only):
        found: dict[str, list[float]] = collections.defaultdict(list)
        for number in range(options.repetitions):
            for what, figure in SERVERS[name](environ, number):
                found[what].append(figure)
        rows += (_row(what, figures) for what, figures in found.items())
    print(markdown(["", "what", "raised", "median", "max"], [_cells(row) for row in rows]))
    if options.out:
        measured = {"machine": machine(), "heartbeat": options.heartbeat, "rows": rows}
        write_json(measured, options.out)


if __name__ == "__main__":
    # Under this name processes find what they are to run.
    module = importlib.import_module("benchmarks.faults")
    module.main()
