"""Cluster resolvers: the processes of a job, their addresses, and the task of this process."""

from ndistribute.cluster.environment import (
    MPIClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    resolve,
    resolver_of_job,
)
from ndistribute.cluster.resolvers import ClusterResolver, SimpleClusterResolver, worker_index
from ndistribute.cluster.slurm import SlurmClusterResolver
from ndistribute.cluster.spec import ClusterSpec

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
