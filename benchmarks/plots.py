"""Plots of the figures of a benchmark; no other file imports matplotlib."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
# Ours and the peers', which colour-blind readers can tell: Okabe and Ito's blue and orange.
_OURS, _PEERS = "#0072B2", "#D55E00"
_STYLES = ("-", "--", ":", "-.", (0, (1, 4)))
_MOST = 5  # Curves of a panel.
_WIDTH = 8.0  # Inches, of a page.


def draw(written: dict[str, Any], path: Path) -> None:
    """Draw what a benchmark wrote: speed over the size where there are sizes, else bars.

    A panel has the curves of the peers, and as many of ours as leave it readable: the first ones.
    """
    entries = written["results"]
    if "bytes" not in entries[0]:
        _draw_bars(written, entries, path)
        return
    panels: dict[str, dict[str, Any]] = {}
    for entry in entries:
        panel = panels.setdefault(entry["group"].partition(",")[0], {})
        xs, ys = panel.setdefault(f"{entry['side']}: {entry['name']}", ([], []))
        xs.append(entry["bytes"])
        ys.append(entry["bytes"] / 1e3 / entry["figure"]["median"])
    for panel in panels.values():
        for name in [name for name in panel if _is_ours(name)][::-1]:
            if len(panel) > _MOST:
                del panel[name]
    draw_curves(panels, dict.fromkeys(panels, ("size", "GB/s")), written["title"], path)


def draw_curves(
    panels: dict[str, dict[str, Any]], axes: dict[str, tuple[str, str]], title: str, path: Path
) -> None:
    """Draw panels of curves, one above the other; each curve has its name at its end."""
    plt = _pyplot()
    size = _WIDTH, 0.6 + 3.6 * len(panels)
    figure, drawn = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, (panel, curves) in zip(drawn.flat, panels.items(), strict=True):
        low = min(min(ys) for _, ys in curves.values())
        high = max(max(ys) for _, ys in curves.values())
        scale = "log" if high > 10 * low else "linear"
        axis.set_xscale("log", base=2)
        axis.set(yscale=scale, ylabel=axes[panel][1])
        used = {True: 0, False: 0}
        for name, (xs, ys) in curves.items():
            is_ours = _is_ours(name)
            color, style = (_OURS if is_ours else _PEERS), _STYLES[used[is_ours] % len(_STYLES)]
            used[is_ours] += 1
            axis.plot(xs, ys, color=color, linestyle=style, linewidth=2)
        ends = {name: (xs[-1], ys[-1]) for name, (xs, ys) in curves.items()}
        _label_ends(axis, ends, scale == "log", low, high)
        sizes = list(dict.fromkeys(x for xs, _ in curves.values() for x in xs))
        labels = [_size(x) if axes[panel][0] == "size" else f"{x:,}" for x in sizes]
        axis.set_xticks(sizes, labels)
        axis.minorticks_off()
        axis.set_xlabel("" if axes[panel][0] == "size" else axes[panel][0])
        axis.set_title(panel, loc="left", fontsize=11)
        axis.grid(True, which="major", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _is_ours(name: str) -> bool:
    return name.startswith(("ours", "predicted"))


def _label_ends(axis: Any, ends: dict[str, Any], is_log: bool, low: float, high: float) -> None:
    """Write the names of curves beside their last points, apart from each other."""
    spread = math.log(high / low) if is_log else high - low
    if not spread:
        spread = 1.0
    above = -math.inf
    for name, (x, y) in sorted(ends.items(), key=lambda end: end[1][1]):
        place = (math.log(y / low) if is_log else y - low) / spread
        above = max(place, above + 0.06)  # The height of a line of text, as a part of the axis.
        axis.annotate(
            name.removeprefix("predicted: "),
            (x, low * math.exp(above * spread) if is_log else low + above * spread),
            xytext=(6, 0),
            textcoords="offset points",
            color=_OURS if _is_ours(name) else _PEERS,
            va="center",
            fontsize=9,
            annotation_clip=False,
        )


def _size(count: float) -> str:
    """Return a number of bytes in words."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


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
        medians = [entry["figure"]["median"] for entry in part]
        below = [m - min(entry["figure"]["all"]) for m, entry in zip(medians, part, strict=True)]
        above = [max(entry["figure"]["all"]) - m for m, entry in zip(medians, part, strict=True)]
        colors = [_OURS if entry["side"] == "ours" else _PEERS for entry in part]
        labels = [f"{entry['side']}: {entry['name']}" for entry in part]
        bars = axis.barh(labels, medians, xerr=[below, above], color=colors, ecolor="#444444")
        texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in medians]
        axis.bar_label(bars, texts, label_type="center", color="white", fontsize=9)
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
