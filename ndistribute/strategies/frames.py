"""Where the methods of a strategy may be called: across its replicas, and in its own scope."""

from __future__ import annotations

from typing import Any

from ndistribute.context import Frame, current_frame

__all__ = ["cross_replica_frame"]


def cross_replica_frame(strategy: Any, method: str, instead: str = "merge_call") -> Frame:
    """Return the thread's frame, having checked that a method makes sense there.

    Args:
        strategy: whose method is called.
        method: its name.
        instead: the method of `ReplicaContext` that a replica calls.

    Raises:
        RuntimeError: the thread is in a replica, or in the scope of another strategy.
    """
    frame = current_frame()
    if frame.replica is not None:
        also = " or all_reduce" if method == "reduce" else ""
        raise RuntimeError(
            f"{method} was called inside a replica, where each replica runs on its own. Call it "
            f"outside run, or use get_replica_context().{instead}{also} instead."
        )
    if frame.strategy is not None and frame.strategy is not strategy:
        raise RuntimeError(
            f"Mixing different strategies: {method} of {strategy!r} was called in the scope of "
            f"{frame.strategy!r}. Leave that scope first."
        )
    return frame
