"""The strategies that keep variables in the memory of the processes that train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from ndistribute.cluster import ClusterResolver, resolver_of_job
from ndistribute.collective.communicator import CommunicationOptions
from ndistribute.collective.membership import Elastic
from ndistribute.collective.select import CrossDeviceOps, join_workers, make_group
from ndistribute.collective.workers import ReplicaGroup, Workers
from ndistribute.data import Topology
from ndistribute.devices import Array, Device, copy_to, device_of, resolve_devices
from ndistribute.strategies.base import Strategy
from ndistribute.strategies.elastic import ElasticSession, code_of, join_elastic_job
from ndistribute.strategies.elastic_input import ElasticBatches
from ndistribute.strategies.elastic_results import check_complete, checked_step
from ndistribute.variables.mirrored import CentralVariable
from ndistribute.variables.policy import VariablePolicy, VariableSynchronization
from ndistribute.variables.variable import Variable

T = TypeVar("T")


class DefaultStrategy(Strategy):
    """The strategy that is current outside any scope, with one replica on ``cpu:0``."""

    is_default = True

    def __init__(self) -> None:
        super().__init__([Device("cpu:0")])

    def close(self) -> None:
        """Do nothing: the process always needs its default strategy, which has no threads."""


class OneDeviceStrategy(Strategy):
    """A strategy with one replica, on one device.

    Args:
        device: the device, for example ``"cpu:0"``.

    Raises:
        ValueError: the device does not exist.

    >>> strategy = OneDeviceStrategy("cpu:0")
    >>> strategy.run(lambda: 2.0)
    PerReplica:{
      0: 2.0
    }
    """

    def __init__(self, device: str | Device) -> None:
        super().__init__(resolve_devices([device], "device"))


class MirroredStrategy(Strategy):
    """A strategy with one replica per device of this machine, and variables copied to each GPU.

    CPU replicas share one copy of a variable; each GPU has its own copy.

    Args:
        devices: one for each replica; None, or an empty list, means all visible GPUs, or ``cpu:0``
            if there are none. CPUs are logical: ``["cpu:0", "cpu:1"]`` are two replicas. A GPU may
            be repeated.
        cross_device_ops: the reduction algorithm, for example `RingAllReduce()`; None: automatic.

    Raises:
        ValueError: a device does not exist, a CPU is named twice, or `cross_device_ops` has an
            `accumulation_fn`.
        TypeError: `cross_device_ops` is not a `CrossDeviceOps`.

    >>> import ndistribute as nd
    >>> with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
    ...     total = nd.Variable(10.0, aggregation="sum")
    ...
    ...     def step():
    ...         total.assign_add(1.0 + nd.get_replica_context().replica_id_in_sync_group)
    ...
    ...     strategy.run(step)
    >>> float(total)
    13.0
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        if not isinstance(cross_device_ops, CrossDeviceOps | None):
            what = f"cross_device_ops must be, say, nd.RingAllReduce(), got {cross_device_ops!r}."
            raise TypeError(what)
        if getattr(cross_device_ops, "accumulation_fn", None) is not None:
            raise ValueError(
                "cross_device_ops has an accumulation_fn, but the strategy adds values in the "
                "order of the replicas: leave it out, or call cross_device_ops.reduce outside of "
                "the strategy."
            )
        self._cross_device_ops = cross_device_ops
        super().__init__(resolve_devices(None if devices in ([], ()) else devices))

    def make_group(self) -> ReplicaGroup:
        """Return communicators that use shared memory, or NCCL on distinct GPUs."""
        return make_group(self.devices, self._cross_device_ops)


class CentralStorageStrategy(Strategy):
    """A strategy with one replica per device, and one copy of each variable on one device.

    Args:
        compute_devices: one for each replica; None means all visible GPUs, or ``cpu:0``.
        parameter_device: the device that stores the variables; None means the compute device if
            there is only one, otherwise ``cpu:0``.

    Raises:
        ValueError: a device does not exist, or a CPU is named twice.

    >>> with CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
    ...     v = Variable(1.0)
    >>> strategy.local_results(v)
    (array(1.),)
    """

    variable_kinds: ClassVar[Mapping[VariableSynchronization, type[Variable]]] = {
        **Strategy.variable_kinds,
        VariableSynchronization.ON_WRITE: CentralVariable,
    }

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | None = None,
        parameter_device: str | Device | None = None,
    ) -> None:
        devices = resolve_devices(compute_devices, "compute_devices")
        home = devices[0] if len(devices) == 1 else Device("cpu:0")
        if parameter_device is not None:
            (home,) = resolve_devices([parameter_device], "parameter_device")
        self.parameter_device = home
        super().__init__(devices)

    def make_group(self) -> ReplicaGroup:
        """Return communicators for replicas that update one copy of each variable."""
        return make_group(self.devices, central=True)


class MultiWorkerMirroredStrategy(Strategy):
    """A strategy with the replicas of all workers of a job, and variables mirrored on each worker.

    Every worker runs the same program. The constructor waits until all workers have called it. An
    evaluator, and a process whose cluster has no other worker, works alone.

    Args:
        cluster_resolver: describes the job; None reads `TF_CONFIG`, or the environment of MPI,
            Slurm or torchrun.
        communication_options: how the workers communicate, and how long they wait for each other.
        devices: one for each replica of this worker; None means all visible GPUs, or ``cpu:0`` if
            there are none. Workers may have different numbers of devices.
        elastic: `Elastic` if workers may join and leave during training; None: the loss of a worker
            ends the job.

    Raises:
        CollectiveTimeoutError: not all workers started in time.
        AuthenticationError: the workers do not share a secret.
        ValueError: the cluster's description is invalid, or a device does not exist.

    >>> with MultiWorkerMirroredStrategy() as strategy:  # This process is its only worker.
    ...     strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        devices: Sequence[str | Device] | None = None,
        elastic: Elastic | None = None,
    ) -> None:
        resolver = resolver_of_job(cluster_resolver)
        local_devices = resolve_devices(devices)
        self.session: ElasticSession | None = None
        if elastic is None:
            workers, leave = join_job(resolver, local_devices, communication_options), None
        else:
            self.session = join_elastic_job(resolver, local_devices, communication_options, elastic)
            workers, leave = None, None
            if self.session is not None:
                workers, leave = self.session.workers, self.session.end
        super().__init__(local_devices, resolver, workers, leave)
        if self.session is not None:
            self.session.attach(self)

    @property
    def is_chief(self) -> bool:
        """True in the one process of a job that should print or write files, such as checkpoints.

        In an elastic job, this is the worker that has rank 0 at this time.
        """
        return super().is_chief if self.session is None else self.session.is_chief

    @property
    def batch_scale(self) -> float:
        """The ratio of workers to those at the first start, with ``batch="scaled"``; else 1."""
        return super().batch_scale if self.session is None else float(self.session.batch_scale)

    @property
    def input_topology(self) -> Topology:
        """The replicas of this process and of all processes, for input pipelines."""
        return super().input_topology if self.session is None else self.session.topology()

    def elastic(self, batches: Any) -> Any:
        """Return batches for a training loop that workers may join or leave.

        If workers change during a step, its batch is divided among the current workers, and the
        step runs again. Waiting workers join in such a loop. If the strategy was created without
        ``elastic=...``, this only distributes the batches.

        Args:
            batches: a dataset, as for `distribute_dataset`, or a distributed one.

        Raises:
            ValueError: the input cannot go back to an earlier batch.
        """
        divided = super().elastic(batches)
        return divided if self.session is None else ElasticBatches(self.session, divided)

    def attempt(self, call: Callable[[], T], what: str = "") -> T:
        """Return the result of a function, once all workers have completed the call."""
        return call() if self.session is None else self.session.attempt(call, what=what)

    def across_workers(self, value: Any, *, whole: bool = False) -> Any:
        """Return a nest in which each `PerReplica` has the components of all processes."""
        if self.session is not None:
            check_complete(self.session, value, raises=whole)
        return super().across_workers(value)

    def agree_on(self, initial_value: Any, policy: VariablePolicy) -> Any:
        """Return rank 0's initial value of a new variable; a newcomer receives it later."""
        session = self.session
        if session is None:
            return super().agree_on(initial_value, policy)
        if session.is_newcomer:
            return initial_value
        if (value := session.state.first_value(policy.name, initial_value)) is not None:
            return copy_to(value, device_of(initial_value))
        return session.attempt(functools.partial(super().agree_on, initial_value, policy))

    def make_variable(self, array: Array, policy: VariablePolicy) -> Variable:
        """Return a new variable of the kind that a policy asks for, with an initial value."""
        if self.session is not None and policy.shard_axis is not None:
            raise ValueError(
                f"variable {policy.name!r} is divided into a shard for each replica, so a lost "
                "worker would lose its shards. Create an nd.Variable, which each worker holds as "
                "a whole, or leave elastic out of the strategy and save checkpoints."
            )
        return super().make_variable(array, policy)

    def note_variable(self, variable: Variable) -> None:
        """Register a new variable of this strategy."""
        if self.session is not None:
            self.session.state.add(variable)

    def note_state(self, holder: Any) -> None:
        """Register an object with plain values, which are restored before a step runs again."""
        if self.session is not None:
            self.session.state.add_plain(holder)

    def regroup(self, workers: Workers | None, changes: int) -> None:
        """Connect the replicas with those of a new group of workers, after a number of changes.

        A replica whose number is new in this process draws other random numbers than the replica
        that had this number before.
        """
        pool, self._workers = self._pool, workers
        self._build()
        pool.close()
        for replica in self.replica_contexts:
            if replica.replica_id_in_sync_group not in self._generators:
                bits: Any = getattr(replica.generator(), "bit_generator", None)
                if hasattr(bits, "jumped"):
                    bits.state = bits.jumped(changes).state

    def _run_step(self, fn: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        step = functools.partial(super()._run_step, fn, args, named)
        if self.session is None:
            return step()
        return self.session.attempt(checked_step(self.session, step, args, named), code_of(fn))


def join_job(
    resolver: ClusterResolver,
    devices: Sequence[Device],
    options: CommunicationOptions | None,
    what: str = "MultiWorkerMirroredStrategy",
) -> Workers | None:
    """Return this process's connections to the other workers, or None if it works alone.

    Errors name the strategy, `what`.
    """
    if not isinstance(options, CommunicationOptions | None):
        raise TypeError(
            f"communication_options must be nd.CommunicationOptions(...), got {options!r}."
        )
    if resolver.task_type == "evaluator" or resolver.num_workers < 2:
        return None
    rank = resolver.worker_index
    if resolver.task_type is None:
        raise ValueError(
            f"{what} needs to know the task of this process: pass task_type and task_id to the "
            "resolver."
        )
    if rank is None:
        task = f"a task of job {resolver.task_type!r} cannot use {what}:"
        raise ValueError(f"{task} only the cluster's chief and workers can.")
    try:
        addresses, options = resolver.worker_addresses, options or CommunicationOptions()
        return join_workers(addresses, rank, devices, options)
    except OSError as error:
        if resolver.address_hint:
            error.add_note(resolver.address_hint)
        raise
