"""`Answer`: what a store gives a transport to send."""

from __future__ import annotations

from dataclasses import dataclass

from ndistribute.cluster.protocol.replies import Reply

__all__ = ["Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, and the call that it belongs to.

    Args:
        client: who called.
        ticket: the number that the transport gave the call.
        reply: one of `replies`.
    """

    client: str
    ticket: int
    reply: Reply
