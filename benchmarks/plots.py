"""Draw the figures of a benchmark; the only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from benchmarks.case import OURS

__all__ = ["draw", "draw_predictions", "draw_staleness"]

Entry = dict[str, Any]

# Ours in blues and greens, the others in warm colours: the Okabe-Ito palette, which colour-blind
# readers can tell.
_OURS = ("#0072B2", "#56B4E9", "#009E73", "#005079", "#7A9E00", "#6A51A3")
_THEIRS = ("#E69F00", "#D55E00", "#CC79A7", "#000000")


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
        if entry.get("algorithm") == "local":  # No all-reduce.
            continue
        series.setdefault((entry["side"], entry["name"]), []).append(entry)
    ours, theirs = cycle(_OURS), cycle(_THEIRS)
    for (side, name), entries in series.items():
        color = next(ours if side == OURS else theirs)
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
    axis.legend(fontsize=7)


def draw_predictions(content: dict[str, Any], path: Path) -> None:
    """Draw the weak and strong scaling that the cost model predicts, and how it fits."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (fitted, weak, strong) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for color, (name, one) in zip((*_OURS, *_THEIRS), content["fits"].items(), strict=False):
        own = [p for p in one["points"] if p["algorithm"] != "local"]
        sizes = [p["size"] for p in own]
        fitted.plot(sizes, [100 * e for e in one["error"]["each"]], "o-", color=color, label=name)
    fitted.set(xscale="log", xlabel="bytes", ylabel="error of the fit, %")
    rows = content["predictions"]
    workers = [row["workers"] for row in rows]
    weak.plot(workers, [100 * row["weak_efficiency"] for row in rows], "o-", color=_OURS[0])
    weak.set(xscale="log", xlabel="workers", ylabel="weak scaling, efficiency %", ylim=(0, 105))
    strong.plot(workers, workers, "--", color="#888888", label="as many times as workers")
    speedups = [row["strong_speedup"] for row in rows]
    strong.plot(workers, speedups, "o-", color=_OURS[0], label="predicted")
    strong.set(xscale="log", yscale="log", xlabel="workers", ylabel="strong scaling, speedup")
    for axis in (fitted, weak, strong):
        axis.grid(True, which="major", alpha=0.3)
    fitted.legend(fontsize=7)
    strong.legend(fontsize=8)
    job = content["job"]
    figure.suptitle(
        f"{job['gradient_bytes']:,} bytes of gradients, {job['compute_seconds']:g} s of computing, "
        f"{job['network']}, {job['per_host']} workers a host",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_staleness(paces: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw how many updates were how stale, one panel for each pace."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(paces), figsize=(3.2 * len(paces), 3.2), sharey=True, layout="constrained"
    )
    for axis, (name, one) in zip(axes, paces.items(), strict=True):
        counts = {int(staleness): count for staleness, count in one["staleness"].items()}
        axis.bar(list(counts), list(counts.values()), color=_OURS[0])
        axis.set_title(f"{name}\n{one['examples_per_second']:,.0f} examples/s", fontsize=9)
        axis.set_xlabel("staleness, updates")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("updates of two workers")
    figure.savefig(path, dpi=150)
    plt.close(figure)
