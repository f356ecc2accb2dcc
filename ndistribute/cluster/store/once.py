"""`Once`: each change made once, those of a closure together.

What was answered is looked up before anything is done; what is done is remembered, and so is why
something can not be: a repetition must find what the first one found.
"""

from __future__ import annotations

import numpy as np

from ndistribute.cluster.replies import Batched, Failure, Reply, Staged
from ndistribute.cluster.requests import Change, Commit, Origin
from ndistribute.cluster.store.changes import Outcome, plan
from ndistribute.cluster.store.limits import Limits
from ndistribute.cluster.store.origins import Windows
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.store.stages import Stages
from ndistribute.cluster.store.state import State

__all__ = ["Once"]


class Once:
    """Make changes.

    Args:
        state: what is changed.
        windows: what was answered.
        stages: what is kept until it is committed.
        limits: for queues.
    """

    def __init__(self, state: State, windows: Windows, stages: Stages, limits: Limits) -> None:
        self._state = state
        self._windows = windows
        self._stages = stages
        self._limits = limits

    def stage(self, client: str, change: Change, part: int) -> Reply:
        """Keep a part of a closure.

        Raises:
            Refused: it can not be kept.
        """
        origin = change.origin
        answered = self._windows.answer_to(origin)
        if answered is not None:
            old = isinstance(answered, Failure) and answered.kind == "acknowledged"
            return answered if old else Staged(committed=True)
        self._stages.add(client, origin, part, change)
        return Staged(committed=False)

    def change(self, change: Change, waiting: int) -> Reply:
        """Make a change.

        Args:
            change: what is asked for.
            waiting: how many requests of its series wait.

        Raises:
            Refused: it can not be made.
        """
        origin = change.origin
        answered = self._windows.answer_to(origin)
        if answered is not None:
            return answered
        self._windows.check_room(origin, waiting)
        (reply,) = self._make(origin, [change])
        self._windows.remember(origin, reply)
        return reply

    def commit(self, request: Commit, waiting: int) -> tuple[Reply, list[Change]]:
        """Make the changes of a closure, and return the answer and what was changed just now.

        Args:
            request: which closure.
            waiting: how many requests of its series wait.

        Raises:
            Refused: one can not be made, so none was.
        """
        origin = request.origin
        answered = self._windows.answer_to(origin)
        if answered is not None:
            return answered, []
        self._windows.check_room(origin, waiting)
        changes = self._stages.complete(origin, request.parts)
        reply = Batched(tuple(self._make(origin, changes)))
        self._windows.remember(origin, reply)
        self._stages.forget(origin.series, origin.number)
        return reply, changes

    def _make(self, origin: Origin, changes: list[Change]) -> list[Outcome]:
        """Make changes, all or none; why none was made is remembered if it is for good."""
        pending = State()
        try:
            planned = [plan(self._state, change, self._limits, pending) for change in changes]
        except Refused as refused:
            if not refused.passing:
                self._windows.remember(origin, refused.failure)
                self._stages.forget(origin.series, origin.number)
            raise
        # A warning that becomes an error would leave the rest unmade.
        with np.errstate(all="ignore"):
            return [make() for make in planned]
