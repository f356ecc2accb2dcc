"""Who is in the job, how its processes are reached, and how a job is started on this machine."""

from ndistribute.cluster.coordination.coordinator import ClusterCoordinator
from ndistribute.cluster.coordination.this_task import worker_index
from ndistribute.cluster.resolvers import (
    ClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    resolve,
)
from ndistribute.cluster.serving.server import Server
from ndistribute.cluster.spec import ClusterSpec

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
