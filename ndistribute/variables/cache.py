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
from typing import Any

from ndistribute.device import Array
from ndistribute.errors import CollectiveTimeoutError, DistributeError, WorkerLostError
from ndistribute.parameter_server.client import Servers
from ndistribute.parameter_server.messages import Item
from ndistribute.timeline import span

__all__ = ["CachedShard", "Place", "VariableCache"]


@dataclass(frozen=True, slots=True)
class Place:
    """Say where a variable, or a shard of one, lies."""

    name: str
    servers: tuple[int, ...]  # It is written on all and read from the first.


class CachedShard:
    """Hold the last known value of what lies at a place."""

    __slots__ = ("__weakref__", "_array", "place", "pulled_in", "seen", "version")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.version = 0
        self.seen = 0
        """The version of which rows were read last, which may not be held here."""
        self.pulled_in = -1
        """The step in which its server was asked last."""
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
    """Keep what a process has read of the variables of one strategy, and bring it up to date."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._lock = threading.RLock()
        self._known: weakref.WeakValueDictionary[str, CachedShard] = weakref.WeakValueDictionary()
        self._step = 0
        self._read_before: Sequence[CachedShard] = ()
        self._read_now: dict[CachedShard, None] = {}
        self.is_final = False
        """Whether nothing is asked of the servers any more."""

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
        """Return a snapshot of each of some shards, and its version; `in_step` for a replica."""
        with self._lock:
            if not in_step:
                self.pull(shards)
            elif old := self._outdated(shards):
                try:
                    self.pull(self._outdated(dict.fromkeys([*shards, *self._read_before])))
                except (WorkerLostError, CollectiveTimeoutError):
                    raise
                except DistributeError:  # What the last step read may have been deleted since.
                    self._read_before = ()
                    self.pull(old)
            if in_step:
                self._read_now.update(dict.fromkeys(shards))
            return [(shard.read(), shard.version) for shard in shards]

    def _outdated(self, shards: Iterable[CachedShard]) -> list[CachedShard]:
        return [shard for shard in shards if shard.pulled_in != self._step]

    def pull(self, shards: Iterable[CachedShard]) -> None:
        """Ask the servers for what is newer than what is held."""
        with self._lock:
            if self.is_final:
                return
            wanted = list(shards)
            with span("pull"):
                asked = [(shard, Item(shard.place.name, shard.version)) for shard in wanted]
                answers = self.ask(asked)
            for shard, (array, version) in zip(wanted, answers, strict=True):
                if array is not None:
                    shard.receive(array, version)
                shard.pulled_in = self._step

    def ask(self, items: Sequence[tuple[CachedShard, Item]]) -> list[tuple[Any, int]]:
        """Return what the servers hold of each item, and its version: one message to each server.

        The array is None where what is known of the whole is the newest.
        """
        asked: dict[int, list[Item]] = defaultdict(list)
        for shard, item in items:
            asked[shard.server].append(item)
        found = self._servers.read(asked)
        answers = {i: zip(each.arrays, each.versions, strict=True) for i, each in found.items()}
        return [next(answers[shard.server]) for shard, _ in items]

    def changed(self, shards: Iterable[CachedShard]) -> None:
        """Let the next read of what this process changed ask the servers."""
        with self._lock:
            for shard in shards:
                shard.pulled_in = -1

    def stay(self) -> None:
        """Ask no more: what is held stays readable."""
        self.is_final = True  # Without the lock, which a thread holds while it waits for a server.
