"""Variables on parameter servers, in one shard or several.

Each process caches the shards, and a read updates the cache. An index in brackets fetches only the
rows that it needs, because tables are large and a step needs few rows. Outside replicas, every read
asks the servers. In a step, the first read updates all variables that the previous step read, with
one message to each server. The values then stay the same until the step ends, unless this process
changes them.

The servers make the writes, and each server makes its part atomically. A process that unpickles a
variable gets a handle to the same variable.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute.context import current_frame, current_trace
from ndistribute.devices import Array, copy_to, to_host
from ndistribute.errors import (
    CollectiveTimeoutError,
    DistributeError,
    TracingError,
    WorkerLostError,
)
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.parameter_server.client import Servers
from ndistribute.parameter_server.messages import Change, Item, VariableUpdate
from ndistribute.timeline import span
from ndistribute.variables.mirrored import DeviceCopies
from ndistribute.variables.partitioners import Shards, joined, select_rows
from ndistribute.variables.policy import VariablePolicy, Write
from ndistribute.variables.variable import ArrayLike, Variable

# Variables up to this size are read whole, with the others of a step, because reading rows costs a
# separate message.
_SMALL_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Place:
    """The name and the servers of a variable or shard."""

    name: str
    servers: tuple[int, ...]  # Writes go to all of them, reads to the first.


@dataclass(eq=False, slots=True, weakref_slot=True)
class CachedShard:
    """The cached value of a variable or shard on servers."""

    place: Place
    version: int = 0
    seen: int = 0  # The version that was read last; perhaps only rows of it.
    pulled_in: int = -1  # The step of the last request to its server.
    array: Array | None = None

    def read(self) -> Array:
        """Return a snapshot of the cached value."""
        if self.array is None:
            raise RuntimeError(
                f"variable {self.place.name!r} has no cached value: read it before close()."
            )
        return self.array


class ServedVariable(Variable):
    """A variable with one value on servers, in shards of consecutive rows.

    A write is checked before any shard changes, and each server makes its part atomically. A read
    from several servers may return parts of different versions.
    """

    _internal = Variable._internal | set("cached make_at places shards".split())
    places: tuple[Place, ...]
    """The name and servers of each shard, in the order of the rows."""
    cached: tuple[CachedShard, ...]
    """The cached shards, in the order of the rows."""
    shards: Shards
    """The division of the rows into shards."""

    @classmethod
    def make(
        cls, strategy: Any, array: Array, policy: VariablePolicy, shards: int = 1
    ) -> ServedVariable:
        """Return a new variable; the strategy chooses the servers of its shards in turn."""
        named = [strategy.place(_part_name(policy, k, shards)) for k in range(shards)]
        return cls.make_at(strategy, array, policy, [Place(name, (i,)) for name, i in named])

    @classmethod
    def make_at(
        cls, strategy: Any, array: Array, policy: VariablePolicy, places: Sequence[Place]
    ) -> ServedVariable:
        """Return the variable at some places; if missing, create it with the value of `array`."""
        initial: dict[int, list[tuple[str, Array]]] = defaultdict(list)
        parts = Shards(tuple(array.shape), len(places)).cut(to_host(array))
        for place, part in zip(places, parts, strict=True):
            for server in place.servers:
                initial[server].append((place.name, part))
        try:
            strategy.servers.create(initial)
        except ValueError as error:
            raise ValueError(
                f"{error} All workers must create the same variables in the same order."
            ) from error
        return attached(strategy, array.shape, array.dtype, policy, tuple(places))

    def _make_beside(self, name: str, array: Array, policy: VariablePolicy) -> ServedVariable:
        places = [Place(f"{place.name}/{name}", place.servers) for place in self.places]
        return type(self).make_at(self._strategy, array, policy, places)

    @property
    def variables(self) -> tuple[ServedVariable, ...]:
        """The shards as separate variables, in the order of the rows."""
        count = len(self.cached)
        if count == 1:
            return (self,)
        shards = []
        for k, place in enumerate(self.places):
            policy = dataclasses.replace(self._policy, name=_part_name(self._policy, k, count))
            shape = self.shards.shape_of(k)
            shards.append(attached(self._strategy, shape, self.dtype, policy, (place,)))
        return tuple(shards)

    def component(self) -> Array:
        """Return a snapshot in this replica's memory, not older than this step."""
        if current_trace() is not None:
            raise TracingError(
                f"variable {self.name!r}, which is on parameter servers, is used in a compiled "
                "step, which would keep its present value: pass variable.numpy() as an argument."
            )
        self.replica("read")
        replica = current_frame().replica
        versions, whole = self._fetched(in_step=replica is not None)
        if replica is None or replica.device.kind == "cpu":
            return whole.view()
        return self._elsewhere.on(replica.device, versions, whole)

    def _read_rows(self, rows: Array) -> Array:
        """Return some rows from the servers; `rows` must be in ascending order and unique."""
        pairs = zip(self.cached, self.shards.locate(rows), strict=True)
        asked = [(shard, Item(shard.place.name, rows=at)) for shard, (_, at) in pairs if len(at)]
        if not asked:
            return np.empty((0, *self.shape[1:]), self.dtype)
        answers = self._strategy.copies.ask(asked)
        for (shard, _), (_, version) in zip(asked, answers, strict=True):
            shard.seen = version
        # Rows in ascending order are in the order of the shards.
        return joined([array for array, _ in answers])

    def _apply_own(self, write: Write, replica: Any) -> None:
        self._apply(write, replica.local_replica_id + 1)

    def _apply(self, write: Write, replica: int = 0) -> None:
        changes: dict[int, list[Change]] = defaultdict(list)
        how: Any = write.how
        for place, value in zip(self.places, self.shards.cut(write.value), strict=True):
            if write.sparse and not len(value.indices) and len(self.places) > 1:
                continue
            for server in place.servers:
                changes[server].append(VariableUpdate(place.name, how, *on_host(value)))
        self._strategy.servers.change(changes, how, replica=replica)
        self._strategy.copies.changed(self.cached)

    def __getitem__(self, index: Any) -> Any:
        if not self.ndim or self._is_small or self._strategy.copies.is_final:
            return super().__getitem__(index)
        index = tuple(map(_read, index)) if isinstance(index, tuple) else _read(index)
        rows, rest = select_rows(index, self.shape)
        if rows is None:
            return super().__getitem__(index)
        self.replica("read")
        part = self._read_rows(rows)[rest]
        frame = current_frame()
        if frame.replica is not None and frame.replica.device.kind != "cpu":
            part = copy_to(np.asarray(part), frame.replica.device)
        return part if frame.recorder is None else frame.recorder.read_part(self, index, part)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(f"variable {self.name!r} is a number and has no len().")
        return self.shape[0]

    def __repr__(self) -> str:
        if self._is_small:
            return super().__repr__()
        return f"<{type(self).__name__} {self.name!r} {self.dtype.name}{self.shape} on servers>"

    def __reduce__(self) -> Any:
        return attached, (self._strategy, self.shape, self.dtype, self._policy, self.places)

    @property
    def _is_small(self) -> bool:
        return self.size * self.dtype.itemsize <= _SMALL_BYTES

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        super()._set_up(strategy, array, policy)
        self._elsewhere = DeviceCopies()
        self._joined: tuple[list[int], Array] = ([], array)

    def _fetched(self, *, in_step: bool) -> tuple[list[int], Array]:
        """Return the versions of the shards, and a snapshot of the whole in host memory."""
        shards = self._strategy.copies.read(self.cached, in_step=in_step)
        versions = [version for _, version in shards]
        if self._joined[0] != versions:
            whole = joined([array for array, _ in shards])
            whole.flags.writeable = False
            self._joined = (versions, whole)
        return self._joined


def attached(
    strategy: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    policy: VariablePolicy,
    places: tuple[Place, ...],
) -> ServedVariable:
    """Return this process's variable at some places; repeated calls return the same object."""
    key = places[0].name if len(places) == 1 else f"{places[0].name} and more"
    variable: ServedVariable | None = strategy.handles.get(key)
    if variable is None:
        variable = object.__new__(ServedVariable)
        variable._set_up(strategy, np.broadcast_to(np.zeros((), dtype), shape), policy)
        variable.places = places
        variable.cached = tuple(map(strategy.copies.at, places))
        variable.shards = Shards(variable.shape, len(places))
        strategy.handles[key] = variable
    return variable


class VariableCache:
    """A process's cache of the values of one strategy's variables."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._lock = threading.RLock()
        self._known: weakref.WeakValueDictionary[str, CachedShard] = weakref.WeakValueDictionary()
        self._step = 0
        self._read_before: Sequence[CachedShard] = ()
        self._read_now: dict[CachedShard, None] = {}
        self.is_final = False
        """Whether the cache sends no more requests to the servers; its values stay readable."""

    def at(self, place: Place) -> CachedShard:
        """Return the cached shard of a place, one object for all variables that contain it."""
        with self._lock:
            return self._known.setdefault(place.name, CachedShard(place))

    def begin_step(self) -> None:
        """Begin a new step, in which the first read in a replica asks the servers."""
        with self._lock:
            self._step += 1
            if self._read_now:
                self._read_before, self._read_now = tuple(self._read_now), {}

    def read(self, shards: Sequence[CachedShard], *, in_step: bool) -> list[tuple[Array, int]]:
        """Return a snapshot and the version of each shard; `in_step` for a read in a replica."""
        with self._lock:
            if not in_step:
                self.pull(shards)
            elif old := self._outdated(shards):
                try:
                    self.pull(self._outdated(dict.fromkeys([*shards, *self._read_before])))
                except (WorkerLostError, CollectiveTimeoutError):
                    raise
                except DistributeError:  # A variable of the last step may have been deleted.
                    self._read_before = ()
                    self.pull(old)
            if in_step:
                self._read_now.update(dict.fromkeys(shards))
            return [(shard.read(), shard.version) for shard in shards]

    def _outdated(self, shards: Iterable[CachedShard]) -> list[CachedShard]:
        return [shard for shard in shards if shard.pulled_in != self._step]

    def pull(self, shards: Iterable[CachedShard]) -> None:
        """Update shards from the servers, which send only newer versions."""
        with self._lock:
            if self.is_final:
                return
            wanted = list(shards)
            with span("pull"):
                asked = [(shard, Item(shard.place.name, shard.version)) for shard in wanted]
                answers = self.ask(asked)
            for shard, (array, version) in zip(wanted, answers, strict=True):
                if array is not None:
                    array.flags.writeable = False
                    shard.array, shard.version, shard.seen = array, version, version
                shard.pulled_in = self._step

    def ask(self, items: Sequence[tuple[CachedShard, Item]]) -> list[tuple[Any, int]]:
        """Return the array and version of each item, with one message to each server.

        The array is None if the item's version is the newest one.
        """
        asked: dict[int, list[Item]] = defaultdict(list)
        for shard, item in items:
            asked[shard.place.servers[0]].append(item)
        answers = {}
        for server, reply in self._servers.read(asked).items():
            answers[server] = zip(reply.arrays, reply.versions, strict=True)
        return [next(answers[shard.place.servers[0]]) for shard, _ in items]

    def changed(self, shards: Iterable[CachedShard]) -> None:
        """Mark shards that this process changed, so that their next read asks the servers."""
        with self._lock:
            for shard in shards:
                shard.pulled_in = -1


def on_host(value: Any) -> tuple[Array, Array | None]:
    """Return the values and the indices, None for an array, in host memory for a message."""
    if isinstance(value, IndexedSlices):
        return to_host(value.values), to_host(value.indices)
    return to_host(value), None


def _part_name(policy: VariablePolicy, shard: int, shards: int) -> str:
    return policy.name if shards == 1 else f"{policy.name}/part_{shard}"


def _read(item: Any) -> Any:
    return item.component() if isinstance(item, ArrayLike) else item
