"""Reads from the environment whether `mpiexec` or `srun` started this process, and as which rank.

MPI itself is not needed to know: each family of launchers sets variables of its own. Addresses are
exchanged through MPI later, so there are none here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ndistribute.cluster.resolvers import Bootstrap, ClusterResolver, number_in
from ndistribute.cluster.spec import ClusterSpec

__all__ = ["MPIClusterResolver", "mpi_rank_and_size"]

# The variables of a rank and of the number of ranks. PMIx sets the rank alone: the size is in the
# variables of whoever started it, Open MPI's mpiexec or Slurm's srun.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)


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
        found = mpi_rank_and_size(os.environ if environ is None else environ)
        if found is None:
            names = sorted({rank for rank, _ in _VARIABLES})
            raise ValueError(
                f"MPI did not start this process: none of {', '.join(names)} is set. Start it with "
                "`mpiexec -n 4 python script.py` or `ndistribute run --mpi -n 4 script.py`."
            )
        rank, size = found
        cluster = ClusterSpec({"worker": [f"mpi:{other}" for other in range(size)]})
        super().__init__(cluster, "worker", rank, "mpi")

    @property
    def bootstrap(self) -> Bootstrap:
        """Return ``"mpi"``."""
        return "mpi"

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """Return no addresses: the processes exchange them through MPI."""
        return ()


def mpi_rank_and_size(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, or None if MPI did not start it.

    Raises:
        ValueError: a rank or size is no number, or the rank is not below the size.

    >>> mpi_rank_and_size({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"})
    (2, 3)
    """
    for rank_name, size_name in _VARIABLES:
        if rank_name in environ and size_name in environ:
            rank, size = number_in(environ, rank_name), number_in(environ, size_name)
            if rank >= size:
                raise ValueError(
                    f"{rank_name}={rank} is not below {size_name}={size}: the variables are left "
                    "from different launchers. Start the job from a clean environment."
                )
            return rank, size
    return None
