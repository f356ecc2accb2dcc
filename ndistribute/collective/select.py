"""Choose how the replicas of a strategy meet, from their devices and the caller's wish.

The only file that names a backend class. The four cross-device operations of `tf.distribute` are
kept as ways to ask. Replicas that meet in memory get the same bits whichever is asked for, because
a sum is taken in replica order; through NCCL the order of a floating sum is NCCL's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ndistribute.collective.backend import Backend
from ndistribute.collective.bootstrap import (
    info_from_addresses,
    info_from_exchange,
    info_from_rank_0,
)
from ndistribute.collective.communicator import Communicator
from ndistribute.collective.control import ControlPlane
from ndistribute.collective.levels import TwoLevelBackend, host_groups, join_replicas
from ndistribute.collective.mpi import MpiTransport, exchange_over_mpi
from ndistribute.collective.nccl import make_nccl_backends
from ndistribute.collective.options import CommunicationImplementation, CommunicationOptions
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.collective.replica_group import ReplicaGroup
from ndistribute.collective.ring import RingBackend
from ndistribute.collective.shared_memory import SharedMemoryBackend
from ndistribute.collective.tcp import TcpTransport
from ndistribute.collective.threads import ThreadBackend
from ndistribute.collective.workers import ProcessBackend, Workers
from ndistribute.device import Device, nccl_available
from ndistribute.stream import Stream

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "RingAllReduce",
    "join_workers",
    "make_group",
    "make_worker_group",
    "nccl_obstacle",
]

_log = logging.getLogger("ndistribute")


class CrossDeviceOps:
    """Ask for a way to reduce over the devices of one process.

    >>> isinstance(RingAllReduce(), CrossDeviceOps)
    True
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class NcclAllReduce(CrossDeviceOps):
    """Reduce through NCCL; replicas on CPUs, or repeated on a GPU, meet in memory instead.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=NcclAllReduce())
    """


class RingAllReduce(CrossDeviceOps):
    """Reduce by slices, each by the replica that owns it.

    This is the ring's division of the work; in one memory there is nothing to pass round.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=RingAllReduce())
    """


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Reduce by slices through the memory of the devices, without NCCL.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=HierarchicalCopyAllReduce())
    """


class ReductionToOneDevice(CrossDeviceOps):
    """Reduce on the device of one replica, and copy the result to the others.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0"], cross_device_ops=ReductionToOneDevice())
    """


def make_group(
    devices: Sequence[Device],
    cross_device_ops: CrossDeviceOps | None = None,
    *,
    central: bool = False,
) -> ReplicaGroup:
    """Make the communicators of replicas on these devices.

    Args:
        devices: one for each replica; a GPU may be repeated.
        cross_device_ops: how to reduce; None chooses NCCL for distinct GPUs.
        central: whether all replicas update one copy of a variable, wherever they compute.

    >>> [c.rank for c in make_group([Device("cpu:0"), Device("cpu:1")]).communicators]
    [0, 1]
    """
    rendezvous = Rendezvous(len(devices))
    streams = [Stream(device) for device in devices]
    if not central and _wants_nccl(devices, cross_device_ops):
        backends = make_nccl_backends(rendezvous, streams)
        communicators = [Communicator(backend) for backend in backends]
        return ReplicaGroup(communicators, rendezvous, streams, close=backends[0].close)
    spaces = ["central" if central else device.memory_space for device in devices]
    one_device = isinstance(cross_device_ops, ReductionToOneDevice)
    threads = _thread_backends(rendezvous, streams, spaces, one_device)
    return ReplicaGroup([Communicator(b) for b in threads], rendezvous, streams)


def make_worker_group(
    devices: Sequence[Device], workers: Workers, options: CommunicationOptions
) -> ReplicaGroup:
    """Make the communicators of replicas that meet those of other processes as well.

    Args:
        devices: one for each replica of this process.
        workers: the processes.
        options: for collectives that bring none of their own.
    """
    rendezvous = Rendezvous(len(devices))
    streams = [Stream(device) for device in devices]
    spaces = [device.memory_space for device in devices]
    local = _thread_backends(rendezvous, streams, spaces, one_device=False)
    backends: Sequence[Backend]
    close = None
    if _workers_want_nccl(workers, options):
        backends = over_nccl = make_nccl_backends(rendezvous, streams, workers)
        close = over_nccl[0].close
    else:
        backends = join_replicas(local, workers)
    communicators = [
        Communicator(backend, options, threads, workers.peers.where)
        for backend, threads in zip(backends, local, strict=True)
    ]
    return ReplicaGroup(communicators, rendezvous, streams, workers, close)


def join_workers(
    addresses: Sequence[str],
    rank: int,
    devices: Sequence[Device],
    options: CommunicationOptions,
) -> Workers:
    """Meet the other processes of the job, and choose how data travels between them.

    Args:
        addresses: of all processes, in rank order; none where they were started by MPI, and empty
            ones where only that of rank 0 is known.
        rank: which process this is.
        devices: of the replicas of this process.
        options: the caller's wish, and how long to wait for the others to start.

    Raises:
        CollectiveTimeoutError: not all processes started in time.
        ValueError: the processes can not meet as the caller wishes, or wish different things.
    """
    over_mpi = not addresses
    if over_mpi:
        info = info_from_exchange(exchange_over_mpi, rank)
    elif not all(addresses):
        info = info_from_rank_0(addresses[0], rank, len(addresses))
    else:
        info = info_from_addresses(addresses, rank)
    peers = ControlPlane(info, timeout=options.timeout)
    try:
        _check_alike(peers, options)
        return Workers(peers, _process_backend(peers, options, over_mpi), devices, options)
    except BaseException as error:
        peers.abort(error)
        peers.close()
        raise


def _check_alike(peers: ControlPlane, options: CommunicationOptions) -> None:
    """Raise ValueError on all processes if their options would have them add up differently."""
    implementation = CommunicationImplementation(options.implementation).value
    own = f"{implementation!r}, wire_dtype={options.wire_dtype!r}"
    own += f", bytes_per_pack={options.bytes_per_pack}"
    told = [text.decode() for text in peers.exchange("options", own.encode(), options.timeout)]
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise ValueError(
                f"worker {rank} has CommunicationOptions(implementation={theirs}), worker 0 has "
                f"(implementation={told[0]}): give all workers the same."
            )


def _process_backend(
    peers: ControlPlane, options: CommunicationOptions, over_mpi: bool
) -> ProcessBackend:
    wish = options.implementation
    if wish is CommunicationImplementation.MPI and not over_mpi:
        raise ValueError(
            "implementation='mpi' needs processes that MPI started: use `ndistribute run --mpi` or "
            "mpiexec, or implementation='auto'."
        )
    if wish in (CommunicationImplementation.RING, CommunicationImplementation.MPI):
        return _ring(peers, options, over_mpi, range(peers.size))
    groups = host_groups(peers.hosts)
    if len(groups) == 1:
        return SharedMemoryBackend(peers)
    leaders = [group[0] for group in groups]
    own = next(group for group in groups if peers.rank in group)
    inside = SharedMemoryBackend(peers, ranks=own)
    if peers.rank not in leaders:
        return TwoLevelBackend(inside, None, groups, peers.rank)
    between = _ring(peers, options, over_mpi, leaders)
    return TwoLevelBackend(inside, between, groups, peers.rank)


def _ring(
    peers: ControlPlane, options: CommunicationOptions, over_mpi: bool, ranks: Sequence[int]
) -> RingBackend:
    return RingBackend(
        peers,
        lambda: MpiTransport(peers) if over_mpi else TcpTransport(peers),
        ranks=ranks,
        bytes_per_pack=options.bytes_per_pack,
        wire_dtype=options.wire_dtype,
    )


def _thread_backends(
    rendezvous: Rendezvous, streams: Sequence[Stream], spaces: Sequence[str], one_device: bool
) -> list[ThreadBackend]:
    return [
        ThreadBackend(
            rendezvous,
            streams,
            rank,
            owner=spaces[:rank].count(spaces[rank]),
            owners=spaces.count(spaces[rank]),
            one_device=one_device,
        )
        for rank in range(len(streams))
    ]


def nccl_obstacle(identities: Sequence[Sequence[str]], hosts: Sequence[str]) -> str | None:
    """Return why NCCL cannot connect the devices of all workers; None where it can.

    Args:
        identities: of each worker's devices, as `device_identity` gives them.
        hosts: of the workers.

    >>> nccl_obstacle([["gpu 0000:3B:00.0"], ["gpu 0000:3B:00.0"]], ["a", "b"])
    >>> nccl_obstacle([["gpu 0000:3B:00.0"], ["gpu 0000:3B:00.0"]], ["a", "a"])
    'workers 0 and 1 share the GPU 0000:3B:00.0 of a host, and NCCL needs a GPU for each replica: \
give each worker its own by devices=[...] or CUDA_VISIBLE_DEVICES'
    """
    owners: dict[tuple[str, str], int] = {}
    for worker, (devices, host) in enumerate(zip(identities, hosts, strict=True)):
        for device in devices:
            kind, _, place = device.partition(" ")
            if kind == "cpu":
                return f"worker {worker} has a replica on a CPU, and NCCL connects GPUs alone"
            if not place:
                return (
                    f"worker {worker} finds no NCCL: pip install nvidia-nccl-cu12 or "
                    "nvidia-nccl-cu13, whichever CUDA its CuPy is for"
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


def _workers_want_nccl(workers: Workers, options: CommunicationOptions) -> bool:
    """Say whether the GPUs of all workers meet through NCCL; every worker finds the same."""
    obstacle = nccl_obstacle(workers.identities, workers.peers.hosts)
    if obstacle is not None and options.implementation is CommunicationImplementation.NCCL:
        raise ValueError(f"implementation='nccl': {obstacle}; or pass implementation='auto'.")
    wishes = (CommunicationImplementation.AUTO, CommunicationImplementation.NCCL)
    return obstacle is None and options.implementation in wishes


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
        _log.warning("NcclAllReduce is not used, %s: replicas on %s meet in memory", reason, names)
    return False
