"""Reads `TF_CONFIG`, the variable in which TensorFlow's clusters tell each process who it is.

What is wrong in it is named part by part: the variable is mostly written by hand or by a template,
and a cluster with one wrong entry otherwise only waits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ndistribute.cluster.base import ClusterResolver
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
        config = _parsed(environ.get("TF_CONFIG", ""))
        cluster = _cluster(config)
        task = _object(config.get("task", {}), "'task'")
        if task_type is None:
            task_type = _task_type(task)
        if task_id is None:
            task_id = _task_index(task)
        environment = config.get("environment", "")
        try:
            super().__init__(cluster, task_type, task_id, str(environment))
        except ValueError as error:
            raise _malformed(str(error)) from None


def _parsed(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _malformed(f"it is not JSON: {error}.") from None
    return _object(config, "it")


def _cluster(config: dict[str, Any]) -> ClusterSpec:
    described = _object(config.get("cluster", {}), "'cluster'")
    for job, tasks in described.items():
        if isinstance(tasks, dict):
            # JSON's keys are strings.
            described[job] = {_sparse_index(job, index): tasks[index] for index in tasks}
    try:
        cluster = ClusterSpec(described)
    except (TypeError, ValueError) as error:
        raise _malformed(f"'cluster': {error}") from None
    for job in cluster.jobs:
        for index in cluster.task_indices(job):
            _check_address(cluster.task_address(job, index), f"task {index} of {job!r}")
    return cluster


def _check_address(address: str, what: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise _malformed(f"{what} has the address {address!r}, which is not HOST:PORT.")


def _sparse_index(job: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise _malformed(f"'cluster': job {job!r} has a task {text!r}, which is no number.")
    return int(text)


def _task_type(task: dict[str, Any]) -> str | None:
    value = task.get("type")
    if value is not None and not isinstance(value, str):
        raise _malformed(f"'type' in 'task' is {value!r}, not a string.")
    return value


def _task_index(task: dict[str, Any]) -> int | None:
    value = task.get("index")
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)  # Templates that fill in an environment variable often quote it.
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise _malformed(f"'index' in 'task' is {value!r}, not a number.")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(f"{what} is {type(value).__name__}, not an object in braces.")
    return value


def _malformed(what: str) -> ValueError:
    return ValueError(f"TF_CONFIG is malformed: {what} A right one: {_EXAMPLE}")
