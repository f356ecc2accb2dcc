"""Resolvers that ask other resolvers or Kubernetes for the cluster, once, when it is needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ndistribute.cluster.resolvers import ClusterResolver
from ndistribute.cluster.spec import ClusterSpec
from ndistribute.errors import MissingDependencyError


class UnionResolver(ClusterResolver):
    """The resolver for the tasks of several resolvers.

    It joins the address lists of each job. If a resolver has only some tasks of a job, all tasks
    keep their indices. Everything else, such as the task of this process, comes from the first
    resolver.

    Args:
        *resolvers: the resolvers to join, at least one.
        task_type: the job of this process; None: that of the first resolver.
        task_id: the index of this process within its job; None: that of the first resolver.
        rpc_layer: the protocol before addresses in ``master()``; None: that of the first resolver.

    Raises:
        TypeError: an argument is not a `ClusterResolver`.
        ValueError: there is no resolver.

    >>> import ndistribute as nd
    >>> workers = nd.SimpleClusterResolver({"worker": ["a:1"]}, task_type="worker", task_id=0)
    >>> both = UnionResolver(workers, nd.SimpleClusterResolver({"worker": ["b:1"], "ps": ["c:1"]}))
    >>> both.cluster_spec(), both.get_task_info()
    (ClusterSpec({'worker': ['a:1', 'b:1'], 'ps': ['c:1']}), ('worker', 0))
    """

    _needs_task = False

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("UnionResolver needs at least one ClusterResolver.")
        for each in resolvers:
            if not isinstance(each, ClusterResolver):
                raise TypeError(f"UnionResolver needs ClusterResolvers, got {each!r}.")
        first, self._resolvers = resolvers[0], resolvers
        super().__init__(ClusterSpec({}), environment=first.environment)
        self.task_type = first.task_type if task_type is None else task_type
        self.task_id = first.task_id if task_id is None else task_id
        self.rpc_layer = rpc_layer or first.rpc_layer
        self._master = first._address_of(None, None)

    def cluster_spec(self) -> ClusterSpec:
        """Return the whole cluster.

        Raises:
            KeyError: two resolvers have a task of the same index, and one of them has only some
                tasks of the job.
        """
        return self._joined

    @functools.cached_property
    def _joined(self) -> ClusterSpec:
        clusters = [each.cluster_spec().as_dict() for each in self._resolvers]
        jobs: dict[str, Any] = {}
        for job in dict.fromkeys(job for cluster in clusters for job in cluster):
            parts = [cluster[job] for cluster in clusters if job in cluster]
            if all(isinstance(part, list) for part in parts):
                jobs[job] = [address for part in parts for address in part]
                continue
            jobs[job] = {}
            for part in parts:
                tasks = part if isinstance(part, dict) else dict(enumerate(part))
                if both := sorted(jobs[job].keys() & tasks):
                    raise KeyError(f"UnionResolver: two resolvers have tasks {both} of {job!r}.")
                jobs[job] |= tasks
        return ClusterSpec(jobs)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Return what the first resolver returns."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


class KubernetesClusterResolver(ClusterResolver):
    """The resolver for the running pods that have some labels.

    Set `task_type` and `task_id` for a strategy of several workers. The resolver asks Kubernetes
    for the pods when the cluster is first needed.

    Args:
        job_to_label_mapping: the label selectors of each job, ``{"worker": ["job-name=a"]}``; None:
            workers with the label ``job-name=tensorflow``.
        tf_server_port: the port at which each task listens.
        rpc_layer: the protocol before addresses in ``master()``.
        override_client: a `CoreV1Api` of the package `kubernetes`; None: a client from the file
            ``~/.kube/config``.

    Raises:
        MissingDependencyError: the package `kubernetes` is not installed, and no client is passed.

    >>> from types import SimpleNamespace as Imitated
    >>> status = Imitated(phase="Running", host_ip="10.0.0.1")
    >>> pods = Imitated(items=[Imitated(metadata=Imitated(name="a"), status=status)])
    >>> client = Imitated(list_pod_for_all_namespaces=lambda label_selector: pods)
    >>> KubernetesClusterResolver(override_client=client).cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:8470']})
    """

    _needs_task = False

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
    ) -> None:
        super().__init__(ClusterSpec({}), environment="kubernetes")
        self._labels = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port, self.rpc_layer = tf_server_port, rpc_layer
        self._client = _client() if override_client is None else override_client

    def cluster_spec(self) -> ClusterSpec:
        """Return the whole cluster.

        Raises:
            RuntimeError: a pod is not running.
        """
        return self._running

    @functools.cached_property
    def _running(self) -> ClusterSpec:
        pods = {
            job: [pod for label in labels for pod in self._pods(label)]
            for job, labels in self._labels.items()
        }
        for pod in (pod for several in pods.values() for pod in several):
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f'Pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}"'
                )
        return ClusterSpec(
            {job: [f"{pod.status.host_ip}:{self._port}" for pod in pods[job]] for job in pods}
        )

    def _pods(self, label: str) -> list[Any]:
        listed = self._client.list_pod_for_all_namespaces(label_selector=label)
        return sorted(listed.items, key=lambda pod: pod.metadata.name)


def _client() -> Any:
    try:
        import kubernetes
    except ImportError as error:
        raise MissingDependencyError(
            "KubernetesClusterResolver needs the package kubernetes, which is not installed: pip "
            "install kubernetes, or pass override_client."
        ) from error
    kubernetes.config.load_kube_config()
    return kubernetes.client.CoreV1Api()
