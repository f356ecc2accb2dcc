"""All-reduce by size, in the columns of nccl-tests: between processes, and replicas of one.

algbw is bytes over time; busbw is algbw times 2(n-1)/n, which does not depend on the number of
ranks where the bus is the limit; the error is the largest difference of any element on any rank
from the exact sum. More ranks than cores are marked: they show that sums are right, not speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.case import MPICH, OPEN_MPI, OURS, PEER, TORCH, Benchmark, Contender, Group, Result
from benchmarks.harness import main
from ndistribute.collective import ring

__all__ = ["BENCHMARK", "conclude", "of_processes"]

KIB, MIB = 1 << 10, 1 << 20
PROCESS_SIZES = tuple(size * KIB for size in (4, 64, 1024, 4096, 16384, 65536, 262144))
THREAD_SIZES = tuple(size * KIB for size in (4, 64, 256, 1024, 4096, 16384, 65536))
QUICK_PROCESS_SIZES = PROCESS_SIZES[:3]
QUICK_THREAD_SIZES = (4 * KIB, 1 * MIB)

LARGE = (1 * MIB, 256 * MIB)


@dataclass(frozen=True)
class Reach:
    """What one of ours is to reach beside a peer; what is None is not asked for.

    Args:
        mean: how many times as fast in the geometric mean over the large sizes.
        least: the same for each of them.
        small: at most how many times the peer's time at 4 KiB.
    """

    mean: float | None = None
    least: float | None = None
    small: float | None = None


REACH = {
    ("shared memory, in place", MPICH): Reach(mean=3.0),
    ("shared memory, in place", TORCH): Reach(mean=8.0),
    ("shared memory, in place", PEER): Reach(mean=50.0),
    ("shared memory, reduce_update", MPICH): Reach(mean=3.0, small=1.5),
    ("shared memory, reduce_update", TORCH): Reach(mean=8.0),
    ("shared memory, reduce_update", PEER): Reach(mean=50.0),
    ("ring over tcp", MPICH): Reach(least=1.0),
    ("ring over mpi", MPICH): Reach(least=1.0),
}

# Ours: name, maker, its arguments, wire, package that it needs, algorithm of the cost model.
_OURS: tuple[tuple[str, str, dict[str, Any], str, str, str], ...] = (
    ("shared memory, reduce_update", "reduce_update", {}, "inherited", "", "shared_memory"),
    (
        "shared memory, all_reduce",
        "all_reduce",
        {"way": "shared"},
        "inherited",
        "",
        "shared_memory",
    ),
    ("shared memory, in place", "in_place", {}, "inherited", "", ""),
    ("ring over tcp", "all_reduce", {"way": "tcp"}, "inherited", "", "ring"),
    ("ring over mpi", "all_reduce", {"way": "mpi"}, "mpi", "mpi4py", "ring"),
    ("ctx.all_reduce", "context_all_reduce", {}, "inherited", "", ""),
)
_PEERS = (
    (MPICH, "Allreduce", "mpi", "mpi"),
    (OPEN_MPI, "Allreduce", "mpi", "mpi"),
    (TORCH, "gloo", "gloo", "tcp"),
    (PEER, "MultiWorkerMirrored RING", "tensorflow", "tcp"),
)


def _groups(quick: bool, cores: int, processes: int) -> list[Group]:
    across = [
        Group(_title(processes, "process", size), tuple(_processes(size, processes, cores)))
        for size in (QUICK_PROCESS_SIZES if quick else PROCESS_SIZES)
    ]
    within = [
        Group(_title(n, "replica", size), tuple(_replicas(size, n, cores)))
        for n in ((2,) if quick else (1, 2, 4))
        for size in (QUICK_THREAD_SIZES if quick else THREAD_SIZES)
    ]
    return [*across, *within]


def _processes(size: int, processes: int, cores: int) -> Iterator[Contender]:
    facts = {"processes": processes, "oversubscribed": processes > cores}
    calls = _calls(size)
    for name, maker, arguments, wire, needs, algorithm in _OURS:
        in_steps = maker == "context_all_reduce"
        yield Contender(
            name,
            OURS,
            f"all_reduce_ours:{maker}",
            {"size": size, **arguments, **({"calls": calls} if in_steps else {})},
            process=name,
            team=processes,
            wire=wire,
            needs=needs,
            units=calls if in_steps else 1,
            facts={**facts, "algorithm": _algorithm(algorithm, size, processes)},
        )
    for side, name, maker, wire in _PEERS:
        in_steps = maker == "tensorflow"
        yield Contender(
            name,
            side,
            f"all_reduce_peers:{maker}",
            {"size": size, **({"calls": calls} if in_steps else {})},
            process="all_reduce",
            team=processes,
            wire=wire,
            units=calls if in_steps else 1,
            facts=facts,
        )
    # How fast one core adds, for the cost model.
    local = {"processes": 1, "algorithm": "local"}
    yield Contender(
        "local", OURS, "all_reduce_ours:local", {"size": size}, blas_threads=1, facts=local
    )


def _algorithm(usual: str, size: int, processes: int) -> str:
    """Return what the cost model has to count: what is small goes whole instead of round a ring."""
    small = ring.SMALL_BYTES_OF_TWO if processes == 2 else ring.SMALL_BYTES
    return "recursive_doubling" if usual == "ring" and size <= small else usual


def _replicas(size: int, replicas: int, cores: int) -> Iterator[Contender]:
    params = {"size": size, "replicas": replicas, "calls": _calls(size)}
    facts = {"oversubscribed": replicas > cores}
    ways = [
        ("ctx.all_reduce", OURS, "ours_all_reduce"),
        ("SGD.apply_gradients", OURS, "ours_apply"),
        ("ctx.all_reduce", PEER, "tensorflow"),
    ]
    for name, side, maker in ways:
        yield Contender(
            name,
            side,
            f"all_reduce_threads:{maker}",
            params,
            process=f"{replicas} replicas" if side == PEER else "",
            units=params["calls"],
            facts=facts | ({"beside": [name]} if maker == "ours_all_reduce" else {}),
        )


def _calls(size: int) -> int:
    """Return how many calls a step makes where starting a step costs something itself."""
    return 16 if size <= MIB else 4 if size <= 16 * MIB else 1


def _columns(result: Result) -> dict[str, Any]:
    """Return the columns of nccl-tests."""
    one = result.contender
    size, ranks = one.params["size"], one.params.get("replicas", one.team)
    algbw = size / statistics.median(result.seconds) / 1e9
    return {
        "bytes": size,
        "count": size // 4,
        "type": "float",
        "redop": "sum",
        "algbw GB/s": algbw,
        "busbw GB/s": algbw * 2 * (ranks - 1) / ranks,
        "error": f"{result.check:.0e}",
    }


def conclude(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare ours between processes with each peer: over the large sizes, and at the smallest.

    Args:
        entries: of the JSON.
    """
    times: dict[tuple[str, str], dict[int, float]] = {}
    for entry in (entry for entry in entries if entry.get("processes", 1) > 1):
        own = times.setdefault((entry["side"], entry["name"]), {})
        own[entry["columns"]["bytes"]] = entry["figure"]["median"]
    rows = []
    for (side, name), own in times.items():
        if side == OURS:
            for (peer, _), theirs in times.items():
                if peer != OURS:
                    rows.append(_compared(name, own, peer, theirs))
    return rows


def _compared(
    name: str, ours: dict[int, float], peer: str, theirs: dict[int, float]
) -> dict[str, Any]:
    common = sorted(ours.keys() & theirs.keys())
    ratios = [theirs[size] / ours[size] for size in common if LARGE[0] <= size <= LARGE[1]]
    mean = statistics.geometric_mean(ratios) if ratios else None
    small = ours[4 * KIB] / theirs[4 * KIB] if 4 * KIB in common else None
    least = min(ratios, default=None)
    reach = REACH.get((name, peer), Reach())
    asked = [
        (f"{reach.mean}", mean, lambda times: times >= reach.mean),
        (f"least {reach.least}", least, lambda times: times >= reach.least),
        (f"4 KiB {reach.small}", small, lambda times: times <= reach.small),
    ]
    bounds = (reach.mean, reach.least, reach.small)
    rules = [rule for rule, bound in zip(asked, bounds, strict=True) if bound is not None]
    return {
        "ours": name,
        "peer": peer,
        "times as fast, 1 to 256 MiB": _or_dash(mean),
        "least": _or_dash(least),
        "time at 4 KiB, of the peer's": _or_dash(small),
        "reach": ", ".join(text for text, _, _ in rules) or "-",
        "met": ", ".join(_met(figure, holds) for _, figure, holds in rules) or "-",
    }


def _met(figure: float | None, holds: Callable[[Any], bool]) -> str:
    return "-" if figure is None else "yes" if holds(figure) else "no"


def _or_dash(figure: float | None) -> float | str:
    return "-" if figure is None else figure


def _title(count: int, what: str, size: int) -> str:
    many = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count} {what}{many}, " + (
        f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
    )


def of_processes(processes: int) -> Benchmark:
    """Return the benchmark with another number of processes than two."""
    return replace(BENCHMARK, groups=partial(_groups, processes=processes))


BENCHMARK = Benchmark(
    name="all_reduce",
    title="All-reduce, float32",
    unit="us",
    groups=partial(_groups, processes=2),
    rate=False,
    columns=_columns,
    max_cores=4,
    conclude=conclude,
    of_processes=of_processes,
)

if __name__ == "__main__":
    main(BENCHMARK)
