"""Resolvers that read the rank of a process from the variables of `mpiexec`, `srun` and `torchrun`.

Every rank is a worker. MPI's ranks exchange their addresses through MPI later. Those of torchrun
send theirs to rank 0, at the port after torchrun's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ndistribute.cluster.resolvers import ClusterResolver, number_in
from ndistribute.cluster.spec import ClusterSpec

# The variables of the rank and of the number of ranks. PMIx sets only the rank: the launcher, Open
# MPI's mpiexec or Slurm's srun, sets the number.
_OF_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class MPIClusterResolver(ClusterResolver):
    """The resolver for processes that MPI's launchers started.

    Every rank is a worker. `cluster_spec` has placeholders for addresses, because MPI needs none.

    Args:
        environ: the environment variables; None: ``os.environ``.

    Raises:
        ValueError: MPI did not start this process, or its variables contradict each other.

    >>> resolver = MPIClusterResolver(environ={"PMI_RANK": "1", "PMI_SIZE": "4"})
    >>> resolver.worker_index, resolver.num_workers, resolver.worker_addresses
    (1, 4, ())
    """

    bootstrap = "mpi"

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        found = mpi_rank_and_size(os.environ if environ is None else environ)
        if found is None:
            names = sorted({rank for rank, _ in _OF_MPI})
            raise ValueError(
                f"MPI did not start this process: none of {', '.join(names)} is set. Start it with "
                "`mpiexec -n 4 python script.py` or `ndistribute run --mpi -n 4 script.py`."
            )
        rank, size = found
        cluster = ClusterSpec({"worker": [f"mpi:{other}" for other in range(size)]})
        super().__init__(cluster, "worker", rank, "mpi")


class TorchrunClusterResolver(ClusterResolver):
    """The resolver for processes that ``torchrun`` started.

    Every rank is a worker. Only the address of rank 0 is known: ``MASTER_ADDR``, or loopback if all
    processes are on one host, and the port ``MASTER_PORT`` + 1. The other addresses are empty.

    Args:
        environ: the environment variables; None: ``os.environ``.

    Raises:
        ValueError: ``torchrun`` did not start this process, or its variables contradict each other.

    >>> environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    >>> TorchrunClusterResolver(environ=environ).worker_addresses
    ('node1:29501', '')
    """

    address_hint = "The port is MASTER_PORT + 1: choose another with torchrun's --master-port."

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        missing = [name for name in _OF_TORCHRUN if not environ.get(name)]
        if missing:
            raise ValueError(
                f"torchrun did not start this process: {', '.join(missing)} is not set. Start it "
                "with `torchrun --nproc-per-node 2 script.py`."
            )
        rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
        port = number_in(environ, "MASTER_PORT") + 1
        if port >= 1 << 16:
            raise ValueError(f"MASTER_PORT={port - 1} is too high: rank 0 uses the next port.")
        on_one_host = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
        host = "127.0.0.1" if on_one_host else environ["MASTER_ADDR"]
        first = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        cluster = ClusterSpec({"worker": [first, *[""] * (size - 1)]})
        super().__init__(cluster, "worker", rank, "torchrun")


def mpi_rank_and_size(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, or None if MPI did not start it."""
    for rank, size in _OF_MPI:
        if rank in environ and size in environ:
            return _rank_and_size(environ, rank, size)
    return None


def torchrun_size(environ: Mapping[str, str]) -> int:
    """Return the number of processes that torchrun started; 0 if its variables are not set."""
    complete = all(environ.get(name) for name in _OF_TORCHRUN)
    return number_in(environ, "WORLD_SIZE") if complete else 0


def _rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = number_in(environ, rank_name), number_in(environ, size_name)
    if rank >= size:
        raise ValueError(
            f"{rank_name}={rank} is not below {size_name}={size}: different launchers set these "
            "variables. Start the job from a clean environment."
        )
    return rank, size
