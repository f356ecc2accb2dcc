"""What to reach, and whether it was: the rows of the comparison with TensorFlow.

A goal names one of our figures, TensorFlow's beside it in the same group, and a bound: on the ratio
of the two, or on our figure itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.case import OURS, PEER
from benchmarks.report import markdown, ratio, shown

__all__ = ["GOALS", "Goal", "comparison"]


@dataclass(frozen=True)
class Goal:
    """One row of the comparison.

    Args:
        benchmark: whose JSON has the figures.
        group: in it.
        ours: the name of our contender.
        theirs: the names of TensorFlow's; of several, the best is compared.
        times: how many times as good as TensorFlow's our figure is to be, or None.
        figure: what our figure is to be at least, or for a time at most, or None.
    """

    benchmark: str
    group: str
    ours: str
    theirs: Sequence[str]
    times: float | None = None
    figure: float | None = None


_ONE, _MIRRORED = "one replica, 2 BLAS threads", "MirroredStrategy, 2 replicas"
_CENTRAL = "CentralStorageStrategy, 2 replicas"
_BATCHES = (32, 256, 2048)
_CALLS = ("eager", "tf.function")

GOALS = (
    *(Goal("mlp", f"batch {b}", _ONE, ["one process"], times=1.0) for b in _BATCHES),
    *(
        Goal("mlp", f"batch {b}", _MIRRORED, [_MIRRORED], times=2.0 if b < 2048 else 1.0)
        for b in _BATCHES
    ),
    *(Goal("mlp", f"batch {b}", _CENTRAL, [_MIRRORED]) for b in _BATCHES),
    Goal("overhead", "run of an empty step", "2 replicas", _CALLS, figure=100),
    Goal("overhead", "run of a scalar all-reduce", "2 replicas", _CALLS, figure=200),
    Goal("overhead", "reduce of a scalar", "2 replicas", _CALLS, figure=30),
    Goal("input_pipeline", "shuffle + batch", "Dataset", ["Dataset"], figure=1_500_000),
    Goal(
        "input_pipeline",
        "through distribute_dataset",
        "2 replicas",
        ["2 replicas"],
        figure=1_000_000,
    ),
    *(
        Goal("all_reduce", f"2 replicas, {size}", "ctx.all_reduce", ["ctx.all_reduce"])
        for size in ("4 KiB", "64 KiB", "1 MiB", "16 MiB", "64 MiB")
    ),
)


def comparison(written: Mapping[str, dict[str, Any]], goals: Sequence[Goal] = GOALS) -> str:
    """Return the table of all goals whose figures there are.

    Args:
        written: what the benchmarks wrote, by name.
        goals: the rows.
    """
    head = ["", "ours", "TF", "ratio (spread)", "reach", "met?"]
    return markdown(head, [row for goal in goals for row in _row(goal, written)])


def _row(goal: Goal, written: Mapping[str, dict[str, Any]]) -> Iterator[list[str]]:
    benchmark = written.get(goal.benchmark, {"results": []})
    found = {
        (entry["side"], entry["name"]): entry["figure"]
        for entry in benchmark["results"]
        if entry["group"] == goal.group
    }
    ours = found.get((OURS, goal.ours))
    if ours is None:
        return
    higher = benchmark["higher_is_better"]
    peers = [found[PEER, name] for name in goal.theirs if (PEER, name) in found]
    theirs = (max if higher else min)(peers, key=lambda f: f["median"], default=None)
    times = None if theirs is None else ratio(ours, theirs, higher_is_better=higher)
    yield [
        f"{goal.benchmark}, {goal.group}: {goal.ours}",
        f"{shown(ours['median'])} {benchmark['unit']}",
        "-" if theirs is None else shown(theirs["median"]),
        "-" if times is None else "{median:.2f} ({min:.2f} to {max:.2f})".format(**times),
        _reach(goal, benchmark),
        _met(goal, ours["median"], times, higher),
    ]


def _reach(goal: Goal, benchmark: dict[str, Any]) -> str:
    if goal.times is not None:
        return f"{goal.times:g} x TF"
    return "-" if goal.figure is None else f"{shown(goal.figure)} {benchmark['unit']}"


def _met(goal: Goal, ours: float, times: dict[str, Any] | None, higher: bool) -> str:
    if goal.figure is not None:
        return _yes(ours >= goal.figure if higher else ours <= goal.figure)
    if goal.times is None or times is None:
        return "-"
    return _yes(times["median"] >= goal.times)


def _yes(met: bool) -> str:
    return "yes" if met else "no"
