"""Several replicas in one process, each with every variable at hand."""

from __future__ import annotations

from collections.abc import Sequence

from ndistribute.collective.replica_group import ReplicaGroup
from ndistribute.collective.select import CrossDeviceOps, make_group
from ndistribute.device import Device, resolve_devices
from ndistribute.strategies.base import Strategy

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """Run on several devices of this machine, with variables mirrored in each memory.

    Args:
        devices: one for each replica; None means all visible GPUs, else ``cpu:0`` alone. CPUs are
            logical: ``["cpu:0", "cpu:1"]`` are two replicas. A GPU may be repeated.
        cross_device_ops: how to reduce over devices; every choice gives the same values.

    Raises:
        ValueError: a device does not exist, or a CPU is named twice.
        TypeError: `cross_device_ops` is no `CrossDeviceOps`.

    >>> import ndistribute as nd
    >>> with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
    ...     with strategy.scope():
    ...         total = nd.Variable(10.0, aggregation="sum")
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
            raise TypeError(
                f"cross_device_ops must be for example nd.RingAllReduce(), got {cross_device_ops!r}"
            )
        self._cross_device_ops = cross_device_ops
        super().__init__(resolve_devices(devices))

    def make_group(self) -> ReplicaGroup:
        """Make communicators that meet in memory, or through NCCL on distinct GPUs."""
        return make_group(self._devices, self._cross_device_ops)
