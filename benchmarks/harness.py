"""Run a benchmark: contenders take turns, one repetition each, until all have done theirs.

Taking turns spreads whatever else the machine does over all of them alike. The parent only tells
workers what to do; it computes nothing while one of them works. A contender that fails is reported
and left out, the others go on, and what is known is written after each group.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.case import (
    OURS,
    PACKAGES,
    Benchmark,
    Contender,
    Group,
    Result,
)
from benchmarks.machine import machine
from benchmarks.options import add_options, parse, pythons
from benchmarks.team import Workers
from benchmarks.workers import WorkerError

__all__ = ["Settings", "main", "measure"]

_log = logging.getLogger("benchmarks")

# OpenBLAS's threads spin for 40 ms after their work (seen); the next contender must not share the
# cores with them.
SETTLE_SECONDS = 0.1

# A first step may trace, page memory in, or start threads.
WARM_STEPS = 3

# A contender's processes are started again after a failure, but not for ever.
MAX_FAILURES = 2


@dataclass(frozen=True)
class Settings:
    """How a benchmark is run.

    Args:
        repetitions: of each contender.
        seconds: how long a repetition takes, about.
        quick: whether the groups are small, a repetition is one step and the figures mean nothing.
        cores: how many cores the workers may use.
        pythons: the interpreter of each side that takes part.
        only: groups whose names contain this take part.
    """

    repetitions: int
    seconds: float
    quick: bool
    cores: int
    pythons: dict[str, str]
    only: str = ""


@dataclass
class _Turn:
    """A contender of the group that runs, and what it did so far."""

    contender: Contender
    case: str
    steps: int = 0
    check: float | None = None
    runs: list[dict[str, float]] = field(default_factory=list)


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark from the command line, print its table and write what was asked for.

    Raises:
        SystemExit: with status 1 where one of our own contenders failed.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # Whoever ends this process ends its workers as well.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=benchmark.title)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    add_options(parser)
    parser.add_argument("--repetitions", type=int, help="of each contender; 9, quick 1")
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose name has this")
    if benchmark.of_processes:
        parser.add_argument("--processes", type=int, default=2, help="that meet; 2")
    options = parse(parser, arguments)
    if benchmark.of_processes:
        benchmark = benchmark.of_processes(options.processes)
    available = len(os.sched_getaffinity(0))
    settings = Settings(
        repetitions=options.repetitions or (1 if options.quick else 9),
        seconds=0.4,
        quick=options.quick,
        cores=options.cores or min(available, benchmark.max_cores),
        pythons=pythons(options),
        only=options.only,
    )

    def save(written: dict[str, Any]) -> None:
        if options.out:
            report.write_json(written, options.out)

    written = measure(benchmark, settings, save)
    print(report.table(written))
    if options.plot and written["results"]:
        from benchmarks import plots

        plots.draw(written, (options.out or Path(benchmark.name)).with_suffix(".png"))
    if any(failure["side"] == OURS for failure in written["failures"]):
        sys.exit(1)


def measure(
    benchmark: Benchmark,
    settings: Settings,
    save: Callable[[dict[str, Any]], None] = lambda written: None,
) -> dict[str, Any]:
    """Run a benchmark and return what its JSON file holds; `save` gets it after each group."""
    groups = [
        g for g in benchmark.groups(settings.quick, settings.cores) if settings.only in g.name
    ]
    with Workers(settings.pythons, settings.cores) as workers:
        run = _Run(benchmark, settings, workers)
        run.describe({one.side for group in groups for one in group.contenders})
        for group in groups:
            run.group(group)
            save(run.written())
        return run.written()


class _Run:
    """One run of a benchmark: who takes part, what was measured, who failed."""

    def __init__(self, benchmark: Benchmark, settings: Settings, workers: Workers) -> None:
        self._benchmark = benchmark
        self._settings = settings
        self._workers = workers
        self._described: dict[str, Any] = {"machine": machine()}
        self._installed: dict[str, set[str]] = {}
        self._results: list[Result] = []
        self._failures: list[dict[str, Any]] = []

    def written(self) -> dict[str, Any]:
        """Return what the JSON file holds."""
        return report.as_json(
            self._benchmark,
            self._results,
            self._described,
            self._failures,
            quick=self._settings.quick,
        )

    def describe(self, sides: set[str]) -> None:
        """Find out what each side has."""
        for side in (side for side in self._settings.pythons if side in sides):
            packages = list(PACKAGES[side])
            answer = self._workers.alone(side).ask(do="describe", packages=packages)
            self._described[side] = answer
            self._installed[side] = {n for n, version in answer["packages"].items() if version}
            if packages[0] not in self._installed[side]:
                python = self._settings.pythons[side]
                _log.warning("%s: %s has no %s: left out", side, python, packages[0])
                del self._installed[side]

    def group(self, group: Group) -> None:
        """Measure the contenders of a group, those that can."""
        chosen = [one for one in group.contenders if self._can(one)]
        turns = [_Turn(one, str(number)) for number, one in enumerate(chosen)]
        turns = [turn for turn in turns if self._trying(group, turn, self._open)]
        self._compare_checks(group, turns)
        for _ in range(self._settings.repetitions):
            turns = [turn for turn in turns if self._trying(group, turn, self._repeat)]
        turns = [turn for turn in turns if self._trying(group, turn, self._close)]
        self._results += [_result(group, turn) for turn in turns]

    def _can(self, one: Contender) -> bool:
        failed = [f for f in self._failures if (f["side"], f["name"]) == (one.side, one.name)]
        installed = self._installed.get(one.side)
        if installed is None or len(failed) >= MAX_FAILURES:
            return False
        return not one.needs or one.needs in installed

    def _trying(self, group: Group, turn: _Turn, action: Callable[[_Turn], None]) -> bool:
        one = turn.contender
        try:
            action(turn)
        except WorkerError as error:
            _log.warning("%s, %s: %s failed: %s", group.name, one.side, one.name, error)
            failure = {"group": group.name, "side": one.side, "name": one.name}
            self._failures.append({**failure, "error": str(error)})
            self._workers.discard(one)
            return False
        return True

    def _open(self, turn: _Turn) -> None:
        one = turn.contender
        _log.info("%s: %s, %s %s", self._benchmark.name, one.side, one.name, dict(one.params))
        module, _, maker = one.maker.rpartition(":")
        answer = self._workers.of(one).ask(
            do="open",
            case=turn.case,
            module=f"benchmarks.{module or self._benchmark.name}",
            maker=maker,
            params=dict(one.params),
        )
        turn.check = answer["check"]
        turn.steps = self._steps(turn)

    def _steps(self, turn: _Turn) -> int:
        """Warm up, and return how many steps take about as long as a repetition should."""
        seconds = self._settings.seconds
        if self._settings.quick:
            return 1
        self._ask_to_run(turn, WARM_STEPS)
        steps = 1
        while True:
            # The fastest of three, lest a hiccup makes repetitions short from then on.
            took = min(self._ask_to_run(turn, steps)["seconds"] for _ in range(3))
            if took >= seconds / 2:
                return max(1, round(steps * seconds / took))
            steps = max(2 * steps, int(steps * seconds / max(took, 1e-9) / 2))

    def _repeat(self, turn: _Turn) -> None:
        time.sleep(0 if self._settings.quick else SETTLE_SECONDS)
        turn.runs.append(self._ask_to_run(turn, turn.steps))

    def _close(self, turn: _Turn) -> None:
        self._workers.of(turn.contender).ask(do="close", case=turn.case)

    def _ask_to_run(self, turn: _Turn, steps: int) -> dict[str, float]:
        return self._workers.of(turn.contender).ask(do="run", case=turn.case, steps=steps)

    def _compare_checks(self, group: Group, turns: Sequence[_Turn]) -> None:
        """Refuse to compare contenders that do not compute the same."""
        tolerance = self._benchmark.same_check
        known = {
            f"{turn.contender.side}: {turn.contender.name}": turn.check
            for turn in turns
            if turn.check is not None
        }
        if tolerance is None or not known:
            return
        first = next(iter(known.values()))
        if any(not math.isclose(check, first, rel_tol=tolerance) for check in known.values()):
            raise RuntimeError(
                f"{self._benchmark.name}, {group.name}: the contenders compute different things: "
                f"{known}"
            )


def _result(group: Group, turn: _Turn) -> Result:
    steps, units = turn.steps, turn.contender.units
    return Result(
        group=group.name,
        contender=turn.contender,
        steps=steps,
        seconds=tuple(run["seconds"] / steps / units for run in turn.runs),
        own_cores=tuple(run["own_cpu"] / run["seconds"] for run in turn.runs),
        others_cores=tuple(run["others_cpu"] / run["seconds"] for run in turn.runs),
        check=turn.check,
    )
