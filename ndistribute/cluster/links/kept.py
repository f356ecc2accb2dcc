"""What a closure wants changed and has not sent yet: one transaction for each server."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.cluster.links.origins import Closure, current_closure
from ndistribute.cluster.links.spare_arrays import SpareArrays
from ndistribute.cluster.protocol.replies import Outcome
from ndistribute.cluster.protocol.requests import (
    Aggregate,
    Apply,
    Change,
    Enqueue,
    IncrementStep,
    Origin,
)
from ndistribute.cluster.wire.tensors import HEAD_LIMIT_BYTES, Array

__all__ = ["Kept"]

# So much goes in one message: its head is bounded, and what is copied here should be.
_HEAD_BYTES, _COPIED_BYTES = HEAD_LIMIT_BYTES // 2, 1 << 28
_CHANGE_BYTES, _NAME_BYTES = 150, 50  # What they take in the head, beside the letters of names.

Send = Callable[[Mapping[int, Sequence[Change]], Mapping[int, Origin]], Any]
Then = Callable[[Mapping[int, tuple[Outcome, ...]]], None]


class _Waiting:
    """What is kept back of one closure."""

    def __init__(self, closure: Closure) -> None:
        self.closure = closure
        self.changes: dict[int, list[Change]] = {}
        self.names: set[str] = set()
        self.copies: list[Array] = []
        self.callers: list[tuple[dict[int, slice], Then | None]] = []
        self.head_bytes = 0
        self.copied_bytes = 0

    @property
    def is_full(self) -> bool:
        """Say whether no more may be kept."""
        return self.head_bytes >= _HEAD_BYTES or self.copied_bytes >= _COPIED_BYTES


class Kept:
    """Keep the changes of the closure that runs, and send them when it is time.

    Args:
        send: makes changes on servers, under given origins, and returns what became of them.
        titles: of the servers.
    """

    def __init__(self, send: Send, titles: Sequence[str]) -> None:
        self._send = send
        self._titles = titles
        self._lock = threading.Lock()
        self._waiting: _Waiting | None = None
        self._spare = SpareArrays()

    def add(
        self, running: Closure, changes: Mapping[int, Sequence[Change]], then: Then | None
    ) -> None:
        """Keep changes until the end of the closure; what they hold now is what is sent.

        Those of a closure that makes very many go out in between.
        """
        with self._lock:
            waiting = self._waiting
            if waiting is None or waiting.closure is not running:
                waiting = self._waiting = _Waiting(running)
                running.at_end(lambda: self._flush(running))
            spans, copied = {}, len(waiting.copies)
            for server, some in changes.items():
                kept = waiting.changes.setdefault(server, [])
                spans[server] = slice(len(kept), len(kept) + len(some))
                kept += [self._owned(change, waiting.copies) for change in some]
                names = [name for change in some for name in _changed(change)]
                waiting.names.update(names)
                waiting.head_bytes += _CHANGE_BYTES * len(some)
                waiting.head_bytes += sum(len(name) + _NAME_BYTES for name in names)
            waiting.copied_bytes += sum(copy.nbytes for copy in waiting.copies[copied:])
            waiting.callers.append((spans, then))
        if waiting.is_full:
            self._flush(running)

    def flush_before(self, names: set[str]) -> None:
        """Send what is kept if it changes a variable that is about to be read."""
        waiting = self._waiting
        running = current_closure()
        if waiting is None or waiting.closure is not running:
            return
        if not waiting.names.isdisjoint(names):
            self._flush(running)

    def _flush(self, running: Closure) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
            if waiting is None or waiting.closure is not running:
                return
            origins = {i: running.origin(self._titles[i]) for i in waiting.changes}
        outcomes = self._send(waiting.changes, origins)
        with self._lock:
            self._spare.keep(waiting.copies)
        for spans, then in waiting.callers:
            if then is not None:
                then({server: outcomes[server][span] for server, span in spans.items()})

    def _owned(self, part: Any, copies: list[Array]) -> Any:
        """Return a change, or a part of one, with arrays that nobody else can write to."""
        if isinstance(part, np.ndarray):
            if not _writable(part):
                return part
            copies.append(self._spare.copy_of(part))
            return copies[-1]
        if isinstance(part, tuple):
            return tuple(self._owned(item, copies) for item in part)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            names = [field.name for field in dataclasses.fields(part)]
            return type(part)(**{name: self._owned(getattr(part, name), copies) for name in names})
        return part


def _changed(change: Change) -> tuple[str, ...]:
    """Return the names of the variables that a change writes to."""
    if isinstance(change, Aggregate):
        return _changed(change.apply)
    if isinstance(change, Apply):
        return (*change.names, *(name for some in change.slots for name in some), change.counter)
    return () if isinstance(change, Enqueue | IncrementStep) else (change.name,)


def _writable(array: np.ndarray[Any, Any]) -> bool:
    """Say whether an array can still change, through itself or through what it is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    return base is not None
