"""Cluster resolvers: the processes of a job, their addresses, and the task of this process."""

from ndistribute.cluster.environment import MPIClusterResolver as MPIClusterResolver
from ndistribute.cluster.environment import TFConfigClusterResolver as TFConfigClusterResolver
from ndistribute.cluster.environment import TorchrunClusterResolver as TorchrunClusterResolver
from ndistribute.cluster.environment import TPUClusterResolver as TPUClusterResolver
from ndistribute.cluster.environment import resolve as resolve
from ndistribute.cluster.environment import resolver_of_job as resolver_of_job
from ndistribute.cluster.joined import KubernetesClusterResolver as KubernetesClusterResolver
from ndistribute.cluster.joined import UnionResolver as UnionResolver
from ndistribute.cluster.resolvers import ClusterResolver as ClusterResolver
from ndistribute.cluster.resolvers import SimpleClusterResolver as SimpleClusterResolver
from ndistribute.cluster.resolvers import worker_index as worker_index
from ndistribute.cluster.slurm import SlurmClusterResolver as SlurmClusterResolver
from ndistribute.cluster.spec import ClusterSpec as ClusterSpec
