"""The resolver that reads `TF_CONFIG`, the variable with the cluster and the task of a process.

Errors name the malformed part: people and templates write this variable, and the processes of a
cluster with a wrong entry would wait for each other until the timeout.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from ndistribute.cluster.resolvers import ClusterResolver, number_of
from ndistribute.cluster.spec import ClusterSpec

_ADDRESS = re.compile(r".+:(\d+)", re.ASCII)
_EXAMPLE = (
    '{"cluster": {"worker": ["host1:12345", "host2:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


class TFConfigClusterResolver(ClusterResolver):
    """The resolver that reads the cluster and the task of this process from ``TF_CONFIG``.

    Args:
        task_type: the job of this process; None: the one in the variable.
        task_id: its index within the job; None: the one in the variable.
        environ: the environment variables; None: ``os.environ``.

    Raises:
        ValueError: the variable is malformed; the message names the part.

    >>> cluster = '{"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}'
    >>> resolver = TFConfigClusterResolver(environ={"TF_CONFIG": '{"cluster": %s}' % cluster})
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 1, 'b:1')
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        text = environ.get("TF_CONFIG", "")
        try:
            config = _object(json.loads(text) if text.strip() else {}, "it")
            cluster = _cluster(_object(config.get("cluster", {}), "'cluster'"))
            task = _object(config.get("task", {}), "'task'")
            task_type = task.get("type") if task_type is None else task_type
            if not isinstance(task_type, str | None):
                raise ValueError(f"'type' in 'task' is {task_type!r}, not a string.")
            if task_id is None and task.get("index") is not None:
                task_id = number_of(task["index"], "'index' in 'task'")
            super().__init__(cluster, task_type, task_id, str(config.get("environment", "")))
        except (TypeError, ValueError) as error:
            what = f"it is not JSON: {error}." if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"TF_CONFIG is malformed: {what} An example: {_EXAMPLE}") from None


def _cluster(described: dict[str, Any]) -> ClusterSpec:
    jobs = dict(described)
    for job, tasks in described.items():
        if isinstance(tasks, dict):  # Not all tasks are known; keys in JSON are strings.
            what = f"a task's index in job {job!r}"
            jobs[job] = {number_of(index, what): address for index, address in tasks.items()}
    cluster = ClusterSpec(jobs)
    for job in cluster.jobs:
        for index in cluster.task_indices(job):
            address = cluster.task_address(job, index)
            match = _ADDRESS.fullmatch(address)
            if match is None or int(match[1]) > 65535:
                raise ValueError(
                    f"task {index} of {job!r} has the address {address!r}, which is not HOST:PORT."
                )
    return cluster


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, not an object in braces.")
    return value
