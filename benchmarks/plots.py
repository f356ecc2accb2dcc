"""Draw the figures of a benchmark; the only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.case import OURS

__all__ = ["draw"]

Entry = dict[str, Any]

# Ours in blues, TensorFlow in oranges: the Okabe-Ito palette, which colour-blind readers can tell.
_OURS, _THEIRS = ("#0072B2", "#56B4E9", "#009E73", "#005079"), ("#E69F00", "#D55E00")


def draw(written: dict[str, Any], path: Path) -> None:
    """Draw what a benchmark wrote into a PNG: bars by group, or curves over the size."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    entries = written["results"]
    curves = "bytes" in entries[0]["columns"]
    panels = _panels(entries, curves)
    width, height = (4.5 * len(panels), 4.2) if curves else (8.0, 0.6 + 0.42 * _bars(panels))
    figure, axes = plt.subplots(
        *((1, len(panels)) if curves else (len(panels), 1)),
        figsize=(width, height),
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, panel) in zip(axes.flat, panels, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        (_draw_curves if curves else _draw_bars)(axis, panel, written["unit"])
    figure.suptitle(written["title"] + (" (quick)" if written["quick"] else ""), fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panels(entries: Sequence[Entry], curves: bool) -> list[tuple[str, list[Entry]]]:
    """Return what each panel shows: a group, or for curves all sizes of a replica count."""

    def title(entry: Entry) -> str:
        return entry["group"].partition(",")[0] if curves else entry["group"]

    return [(name, list(part)) for name, part in groupby(entries, key=title)]


def _bars(panels: Sequence[tuple[str, list[Entry]]]) -> int:
    return sum(len(panel) + 2 for _, panel in panels)


def _draw_bars(axis: Any, panel: Sequence[Entry], unit: str) -> None:
    labels = [f"{entry['side']}: {entry['name']}" for entry in panel]
    figures = [entry["figure"] for entry in panel]
    medians = [figure["median"] for figure in figures]
    below = [figure["median"] - figure["min"] for figure in figures]
    above = [figure["max"] - figure["median"] for figure in figures]
    colors = [_OURS[0] if entry["side"] == OURS else _THEIRS[0] for entry in panel]
    axis.barh(labels, medians, xerr=[below, above], color=colors, ecolor="#444444", height=0.7)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)


def _draw_curves(axis: Any, panel: Sequence[Entry], _: str) -> None:
    series: dict[tuple[str, str], list[Entry]] = {}
    for entry in panel:
        series.setdefault((entry["side"], entry["name"]), []).append(entry)
    colors = {OURS: iter(_OURS)}
    for (side, name), entries in series.items():
        color = next(colors.setdefault(side, iter(_THEIRS)))
        sizes = [entry["columns"]["bytes"] for entry in entries]
        speeds = [entry["columns"]["algbw GB/s"] for entry in entries]
        slow = [s / e["figure"]["max"] for s, e in zip(sizes, entries, strict=True)]
        fast = [s / e["figure"]["min"] for s, e in zip(sizes, entries, strict=True)]
        axis.plot(sizes, speeds, "o-", color=color, label=f"{side}: {name}", markersize=4)
        # Bytes a microsecond are megabytes a second.
        axis.fill_between(
            sizes, [v / 1e3 for v in slow], [v / 1e3 for v in fast], color=color, alpha=0.2
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("bytes")
    axis.set_ylabel("algbw GB/s")
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=8)
