"""Choose how the replicas of a strategy meet, from their devices and the caller's wish.

The only file that names a backend class. The four cross-device operations of `tf.distribute` are
kept as ways to ask. Replicas that meet in memory get the same bits whichever is asked for, because
a sum is taken in replica order; through NCCL the order of a floating sum is NCCL's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ndistribute.collective.communicator import Communicator
from ndistribute.collective.nccl import make_nccl_backends, nccl_available
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.collective.threads import ThreadBackend
from ndistribute.device import Device
from ndistribute.stream import Stream

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "ReplicaGroup",
    "RingAllReduce",
    "make_group",
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


class ReplicaGroup:
    """Hold the communicators of the replicas of one process.

    Args:
        communicators: one for each replica, in order.
        rendezvous: where they meet.
        streams: the device and stream of each.
    """

    def __init__(
        self,
        communicators: Sequence[Communicator],
        rendezvous: Rendezvous,
        streams: Sequence[Stream],
    ) -> None:
        self.communicators = tuple(communicators)
        self.streams = tuple(streams)
        self._rendezvous = rendezvous

    def begin(self) -> None:
        """Start a step; every replica must be out of the last one."""
        self._rendezvous.reset()
        for communicator in self.communicators:
            communicator.begin()

    def leave(self, rank: int) -> None:
        """Say that a replica has returned from its step."""
        self._rendezvous.leave(rank, self.communicators[rank].calls_made)

    def abort(self, cause: BaseException) -> None:
        """Release every replica that waits, with the reason."""
        self.communicators[0].abort(cause)


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
    spaces = ["central" if central else device.memory_space for device in devices]
    if not central and _wants_nccl(devices, cross_device_ops):
        backends = make_nccl_backends(rendezvous, streams)
        return ReplicaGroup([Communicator(b) for b in backends], rendezvous, streams)
    threads = [
        ThreadBackend(
            rendezvous,
            streams,
            rank,
            owner=spaces[:rank].count(spaces[rank]),
            owners=spaces.count(spaces[rank]),
            one_device=isinstance(cross_device_ops, ReductionToOneDevice),
        )
        for rank in range(len(devices))
    ]
    return ReplicaGroup([Communicator(b) for b in threads], rendezvous, streams)


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
