"""What becomes of the seconds: medians with their spread, tables, JSON. Pure, but for the writing.

The ratio of two contenders is that of their medians; its spread is over repetitions that followed
each other, in which the machine was in about the same mood.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import PEER, Benchmark, Result

__all__ = ["as_json", "conclusions", "markdown", "ratio", "shown", "summary", "table", "write_json"]


def summary(figures: Sequence[float]) -> dict[str, Any]:
    """Return the median of some repetitions, and between what they lay."""
    return {
        "median": statistics.median(figures),
        "min": min(figures),
        "max": max(figures),
        "all": list(figures),
    }


def as_json(
    benchmark: Benchmark,
    results: Sequence[Result],
    described: dict[str, Any],
    failures: Sequence[dict[str, Any]],
    *,
    quick: bool,
) -> dict[str, Any]:
    """Return what a benchmark's JSON file holds."""
    entries = [_entry(benchmark, result) for result in results]
    return {
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "unit": benchmark.unit,
        "higher_is_better": benchmark.rate,
        "quick": quick,
        **described,
        "results": entries,
        "conclusions": benchmark.conclude(entries),
        "beside": list(_beside(benchmark, entries)),
        "failures": list(failures),
    }


def _entry(benchmark: Benchmark, result: Result) -> dict[str, Any]:
    one = result.contender
    return {
        "group": result.group,
        "name": one.name,
        "side": one.side,
        "parameters": dict(one.params),
        **one.facts,
        "figure": summary([benchmark.figure(seconds) for seconds in result.seconds]),
        "columns": benchmark.columns(result),
        "own_cores": summary(result.own_cores),
        "others_cores": summary(result.others_cores),
        "steps": result.steps,
        "check": result.check,
    }


def _beside(benchmark: Benchmark, entries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compare ours with those of TensorFlow that it is to be seen beside, the best of them.

    What is to be reached is a fact of ours: how many times TensorFlow's figure, or which figure.
    """
    higher = benchmark.rate
    for own in entries:
        if "beside" not in own:
            continue
        names = own["beside"]
        peers = [
            one["figure"]
            for one in entries
            if (one["side"], one["group"]) == (PEER, own["group"]) and one["name"] in names
        ]
        theirs = (max if higher else min)(peers, key=lambda f: f["median"], default=None)
        times = theirs and ratio(own["figure"], theirs, higher_is_better=higher)
        reach, met = "-", None
        if "reach" in own:
            reach = f"{own['reach']:g} x TF"
            met = times and times["median"] >= own["reach"]
        elif "bound" in own:
            reach, figure = f"{shown(own['bound'])} {benchmark.unit}", own["figure"]["median"]
            met = figure >= own["bound"] if higher else figure <= own["bound"]
        yield {
            "": f"{benchmark.name}, {own['group']}: {own['name']}",
            f"ours, {benchmark.unit}": own["figure"]["median"],
            "TF": theirs["median"] if theirs else "-",
            "ratio (spread)": "{median:.2f} ({min:.2f} to {max:.2f})".format(**times)
            if times
            else "-",
            "reach": reach,
            "met?": "-" if met is None else "yes" if met else "no",
        }


def table(written: dict[str, Any]) -> str:
    """Return the figures of one benchmark as a markdown table."""
    entries = written["results"]
    extra = list(entries[0]["columns"]) if entries else []
    rows = [
        [
            entry["group"],
            f"{entry['side']}: {entry['name']}" + _star(entry),
            *(_plain(entry["columns"].get(name, "")) for name in extra),
            shown(entry["figure"]["median"]),
            f"{shown(entry['figure']['min'])} to {shown(entry['figure']['max'])}",
            f"{entry['own_cores']['median']:.1f}",
            f"{entry['others_cores']['median']:.1f}",
        ]
        for entry in entries
    ]
    head = ["", "contender", *extra, written["unit"], "spread", "cores", "others'"]
    notes = [written["title"] + (" (quick: the figures mean nothing)" if written["quick"] else "")]
    lines = [*notes, "", markdown(head, rows)]
    if any(_star(entry) for entry in entries):
        lines += ["", "\\* more replicas than cores: for correctness, not for comparison"]
    if written["conclusions"] or written["beside"] or written["failures"]:
        lines += ["", conclusions(written)]
    return "\n".join(lines)


def conclusions(written: dict[str, Any]) -> str:
    """Return what the figures say together as a markdown table, and who failed."""
    parts = []
    for found in filter(None, (written["conclusions"], written["beside"])):
        rows = [[_plain(cell) for cell in row.values()] for row in found]
        parts.append(markdown(list(found[0]), rows))
    for failure in written["failures"]:
        last = failure["error"].strip().splitlines()[-1]
        parts.append(f"FAILED: {failure['group']}, {failure['side']}: {failure['name']}: {last}")
    return "\n\n".join(parts)


def _star(entry: dict[str, Any]) -> str:
    return " \\*" if entry.get("oversubscribed") else ""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table with columns of equal width."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])


def shown(figure: float) -> str:
    """Return a figure with three digits, and thousands set apart.

    >>> shown(12345.6), shown(0.01234), shown(98.76)
    ('12,300', '0.0123', '98.8')
    """
    if figure == 0:
        return "0"
    rounded = float(f"{figure:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def _plain(value: Any) -> str:
    return shown(value) if isinstance(value, float) else str(value)


def ratio(
    ours: dict[str, Any], theirs: dict[str, Any], *, higher_is_better: bool
) -> dict[str, float]:
    """Return how many times as good our figures are as theirs: median, and spread of the pairs."""

    def better(own: float, other: float) -> float:
        return own / other if higher_is_better else other / own

    pairs = [better(a, b) for a, b in zip(ours["all"], theirs["all"], strict=True)]
    return {
        "median": better(ours["median"], theirs["median"]),
        "min": min(pairs),
        "max": max(pairs),
    }


def write_json(content: Any, path: Path) -> None:
    """Write a JSON file, and the folder for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
