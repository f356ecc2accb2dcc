"""The choice of backends for the replicas of a strategy, and the four `CrossDeviceOps`.

The choice depends on the devices and on the caller's options. No other file names a backend class.
Without NCCL all choices give the same bits, because replicas of one process are combined in replica
order; NCCL chooses the order of a floating-point sum itself.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

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
from ndistribute.collective.ring import RingBackend
from ndistribute.collective.shared_memory import SharedMemoryBackend
from ndistribute.collective.tcp import TcpTransport
from ndistribute.collective.threads import Rendezvous, ThreadBackend
from ndistribute.collective.workers import ReplicaGroup, Workers
from ndistribute.devices import Device, nccl_available
from ndistribute.stream import Stream

_log = logging.getLogger("ndistribute")


class CrossDeviceOps:
    """The base class of the ways to reduce over the devices of one process.

    >>> isinstance(RingAllReduce(), CrossDeviceOps)
    True
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NcclAllReduce(CrossDeviceOps):
    """Reduction through NCCL; without NCCL or distinct GPUs, replicas reduce in memory instead.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=NcclAllReduce())
    """


class RingAllReduce(CrossDeviceOps):
    """Reduction by slices in memory, without NCCL: each replica reduces the slice that it owns.

    A ring divides large arrays in the same way. One replica reduces small arrays alone.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=RingAllReduce())
    """


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Reduction by slices in memory, without NCCL, exactly as `RingAllReduce`.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=HierarchicalCopyAllReduce())
    """


class ReductionToOneDevice(CrossDeviceOps):
    """Reduction on the device of one replica, which copies the result to the others.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=ReductionToOneDevice())
    """


def make_group(
    devices: Sequence[Device],
    cross_device_ops: CrossDeviceOps | None = None,
    *,
    central: bool = False,
    workers: Workers | None = None,
) -> ReplicaGroup:
    """Return the communicators of the replicas of this process.

    A GPU may occur several times. With `central`, all replicas update one copy of a variable.

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
    # The same in all processes, because they must make the same calls.
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

    Under MPI, `addresses` is empty. If only that of rank 0 is known, the others are empty strings.

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
    peers = ControlPlane(info, timeout=options.timeout)
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
    """Return why NCCL cannot connect the devices of all workers, given by `device_identity`.

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
    """Return True if NCCL connects the GPUs of all workers; all workers return the same."""
    obstacle = nccl_obstacle(workers.identities, workers.peers.hosts)
    wish = workers.options.implementation
    if obstacle is not None and wish is CommunicationImplementation.NCCL:
        raise ValueError(f"implementation='nccl': {obstacle}; or pass implementation='auto'.")
    possible = (CommunicationImplementation.AUTO, CommunicationImplementation.NCCL)
    return obstacle is None and wish in possible


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
        _log.warning("NcclAllReduce is not used, %s: %s reduce in memory", reason, names)
    return False
