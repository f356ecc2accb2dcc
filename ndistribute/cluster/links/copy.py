"""What a process holds of a variable that lies on a server, as those who fetch it see it."""

from __future__ import annotations

from typing import Protocol

from ndistribute.cluster.wire.tensors import Array

__all__ = ["Copy", "Version", "known_version"]

Version = tuple[int, int]
"""How often the server had been started again, and the version of the variable there."""


class Copy(Protocol):
    """What a process holds of a variable that lies on a server."""

    server_name: str
    """The variable's name there."""
    version: Version | None
    """Which version is held, None for none."""

    def writable(self) -> Array:
        """Return an array for another version to be written to; there is none until `receive`."""
        ...

    def saw(self, version: Version) -> None:
        """Know that rows of a version were read, which are not held here."""
        ...

    def receive(self, array: Array | None, version: Version) -> None:
        """Hold a read-only array, or what was written to `writable`."""
        ...


def known_version(copy: Copy, restarts: int) -> int | None:
    """Return the version of a copy, None if it is of a server that was before."""
    version = copy.version
    return version[1] if version is not None and version[0] == restarts else None
