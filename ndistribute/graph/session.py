"""`Session`: it runs parts of a graph and returns the values of tensors; and its options."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ndistribute import tree
from ndistribute.devices import as_array
from ndistribute.errors import CancelledError, InvalidArgumentError, OperationError
from ndistribute.graph import requests as m
from ndistribute.graph.definition import sendable, unpack
from ndistribute.graph.executor import Plan
from ndistribute.graph.graph import Graph, Operation, Tensor, as_default_session, get_default_graph
from ndistribute.graph.partition import pruned
from ndistribute.graph.placement import CPU, moved, task_of
from ndistribute.graph.pool import ClientPool
from ndistribute.graph.service import SessionClient, service_at
from ndistribute.graph.shapes import known_of
from ndistribute.graph.step import Resources, Step
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.mistakes import accepting
from ndistribute.ownership import read_only
from ndistribute.transport.secret import Credentials, find_secret, tls_files

HERE = "/job:localhost/task:0"
"""The only task of a session without a target."""
_CLOSE_SECONDS = 5.0
Names = Sequence[str]
Seconds = float | None
_log = logging.getLogger("ndistribute")


@dataclass(slots=True, kw_only=True)
class GPUOptions:
    """The value of `ConfigProto.gpu_options`: a GPU's memory is allocated as it is needed."""

    allow_growth: bool = True


@dataclass(slots=True, kw_only=True)
class ConfigProto:
    """The options of a session, under the names of `tf.compat.v1.ConfigProto`.

    Args:
        allow_soft_placement: whether an operation whose device does not exist in its task runs on
            the task's CPU. If False, it raises an error.
        log_device_placement: whether to log where operations run.
        operation_timeout_in_ms: the timeout of a step in milliseconds; 0: no limit.
        device_filters: has no effect: a session uses only tasks on which operations are placed.
        gpu_options: has no effect: memory of a GPU is always allocated as it is needed.
        inter_op_parallelism_threads: has no effect: operations get the threads that they need.
        intra_op_parallelism_threads: has no effect: set ``OMP_NUM_THREADS`` before the start.

    >>> ConfigProto(allow_soft_placement=True).operation_timeout_in_ms
    0
    """

    allow_soft_placement: bool = False
    log_device_placement: bool = False
    operation_timeout_in_ms: int = 0
    device_filters: list[str] = field(default_factory=list, compare=False)
    gpu_options: GPUOptions = field(default_factory=GPUOptions, compare=False)
    inter_op_parallelism_threads: int = field(default=0, compare=False)
    intra_op_parallelism_threads: int = field(default=0, compare=False)


class RunOptions:
    """The options of a run, under the names of `tf.compat.v1.RunOptions`.

    Args:
        timeout_in_ms: the timeout of the run in milliseconds; 0: the timeout of the session.
    """

    NO_TRACE, SOFTWARE_TRACE, HARDWARE_TRACE, FULL_TRACE = range(4)

    @accepting("output_partition_graphs", "trace_level")
    def __init__(self, timeout_in_ms: int = 0) -> None:
        self.timeout_in_ms = timeout_in_ms


class Session:
    """A session, which runs operations of a graph and returns the values of tensors.

    Args:
        target: the address of the server that runs the graph, ``host:port``; empty: this process.
        graph: the graph to run; None: the default graph.
        config: see `ConfigProto`.
        job: the identity of the job whose servers to use; empty: ``NDISTRIBUTE_JOB_ID``, or if this
            is not set, the identity of the first server to which the session connects.

    >>> from ndistribute.graph.operations import placeholder
    >>> with Graph().as_default(), Session() as session:
    ...     x = placeholder(np.float64)
    ...     session.run({"double": 2 * x, "x": x}, {x: 3.0})
    {'double': np.float64(6.0), 'x': array(3.)}
    """

    def __init__(
        self, target: str = "", graph: Graph | None = None, config: Any = None, job: str = ""
    ) -> None:
        self.graph = graph or get_default_graph()
        self.target, self.config = target, config
        self._timeout = _seconds(getattr(config, "operation_timeout_in_ms", 0))
        self._runner: _Remote | _InProcess | None = (
            _Remote(target, config, self.graph, job) if target else _InProcess(config)
        )
        self._entered = contextlib.ExitStack()

    def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        options: RunOptions | None = None,
        run_metadata: Any = None,
    ) -> Any:
        """Run the operations that the fetches need, and return the values of the fetches.

        Args:
            fetches: a nest of tensors, variables, operations, and names of tensors or operations.
            feed_dict: values that replace the results of operations, by tensor.
            options: see `RunOptions`.
            run_metadata: ignored; accepted for compatibility with TensorFlow.

        Returns:
            The same nest with arrays for tensors and variables, and None for operations.

        Raises:
            OperationError: an operation failed; the subclass and the attributes tell why and where.
            RuntimeError: the session was closed.
            ValueError: a fetch or a fed tensor is not of this graph, or a fed value does not have
                the shape or dtype of its tensor.
        """
        if self._runner is None:
            raise RuntimeError("this session was closed: create a new one.")
        graph = self.graph
        leaves = tree.flatten(fetches)
        elements = [graph.as_graph_element(leaf) for leaf in leaves]
        feeds = {}
        for key, value in (feed_dict or {}).items():
            tensor = graph.as_graph_element(key)
            # Read-only, so that no result shares memory with a fed array.
            feeds[tensor.name] = read_only(_fed(tensor, value))
        names = [each.name for each in elements if isinstance(each, Tensor)]
        targets = [each.name for each in elements if isinstance(each, Operation)]
        timeout = _seconds(getattr(options, "timeout_in_ms", 0)) or self._timeout
        values = iter(self._runner.run(graph, names, targets, feeds, timeout))
        results = [next(values) if isinstance(each, Tensor) else None for each in elements]
        return tree.unflatten(fetches, results)

    @property
    def job(self) -> str:
        """The identity of the job whose servers it uses; empty before the first connection."""
        return self._runner.pool.credentials.job if isinstance(self._runner, _Remote) else ""

    @staticmethod
    def reset(target: str) -> None:
        """Drop all variables of a target's server and of all other tasks of its cluster."""
        with contextlib.closing(_pool_to(target)) as pool:
            m.values_of(pool.client(address_of(target)).call(m.Reset()))

    def close(self) -> None:
        """Close the session; a second call does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def as_default(self) -> Any:
        """Return a context manager; `Tensor.eval` and `Operation.run` in it use this session."""
        return as_default_session(self)

    def __enter__(self) -> Self:
        self._entered.enter_context(self.graph.as_default())
        self._entered.enter_context(self.as_default())
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()
        self.close()


class _InProcess:
    """Runs steps in this process; each session has its own variables."""

    def __init__(self, config: Any) -> None:
        self._resources = Resources()
        self._plans: dict[Any, Plan] = {}
        self._steps: set[Step] = set()  # Those that are running.
        self._soft, self._log = _options(config)

    def run(
        self, graph: Graph, fetches: Names, targets: Names, feeds: dict[str, Any], timeout: Seconds
    ) -> list[Any]:
        key = (*fetches, None, *targets, None, *feeds)
        plan = self._plans.get(key)
        if plan is None:
            definitions = {op.name: op.definition for op in graph.get_operations()}
            needed = pruned(definitions, fetches, targets, list(feeds))
            for op in needed:
                task_of(op, {HERE: ""}, HERE, soft=self._soft)
                if self._log:
                    _log.info("%s: %s", op.name, op.device or HERE)
            plan = self._plans[key] = Plan(needed, list(feeds), fetches, self._soft)
        step = Step(self._resources, functions=graph.functions, timeout=timeout)
        self._steps.add(step)
        try:
            return _owned(plan.run(step, list(feeds.values())))
        finally:
            self._steps.discard(step)

    def close(self) -> None:
        for step in list(self._steps):
            step.abort(CancelledError("the session was closed."))
        self._plans.clear()
        self._resources.clear()


class _Remote:
    """Runs steps on the tasks of a cluster; the server of the target is the master.

    A server in this process is called without a connection.
    """

    def __init__(self, target: str, config: Any, graph: Graph, job: str) -> None:
        self._address, self.pool = address_of(target), _pool_to(target, job)
        self._client = SessionClient(f"client#{secrets.token_hex(6)}", graph.functions)
        self._session = secrets.token_hex(8)
        self._known = 0  # The number of operations that the master has.
        self._soft, self._log = _options(config)

    def run(
        self, graph: Graph, fetches: Names, targets: Names, feeds: dict[str, Any], timeout: Seconds
    ) -> list[Any]:
        wanted = [name for name in fetches if name not in feeds]
        known = self._known
        added = graph.get_operations()[known:] if graph.version > known else []
        new = [op.definition for op in added]
        values = tuple(map(sendable, feeds, feeds.values()))
        names = tuple(new), tuple(wanted), tuple(targets), tuple(feeds)
        options = timeout, self._soft, self._log
        request = m.RunStep(self._session, known, *names, values, *options)
        # The master ends a step that takes too long, unless the master itself has stopped.
        seconds = math.inf if timeout is None else timeout + _CLOSE_SECONDS
        results = map(unpack, m.values_of(self._call(request, seconds)))
        self._known = max(self._known, known + len(new))
        return _owned([feeds[name] if name in feeds else next(results) for name in fetches])

    def close(self) -> None:
        with contextlib.suppress(OperationError):
            self._call(m.Close(self._session), _CLOSE_SECONDS)
        self.pool.close()

    def _call(self, request: m.Request, timeout: float = math.inf) -> Any:
        service = service_at(self._address)
        if service is not None:
            return service.handle(self._client, 0, request)
        return self.pool.client(self._address).call(request, timeout)


def _owned(values: Sequence[Any]) -> list[Any]:
    """Return values that the caller may change; no two of them share memory."""
    results = [_writable(value) for value in values]
    if len(results) > 1:
        owners: set[int] = set()
        for k, value in enumerate(results):
            if isinstance(value, np.ndarray):
                owner = id(value.base) if isinstance(value.base, np.ndarray) else id(value)
                if owner in owners:
                    results[k] = value.copy()
                owners.add(owner)
    return results


def _writable(value: Any) -> Any:
    """Return a value that the caller may change, in host memory."""
    if isinstance(value, IndexedSlices):
        return IndexedSlices(_writable(value.values), _writable(value.indices), value.dense_shape)
    value = moved(value, CPU)
    return value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value


def _options(config: Any) -> tuple[bool, bool]:
    """Return whether to replace devices that do not exist, and to log."""
    soft = bool(getattr(config, "allow_soft_placement", False))
    return soft, bool(getattr(config, "log_device_placement", False))


def _seconds(milliseconds: int) -> Seconds:
    """Return the timeout of a run; 0: None."""
    return milliseconds / 1000 or None


def address_of(target: str) -> str:
    """Return the address of a target, ``host:port`` or ``grpc://host:port``."""
    return target.removeprefix("grpc://")


def _pool_to(target: str, job: str = "") -> ClientPool:
    address = address_of(target)
    job = job or os.environ.get("NDISTRIBUTE_JOB_ID", "")
    credentials = Credentials(find_secret([address], os.environ), job, tls_files(os.environ))
    return ClientPool(credentials, "client")


def _fed(tensor: Any, value: Any) -> Any:
    """Return a value to feed, in the tensor's dtype.

    Raises:
        ValueError: it has another shape, or is itself a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{tensor!r} is not a tensor: only tensors can be fed.")
    if isinstance(value, Tensor):
        raise TypeError(f"the value for {tensor!r} is a tensor: feed an array.")
    array, (dtype, shape, _) = as_array(value), known_of(tensor)
    if dtype is not None and array.dtype != dtype:
        try:
            array = array.astype(dtype)
        except (TypeError, ValueError) as error:
            why = f"the value for {tensor.name!r} has dtype {array.dtype}, expected {dtype}."
            raise InvalidArgumentError(why) from error
    if shape is not None and (
        len(shape) != array.ndim
        or any(n is not None and n != m for n, m in zip(shape, array.shape, strict=True))
    ):
        raise InvalidArgumentError(
            f"the value for {tensor.name!r} has shape {array.shape}, expected {shape}; None is any "
            "length."
        )
    return np.asarray(array) if isinstance(array, np.generic) else array
