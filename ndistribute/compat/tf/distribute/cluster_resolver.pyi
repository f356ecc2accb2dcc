# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.cluster.resolvers import ClusterResolver as _ClusterResolver
ClusterResolver = _ClusterResolver
from ndistribute.cluster.joined import KubernetesClusterResolver as _KubernetesClusterResolver
KubernetesClusterResolver = _KubernetesClusterResolver
from ndistribute.cluster.resolvers import SimpleClusterResolver as _SimpleClusterResolver
SimpleClusterResolver = _SimpleClusterResolver
from ndistribute.cluster.slurm import SlurmClusterResolver as _SlurmClusterResolver
SlurmClusterResolver = _SlurmClusterResolver
from ndistribute.cluster.environment import TFConfigClusterResolver as _TFConfigClusterResolver
TFConfigClusterResolver = _TFConfigClusterResolver
from ndistribute.cluster.environment import TPUClusterResolver as _TPUClusterResolver
TPUClusterResolver = _TPUClusterResolver
from ndistribute.cluster.joined import UnionResolver as _UnionResolver
UnionResolver = _UnionResolver
