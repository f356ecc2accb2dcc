"""What a benchmark is made of: plain values that the harness runs and the report shows.

A benchmark is groups of contenders that do the same work; a contender names a function of its
benchmark's module, which sets the work up in a worker process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "MPICH",
    "OPEN_MPI",
    "OURS",
    "PACKAGES",
    "PEER",
    "TORCH",
    "Benchmark",
    "Contender",
    "Group",
    "Prepared",
    "Result",
]

OURS = "ours"
PEER = "TF"
TORCH = "PyTorch"
MPICH = "MPICH"
OPEN_MPI = "Open MPI"

# What a side's interpreter must have, and what else of it is worth noting.
PACKAGES = {
    OURS: ("ndistribute", "mpi4py", "mpich", "openmpi"),
    PEER: ("tensorflow",),
    TORCH: ("torch",),
    MPICH: ("mpi4py", "mpich"),
    OPEN_MPI: ("mpi4py", "openmpi"),
}


class Prepared(NamedTuple):
    """What a maker yields in a worker: the step to time.

    Args:
        step: does the work once.
        check: a number that says whether the work is right; contenders of a group must agree on
            it, or for an error column it is the error.
    """

    step: Callable[[], Any]
    check: float | None = None


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a group.

    Args:
        name: how tables call it.
        side: `OURS` or `PEER`; each has its own interpreter.
        maker: the context manager that yields a `Prepared`: its name in the benchmark's module, or
            ``module:name``.
        params: its keyword arguments.
        blas_threads: the environment pins this many; None means one for each core of the run.
        process: contenders of a side that name different ones work in different processes.
        team: how many processes do the work together.
        wire: how a team is started, see `Team`; empty for a process on its own.
        needs: a package without which it is left out.
        units: how much work one step is, in the benchmark's unit.
        facts: what else the JSON says about it. `report` knows ``beside``, the names of those of
            TensorFlow that it is compared with, and what is asked for: ``reach`` times the best of
            them, or a figure of ``bound``.
    """

    name: str
    side: str
    maker: str
    params: Mapping[str, Any]
    blas_threads: int | None = None
    process: str = ""
    team: int = 1
    wire: str = ""
    needs: str = ""
    units: float = 1.0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Contenders that alternate, because their figures are compared."""

    name: str
    contenders: tuple[Contender, ...]


@dataclass(frozen=True)
class Result:
    """The seconds that each repetition of a contender took for one unit of work.

    Args:
        group: its name.
        contender: who.
        steps: in a repetition.
        seconds: of each repetition, for one unit of work.
        own_cores: how many cores the contender kept busy, of each repetition.
        others_cores: how many were busy with something else.
        check: what the maker yielded.
    """

    group: str
    contender: Contender
    steps: int
    seconds: tuple[float, ...]
    own_cores: tuple[float, ...]
    others_cores: tuple[float, ...]
    check: float | None


@dataclass(frozen=True)
class Benchmark:
    """A script: what it measures and how its figures read.

    Args:
        name: of the module, and of the JSON file.
        title: what is measured.
        unit: of the figure, for example ``examples/s`` or ``us``.
        groups: makes the groups; called with whether the run is quick and the number of cores.
        rate: whether the figure is units per second; else it is the microseconds for one unit.
        columns: what else a table row shows, as name and value.
        same_check: the relative difference up to which the checks of a group agree, else None.
        max_cores: how many cores the workers may use.
        conclude: returns what all entries of the JSON say together: rows of a table.
        of_processes: returns the benchmark with so many processes, where their number is free.
    """

    name: str
    title: str
    unit: str
    groups: Callable[[bool, int], list[Group]]
    rate: bool
    columns: Callable[[Result], dict[str, Any]] = lambda result: {}
    same_check: float | None = None
    max_cores: int = 2
    conclude: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] = lambda entries: []
    of_processes: Callable[[int], Benchmark] | None = None

    def figure(self, seconds: float) -> float:
        """Turn the seconds for one unit into the figure that tables show."""
        return 1 / seconds if self.rate else seconds * 1e6
