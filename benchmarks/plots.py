"""Plots of the figures of a benchmark; no other file imports matplotlib."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
# One for each curve of a page, which colour-blind readers can tell: Okabe and Ito's, and Tol's.
_COLORS = (
    *("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7", "#000000", "#882255"),
    *("#999933", "#44AA99", "#332288", "#999999"),
)
_MARKERS = "os^vD<>*PXpd"
_WIDTH = 8.0  # Inches, of a page.


def draw(written: dict[str, Any], path: Path) -> None:
    """Draw what a benchmark wrote: speed over the size where there are sizes, else bars."""
    entries = written["results"]
    if "bytes" not in entries[0]:
        _draw_bars(written, entries, path)
        return
    panels: dict[str, dict[str, Any]] = {}
    for one in entries:
        panel = panels.setdefault(one["group"].partition(",")[0], {})
        xs, ys = panel.setdefault(f"{one['side']}: {one['name']}", ([], []))
        xs.append(one["bytes"])
        ys.append(one["bytes"] / 1e3 / one["figure"]["median"])
    draw_curves(panels, dict.fromkeys(panels, ("bytes", "GB/s")), written["title"], path)


def draw_curves(
    panels: dict[str, dict[str, Any]], axes: dict[str, tuple[str, str]], title: str, path: Path
) -> None:
    """Draw panels of curves, one above the other; the legend is beside them."""
    plt = _pyplot()
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    styles = {name: (_COLORS[k % 12], _MARKERS[k % 12]) for k, name in enumerate(names)}
    size = _WIDTH, 0.6 + 3.2 * len(panels)
    figure, drawn = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, (panel, curves) in zip(drawn.flat, panels.items(), strict=True):
        for name, (xs, ys) in curves.items():
            color, marker = styles[name]
            axis.plot(xs, ys, marker=marker, color=color, label=name, markersize=5)
        axis.set_xscale("log", base=2)
        highs = [max(ys) / min(ys) for _, ys in curves.values()]
        scale = "log" if max(highs) > 10 else "linear"
        axis.set(yscale=scale, xlabel=axes[panel][0], ylabel=axes[panel][1])
        axis.set_title(panel, loc="left", fontsize=11)
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_bars(written: dict[str, Any], entries: list[Entry], path: Path) -> None:
    """Draw a panel of bars for each group, in its own unit, with the spread."""
    plt = _pyplot()
    panels = [(group, list(part)) for group, part in groupby(entries, key=lambda e: e["group"])]
    heights = [len(part) + 1.6 for _, part in panels]
    figure, drawn = plt.subplots(
        len(panels),
        1,
        figsize=(_WIDTH, 0.6 + 0.3 * sum(heights)),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    for axis, (group, part) in zip(drawn.flat, panels, strict=True):
        medians = [one["figure"]["median"] for one in part]
        below = [m - min(one["figure"]["all"]) for m, one in zip(medians, part, strict=True)]
        above = [max(one["figure"]["all"]) - m for m, one in zip(medians, part, strict=True)]
        colors = [_COLORS[0] if one["side"] == "ours" else _COLORS[4] for one in part]
        labels = [f"{one['side']}: {one['name']}" for one in part]
        axis.barh(labels, medians, xerr=[below, above], color=colors, ecolor="#444444", height=0.7)
        axis.invert_yaxis()
        axis.set_title(f"{group}: {part[0]['unit']}", loc="left", fontsize=10)
        axis.tick_params(labelsize=9)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(written["title"], fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt
