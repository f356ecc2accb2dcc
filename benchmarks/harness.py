"""The harness: contenders alternate, one repetition each, until all repetitions are done.

So the other load of the machine affects all contenders equally. The processes of a contender sleep
until they must run a repetition. A contender that fails is reported and left out; the others go on.
The results so far are written after each group.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import logging
import math
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import report, worker
from benchmarks.machine import busy_seconds, machine, seconds_of
from ndistribute.launcher import doctor
from tests.processes import Ranks, Starter

OURS, TF, TORCH, MPICH, JAX = "ours", "TF", "PyTorch", "MPICH", "JAX"
# What a side's interpreter must have, and what else of it is worth noting.
_PACKAGES = {
    OURS: ["numpy", "mpi4py", "mpich", "jax", "torch"],
    TF: ["tensorflow"],
    TORCH: ["torch"],
    MPICH: ["mpi4py", "mpich"],
    JAX: ["keras", "jax"],
}
_PYTHONS = {TF: "tf_python", TORCH: "torch_python", MPICH: "mpi_python", JAX: "jax_python"}

# OpenBLAS's threads spin for 40 ms after their work (seen); the next contender must not share the
# cores with them.
_SETTLE_SECONDS = 0.1
# A first step may trace, page memory in, or start threads.
_WARM_STEPS = 3
# A step that takes longer is warm after the one that is checked and another.
_LONG_SECONDS = 1.0
# Importing TensorFlow takes ten seconds on a busy machine, tracing a step about as long.
_ANSWER_SECONDS = 180.0
_MAX_FAILURES = 2
_log = logging.getLogger("benchmarks")


Way = tuple[str, str, str, Mapping[str, Any]]  # The name, side, maker and parameters.


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a group."""

    name: str
    side: str  # Whose it is; each side has its own interpreter.
    maker: str  # ``module:function``, a context manager that yields a `worker.Prepared`.
    params: Mapping[str, Any]
    jobs: tuple[str, ...] = ("worker",)  # Its processes, as tasks of a cluster.
    wire: str | Starter = "python"  # Or "mpi": they are started by mpiexec; or what starts them.
    threads: int = 1  # For arithmetic, in each process; 0: it chooses itself.
    environ: Mapping[str, str] = field(default_factory=dict)  # Of its processes, besides.
    units: float = 1.0  # How much work a step is, in the benchmark's unit.
    facts: Mapping[str, Any] = field(default_factory=dict)  # What else the JSON says about it.
    alone: bool = False  # Whether its processes end with the group, so that their memory is its.


@dataclass(frozen=True)
class Group:
    """Contenders that alternate, because their figures are compared."""

    name: str
    contenders: Sequence[Contender]
    unit: str = ""  # If it is not the benchmark's.


@dataclass(frozen=True)
class Benchmark:
    """A script: what it measures and how its figures read."""

    name: str
    title: str
    unit: str
    groups: Callable[[bool], list[Group]]  # Called with whether the run is quick.
    rate: bool = True  # Whether a figure is units a second; else it is microseconds for one unit.
    tolerance: float = 1e-3  # By which the checks of a group may differ, relatively.
    conclude: Callable[[list[dict[str, Any]]], str] = lambda entries: ""  # More tables.


def contenders(module: str, ways: Sequence[Way], **common: Any) -> list[Contender]:
    """Return contenders from their name, side, maker and parameters, and what all have alike."""
    return [
        Contender(name, side, f"{module}:{maker}", params, **common)
        for name, side, maker, params in ways
    ]


@dataclass
class _Turn:
    one: Contender
    case: str
    steps: int = 1
    check: float | None = None
    told: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    own_cores: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)
    processor: list[tuple[float, float]] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all scripts share."""
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--plot", action="store_true", help="draw a PNG as well (matplotlib)")
    parser.add_argument("--peers", action="store_true", help="alternate with what is installed")
    parser.add_argument("--tf-python", default=sys.executable, help="interpreter with TensorFlow")
    parser.add_argument("--torch-python", default=sys.executable, help="one with PyTorch")
    parser.add_argument("--mpi-python", default=sys.executable, help="one with mpi4py and MPICH")
    parser.add_argument("--jax-python", default=sys.executable, help="one with Keras and JAX")
    parser.add_argument("--cores", type=int, default=2, help="that all processes share; 2")
    parser.add_argument("--busy", type=int, default=0, help="loops that use cores meanwhile; none")
    parser.add_argument("--repetitions", type=int, help="of each contender; 7, quick 1")


def options_of(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the command line, and refuse now what would fail after minutes."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # Whoever ends this process ends its workers as well, and what they left among temporary files.
    signal.signal(signal.SIGTERM, _exit)
    folder = os.path.join(tempfile.gettempdir(), f"benchmark-{secrets.token_hex(4)}")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # The signal may come during mkdir.
    os.mkdir(folder, 0o700)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")
    for name in _PYTHONS.values():  # Given relative to where we are; workers run in the repository.
        if os.sep in getattr(options, name):
            setattr(options, name, os.path.abspath(getattr(options, name)))
    options.repetitions = options.repetitions or (1 if options.quick else 7)
    return options


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # Another one would interrupt the cleanup.
    sys.exit(128 + number)


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark from the command line, print its table and write what was asked for."""
    parser = argparse.ArgumentParser(description=benchmark.title)
    add_options(parser)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose name has this")
    options = options_of(parser, arguments)

    def save(written: dict[str, Any]) -> None:
        if options.out:
            report.write_json(written, options.out)

    written = measure(benchmark, options, save)
    print(report.table(written) + "\n\n" + benchmark.conclude(written["results"]))
    if options.plot and written["results"]:
        from benchmarks import plots

        plots.draw(written, (options.out or Path(benchmark.name)).with_suffix(".png"))
    if any(failure["side"] == OURS for failure in written["failures"]):
        sys.exit(1)


def measure(
    benchmark: Benchmark,
    options: argparse.Namespace,
    save: Callable[[dict[str, Any]], None] = lambda written: None,
) -> dict[str, Any]:
    """Run a benchmark and return what its JSON file holds; `save` gets it after each group."""
    for finding in doctor.examine():
        if finding.state == "slow":
            _log.warning("%s", finding)
    groups = [one for one in benchmark.groups(options.quick) if options.only in one.name]
    with contextlib.closing(_Run(benchmark, options)) as run, _busy_loops(options.busy):
        run.describe({one.side for group in groups for one in group.contenders})
        for group in groups:
            run.group(group)
            save(run.written)
        return run.written


class _Run:
    """One run of a benchmark: who takes part, what was measured, who failed."""

    def __init__(self, benchmark: Benchmark, options: argparse.Namespace) -> None:
        self._benchmark, self._options = benchmark, options
        self._teams: dict[Any, Ranks] = {}
        self._pythons = {OURS: sys.executable}
        if options.peers:
            self._pythons |= {side: getattr(options, name) for side, name in _PYTHONS.items()}
        self.written: dict[str, Any] = {
            **{name: getattr(benchmark, name) for name in ("name", "title", "unit", "rate")},
            "quick": options.quick,
            "machine": machine(),
            "busy_loops": options.busy,
            "sides": {},
            "results": [],
            "failures": [],
        }

    def describe(self, sides: set[str]) -> None:
        """Find out what each side has."""
        for side in (side for side in self._pythons if side in sides):
            python = self._pythons[side]
            with Ranks(1, self._wire(side), python=python) as alone:
                (found,) = alone.run(worker.describe, _PACKAGES[side])
            if found.result()[_PACKAGES[side][0]] is None:
                _log.warning("%s: %s has no %s: left out", side, python, _PACKAGES[side][0])
            else:
                self.written["sides"][side] = found.result()

    def group(self, group: Group) -> None:
        """Measure the contenders of a group, those that can."""
        able = [one for one in group.contenders if self._can(one)]
        turns = [_Turn(one, str(number)) for number, one in enumerate(able)]
        turns = [turn for turn in turns if self._trying(group, turn, self._open)]
        self._compare_checks(group, turns)
        for _ in range(self._options.repetitions):
            turns = [turn for turn in turns if self._trying(group, turn, self._repeat)]
        turns = [turn for turn in turns if self._trying(group, turn, self._close)]
        self.written["results"] += [self._entry(group, turn) for turn in turns]
        for one in (turn.one for turn in turns if turn.one.alone):
            _end(self._teams.pop(_key(one)))

    def close(self) -> None:
        """End all processes."""
        for key, team in self._teams.items():
            if key[3] == "python":  # They hold nothing that is worth saving.
                team.kill()
            _end(team)

    def _can(self, one: Contender) -> bool:
        who = [(failure["side"], failure["name"]) for failure in self.written["failures"]]
        return one.side in self.written["sides"] and who.count((one.side, one.name)) < _MAX_FAILURES

    def _trying(self, group: Group, turn: _Turn, action: Callable[[_Turn], None]) -> bool:
        one = turn.one
        try:
            action(turn)
        except (AssertionError, OSError) as error:
            _log.warning("%s, %s: %s failed: %s", group.name, one.side, one.name, error)
            failure = {"group": group.name, "side": one.side, "name": one.name}
            self.written["failures"].append({**failure, "error": str(error)})
            if (failed := self._teams.pop(_key(one), None)) is not None:
                failed.kill()
                _end(failed)
            return False
        return True

    def _ask(self, one: Contender, function: Callable[..., Any], *args: Any) -> list[Any]:
        if _key(one) not in self._teams:
            with _on_cores(self._options.cores):
                environ = {**_pinned(one.threads), **one.environ}
                self._teams[_key(one)] = Ranks(
                    len(one.jobs),
                    self._wire(one.side) if one.wire == "python" else one.wire,
                    environ,
                    jobs=one.jobs,
                    python=self._pythons[one.side],
                )
        outcomes = self._teams[_key(one)].run(function, *args, timeout=_ANSWER_SECONDS)
        # Who failed first says why; that the others lost it is no news.
        outcomes.sort(key=lambda outcome: outcome.error in (None, "WorkerLostError", "Lost"))
        return [value for value in (outcome.result() for outcome in outcomes) if value is not None]

    def _wire(self, side: str) -> str:
        """Return how processes start that need no MPI.

        Forks start at once, but with the threads for arithmetic of whom they are forked from.
        """
        return "tcp" if self._options.quick and side == OURS else "python"

    def _open(self, turn: _Turn) -> None:
        one = turn.one
        _log.info("%s: %s, %s %s", self._benchmark.name, one.side, one.name, dict(one.params))
        server = "worker:serve" if one.side == OURS else "peer:server"
        params = server, one.maker, dict(one.params)
        turn.check = max(self._ask(one, worker.open_case, turn.case, *params), default=None)
        if self._options.quick:
            return
        seconds = 0.25
        if self._seconds(turn, 1) > _LONG_SECONDS:
            return
        self._seconds(turn, _WARM_STEPS)
        while True:
            # The fastest of three, lest a hiccup makes repetitions short from then on.
            took = min(self._seconds(turn, turn.steps) for _ in range(3))
            if took >= seconds / 2:
                turn.steps = max(1, round(turn.steps * seconds / took))
                return
            turn.steps = max(2 * turn.steps, int(turn.steps * seconds / max(took, 1e-9) / 2))

    def _repeat(self, turn: _Turn) -> None:
        time.sleep(0 if self._options.quick else _SETTLE_SECONDS)
        pids = self._teams[_key(turn.one)].pids
        busy, own, start = busy_seconds(), seconds_of(pids), time.perf_counter()
        seconds = self._seconds(turn, turn.steps)
        busy, own = busy_seconds() - busy, seconds_of(pids) - own
        whole = time.perf_counter() - start
        turn.seconds.append(seconds / turn.steps / turn.one.units)
        units = turn.steps * turn.one.units
        turn.processor.append((own / units, busy / units))
        turn.own_cores.append(own / whole)
        turn.others_cores.append(max(0.0, busy - own) / whole)

    def _seconds(self, turn: _Turn, steps: int) -> float:
        self._ask(turn.one, worker.collect)
        return float(max(self._ask(turn.one, worker.run_case, turn.case, steps)))

    def _close(self, turn: _Turn) -> None:
        turn.told = self._ask(turn.one, worker.close_case, turn.case)

    def _compare_checks(self, group: Group, turns: Sequence[_Turn]) -> None:
        """Refuse to compare contenders that do not compute the same."""
        tolerance = self._benchmark.tolerance
        known = {f"{turn.one.side}: {turn.one.name}": turn.check for turn in turns}
        checks = [check for check in known.values() if check is not None]
        if not all(math.isclose(check, checks[0], rel_tol=tolerance) for check in checks):
            raise RuntimeError(f"{group.name}: contenders compute different things: {known}")

    def _entry(self, group: Group, turn: _Turn) -> dict[str, Any]:
        one, rate = turn.one, self._benchmark.rate
        figures = [1 / seconds if rate else seconds * 1e6 for seconds in turn.seconds]
        processor = [statistics.mean(column) for column in zip(*turn.processor, strict=True)]
        return {
            "group": group.name,
            "unit": group.unit or self._benchmark.unit,
            "side": one.side,
            "name": one.name,
            "parameters": dict(one.params),
            **one.facts,
            "figure": {"median": statistics.median(figures), "all": figures},
            "own_cores": statistics.median(turn.own_cores),
            "others_cores": statistics.median(turn.others_cores),
            # Seconds for a unit: of the processes, and of all that computes, as the kernel does.
            "processor": dict(zip(("own", "machine"), processor, strict=True)),
            "check": turn.check,
            "told": turn.told,
        }


def _key(one: Contender) -> tuple[Any, ...]:
    return (one.side, one.name, one.jobs, one.wire, one.threads)


@contextlib.contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    """Keep cores busy in a ``with`` block."""
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(count)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait(10)


def _pinned(threads: int) -> dict[str, str]:
    """Return the environment that all processes get, whoever's they are."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    return dict.fromkeys(names, str(threads or "")) | quiet


@contextlib.contextmanager
def _on_cores(count: int) -> Any:
    """Let processes that are started meanwhile run on the first so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(team: Ranks) -> None:
    with contextlib.suppress(AssertionError):
        team.close()
