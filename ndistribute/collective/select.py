"""The choice of backends for the replicas of a strategy, and the four `CrossDeviceOps`.

The choice depends on the devices and on the caller's options. No other file names a backend class.
Without NCCL all choices give the same bits, because replicas of one process are combined in replica
order; NCCL chooses the order of a floating-point sum itself.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ndistribute.collective import bootstrap, levels
from ndistribute.collective.backend import Backend
from ndistribute.collective.communicator import (
    CommunicationImplementation,
    CommunicationOptions,
    Communicator,
)
from ndistribute.collective.control_plane import ControlPlane
from ndistribute.collective.mpi import MpiTransport, exchange_over_mpi
from ndistribute.collective.nccl import make_nccl_backends
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays, reduce_rows
from ndistribute.collective.ring import RingBackend
from ndistribute.collective.shared_memory import SharedMemoryBackend
from ndistribute.collective.tcp import TcpTransport
from ndistribute.collective.threads import Rendezvous, ThreadBackend
from ndistribute.collective.workers import ReplicaGroup, Workers
from ndistribute.devices import Device, as_array, copy_to, device_of, nccl_available
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.stream import Stream
from ndistribute.values import DistributedValues, Mirrored

_log = logging.getLogger("ndistribute")


class CrossDeviceOps:
    """The base class of the ways to reduce over the devices of one process.

    Pass an instance to a strategy, or call its methods to reduce values outside of strategies.

    >>> import ndistribute as nd
    >>> ops = RingAllReduce()
    >>> ops.reduce("sum", nd.PerReplica([1.0, 2.0]), destinations=["cpu:0", "cpu:1"]).values
    (array(3.), array(3.))
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: Any = None,
    ) -> Mirrored:
        """Return the reduction of the components of a value, copied to devices.

        Args:
            reduce_op: a `ReduceOp`, or its name.
            per_replica_value: a `PerReplica` of arrays or `IndexedSlices`, or one of these.
            destinations: one or several devices, or a value or variable whose devices are used.
            options: `CommunicationOptions`; they have an effect only with several processes.

        Raises:
            ValueError: the op is unknown, or undefined for these values.
        """
        op = ReduceOp.parse(reduce_op)
        value = per_replica_value
        parts = value.values if isinstance(value, DistributedValues) else (value,)
        if isinstance(parts[0], IndexedSlices):
            columns = ((part.values, part.indices) for part in parts)
            rows, indices = map(np.concatenate, zip(*columns, strict=True))
            joined = IndexedSlices(rows, indices, parts[0].dense_shape)
            return self.broadcast(reduce_rows(joined, op, len(parts), lambda x: x), destinations)
        device = device_of(as_array(parts[0]))
        arrays = [copy_to(as_array(part), device) for part in parts]
        return self.broadcast(self._combine(op, arrays), destinations)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Mirrored]:
        """Return the result of `reduce` for each pair of a value and its destinations."""
        return [self.reduce(reduce_op, *pair) for pair in value_destination_pairs]

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Return an array, or `IndexedSlices`, copied to devices; see `reduce`."""
        strategy = getattr(destinations, "distribute_strategy", None)  # If it is a variable.
        if strategy is not None:
            devices = list(strategy.devices)
        elif isinstance(destinations, DistributedValues):
            devices = [device_of(as_array(part)) for part in destinations.values]
        else:
            several = isinstance(destinations, list | tuple)
            devices = [Device(each) for each in (destinations if several else [destinations])]
        if not isinstance(tensor, IndexedSlices):
            return Mirrored(copy_to(as_array(tensor), device) for device in devices)
        rows = [(copy_to(tensor.values, at), copy_to(tensor.indices, at)) for at in devices]
        return Mirrored(IndexedSlices(*pair, tensor.dense_shape) for pair in rows)

    def _combine(self, op: ReduceOp, arrays: list[Any]) -> Any:
        return reduce_arrays(op, arrays)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Packing(CrossDeviceOps):
    """Accepts TensorFlow's `num_packs`; here, buckets of gradients have equally many bytes."""

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"{type(self).__name__} needs num_packs >= 0, got {num_packs}.")


class NcclAllReduce(_Packing):
    """Reduction through NCCL; without NCCL or distinct GPUs, replicas reduce in memory instead.

    Args:
        num_packs: changes nothing: gradients are packed into buckets of some bytes.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=NcclAllReduce())
    """


class RingAllReduce(CrossDeviceOps):
    """Reduction by slices in memory, without NCCL: each replica reduces its slice of the arrays.

    A ring divides large arrays in the same way. A single replica reduces small arrays.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=RingAllReduce())
    """


class HierarchicalCopyAllReduce(_Packing):
    """Reduction by slices in memory, without NCCL, exactly as `RingAllReduce`.

    Args:
        num_packs: changes nothing: gradients are packed into buckets of some bytes.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=HierarchicalCopyAllReduce())
    """


class ReductionToOneDevice(CrossDeviceOps):
    """Reduction on the device of one replica, which copies the result to the others.

    Args:
        reduce_to_device: the device on which `reduce` computes; None means the device of the first
            component. Replicas of a strategy take turns to reduce; the result does not depend on
            which of them does.
        accumulation_fn: a function that `reduce` calls with the list of arrays and that returns
            their sum; None adds them in order. Strategies refuse it.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=ReductionToOneDevice())
    """

    def __init__(
        self,
        reduce_to_device: str | Device | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._device = None if reduce_to_device is None else Device(reduce_to_device)
        self.accumulation_fn = accumulation_fn

    def _combine(self, op: ReduceOp, arrays: list[Any]) -> Any:
        if self._device is not None:
            arrays = [copy_to(array, self._device) for array in arrays]
        if self.accumulation_fn is None or op not in (ReduceOp.SUM, ReduceOp.MEAN):
            return super()._combine(op, arrays)
        total = self.accumulation_fn(arrays)
        return total / len(arrays) if op is ReduceOp.MEAN else total


def make_group(
    devices: Sequence[Device],
    cross_device_ops: CrossDeviceOps | None = None,
    *,
    central: bool = False,
    workers: Workers | None = None,
) -> ReplicaGroup:
    """Return the communicators of the replicas of this process.

    The same GPU may occur several times. With `central`, all replicas update one copy of a
    variable.

    >>> [c.rank for c in make_group([Device("cpu:0"), Device("cpu:1")]).communicators]
    [0, 1]
    """
    rendezvous = Rendezvous(len(devices))
    streams = [Stream(device) for device in devices]
    homes = ["central" if central else device.memory_space for device in devices]
    alone = isinstance(cross_device_ops, ReductionToOneDevice)
    ranks = range(len(devices))
    threads = [ThreadBackend(rendezvous, streams, homes, rank, alone) for rank in ranks]
    if workers is None:
        nccl = not central and _wants_nccl(devices, cross_device_ops)
    else:
        nccl = _workers_want_nccl(workers)
    backends: Sequence[Backend] = threads
    end_devices = None
    if nccl:
        backends = over_nccl = make_nccl_backends(rendezvous, streams, workers)
        end_devices = over_nccl[0].close
    elif workers is not None:
        backends = _join_replicas(threads, workers)
    if workers is None:
        communicators = [Communicator(backend) for backend in backends]
    else:
        communicators = [
            Communicator(backend, workers.options, local, workers.peers.where)
            for backend, local in zip(backends, threads, strict=True)
        ]
    return ReplicaGroup(communicators, rendezvous, streams, workers, end_devices)


def _join_replicas(local: Sequence[ThreadBackend], workers: Workers) -> list[Backend]:
    """Return the backends of this process's replicas in the group of all processes' replicas."""
    # The decision must be the same in all processes, because they must make the same calls.
    if all(devices == ["cpu"] for devices in workers.identities):
        return [levels.SingleReplicaBackend(local[0], workers.backend)]
    counts = workers.replica_counts
    ends = np.cumsum(counts).tolist()
    groups = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
    sums = levels.reused_sums(workers.backend.allocate)
    workers.held.callback(sums.cache_clear)
    ranked = zip(local, groups[workers.rank], strict=True)
    join = functools.partial(levels.ReplicaLevelBackend, sums=sums)
    return [join(threads, workers.backend, groups, rank) for threads, rank in ranked]


def join_workers(
    addresses: Sequence[str], rank: int, devices: Sequence[Device], options: CommunicationOptions
) -> Workers:
    """Return the group of all processes of the job, once all have joined.

    Under MPI, `addresses` is empty. If only the address of rank 0 is known, the others are empty
    strings.

    Raises:
        CollectiveTimeoutError: not all processes started in time.
        ValueError: the processes have different options, or cannot use the transport.
    """
    over_mpi = not addresses
    if over_mpi:
        info = bootstrap.info_from_exchange(exchange_over_mpi, rank)
    elif not all(addresses):
        info = bootstrap.info_from_rank_0(addresses[0], rank, len(addresses))
    else:
        info = bootstrap.info_from_addresses(addresses, rank)
    return join_members(info, devices, options, over_mpi=over_mpi)


def join_members(
    info: bootstrap.ProcessInfo,
    devices: Sequence[Device],
    options: CommunicationOptions,
    check: Callable[[], None] = lambda: None,
    *,
    over_mpi: bool = False,
) -> Workers:
    """Return the group of processes that know each other's addresses, once all have joined.

    `check` is called during the wait; it may raise if a member is lost.
    """
    peers = ControlPlane(info, options.timeout, check)
    try:
        _check_alike(peers, options)
        return Workers(peers, _process_backend(peers, options, over_mpi), devices, options)
    except BaseException as error:
        peers.abort(error)
        peers.close()
        raise


def _check_alike(peers: ControlPlane, options: CommunicationOptions) -> None:
    """Raise ValueError on all processes if their options differ."""
    implementation = CommunicationImplementation(options.implementation).value
    shown = f"{implementation!r}, wire_dtype={options.wire_dtype!r}"
    shown += f", bytes_per_pack={options.bytes_per_pack}"
    texts = [text.decode() for text in peers.exchange("options", shown.encode(), options.timeout)]
    for rank, theirs in enumerate(texts):
        if theirs != texts[0]:
            raise ValueError(
                f"worker {rank} has CommunicationOptions(implementation={theirs}), worker 0 has "
                f"(implementation={texts[0]}): pass the same options on all workers."
            )


def _process_backend(peers: ControlPlane, options: CommunicationOptions, over_mpi: bool) -> Backend:
    def ring(ranks: Sequence[int]) -> RingBackend:
        transport = MpiTransport if over_mpi else TcpTransport
        return RingBackend(peers, functools.partial(transport, peers), ranks, options)

    wish = options.implementation
    if wish is CommunicationImplementation.MPI and not over_mpi:
        what = "implementation='mpi' needs processes that MPI started:"
        how = "use `ndistribute run --mpi` or mpiexec, or implementation='auto'."
        raise ValueError(f"{what} {how}")
    if wish in (CommunicationImplementation.RING, CommunicationImplementation.MPI):
        return ring(range(peers.size))
    groups = host_groups(peers.hosts)
    if len(groups) == 1:
        return SharedMemoryBackend(peers)
    leaders = [group[0] for group in groups]
    here = next(group for group in groups if peers.rank in group)
    inside = SharedMemoryBackend(peers, ranks=here)
    between = ring(leaders) if peers.rank in leaders else None
    return levels.HostLevelBackend(inside, between, groups, peers.rank)


def host_groups(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first ranks.

    >>> host_groups(["red", "blue", "red"])
    [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())


def nccl_obstacle(identities: Sequence[Sequence[str]], hosts: Sequence[str]) -> str | None:
    """Return why NCCL cannot connect all workers' devices, each named by its `device_identity`.

    >>> nccl_obstacle([["gpu 0000:3B:00.0"], ["cpu"]], ["a", "b"])
    'worker 1 has a replica on a CPU, and NCCL connects only GPUs'
    """
    owners: dict[tuple[str, str], int] = {}
    for worker, (devices, host) in enumerate(zip(identities, hosts, strict=True)):
        for device in devices:
            kind, _, place = device.partition(" ")
            if kind == "cpu":
                return f"worker {worker} has a replica on a CPU, and NCCL connects only GPUs"
            if not place:
                return (
                    f"worker {worker} has no NCCL: pip install nvidia-nccl-cu12 or "
                    "nvidia-nccl-cu13, for the CUDA version of its CuPy"
                )
            other = owners.setdefault((host, place), worker)
            if other != worker or devices.count(device) > 1:
                alone = f"two replicas of worker {worker}"
                who = alone if other == worker else f"workers {other} and {worker}"
                return (
                    f"{who} share the GPU {place} of a host, and NCCL needs a GPU for each "
                    "replica: give each worker its own by devices=[...] or CUDA_VISIBLE_DEVICES"
                )
    return None


def _workers_want_nccl(workers: Workers) -> bool:
    """Return True if NCCL will connect the GPUs of all workers; all workers get the same result."""
    obstacle = nccl_obstacle(workers.identities, workers.peers.hosts)
    wish = workers.options.implementation
    if obstacle is not None and wish is CommunicationImplementation.NCCL:
        raise ValueError(f"implementation='nccl': {obstacle}; or pass implementation='auto'.")
    possible = (CommunicationImplementation.AUTO, CommunicationImplementation.NCCL)
    return workers.may_use_nccl and obstacle is None and wish in possible


def _wants_nccl(devices: Sequence[Device], wish: CrossDeviceOps | None) -> bool:
    if not isinstance(wish, NcclAllReduce | None) or len(devices) == 1:
        return False
    if any(d.kind != "gpu" for d in devices) or len(set(devices)) < len(devices):
        reason = "it needs one distinct GPU for each replica"
    elif not nccl_available():
        reason = "NCCL is not installed"
    else:
        return True
    if isinstance(wish, NcclAllReduce):
        names = ", ".join(map(str, devices))
        _log.warning("NcclAllReduce is not used, because %s: %s reduce in memory", reason, names)
    return False
