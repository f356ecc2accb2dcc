"""How a process waits for others: with a deadline, an ear for failures, and a question.

Whoever waits in a collective polls its wire as it likes and calls `Patience.check` now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ndistribute.collective.backend import Call
from ndistribute.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from ndistribute.collective.peers import Peers

__all__ = ["Patience"]

# A process that comes later than this is asked whether it comes at all.
ASK_SECONDS = 0.2


class Patience:
    """Watch over one wait.

    Args:
        peers: the processes of the group.
        call: what this process is doing.
        timeout: how long it may take, in seconds.
    """

    def __init__(self, peers: Peers, call: Call, timeout: float) -> None:
        self._peers = peers
        self._call = call
        self._timeout = timeout
        start = time.monotonic()
        self._deadline = start + timeout
        self._ask_at = start + ASK_SECONDS

    def check(self, missing: Callable[[], Sequence[int]]) -> None:
        """Go on waiting, or raise.

        Args:
            missing: returns the ranks that have not come.

        Raises:
            WorkerLostError: a process was lost, has failed or has finished.
            CollectiveMismatchError: a process skipped the call.
            CollectiveTimeoutError: the time is up.
        """
        peers = self._peers
        peers.check()
        now = time.monotonic()
        if now < min(self._ask_at, self._deadline) and not peers.where.anyone_gone:
            return
        # First who has gone and then who is missing: what came before a good-bye has come.
        gone = peers.where.gone(self._call)
        absent = missing()
        for rank in absent:
            if rank in gone:
                error = peers.given_up(self._call, rank)
                peers.abort(error)
                raise error
        if now >= self._deadline:
            raise self._too_late(absent)
        if now >= self._ask_at:
            self._ask_at = now + ASK_SECONDS
            peers.ask(self._call)

    def _too_late(self, absent: Sequence[int]) -> CollectiveTimeoutError:
        peers = self._peers
        others = [rank for rank in range(peers.size) if rank != peers.rank]
        late = peers.where.late(self._call, absent, others)
        return CollectiveTimeoutError(
            f"{self._call.title}: worker {peers.rank} waited {self._timeout:g} s for worker(s) "
            f"{', '.join(map(str, late))}. Work that takes longer needs "
            "CommunicationOptions(timeout_seconds=...).",
            rank=late[0] if late else None,
            op=self._call.kind,
            sequence=self._call.sequence,
        )
