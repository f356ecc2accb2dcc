"""`TPUStrategy`: a step is one program that XLA compiles for all devices of JAX.

The variables' values stay on the devices between steps. They are copied to the host when somebody
reads or writes them outside of a step.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute import context, tree
from ndistribute.cluster import ClusterResolver
from ndistribute.collective.communicator import CommunicationOptions, Communicator
from ndistribute.collective.objects import all_gather_object
from ndistribute.collective.workers import Workers
from ndistribute.context import Frame, ReplicaContext, entered
from ndistribute.devices import Array, Device, jax_module, list_devices, resolve_devices
from ndistribute.errors import CollectiveTimeoutError, DistributeError
from ndistribute.jit.box import Box
from ndistribute.jit.program import Compiler, Devices
from ndistribute.jit.traced_backend import TracedBackend
from ndistribute.strategies.base import Strategy
from ndistribute.strategies.local import join_job
from ndistribute.transport.address import address_of, split_address
from ndistribute.values import PerReplica
from ndistribute.variables.policy import VariablePolicy
from ndistribute.variables.variable import Variable

_MOST_PROGRAMS = 256
_DEADLINE = "xla_cpu_collective_timeout_seconds"
_ANSWER_SECONDS = 10.0  # Time for the others to answer after a program was aborted.


class TPUStrategy(Strategy):
    """A strategy with one replica on each of JAX's devices, whose steps are compiled by XLA.

    The devices are TPUs or, if JAX has none, GPUs or CPUs. `run` traces the step once for each
    shape of its arguments. Python code in the step runs only during tracing, not in later calls;
    code whose result would then be wrong raises `nd.errors.TracingError`.

    Several processes train together if a resolver describes them; each has one replica per device.
    JAX's distributed system connects the processes, with its coordinator in worker 0.

    Args:
        devices: names such as ``["tpu:0", "tpu:1"]``, a resolver such as `TPUClusterResolver`, or
            None for all devices that JAX has here.
        communication_options: how long the processes wait for each other.

    Raises:
        MissingDependencyError: JAX is not installed.
        ValueError: a device does not exist.
        RuntimeError: JAX was used in this process before it could be connected to the others.
        CollectiveTimeoutError: not all processes started in time.

    >>> import ndistribute as nd
    >>> strategy = nd.TPUStrategy(["tpu:0"])
    >>> with strategy.scope():
    ...     total = nd.Variable(1.0)
    >>> strategy.run(lambda x: total + np.sum(x), args=(np.ones(3),)).values
    (np.float64(4.0),)
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        resolver = devices if isinstance(devices, ClusterResolver) else None
        workers = None if resolver is None else _connected(resolver, communication_options)
        names: Any = list_devices("tpu") if devices is None or resolver is not None else devices
        chosen = resolve_devices(names)
        if any(device.kind != "tpu" for device in chosen):
            raise ValueError(f"TPUStrategy runs on devices such as 'tpu:0', got {names!r}.")
        if workers is None:
            known = jax_module().local_devices()
            on = [known[device.index] for device in chosen]
        else:
            on = sorted(jax_module().devices(), key=lambda d: d.process_index)
        super().__init__(chosen, resolver, workers)
        self.needs_equal_parts = self.num_replicas_in_sync > 1
        self._compiler = Compiler(
            Devices(on), lambda: self.replica_contexts, self._traced, self._together, _MOST_PROGRAMS
        )

    @property
    def compilations(self) -> list[Any]:
        """The compilations of steps so far: the shapes of the arguments, and seconds."""
        return list(self._compiler.compilations)

    def make_variable(self, array: Array, policy: VariablePolicy) -> Variable:
        """Return a new variable, whose value is divided among the devices as its kind needs."""
        axis = policy.shard_axis
        if axis is not None and array.shape[axis] % self.num_replicas_in_sync:
            raise ValueError(
                f"variable {policy.name!r} of shape {array.shape} cannot be divided along axis "
                f"{axis} among {self.num_replicas_in_sync} devices: XLA needs equal shards."
            )
        made = super().make_variable(array, policy)
        made.join_cells()
        return made

    def _run_step(self, fn: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        def run() -> list[Any]:
            if self._refusal:
                raise RuntimeError(f"{self!r} {self._refusal}")
            try:
                return self._compiler(fn, args, named)
            except (ValueError, jax_module().errors.JaxRuntimeError) as error:
                is_of_xla = not isinstance(error, ValueError) or "Gloo" in str(error)
                if self._workers is not None and is_of_xla:  # A worker may be missing.
                    _name_missing(self._workers, error)
                raise

        return tree.regroup(self._exclusively(run), context.join_leaf)

    def _together(self, compiles: Callable[[], Any]) -> Any:
        """Return what this process compiled, once all have compiled; raise another's error."""
        if self._workers is None:
            return compiles()
        try:
            compiled = compiles()
        except Exception as error:  # Any exception, because the others wait.
            with contextlib.suppress(Exception):
                all_gather_object(self._workers, error)
            raise
        all_gather_object(self._workers, None)
        return compiled

    def _traced(self) -> contextlib.AbstractContextManager[Any]:
        return entered(Frame(self, _TracedContext(self)))


def _name_missing(workers: Workers, broken: Exception) -> None:
    """Raise an error that names the worker whose loss aborted a program."""
    seconds = workers.options.timeout
    try:
        workers.peers.exchange("step", b"", min(seconds, _ANSWER_SECONDS))
    except CollectiveTimeoutError as error:
        raise CollectiveTimeoutError(
            f"a compiled step of worker {workers.rank} was interrupted, because worker "
            f"{error.rank} does not answer: it runs other code, or did not begin the step within "
            f"{seconds:g} s. Every worker must run the same steps. If they need more time, "
            "increase timeout_seconds in CommunicationOptions. Start the job again from its last "
            "checkpoint.",
            rank=error.rank,
            op="step",
        ) from broken


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> list[Device]:
    """Connect JAX to the job's other processes, and return the devices of this process.

    `TPUStrategy` does this itself. Call this in programs that use JAX's devices earlier.

    Args:
        cluster_resolver: describes the job; None: this process is alone.

    >>> import ndistribute as nd
    >>> nd.initialize_tpu_system()[0]
    Device('tpu:0')
    """
    if cluster_resolver is not None:
        _connect_jax(cluster_resolver, None)
    return list_devices("tpu")


def _connect_jax(resolver: ClusterResolver, options: CommunicationOptions | None) -> None:
    """Connect JAX to the job's other processes, until this process ends."""
    jax = jax_module()
    if jax.distributed.is_initialized() or resolver.num_workers < 2:
        return
    workers = join_job(resolver, [Device("cpu:0")], options, "TPUStrategy")
    if workers is not None:
        atexit.register(_disconnect_jax, workers)
        _start_jax(workers)


def _disconnect_jax(workers: Workers) -> None:
    """Leave JAX's system; worker 0, which has its coordinator, leaves last."""
    if getattr(sys, "last_value", None) is None:  # Else the others may wait for this process.
        with contextlib.suppress(DistributeError):
            workers.peers.exchange("end", b"", workers.options.timeout)
    if workers.rank == 0:
        workers.close()
    jax_module().distributed.shutdown()
    workers.close()


def _start_jax(workers: Workers) -> None:
    jax, seconds = jax_module(), math.ceil(workers.options.timeout)
    host, _ = split_address(workers.peers.addresses[0])
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        if workers.rank == 0:
            free.bind((host, 0))
        port = free.getsockname()[1]
    address = address_of(host, port).encode()
    first, *_ = workers.peers.exchange("jax", address, workers.options.timeout)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Without it, JAX ends this process when another one was killed.
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        first.decode(),
        workers.size,
        workers.rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=first.decode(),
        initialization_timeout=seconds,
        shutdown_timeout_seconds=seconds,
    )
    flags = os.environ.get("XLA_FLAGS", "")
    # Otherwise it is 30 minutes, for collectives of CPUs. An XLA without this flag would end the
    # process.
    if _DEADLINE not in flags and jax.__version_info__ >= (0, 10):
        os.environ["XLA_FLAGS"] = f"{flags} --{_DEADLINE}={seconds}"
    jax.devices()  # XLA reads the flags.
    os.environ["XLA_FLAGS"] = flags


def _connected(resolver: ClusterResolver, options: CommunicationOptions | None) -> Workers | None:
    """Return the group of the job's processes after JAX connected them; None if alone."""
    _connect_jax(resolver, options)
    workers = join_job(resolver, [Device("cpu:0")], options, "TPUStrategy")
    if workers is None:
        return None
    jax = jax_module()
    place = jax.process_index(), jax.process_count()
    if place != (workers.rank, workers.size):
        workers.close()
        raise RuntimeError(
            f"this is process {place[0]} of {place[1]} for JAX, but worker {workers.rank} of "
            f"{workers.size} in the cluster: let TPUStrategy connect JAX's processes."
        )
    counts = Counter(device.process_index for device in jax.devices())
    workers.identities = [["tpu"] * counts[k] for k in range(workers.size)]
    return workers


class _TracedContext(ReplicaContext):
    """The context of all replicas of a compiled step, which are traced once."""

    def __init__(self, strategy: TPUStrategy) -> None:
        backend = TracedBackend(strategy.num_replicas_in_sync)
        communicator = Communicator(backend, local=TracedBackend(1))
        super().__init__(strategy, communicator, strategy.devices[0], {})

    def merge_call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function with the values of all replicas, which each device gathers."""
        self._frame("merge_call")
        size, rank = self.num_replicas_in_sync, self.replica_id_in_sync_group

        def of_all(leaf: Any) -> Any:
            if isinstance(leaf, Box):
                everyone = self.communicator.all_gather(leaf[None], 0)
                return PerReplica([everyone[k] for k in range(size)])
            return context.join_leaf([leaf] * size)

        def of_this(leaf: Any) -> Any:
            return np.stack(leaf.values)[rank] if isinstance(leaf, PerReplica) else leaf

        args, kwargs = tree.map_leaves(of_all, (tuple(args), dict(kwargs or {})))
        with entered(Frame(self.strategy, None, merging=True)):
            return tree.map_leaves(of_this, fn(self.strategy, *args, **kwargs))
