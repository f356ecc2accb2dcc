"""A report in words: where the time goes, which rank is late, and what may help."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from ndistribute.trace_report.lateness import Lateness, lateness
from ndistribute.trace_report.reading import Trace, read
from ndistribute.trace_report.shares import KINDS, UNTRACED, exclusive, shares

__all__ = ["explain", "report"]

# A rank is called late where the others lose clearly more to it than to each other, so far from its
# fair share towards everything, and more than the second figure of the run. Below, chance is as
# good an explanation.
_MORE_THAN_SHARE = 0.3
_LATE_COST = 0.02
_LARGE = {"wait": 0.2, "pack": 0.15, "reduce": 0.2, "update": 0.25, UNTRACED: 0.3}

_MEASURES = {
    "wait": "Waiting takes {share:.0%} and nobody is to blame: the wire or the number of calls is. "
    "A larger batch makes fewer calls for the same work, a larger `bytes_per_pack` fewer messages, "
    "and sixteen bits on the wire half as many bytes.",
    "pack": "Copying gradients takes {share:.0%}: a larger batch copies them less often.",
    "reduce": "Adding takes {share:.0%}: memory is the limit. A larger batch adds less often; more "
    "processes than memory can feed only share it.",
    "update": "Updating variables takes {share:.0%}: a larger batch updates less often, and a "
    "simpler optimizer reads and writes less.",
    UNTRACED: "{share:.0%} of the time stands in no span: input, logging or a checkpoint may take "
    "it. Wrap them in `timeline.span` to see which.",
}


def report(directory: str | os.PathLike[str]) -> str:
    """Say in words what the traces in a directory show.

    Raises:
        FileNotFoundError: the directory has no trace.
    """
    return explain(read(directory))


def explain(traces: Sequence[Trace]) -> str:
    """Say where the time of some ranks goes, which one is late, and what to do about it.

    >>> from ndistribute.trace_report import Event, Trace
    >>> print(explain([Trace(0, events=(Event("compute", "", 0, 3e6, 1),))]))
    1 rank, 3.0 s.
    <BLANKLINE>
    rank  compute  pack  wait  reduce  update  other
    0        100%    0%    0%      0%      0%     0%
    <BLANKLINE>
    Only one rank left a trace, so nobody waits for anybody.
    Computing takes 100%: that is what the machine is for.
    """
    seconds = max(_seconds(trace) for trace in traces)
    ranks = f"{len(traces)} rank{'s' * (len(traces) > 1)}"
    late = lateness(traces)
    missing = sorted(set(range(traces[0].size)) - {trace.rank for trace in traces})
    notes = [f"No trace of rank {', '.join(map(str, missing))}."] if missing else []
    return "\n".join(
        [
            f"{ranks}, {seconds:.1f} s.",
            *notes,
            "",
            *_table(traces),
            "",
            _who_is_late(late, traces),
            *_advice(late, traces),
        ]
    )


def _seconds(trace: Trace) -> float:
    return (max(e.end for e in trace.events) - min(e.start for e in trace.events)) / 1e6


def _table(traces: Sequence[Trace]) -> Iterator[str]:
    rows = [["rank", *KINDS, "other"]]
    for trace in traces:
        parts = shares(trace.events)
        known = [parts.get(kind, 0.0) for kind in KINDS]
        rest = max(0.0, 1 - sum(known)) if parts else 0.0
        rows.append([str(trace.rank), *(f"{part:.0%}" for part in [*known, rest])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def _latest(late: Sequence[Lateness], traces: Sequence[Trace]) -> Lateness | None:
    """Return who makes the others wait, where it is more than chance and worth a word."""
    worst = max(late, key=lambda one: one.cost)
    seconds = max(_seconds(trace) for trace in traces)
    share = 1 / len(late)
    most = share + _MORE_THAN_SHARE * (1 - share)
    stands_out = worst.cost > most * sum(one.cost for one in late)
    return worst if stands_out and worst.cost > _LATE_COST * seconds * 1e6 else None


def _who_is_late(late: Sequence[Lateness], traces: Sequence[Trace]) -> str:
    if len(traces) == 1:
        return "Only one rank left a trace, so nobody waits for anybody."
    if late[0].calls == 0:
        return "The ranks share no collective, so it can not be said who waits for whom."
    worst = _latest(late, traces)
    if worst is None:
        return f"No rank is late: over {late[0].calls} calls they wait for each other in turn."
    seconds = max(_seconds(trace) for trace in traces)
    return (
        f"Rank {worst.rank} is late: it comes last to {worst.last / worst.calls:.0%} of "
        f"{worst.calls} calls, {_time(worst.behind)} after the others in the median. Each of them "
        f"loses {_time(worst.cost / worst.steps)} a step, {worst.cost / 1e6 / seconds:.0%} of the "
        "run, to waiting for it."
    )


def _advice(late: Sequence[Lateness], traces: Sequence[Trace]) -> Iterator[str]:
    worst = _latest(late, traces) if len(traces) > 1 else None
    mean = _mean([shares(trace.events) for trace in traces])
    if worst is not None:
        yield _why_late(worst, traces)
    for kind, measure in _MEASURES.items():
        if mean.get(kind, 0.0) > _LARGE[kind] and not (kind == "wait" and worst is not None):
            yield measure.format(share=mean[kind])
    if mean.get("compute", 0.0) > 0.7:
        yield f"Computing takes {mean['compute']:.0%}: that is what the machine is for."


def _why_late(worst: Lateness, traces: Sequence[Trace]) -> str:
    """Say what the late rank does more of than the others."""
    times = {trace.rank: exclusive(trace.events) for trace in traces}
    own = times.pop(worst.rank)
    others = _mean(list(times.values()))
    kinds = [kind for kind in {**own, **others} if kind != "wait"]
    more = {kind: own.get(kind, 0.0) - others.get(kind, 0.0) for kind in kinds}
    kind = max(kinds, key=lambda name: more[name], default=UNTRACED)
    host = next(trace.host for trace in traces if trace.rank == worst.rank)
    per_step = _time(max(0.0, more.get(kind, 0.0)) / worst.steps)
    if kind == "compute":
        return (
            f"It computes {per_step} a step longer than the others: look at what else runs on "
            f"{host or 'its host'}, at its cores and BLAS threads (`ndistribute doctor`), or give "
            "it a smaller part of the batch."
        )
    if kind == UNTRACED:
        return (
            f"It spends {per_step} a step more than the others in no span: its input, its logging "
            "or its checkpoints. Prefetch the input, or do the rest on all ranks less often."
        )
    return f"It spends {per_step} a step more than the others in `{kind}`."


def _mean(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in of_ranks for name in one)
    return {name: sum(one.get(name, 0.0) for one in of_ranks) / len(of_ranks) for name in names}


def _time(microseconds: float) -> str:
    """Return a time with a unit that suits it.

    >>> _time(12.34), _time(4_321.0), _time(2_500_000.0)
    ('12 us', '4.3 ms', '2.5 s')
    """
    if microseconds < 1e3:
        return f"{microseconds:.0f} us"
    return f"{microseconds / 1e3:.1f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.1f} s"
