"""Reads `TF_CONFIG`, the variable that describes a cluster and its own task to each process.

An error names the part that is wrong: the variable is mostly written by hand or by a template, and
a cluster with one wrong entry otherwise only waits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ndistribute.cluster.resolvers import ClusterResolver
from ndistribute.cluster.spec import ClusterSpec

__all__ = ["TFConfigClusterResolver"]

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
            task_type = _task_type(task) if task_type is None else task_type
            task_id = _task_index(task) if task_id is None else task_id
            super().__init__(cluster, task_type, task_id, str(config.get("environment", "")))
        except (TypeError, ValueError) as error:
            what = f"it is not JSON: {error}." if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"TF_CONFIG is malformed: {what} A right one: {_EXAMPLE}") from None


def _cluster(described: dict[str, Any]) -> ClusterSpec:
    # JSON's keys are strings, and only some tasks may be known.
    cluster = ClusterSpec(
        {
            job: {_sparse_index(job, index): tasks[index] for index in tasks}
            if isinstance(tasks, dict)
            else tasks
            for job, tasks in described.items()
        }
    )
    for job in cluster.jobs:
        for index in cluster.task_indices(job):
            _check_address(cluster.task_address(job, index), f"task {index} of {job!r}")
    return cluster


def _check_address(address: str, what: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{what} has the address {address!r}, which is not HOST:PORT.")


def _sparse_index(job: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"'cluster': job {job!r} has a task {text!r}, which is no number.")
    return int(text)


def _task_type(task: dict[str, Any]) -> str | None:
    value = task.get("type")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"'type' in 'task' is {value!r}, not a string.")
    return value


def _task_index(task: dict[str, Any]) -> int | None:
    value = task.get("index")
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)  # Templates that fill in an environment variable often quote it.
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"'index' in 'task' is {value!r}, not a number.")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, not an object in braces.")
    return value
