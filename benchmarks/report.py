"""Results of a benchmark: medians with their spread, as a table and as JSON.

The ratio of two contenders is that of their medians. Its spread is over pairs of repetitions
of the same turn, which ran under similar load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


def table(written: dict[str, Any]) -> str:
    """Return the figures, each of ours with how many times as good as the best of each peer."""
    entries = written["results"]
    peers = list(dict.fromkeys(one["side"] for one in entries if one["side"] != "ours"))
    rows = []
    for one in entries:
        figures = one["figure"]["all"]
        rows.append(
            [
                one["group"],
                f"{one['side']}: {one['name']}",
                f"{shown(one['figure']['median'])} {one['unit']}",
                f"{shown(min(figures))} to {shown(max(figures))}",
                *(_times(written, one, peer) for peer in peers),
                f"{one['own_cores']:.1f}",
                f"{one['others_cores']:.1f}",
            ]
        )
    head = ["", "contender", "median", "spread", *(f"times {peer}" for peer in peers)]
    title = written["title"] + (" (quick: the figures mean nothing)" if written["quick"] else "")
    lines = [title, "", markdown([*head, "cores", "others'"], rows)]
    for failure in written["failures"]:
        last = failure["error"].strip().splitlines()[-1]
        lines.append(f"FAILED: {failure['group']}, {failure['side']}: {failure['name']}: {last}")
    return "\n".join(lines)


def _times(written: dict[str, Any], one: Entry, peer: str) -> str:
    theirs = [e for e in written["results"] if (e["side"], e["group"]) == (peer, one["group"])]
    if one["side"] != "ours" or not theirs:
        return ""
    best = (max if written["rate"] else min)(theirs, key=lambda e: e["figure"]["median"])
    own, other = one["figure"], best["figure"]
    both = [(own["median"], other["median"]), *zip(own["all"], other["all"], strict=False)]
    times, *pairs = [mine / its if written["rate"] else its / mine for mine, its in both]
    return f"{times:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"


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
    rounded = float(f"{figure:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def write_json(content: Any, path: Path) -> None:
    """Write a JSON file, and the folder for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
