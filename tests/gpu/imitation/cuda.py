"""Imitated devices and streams: how a program says where and in which order."""

from __future__ import annotations

from tests.gpu.imitation.clock import current_world

__all__ = ["Device", "Stream"]


class Device:
    """Play ``cupy.cuda.Device``."""

    def __init__(self, device: int | None = None) -> None:
        self.id = current_world().device if device is None else int(device)
        self._before: list[int] = []

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{0x3B + self.id:02x}:00.0"

    def synchronize(self) -> None:
        current_world().wait_for_device(self.id)

    def use(self) -> None:
        current_world().device = self.id

    def __enter__(self) -> Device:
        self._before.append(current_world().device)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        current_world().device = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


class Stream:
    """Play ``cupy.cuda.Stream``."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        if not non_blocking and not null:
            raise NotImplementedError("the imitation knows non-blocking streams only")
        world = current_world()
        self.clock = world.stack(world.device)[0] if null else world.new_clock()

    @classmethod
    def current(cls, device_id: int = -1) -> Stream:
        """Return this thread's stream, as ``cupy.cuda.get_current_stream`` does."""
        world = current_world()
        made = cls.__new__(cls)
        made.clock = world.stack(world.device if device_id < 0 else device_id)[-1]
        return made

    @property
    def ptr(self) -> int:
        return self.clock.pointer

    @property
    def device_id(self) -> int:
        return self.clock.device

    def synchronize(self) -> None:
        current_world().wait([self.clock])

    def __enter__(self) -> Stream:
        world = current_world()
        if self.clock.device != world.device:
            raise RuntimeError(
                f"The device that the stream is created on ({self.clock.device}) does not match "
                f"with the current device ({world.device})"
            )
        world.stack(world.device).append(self.clock)
        return self

    def __exit__(self, *_: object) -> None:
        current_world().stack(self.clock.device).pop()
