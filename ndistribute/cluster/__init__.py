"""Who is in the job, how its processes are reached, and how a job is started on this machine."""

from ndistribute.cluster.resolvers import (
    ClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    resolve,
)
from ndistribute.cluster.spec import ClusterSpec

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "resolve",
]
