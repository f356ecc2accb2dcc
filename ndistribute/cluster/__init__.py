"""Cluster resolvers: the processes of a job, their addresses, and the task of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ndistribute.cluster.ranks import (
    MPIClusterResolver,
    TorchrunClusterResolver,
    mpi_rank_and_size,
    torchrun_size,
)
from ndistribute.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    number_in,
    worker_index,
)
from ndistribute.cluster.slurm import SlurmClusterResolver
from ndistribute.cluster.spec import ClusterSpec
from ndistribute.cluster.tf_config import TFConfigClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "resolve",
    "resolver_of_job",
    "worker_index",
]


def resolver_of_job(given: ClusterResolver | None) -> ClusterResolver:
    """Return `given`, or if it is None, the resolver for the launcher of this process.

    Without a launcher, the resolver has an empty cluster.

    Raises:
        TypeError: `given` is neither a `ClusterResolver` nor None.
    """
    if given is not None and not isinstance(given, ClusterResolver):
        raise TypeError(
            f"cluster_resolver must be a resolver such as nd.TFConfigClusterResolver(), or None to "
            f"read the environment; got {given!r}. Pass devices by name: devices=['cpu:0']."
        )
    return given or resolve() or ClusterResolver(ClusterSpec({}))


def resolve(environ: Mapping[str, str] | None = None) -> ClusterResolver | None:
    """Return the resolver for the launcher that started this process, or None if there is none.

    ``TF_CONFIG`` has priority, because it was written for this process; then torchrun, which MPI
    or Slurm may have started; then MPI and Slurm; then torchrun's variables that another program
    set. MPI, Slurm and torchrun count only with more than one process.

    Args:
        environ: the environment variables; None: ``os.environ``.

    Raises:
        ValueError: the variables are malformed.

    >>> resolve({}) is None
    True
    >>> resolve({"PMI_RANK": "0", "PMI_SIZE": "2"}).bootstrap
    'mpi'
    """
    environ = os.environ if environ is None else environ
    if environ.get("TF_CONFIG", "").strip():
        return TFConfigClusterResolver(environ=environ)
    under_torchrun = torchrun_size(environ) > 1
    if under_torchrun and "TORCHELASTIC_RUN_ID" in environ:
        return TorchrunClusterResolver(environ=environ)
    mpi = mpi_rank_and_size(environ)
    if mpi is not None and mpi[1] > 1:
        return MPIClusterResolver(environ=environ)
    # A batch script is not a step, although Slurm sets the number of tasks it may start.
    in_step = mpi is None and "SLURM_STEP_NUM_TASKS" in environ
    if in_step and number_in(environ, "SLURM_STEP_NUM_TASKS") > 1:
        return SlurmClusterResolver(environ=environ)
    return TorchrunClusterResolver(environ=environ) if under_torchrun else None
