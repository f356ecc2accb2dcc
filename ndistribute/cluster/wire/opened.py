"""What a client holds for a session that is open, and for a call that is on its way."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ndistribute.cluster.wire.near import NearTransport
from ndistribute.cluster.wire.session import Session
from ndistribute.cluster.wire.transport import Lifeline, PendingCall, Transport

__all__ = ["Opened", "Sent"]


@dataclass(eq=False)
class Opened:
    """What goes with one session.

    Args:
        session: the session.
        far: what carried it.
        near: what carries its calls, where the server is on this host.
        near_served: whether it did carry one.
        lifeline: the call that lasts as long as this client.
        lifeline_ended: set once it has ended otherwise.
    """

    session: Session
    far: Transport
    near: NearTransport | None = None
    near_served: bool = False
    lifeline: Lifeline | None = None
    lifeline_ended: threading.Event = field(default_factory=threading.Event)

    @property
    def road(self) -> Transport:
        """Return what is to carry the next call."""
        near = self.near
        return near if near and not near.is_crowded else self.far

    def close(self) -> None:
        """Hold nothing any more, but for what carries calls far."""
        if self.lifeline is not None:
            self.lifeline.cancel()
        if self.near is not None:
            self.near.close()


@dataclass(frozen=True)
class Sent:
    """A call that is on its way."""

    pending: PendingCall
    opened: Opened
    road: Transport
    method: str
    counter: int
    deadline: float
