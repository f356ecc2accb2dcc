"""What a process holds of the variables that lie on servers, and when it asks for newer values.

Across replicas every read asks. In a step the first read brings up to date all that the step before
has read, in one exchange with each server; what was read once stays as it is until the step ends,
unless this process changes it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ndistribute.device import Array
from ndistribute.parameter_server.client import Servers
from ndistribute.parameter_server.messages import Item
from ndistribute.timeline import span

__all__ = ["Copies", "LocalCopy"]


class LocalCopy:
    """Hold the last known value of a variable of a server.

    Args:
        server_name: the variable's name there.
        server: its number.
    """

    __slots__ = ("_array", "pulled_in", "seen", "server", "server_name", "version")

    def __init__(self, server_name: str, server: int) -> None:
        self.server_name = server_name
        self.server = server
        self.version = 0
        self.seen = 0
        self.pulled_in = -1
        self._array: Array | None = None

    def saw(self, version: int) -> None:
        """Know that rows of a version were read, which are not held here."""
        self.seen = version

    def receive(self, array: Array, version: int) -> None:
        """Hold an array, which nobody changes any more."""
        array.flags.writeable = False
        self._array, self.version, self.seen = array, version, version

    def read(self) -> Array:
        """Return a snapshot of what is held.

        Raises:
            RuntimeError: nothing is.
        """
        if self._array is None:
            raise RuntimeError(
                f"the value of variable {self.server_name!r} was never fetched from its server."
            )
        return self._array


class Copies:
    """Bring the copies of one strategy up to date.

    Args:
        servers: where the variables lie.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._lock = threading.RLock()
        self._step = 0
        self._read_before: Sequence[LocalCopy] = ()
        self._read_now: dict[LocalCopy, None] = {}
        self._final = False

    def begin_step(self) -> None:
        """Let the next reads in replicas be those of another step."""
        with self._lock:
            self._step += 1
            if self._read_now:
                self._read_before, self._read_now = tuple(self._read_now), {}

    def read(self, copies: Sequence[LocalCopy], *, in_step: bool) -> list[tuple[Array, int]]:
        """Return a snapshot of each of some variables, and its version.

        Args:
            copies: of the variables.
            in_step: whether a replica reads.
        """
        with self._lock:
            if not in_step:
                self.pull(copies)
            elif any(copy.pulled_in != self._step for copy in copies):
                all_read = dict.fromkeys([*copies, *self._read_before])
                self.pull([copy for copy in all_read if copy.pulled_in != self._step])
            if in_step:
                self._read_now.update(dict.fromkeys(copies))
            return [(copy.read(), copy.version) for copy in copies]

    def pull(self, copies: Iterable[LocalCopy]) -> None:
        """Ask the servers for what is newer than what is held."""
        with self._lock:
            if self._final:
                return
            by_server: dict[int, list[LocalCopy]] = defaultdict(list)
            for copy in copies:
                by_server[copy.server].append(copy)
            asked = {
                server: [Item(copy.server_name, copy.version) for copy in some]
                for server, some in by_server.items()
            }
            with span("pull"):
                found = self._servers.read(asked)
            for server, some in by_server.items():
                newer = found[server]
                for copy, array, version in zip(some, newer.arrays, newer.versions, strict=True):
                    if array is not None:
                        copy.receive(array, version)
                    copy.pulled_in = self._step

    def changed(self, copies: Iterable[LocalCopy]) -> None:
        """Let the next read of what this process changed ask the servers."""
        with self._lock:
            for copy in copies:
                copy.pulled_in = -1

    @property
    def is_final(self) -> bool:
        """Return whether nothing is asked of the servers any more."""
        return self._final

    def stay(self) -> None:
        """Ask no more: what is held stays readable."""
        with self._lock:
            self._final = True
