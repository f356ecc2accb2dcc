"""Where calls wait for their replies, which may come at once, or late and from any thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

__all__ = ["Replies", "Visitor", "WaitingRoom"]

Replies = Sequence[tuple[int, Any]]


class Visitor:
    """Wait for one reply."""

    __slots__ = ("arrived", "reply", "ticket")

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket
        self.reply: Any = None
        self.arrived = threading.Lock()  # Held until the reply is here: cheaper than an event.
        self.arrived.acquire()


class WaitingRoom:
    """Bring replies to those who wait for them.

    Args:
        places: how many may keep a thread that others need too.

    >>> room = WaitingRoom()
    >>> visitor = room.enter()
    >>> room.deliver([(visitor.ticket, "reply")])
    >>> room.leave(visitor, seconds=1.0, shares_thread=False)
    'reply'
    """

    def __init__(self, places: int = 32) -> None:
        self._tickets = itertools.count(1)
        self._lock = threading.Lock()
        self._visitors: dict[int, Visitor] = {}
        self._places = threading.Semaphore(places)

    def enter(self) -> Visitor:
        """Return one who waits from now on, until ``leave``."""
        visitor = Visitor(next(self._tickets))
        with self._lock:
            self._visitors[visitor.ticket] = visitor
        return visitor

    def deliver(self, replies: Replies) -> None:
        """Give replies to those who wait for them; any thread may."""
        for ticket, reply in replies:
            with self._lock:
                # Else its client was told to ask again, and will.
                visitor = self._visitors.pop(ticket, None)
            if visitor is not None:
                visitor.reply = reply
                visitor.arrived.release()

    def leave(self, visitor: Visitor, seconds: float, *, shares_thread: bool) -> Any:
        """Return the reply, or None where it does not come soon.

        Args:
            visitor: who has waited enough.
            seconds: how long it may take yet.
            shares_thread: whether others need this thread, so that a place has to be free.
        """
        if visitor.arrived.acquire(blocking=False):
            return visitor.reply
        if not shares_thread:
            visitor.arrived.acquire(timeout=max(0.0, seconds))
        elif self._places.acquire(blocking=False):
            try:
                visitor.arrived.acquire(timeout=max(0.0, seconds))
            finally:
                self._places.release()
        with self._lock:
            self._visitors.pop(visitor.ticket, None)
        return visitor.reply

    def close(self) -> None:
        """Send away who waits."""
        with self._lock:
            visitors, self._visitors = list(self._visitors.values()), {}
        for visitor in visitors:
            visitor.arrived.release()
