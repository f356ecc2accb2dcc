"""How a parameter-server strategy, sent to another process, becomes that process's own.

What is pickled says how to make one. A worker makes it once for a coordinator, so that all
variables and functions which were sent there meet in the same strategy; it is dropped with the
coordinator's own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ndistribute.cluster import ClusterSpec
from ndistribute.cluster.resolvers import current_task
from ndistribute.coordinator.worker import keep

if TYPE_CHECKING:
    from ndistribute.strategies.parameter_server import ParameterServerStrategy

__all__ = ["Handle", "new_handle", "new_namespace", "strategy_of"]


@dataclass(frozen=True, slots=True)
class Handle:
    """Say which strategy is meant, and how to make it in another process.

    Args:
        token: no other strategy has it.
        namespace: stands before all its names on the servers.
        devices: as its maker named them; of each worker itself.
        partitioner: likewise.
        timeout_seconds: likewise.
    """

    token: str
    namespace: str
    devices: tuple[str, ...] | None
    partitioner: Callable[..., Sequence[int]] | None
    timeout_seconds: float | None


class _Process:
    """The strategies that this process made, and how many on each cluster; none in a fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.counts: Counter[str] = Counter()


_process = _Process()
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]


@contextlib.contextmanager
def new_namespace(cluster: ClusterSpec, restore: bool) -> Iterator[str]:
    """Give what stands before a new strategy's names on the servers of a cluster.

    The first strategy of each process has an empty one, so that workers share their variables, and
    a worker that is started again finds them. A second one of a process starts afresh. One that
    could not be made, as an error in the ``with`` block tells, does not count.

    Args:
        cluster: all tasks.
        restore: whether the strategy goes on with the variables of the one before.
    """
    key = str(cluster.as_dict())
    with _process.lock:
        fresh = not restore or not _process.counts[key]
        _process.counts[key] += fresh
        count = _process.counts[key]
    try:
        yield "" if count == 1 else f"strategy_{count}/"
    except BaseException:
        with _process.lock:
            _process.counts[key] -= fresh
        raise


def new_handle(strategy: Any, **made_with: Any) -> Handle:
    """Return the handle of a new strategy of this process.

    Args:
        strategy: the strategy.
        made_with: the fields of the handle but for the token.
    """
    made = Handle(secrets.token_hex(8), **made_with)
    with _process.lock:
        _process.made[made.token] = strategy
    return made


def strategy_of(handle: Handle) -> ParameterServerStrategy:
    """Return the strategy of a handle in this process.

    Raises:
        RuntimeError: it is not from here, and this process is no worker.
    """
    from ndistribute.strategies.parameter_server import ParameterServerStrategy

    with _process.lock:
        found: ParameterServerStrategy | None = _process.made.get(handle.token)
    if found is not None:
        return found
    task = current_task()
    if task is None:
        raise RuntimeError(
            "a ParameterServerStrategy, or a variable of one, was sent to a process that is no "
            "worker of its cluster: only functions that a ClusterCoordinator schedules can "
            "use them elsewhere."
        )

    def make() -> ParameterServerStrategy:
        return ParameterServerStrategy.from_handle(task, handle)

    kept: ParameterServerStrategy = keep(handle.token, make, ParameterServerStrategy.close)
    return kept
