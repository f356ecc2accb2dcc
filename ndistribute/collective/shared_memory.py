"""The backend for processes of one host: they map each other's memory.

Data streams through windows of fixed size that fit the processor's cache, so a call of any size
needs no memory of its own, and every process sees at the first step that all make the same call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from ndistribute.collective.arena import Arena
from ndistribute.collective.backend import Call, Update
from ndistribute.collective.chunks import Chunk, LeafKey, aligned, cut, leaf_keys
from ndistribute.collective.hand_over import update_in_blocks
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.reducer import Reducer
from ndistribute.collective.windows import WINDOW_BYTES, Windows
from ndistribute.device import Array, Device
from ndistribute.timeline import span

if TYPE_CHECKING:
    from ndistribute.collective.control import ControlPlane

__all__ = ["SharedMemoryBackend"]

T = TypeVar("T")
P = ParamSpec("P")

_ROWS = np.dtype(np.int64)


def _aborting(
    method: Callable[Concatenate[SharedMemoryBackend, P], T],
) -> Callable[Concatenate[SharedMemoryBackend, P], T]:
    """Tell all processes of a failure before it leaves the backend."""

    @functools.wraps(method)
    def told(self: SharedMemoryBackend, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            self._peers.check()  # Else who comes late might complete a call of a broken group.
            return method(self, *args, **kwargs)
        except BaseException as error:
            self.abort(error)
            raise

    return told


class SharedMemoryBackend:
    """Move data between a process and the others of its host.

    `rank` and `size` count the processes of this host.

    Args:
        peers: all processes; each of them must make its backend at the same time.
        ranks: those that share this host, this one among them; None means all.

    Raises:
        DistributeError: the memory of another process can not be reached.
    """

    def __init__(self, peers: ControlPlane, *, ranks: Sequence[int] | None = None) -> None:
        here = tuple(range(peers.size) if ranks is None else ranks)
        self._windows = Windows(peers, here)
        self.rank = self._windows.rank
        self.size = len(here)
        self.device = Device("cpu:0")
        self.owner, self.owners = 0, 1  # A process has its variables to itself.
        self._peers = peers
        self._ranks = here
        self._arenas_made = 0
        self._reducer = Reducer(self._windows)
        self._totals: tuple[Any, list[Array]] = ((), [])

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` over this process's value; nothing is sent."""
        return combine([value])

    @_aborting
    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce in shares, small data whole; inputs and outputs may be the same arrays."""
        self._reducer.run(call, inputs, outputs, op, timeout)

    @_aborting
    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce everything into memory of this process, then update all of it, block by block."""
        key = leaf_keys(inputs)
        if self._totals[0] != key:
            self._totals = (key, [np.empty(size, dtype) for dtype, size in key])
        totals = self._totals[1]
        self._reducer.run(call, inputs, totals, op, timeout)
        return update_in_blocks(call, inputs, totals, prepare, update)

    @_aborting
    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join everyone's rows; how many there are stands in front of them."""
        windows, title, leaves = self._windows, call.title, len(inputs)
        flats = [array.reshape(-1) for array in inputs]
        head = aligned(_ROWS.itemsize * leaves)
        cuts = {self.rank: cut(leaf_keys(flats), WINDOW_BYTES, head)}
        places: dict[int, list[Array]] = {}
        joined: list[Array] = []
        header: bytes | None = windows.begin(call)
        rounds, number = 1, 0
        while number < rounds:
            step = windows.step = windows.step + 1
            with span("pack", title):
                if header:
                    windows.views(step, _ROWS, 0, leaves)[self.rank][...] = list(map(len, inputs))
                windows.fill(step, _nth(cuts[self.rank], number), flats)
            windows.publish(step, header)
            windows.meet(step, header, call, timeout)
            if header:
                counts = [rows.tolist() for rows in windows.views(step, _ROWS, 0, leaves)]
                joined, places = _room_for(inputs, counts)
                for own, place in zip(flats, places[self.rank], strict=True):
                    place[...] = own
                for rank in windows.others:
                    cuts[rank] = cut(leaf_keys(places[rank]), WINDOW_BYTES, head)
                rounds = max(map(len, cuts.values()))
            with span("reduce", title):
                for rank in windows.others:
                    windows.drain(step, rank, _nth(cuts[rank], number), places[rank])
            number, header = number + 1, None
        return joined

    @_aborting
    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Copy from the root's windows."""
        windows, title = self._windows, call.title
        header: bytes | None = windows.begin(call)
        for chunk in cut(leaf_keys(buffers), WINDOW_BYTES):
            step = windows.step = windows.step + 1
            if self.rank == root:
                with span("pack", title):
                    windows.fill(step, chunk, buffers)
            windows.publish(step, header)
            windows.meet(step, header, call, timeout)
            if self.rank != root:
                with span("reduce", title):
                    windows.drain(step, root, chunk, buffers)
            header = None

    @_aborting
    def allocate(self, leaves: Sequence[LeafKey], timeout: float) -> list[Array]:
        """Return arrays of zeros that `all_reduce` reduces in place without copying them.

        They are ordinary arrays otherwise. The memory is kept until the backend is closed and the
        arrays are gone, so this is for buffers that many calls use.

        Args:
            leaves: dtype and number of elements of each array. Every process must make this call,
                with the same sizes, when it makes no other.
            timeout: how long to wait for the others, in seconds.
        """
        self._arenas_made += 1
        arena = Arena(self._peers, self._ranks, leaves, self._arenas_made, timeout)
        self._reducer.add_arena(arena)
        return list(arena.arrays)

    def abort(self, cause: BaseException) -> None:
        """Tell all processes, so that none waits for this one."""
        self._peers.abort(cause)

    def reset(self) -> None:
        """Forget every call; run by every process when none of them is inside one."""
        self._windows.reset()

    def close(self) -> None:
        """Give the memory back; the backend can not be used any more."""
        self._reducer.forget()
        self._windows.close()


def _nth(chunks: Sequence[Chunk], number: int) -> Chunk:
    return chunks[number] if number < len(chunks) else ()


def _room_for(
    inputs: Sequence[Array], counts: Sequence[Sequence[int]]
) -> tuple[list[Array], dict[int, list[Array]]]:
    """Allocate joined matrices; return them, and flat where the rows of each process belong."""
    joined = []
    places: dict[int, list[Array]] = {rank: [] for rank in range(len(counts))}
    for leaf, own in enumerate(inputs):
        ends = list(itertools.accumulate(rows[leaf] for rows in counts))
        whole = np.empty((ends[-1], *own.shape[1:]), own.dtype)
        joined.append(whole)
        for rank, end in enumerate(ends):
            places[rank].append(whole[end - counts[rank][leaf] : end].reshape(-1))
    return joined, places
