"""Chooses the resolver that fits the environment: who started this process decides.

A script that names no resolver then runs unchanged alone, under `ndistribute run`, `mpiexec`,
`srun`, and with a `TF_CONFIG` of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ndistribute.cluster.base import ClusterResolver, SimpleClusterResolver
from ndistribute.cluster.mpi_environment import MPIClusterResolver, mpi_place
from ndistribute.cluster.slurm import SlurmClusterResolver, slurm_tasks
from ndistribute.cluster.tf_config import TFConfigClusterResolver

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "resolve",
]


def resolve(environ: Mapping[str, str] | None = None) -> ClusterResolver | None:
    """Return the resolver for how this process was started, or None if it works alone.

    ``TF_CONFIG`` comes first, as somebody wrote it for this process; then MPI, then Slurm, where
    either started more than one.

    Args:
        environ: the environment to read.

    Raises:
        ValueError: the environment is malformed.

    >>> resolve({}) is None
    True
    >>> resolve({"PMI_RANK": "0", "PMI_SIZE": "2"}).bootstrap
    'mpi'
    """
    environ = os.environ if environ is None else environ
    if environ.get("TF_CONFIG", "").strip():
        return TFConfigClusterResolver(environ=environ)
    place = mpi_place(environ)
    if place is not None and place.size > 1:
        return MPIClusterResolver(environ=environ)
    if place is None and slurm_tasks(environ) > 1:
        return SlurmClusterResolver(environ=environ)
    return None
