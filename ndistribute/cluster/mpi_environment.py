"""Reads from the environment whether `mpiexec` or `srun` started this process, and as which rank.

MPI itself is not needed to know: its launchers say so in variables, each family in its own. Where
the processes are is exchanged through MPI later, so there are no addresses here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from ndistribute.cluster.base import Bootstrap, ClusterResolver
from ndistribute.cluster.spec import ClusterSpec

__all__ = ["MPIClusterResolver", "Place", "mpi_place"]

# The variables of a rank and of the number of ranks. PMIx says the rank alone: its size is in the
# variables of whoever started it, Open MPI's mpiexec or Slurm's srun.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)


class Place(NamedTuple):
    """A rank, and how many there are."""

    rank: int
    size: int


class MPIClusterResolver(ClusterResolver):
    """Read this process's rank from the variables that MPI's launchers set.

    Every rank is a worker; its address is the name of its rank, as MPI needs none.

    Args:
        environ: the environment to read.

    Raises:
        ValueError: MPI did not start this process, or its variables contradict each other.

    >>> resolver = MPIClusterResolver(environ={"PMI_RANK": "1", "PMI_SIZE": "4"})
    >>> resolver.worker_index, resolver.num_workers, resolver.worker_addresses
    (1, 4, ())
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        place = mpi_place(environ)
        if place is None:
            names = sorted({name for pair in _VARIABLES for name in pair[:1]})
            raise ValueError(
                f"MPI did not start this process: none of {', '.join(names)} is set. Start it with "
                "`mpiexec -n 4 python script.py` or `ndistribute run --mpi -n 4 script.py`."
            )
        cluster = ClusterSpec({"worker": [f"mpi:{rank}" for rank in range(place.size)]})
        super().__init__(cluster, "worker", place.rank, "mpi")

    @property
    def bootstrap(self) -> Bootstrap:
        """Return ``"mpi"``."""
        return "mpi"

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """Return no addresses: the processes exchange them through MPI."""
        return ()


def mpi_place(environ: Mapping[str, str]) -> Place | None:
    """Return this process's rank among those that MPI started, or None if it started none.

    Raises:
        ValueError: a rank or size is no number, or the rank is not below the size.

    >>> mpi_place({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"})
    Place(rank=2, size=3)
    """
    for rank, size in _VARIABLES:
        if rank in environ and size in environ:
            place = Place(_number(environ, rank), _number(environ, size))
            if place.rank >= place.size:
                raise ValueError(
                    f"{rank}={place.rank} is not below {size}={place.size}: the variables are left "
                    "from different launchers. Start the job from a clean environment."
                )
            return place
    return None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r} is no number.")
    return int(text)
