"""Reads `TF_CONFIG`, the variable that describes a cluster and its own task to each process.

An error names the part that is wrong: the variable is mostly written by hand or by a template, and
a cluster with one wrong entry otherwise only waits.
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
    """Read the cluster and this process's task from ``TF_CONFIG``.

    Args:
        task_type: this process's job, in place of what the variable says.
        task_id: its index, in place of what the variable says.
        environ: the environment to read.

    Raises:
        ValueError: the variable is not what it should be; the message names the part.

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
            raise ValueError(f"TF_CONFIG is malformed: {what} A right one: {_EXAMPLE}") from None


def _cluster(described: dict[str, Any]) -> ClusterSpec:
    jobs = dict(described)
    for job, tasks in described.items():
        if isinstance(tasks, dict):  # Only some tasks are known, and JSON's keys are strings.
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
