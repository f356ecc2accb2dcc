"""How a parameter-server strategy, sent to another process, becomes that process's own.

What is pickled says how to make one. A process makes it once, so that all variables and functions
which were sent there meet in the same strategy.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ndistribute.cluster import SimpleClusterResolver
from ndistribute.cluster.coordination import this_task
from ndistribute.device import Device

if TYPE_CHECKING:
    from ndistribute.strategies.parameter_server import ParameterServerStrategy

__all__ = ["Handle", "handle_of", "strategy_of"]


@dataclass(frozen=True, slots=True)
class Handle:
    """Say which strategy is meant, and how to make it in another process.

    Args:
        token: no other strategy has it.
        devices: as its maker named them; of each worker itself.
        partitioner: likewise.
        timeout_seconds: likewise.
    """

    token: str
    devices: tuple[str, ...] | None
    partitioner: Callable[..., Sequence[int]] | None
    timeout_seconds: float | None


class _Process:
    """The strategies of this process that can be sent, or were."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        # Nobody else holds on to those that were sent here between two functions.
        self.sent: dict[str, Any] = {}


_process = _Process()


def handle_of(
    strategy: Any,
    devices: Sequence[str | Device] | None,
    partitioner: Callable[..., Sequence[int]] | None,
    timeout_seconds: float | None,
) -> Handle:
    """Return the handle of a new strategy."""
    names = None if devices is None else tuple(map(str, devices))
    handle = Handle(secrets.token_hex(8), names, partitioner, timeout_seconds)
    with _process.lock:
        _process.made[handle.token] = strategy
    return handle


def strategy_of(handle: Handle) -> ParameterServerStrategy:
    """Return the strategy of a handle in this process.

    Raises:
        RuntimeError: it is not from here, and this process is no worker.
    """
    from ndistribute.strategies.parameter_server import ParameterServerStrategy

    with _process.lock:
        found: ParameterServerStrategy | None = _process.made.get(handle.token)
        found = found or _process.sent.get(handle.token)
        if found is not None:
            return found
        task = this_task.current()
        if task is None:
            raise RuntimeError(
                "a ParameterServerStrategy, or a variable of one, was sent to a process that is no "
                "worker of its cluster: only functions that a ClusterCoordinator schedules can "
                "use them elsewhere."
            )
    resolver = SimpleClusterResolver(task.cluster, task_type=task.job, task_id=task.index)
    made = ParameterServerStrategy(
        resolver,
        handle.partitioner,
        devices=handle.devices,
        timeout_seconds=handle.timeout_seconds,
    )
    made.known_by(handle)
    with _process.lock:
        kept: ParameterServerStrategy = _process.sent.setdefault(handle.token, made)
    if kept is not made:  # Another thread was asked for the same, and was faster.
        made.close()
    return kept
