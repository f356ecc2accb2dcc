"""Who is in the job, how its processes are reached, and how a job is started on this machine."""

from ndistribute.cluster.coordinator import ClusterCoordinator
from ndistribute.cluster.resolvers import (
    ClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    resolve,
)
from ndistribute.cluster.server import Server
from ndistribute.cluster.spec import ClusterSpec
from ndistribute.cluster.this_task import worker_index

__all__ = [
    "ClusterCoordinator",
    "ClusterResolver",
    "ClusterSpec",
    "MPIClusterResolver",
    "Server",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "resolve",
    "worker_index",
]
