"""`Once`: each transaction made once, whole or not at all.

What was answered is looked up before anything is done; what is done is remembered, and so is why
something can not be: a repetition must find what the first one found.
"""

from __future__ import annotations

import numpy as np

from ndistribute.cluster.protocol.replies import Changed, Reply
from ndistribute.cluster.protocol.requests import Transaction
from ndistribute.cluster.store.changes import plan
from ndistribute.cluster.store.limits import Limits
from ndistribute.cluster.store.origins import Windows
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.store.state import State

__all__ = ["Once"]


class Once:
    """Make transactions.

    Args:
        state: what is changed.
        windows: what was answered.
        limits: for queues.
    """

    def __init__(self, state: State, windows: Windows, limits: Limits) -> None:
        self._state = state
        self._windows = windows
        self._limits = limits

    def make(self, transaction: Transaction, waiting: int) -> tuple[Reply, bool]:
        """Make a transaction, unless it was; return the answer, and whether it was made just now.

        Args:
            transaction: what is asked for.
            waiting: how many requests of its series wait.

        Raises:
            Refused: a change can not be made, so none was; that is remembered if it is for good.
        """
        origin = transaction.origin
        answered = self._windows.answer_to(origin)
        if answered is not None:
            return answered, False
        self._windows.check_room(origin, waiting)
        try:
            changed = self._make(transaction)
        except Refused as refused:
            if not refused.passing:
                self._windows.remember(origin, refused.failure)
            raise
        self._windows.remember(origin, changed)
        return changed, True

    def _make(self, transaction: Transaction) -> Changed:
        state, pending = self._state, State()
        planned = [
            plan(state, transaction.origin.series, change, self._limits, pending)
            for change in transaction.changes
        ]
        try:
            # A warning that becomes an error would leave the rest unmade.
            with np.errstate(all="ignore"):
                outcomes = tuple(make() for make in planned)
        finally:
            state.end_writing()
        state.total += 1
        return Changed(outcomes, state.total)
