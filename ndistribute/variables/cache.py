"""What a process holds of the variables that lie on servers, and when it asks for newer values.

Across replicas every read asks. In a step the first read brings up to date all that the step before
has read, in one exchange with each server; what was read once stays as it is until the step ends,
unless this process changes it.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ndistribute.device import Array
from ndistribute.errors import CollectiveTimeoutError, DistributeError, WorkerLostError
from ndistribute.parameter_server.client import Servers
from ndistribute.parameter_server.messages import Item
from ndistribute.timeline import span

__all__ = ["CachedShard", "Place", "VariableCache"]


@dataclass(frozen=True, slots=True)
class Place:
    """Say where a variable, or a shard of one, lies.

    Args:
        name: by which its servers know it.
        servers: their numbers; it is written on all and read from the first.
    """

    name: str
    servers: tuple[int, ...]


class CachedShard:
    """Hold the last known value of what lies at a place."""

    __slots__ = ("__weakref__", "_array", "place", "pulled_in", "seen", "version")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.version = 0
        self.seen = 0
        """The version of which rows were read last, which may not be held here."""
        self.pulled_in = -1
        self._array: Array | None = None

    @property
    def server(self) -> int:
        """Return the number of the server that it is read from."""
        return self.place.servers[0]

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
                f"the value of variable {self.place.name!r} was never fetched from its server."
            )
        return self._array


class VariableCache:
    """Keep what a process has read of the variables of one strategy, and bring it up to date.

    Args:
        servers: where the variables lie.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._lock = threading.RLock()
        self._known: weakref.WeakValueDictionary[str, CachedShard] = weakref.WeakValueDictionary()
        self._step = 0
        self._read_before: Sequence[CachedShard] = ()
        self._read_now: dict[CachedShard, None] = {}
        self._final = False

    def at(self, place: Place) -> CachedShard:
        """Return what is held of a place, one object for all variables that it belongs to."""
        with self._lock:
            return self._known.setdefault(place.name, CachedShard(place))

    def begin_step(self) -> None:
        """Let the next reads in replicas be those of another step."""
        with self._lock:
            self._step += 1
            if self._read_now:
                self._read_before, self._read_now = tuple(self._read_now), {}

    def read(self, shards: Sequence[CachedShard], *, in_step: bool) -> list[tuple[Array, int]]:
        """Return a snapshot of each of some shards, and its version.

        Args:
            shards: what to read.
            in_step: whether a replica reads.
        """
        with self._lock:
            if not in_step:
                self.pull(shards)
            elif any(shard.pulled_in != self._step for shard in shards):
                try:
                    self._pull_once(dict.fromkeys([*shards, *self._read_before]))
                except (WorkerLostError, CollectiveTimeoutError):
                    raise
                except DistributeError:  # What the last step read may have been deleted since.
                    self._read_before = ()
                    self._pull_once(shards)
            if in_step:
                self._read_now.update(dict.fromkeys(shards))
            return [(shard.read(), shard.version) for shard in shards]

    def _pull_once(self, shards: Iterable[CachedShard]) -> None:
        self.pull([shard for shard in shards if shard.pulled_in != self._step])

    def pull(self, shards: Iterable[CachedShard]) -> None:
        """Ask the servers for what is newer than what is held."""
        with self._lock:
            if self._final:
                return
            by_server: dict[int, list[CachedShard]] = defaultdict(list)
            for shard in shards:
                by_server[shard.server].append(shard)
            asked = {
                server: [Item(shard.place.name, shard.version) for shard in some]
                for server, some in by_server.items()
            }
            with span("pull"):
                found = self._servers.read(asked)
            for server, some in by_server.items():
                newer = found[server]
                for shard, array, version in zip(some, newer.arrays, newer.versions, strict=True):
                    if array is not None:
                        shard.receive(array, version)
                    shard.pulled_in = self._step

    def changed(self, shards: Iterable[CachedShard]) -> None:
        """Let the next read of what this process changed ask the servers."""
        with self._lock:
            for shard in shards:
                shard.pulled_in = -1

    @property
    def is_final(self) -> bool:
        """Return whether nothing is asked of the servers any more."""
        return self._final

    def stay(self) -> None:
        """Ask no more: what is held stays readable."""
        self._final = True  # Without the lock, which a thread holds while it waits for a server.
