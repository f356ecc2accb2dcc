"""Run a benchmark: contenders take turns, one repetition each, until all have done theirs.

Taking turns spreads whatever else the machine does over all of them alike. The parent only tells
workers what to do; it computes nothing while one of them works.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.case import OURS, PEER, Benchmark, Group, Result
from benchmarks.machine import machine
from benchmarks.workers import Workers

__all__ = ["Settings", "add_options", "main", "measure", "parse"]

_log = logging.getLogger("benchmarks")

# OpenBLAS's threads spin for 40 ms after their work (seen); the next contender must not share the
# cores with them.
SETTLE_SECONDS = 0.1


@dataclass(frozen=True)
class Settings:
    """How a benchmark is run.

    Args:
        repetitions: of each contender.
        seconds: how long a repetition takes, about.
        quick: whether the groups are small and the figures mean nothing.
        peers: whether TensorFlow takes part.
        cores: how many cores the workers may use.
        peer_python: the interpreter that has TensorFlow.
        only: groups whose names contain this take part.
    """

    repetitions: int
    seconds: float
    quick: bool
    peers: bool
    cores: int
    peer_python: str
    only: str = ""


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark from the command line, print its table and write what was asked for."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(description=benchmark.title)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    add_options(parser)
    parser.add_argument("--repetitions", type=int, help="of each contender; 9, quick 3")
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose name has this")
    options = parse(parser, arguments)
    available = len(os.sched_getaffinity(0))
    settings = Settings(
        repetitions=options.repetitions or (3 if options.quick else 9),
        seconds=0.02 if options.quick else 0.4,
        quick=options.quick,
        peers=options.peers,
        cores=options.cores or min(available, benchmark.max_cores),
        peer_python=options.tf_python,
        only=options.only,
    )
    written = measure(benchmark, settings)
    print(report.table(written))
    if options.out:
        report.write_json(written, options.out)
    if options.plot:
        from benchmarks import plots

        plots.draw(written, (options.out or Path(benchmark.name)).with_suffix(".png"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every script and run_all share."""
    parser.add_argument("--plot", action="store_true", help="draw a PNG as well (matplotlib)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--peers", action="store_true", help="alternate with TensorFlow")
    parser.add_argument("--tf-python", default=sys.executable, help="interpreter with TensorFlow")
    parser.add_argument("--cores", type=int, help="cores for all workers; 2, or 4 for all_reduce")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and refuse now what would fail after minutes."""
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")
    return options


def measure(benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """Run a benchmark and return what its JSON file holds."""
    sides = [OURS, PEER] if settings.peers else [OURS]
    described: dict[str, Any] = {"machine": machine()}
    results: list[Result] = []
    with Workers({OURS: sys.executable, PEER: settings.peer_python}, settings.cores) as workers:
        for side in list(sides):
            package = {OURS: "ndistribute", PEER: "tensorflow"}[side]
            described[side] = workers.get(side).ask(do="describe", packages=[package])
            if described[side]["packages"][package] is None and side == PEER:
                _log.warning("TensorFlow is not installed for %s: left out", settings.peer_python)
                sides.remove(side)
        for group in benchmark.groups(settings.quick, settings.cores):
            if settings.only in group.name:
                results += _run_group(benchmark, group, sides, settings, workers)
    return report.as_json(benchmark, results, described, quick=settings.quick)


def _run_group(
    benchmark: Benchmark, group: Group, sides: list[str], settings: Settings, workers: Workers
) -> list[Result]:
    contenders = [one for one in group.contenders if one.side in sides]
    opened: list[dict[str, Any]] = []
    for number, one in enumerate(contenders):
        _log.info("%s, %s: %s, %s", benchmark.name, group.name, one.side, one.name)
        opened.append(
            workers.of(one).ask(
                do="open",
                case=str(number),
                module=f"benchmarks.{benchmark.name}",
                maker=one.maker,
                params=dict(one.params),
                seconds=settings.seconds,
            )
        )
    _compare_checks(benchmark, group, [answer["check"] for answer in opened])
    runs: list[list[dict[str, float]]] = [[] for _ in contenders]
    for _ in range(settings.repetitions):
        for number, one in enumerate(contenders):
            time.sleep(0 if settings.quick else SETTLE_SECONDS)
            steps = opened[number]["steps"]
            runs[number].append(workers.of(one).ask(do="run", case=str(number), steps=steps))
    for number, one in enumerate(contenders):
        workers.of(one).ask(do="close", case=str(number))
    return [
        Result(
            group=group.name,
            contender=one,
            steps=answer["steps"],
            seconds=tuple(run["seconds"] / answer["steps"] / one.units for run in own),
            own_cores=tuple(run["own_cpu"] / run["seconds"] for run in own),
            others_cores=tuple(run["others_cpu"] / run["seconds"] for run in own),
            check=answer["check"],
        )
        for one, answer, own in zip(contenders, opened, runs, strict=True)
    ]


def _compare_checks(benchmark: Benchmark, group: Group, checks: list[float | None]) -> None:
    """Refuse to compare contenders that do not compute the same."""
    if benchmark.same_check is None or not checks:
        return
    known = [check for check in checks if check is not None]
    if any(not math.isclose(c, known[0], rel_tol=benchmark.same_check) for c in known):
        names = [one.name for one in group.contenders]
        raise RuntimeError(
            f"{benchmark.name}, {group.name}: the contenders compute different things: "
            f"{dict(zip(names, checks, strict=False))}"
        )
