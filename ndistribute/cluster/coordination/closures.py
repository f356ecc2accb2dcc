"""Which function a coordinator sends to which worker next, and what is left when one fails.

Pure bookkeeping: no thread, no lock and no clock; `dispatch.py` has those. A closure waits for its
inputs, is ready, flies on a worker, and is over; only a worker that is lost brings it back.
"""

from __future__ import annotations

import traceback
from collections import defaultdict, deque
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

from ndistribute.cluster.coordination.pickles import Pickled
from ndistribute.cluster.coordination.remote_value import RemoteValue
from ndistribute.cluster.protocol.spans import Span, Spans

__all__ = ["MOST_INPUTS", "Closure", "ClosureQueue"]

MOST_INPUTS = 4096
"""A message describes so many inputs."""


@dataclass(eq=False)
class Closure:
    """Hold a function with its arguments.

    Args:
        name: of the function, for messages.
        function: what is run.
        datasets: the functions that make the datasets in the arguments.
        arguments: its args and kwargs.
        inputs: the results that stand in the arguments.
        kept: what must live until it has run.
        result: what it returns is to be found there.
        number: of the closure, from 1, in the order in which they were scheduled.
        missing: how many of its inputs are not there yet.
    """

    name: str
    function: Pickled
    datasets: tuple[Pickled, ...]
    arguments: Pickled
    inputs: tuple[RemoteValue, ...]
    kept: list[Any]
    result: RemoteValue
    number: int = 0
    missing: int = 0

    def __str__(self) -> str:
        return f"closure {self.number} ({self.name})"


@dataclass
class ClosureQueue:
    """Keep what was scheduled until it is over.

    Args:
        workers: how many there are.
        capacity: how many closures may wait.
        capacity_bytes: once their arguments take so much, no more may.
    """

    workers: int
    capacity: int = 4096
    capacity_bytes: int = 1 << 30
    error: Exception | None = None  # The first one since it was last taken.
    over: Spans = field(default_factory=Spans)  # The numbers of the closures that are.
    _last: int = 0
    _ready: deque[Closure] = field(default_factory=deque)
    _blocked: dict[RemoteValue, list[Closure]] = field(default_factory=lambda: defaultdict(list))
    _waiting: int = 0  # How many closures are blocked.
    _bytes: int = 0  # Of the arguments of all that are ready or blocked.
    _flying: dict[int, dict[int, Closure]] = field(default_factory=dict)

    @property
    def queued(self) -> int:
        """Return how many no worker has."""
        return len(self._ready) + self._waiting

    @property
    def flying(self) -> int:
        """Return how many workers have."""
        return sum(len(some) for some in self._flying.values())

    @property
    def full(self) -> bool:
        """Say whether no more may be added."""
        return self.queued >= self.capacity or self._bytes >= self.capacity_bytes

    @property
    def at_rest(self) -> bool:
        """Say whether nothing runs, and nothing will."""
        return not self.flying and not self.queued

    def add(self, closure: Closure) -> None:
        """Take a closure, and number it."""
        self._last += 1
        closure.number = self._last
        self._bytes += closure.arguments.nbytes
        missing = {value for value in closure.inputs if not value.done()}
        closure.missing = len(missing)
        for value in missing:
            self._blocked[value].append(closure)
        if missing:
            self._waiting += 1
        else:
            self._ready.append(closure)

    def take(self, worker: int, depth: int) -> list[Closure]:
        """Return what a worker runs next, perhaps nothing.

        A worker gets closures in advance only while there are as many for each of the others, even
        if they are away: at the end each should go to whoever is free first.

        Args:
            worker: its index.
            depth: how many it may have at most.
        """
        flying = self._flying.setdefault(worker, {})
        taken = []
        while self._ready and len(flying) < depth:
            if len(self._ready) < self.workers * len(flying):
                break
            closure = self._ready.popleft()
            self._bytes -= closure.arguments.nbytes
            flying[closure.number] = closure
            taken.append(closure)
        return taken

    def succeed(self, worker: int, closure: Closure, result: Pickled) -> int:
        """Take a result, and return how many closures became ready by it."""
        if not self._land(worker, closure):
            return 0
        closure.result.settle(result)
        woken = 0
        for follower in self._blocked.pop(closure.result, ()):
            follower.missing -= 1
            if not follower.missing:
                self._waiting -= 1
                self._ready.append(follower)
                woken += 1
        return woken

    def fail(self, worker: int, closure: Closure, error: Exception) -> None:
        """Take an error: what no worker has yet is cancelled."""
        if self._land(worker, closure):
            closure.result.settle(error)
            self.abort(error)

    def abort(self, error: Exception) -> None:
        """Keep an error for who asks, unless there is one, and cancel what no worker has."""
        self.error = self.error or error
        blocked = {closure for some in self._blocked.values() for closure in some}
        waiting = [*self._ready, *blocked]
        self._ready.clear()
        self._blocked.clear()
        self._waiting = self._bytes = 0
        for closure in waiting:
            self._cancel(closure)

    def give_back(self, worker: int) -> list[Closure]:
        """Return what a worker had that is lost: it stands first now, or is cancelled."""
        lost = sorted(self._flying.pop(worker, {}).values(), key=lambda closure: closure.number)
        if self.error is None:
            self._ready.extendleft(reversed(lost))
            self._bytes += sum(closure.arguments.nbytes for closure in lost)
        else:
            for closure in lost:
                self._cancel(closure)
        return lost

    def take_error(self) -> Exception | None:
        """Return the error once, when no worker has anything any more."""
        if self.error is None or self.flying:
            return None
        error, self.error = self.error, None
        return error

    def _cancel(self, closure: Closure) -> None:
        # Its own text may be what can not be made.
        before = traceback.format_exception_only(self.error)[0].strip()
        cancelled = CancelledError(
            f"{closure} was cancelled, since this was raised before: {before}. Schedule it again."
        )
        cancelled.__cause__ = self.error
        closure.result.settle(cancelled)
        self._end(closure)

    def _land(self, worker: int, closure: Closure) -> bool:
        """Say whether a worker still had a closure; it is over then."""
        if self._flying.get(worker, {}).pop(closure.number, None) is None:
            return False
        self._end(closure)
        return True

    def _end(self, closure: Closure) -> None:
        closure.kept, closure.inputs = [], ()
        self.over.add(Span(closure.number, closure.number))
