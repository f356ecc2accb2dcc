"""Several replicas in one process that share one copy of every variable."""

from __future__ import annotations

from collections.abc import Sequence

from ndistribute.collective.replica_group import ReplicaGroup
from ndistribute.collective.select import make_group
from ndistribute.device import Device, resolve_devices
from ndistribute.strategies.base import Strategy
from ndistribute.variables.mirrored import CentralVariable
from ndistribute.variables.policy import VariableSynchronization
from ndistribute.variables.variable import Variable

__all__ = ["CentralStorageStrategy"]


class CentralStorageStrategy(Strategy):
    """Run on several devices, with variables on one of them or on the CPU.

    Args:
        compute_devices: one for each replica; None means all visible GPUs, else ``cpu:0``.
        parameter_device: where variables live; None means the compute device if there is only
            one, else ``cpu:0``.

    Raises:
        ValueError: a device does not exist, or a CPU is named twice.

    >>> strategy = CentralStorageStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     v = Variable(1.0)
    >>> strategy.local_results(v)
    (array(1.),)
    >>> strategy.close()
    """

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | None = None,
        parameter_device: str | Device | None = None,
    ) -> None:
        devices = resolve_devices(compute_devices, "compute_devices")
        if parameter_device is not None:
            home = resolve_devices([parameter_device], "parameter_device")[0]
        else:
            home = devices[0] if len(devices) == 1 else Device("cpu:0")
        self._parameter_device = home
        super().__init__(devices)

    @property
    def parameter_device(self) -> Device:
        """Return where the variables live."""
        return self._parameter_device

    def make_group(self) -> ReplicaGroup:
        """Make communicators whose replicas update one copy."""
        return make_group(self._devices, central=True)

    def variable_kind(self, synchronization: VariableSynchronization) -> type[Variable]:
        """Return the class of variables with this synchronization."""
        if synchronization is VariableSynchronization.ON_READ:
            return super().variable_kind(synchronization)
        return CentralVariable
