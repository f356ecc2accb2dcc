"""The placement of operations: device scopes, and functions that spread variables over servers.

When an operation is added to a graph, such a function returns the name of its device.
`placement.py` merges these names with those of the scopes around.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ndistribute.cluster.spec import ClusterSpec
from ndistribute.devices import parse_device
from ndistribute.exports import export as _export
from ndistribute.graph.graph import Operation, get_default_graph
from ndistribute.graph.placement import DeviceFunction, merge_device


def device(device_name_or_function: str | DeviceFunction | None) -> AbstractContextManager[None]:
    """Return a context manager that places the operations that are added to the default graph.

    Args:
        device_name_or_function: the name of a device, or a function from an `Operation` to such a
            name. Outer scopes fill in missing parts of the name. None: ignore the outer scopes.

    Raises:
        ValueError: the name is not that of a device.

    >>> from ndistribute.graph.operations import placeholder
    >>> with device("/job:worker/task:1"), device("/gpu:0"):
    ...     x = placeholder("float32")
    >>> x.device
    '/job:worker/task:1/device:GPU:0'
    """
    name = device_name_or_function
    parts = parse_device(name) if isinstance(name, str) else {}
    if parts.get("device", "").startswith("TPU"):
        what = f"{name!r}: operations of graphs run only on CPUs and GPUs."
        raise ValueError(f"{what} To use TPUs, write a function and run it with nd.TPUStrategy.")
    return get_default_graph().device(device_name_or_function)


def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: ClusterSpec | Mapping[str, Any] | None = None,
    ps_ops: Sequence[str] | None = None,
    ps_strategy: Callable[[Operation], int] | None = None,
) -> DeviceFunction | None:
    """Return a function for `device` that spreads variables over the tasks of a job.

    Args:
        ps_tasks: the number of tasks that hold variables.
        ps_device: the device of the variables; only its job has an effect.
        worker_device: the device of all other operations.
        merge_devices: whether to fill in missing parts of devices that inner scopes name. If False,
            an operation that has a device keeps it.
        cluster: a cluster, whose number of tasks is used instead of `ps_tasks`.
        ps_ops: the types of operations to spread; None: variables.
        ps_strategy: a function that returns the task of an operation; None: the tasks in turn.

    Returns:
        The function, or None if no task holds variables.

    Raises:
        TypeError: `ps_strategy` cannot be called.

    >>> from ndistribute.graph import Variable
    >>> with device(replica_device_setter(ps_tasks=2, worker_device="/job:worker/task:0")):
    ...     variables = [Variable(0.0) for _ in range(3)]
    ...     total = variables[0] + variables[1]
    >>> [each.device for each in variables], total.device
    (['/job:ps/task:0', '/job:ps/task:1', '/job:ps/task:0'], '/job:worker/task:0')
    """
    job = parse_device(ps_device).get("job")
    if cluster is not None:
        jobs = ClusterSpec(cluster).as_dict()
        ps_tasks = len(jobs.get(job or "", ()))
    if ps_tasks == 0:
        return None
    spread = frozenset(("variable",) if ps_ops is None else ps_ops)
    turns = itertools.cycle(range(ps_tasks))
    choose = (lambda op: next(turns)) if ps_strategy is None else ps_strategy
    if not callable(choose):
        raise TypeError(f"ps_strategy is a function of an operation, got {ps_strategy!r}.")

    def place(op: Operation) -> str:
        if op.device and not merge_devices:
            return op.device
        if not ps_device or op.type not in spread:
            return merge_device(op.device, worker_device)
        server = ps_device
        if job and parse_device(op.device).get("job", job) == job:
            server = merge_device(f"/task:{int(choose(op))}", ps_device)
        return merge_device(op.device, server)

    return place


class GreedyLoadBalancingStrategy:
    """A `ps_strategy` of `replica_device_setter` that chooses the task with the least load so far.

    Args:
        num_tasks: the number of tasks.
        load_fn: a function that returns the load of an operation, such as `byte_size_load_fn`.

    >>> from ndistribute.graph import Variable
    >>> balanced = GreedyLoadBalancingStrategy(2, byte_size_load_fn)
    >>> with device(replica_device_setter(2, ps_strategy=balanced)):
    ...     variables = [Variable(np.zeros(n)) for n in (9, 3, 3, 3, 1)]
    >>> [each.device for each in variables]
    ['/job:ps/task:0', '/job:ps/task:1', '/job:ps/task:1', '/job:ps/task:1', '/job:ps/task:0']
    """

    def __init__(self, num_tasks: int, load_fn: Callable[[Operation], float]) -> None:
        self._load_fn = load_fn
        self._loads = [0.0] * num_tasks

    def __call__(self, op: Operation) -> int:
        """Return the task of an operation, and add its load."""
        task = self._loads.index(min(self._loads))
        self._loads[task] += self._load_fn(op)
        return task


def byte_size_load_fn(op: Operation) -> float:
    """Return the bytes of a variable.

    Raises:
        ValueError: the operation is not a variable, or its shape or dtype is known only in a run.
    """
    attributes = op.definition.attributes
    shape, dtype = attributes.get("shape"), attributes.get("dtype")
    if shape is None or dtype is None:
        raise ValueError(
            f"the bytes of {op.name!r} ({op.type}) are not known: only variables whose initial "
            "value has a known shape and dtype can be balanced by bytes."
        )
    return float(math.prod(shape) * np.dtype(dtype).itemsize)


_export(vars())
