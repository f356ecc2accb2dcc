"""How much clients can make a server hold beside its variables."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound what clients can make a server hold; what would exceed it is answered by a failure.

    Args:
        series: how many series of origins there may be.
        replies: how many answers of a series are remembered, or still waited for, before its owner
            must acknowledge some.
        reply_bytes: how many bytes of arrays these may hold, for each series.
        tokens: how many tokens a queue holds.
    """

    series: int = 1 << 16
    replies: int = 1 << 16
    reply_bytes: int = 1 << 28
    tokens: int = 1 << 20
