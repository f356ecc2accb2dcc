"""One replica: the strategy without distribution, for the same step."""

from __future__ import annotations

from ndistribute.device import Device, resolve_devices
from ndistribute.strategies.base import Strategy

__all__ = ["DefaultStrategy", "OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """Run on one device.

    Args:
        device: where, for example ``"cpu:0"``.

    Raises:
        ValueError: there is no such device.

    >>> strategy = OneDeviceStrategy("cpu:0")
    >>> strategy.run(lambda: 2.0)
    PerReplica:{
      0: 2.0
    }
    """

    def __init__(self, device: str | Device) -> None:
        super().__init__(resolve_devices([device], "device"))


class DefaultStrategy(Strategy):
    """What is current outside any scope: one replica on the first CPU."""

    is_default = True

    def __init__(self) -> None:
        super().__init__([Device("cpu:0")])

    def close(self) -> None:
        """Do nothing: the default strategy has no threads and belongs to the process."""
