"""The strategies of one process, with one or several replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ndistribute.collective.select import CrossDeviceOps, make_group
from ndistribute.collective.workers import ReplicaGroup
from ndistribute.device import Device, resolve_devices
from ndistribute.strategies.base import Strategy
from ndistribute.variables.mirrored import CentralVariable
from ndistribute.variables.policy import VariableSynchronization
from ndistribute.variables.variable import Variable

__all__ = ["CentralStorageStrategy", "DefaultStrategy", "MirroredStrategy", "OneDeviceStrategy"]


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
    """A strategy with one replica per device of this machine, and variables in each memory.

    CPU replicas share one copy of a variable; each GPU has its own copy.

    Args:
        devices: one for each replica; None means all visible GPUs, or ``cpu:0`` if there are none.
            CPUs are logical: ``["cpu:0", "cpu:1"]`` are two replicas. A GPU may be repeated.
        cross_device_ops: the reduction algorithm, for example `RingAllReduce()`; None: automatic.

    Raises:
        ValueError: a device does not exist, or a CPU is named twice.
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
            raise TypeError(
                f"cross_device_ops must be, say, nd.RingAllReduce(), got {cross_device_ops!r}."
            )
        self._cross_device_ops = cross_device_ops
        super().__init__(resolve_devices(devices))

    def make_group(self) -> ReplicaGroup:
        """Return communicators that use shared memory, or NCCL on distinct GPUs."""
        return make_group(self._devices, self._cross_device_ops)


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
        return make_group(self._devices, central=True)
