"""The sessions of TensorFlow 1 that call no hooks but those that they get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ndistribute.compat.graphs import MonitoredBytesSession


def ChiefSessionCreator(  # noqa: N802
    scaffold: Any = None, master: str = "", config: Any = None, checkpoint_dir: Any = None
) -> dict[str, Any]:
    """Return how a `MonitoredSession` of a chief begins; see `MonitoredTrainingSession`."""
    begin = {"scaffold": scaffold, "master": master, "config": config}
    return {**begin, "checkpoint_dir": checkpoint_dir}


def WorkerSessionCreator(  # noqa: N802
    scaffold: Any = None, master: str = "", config: Any = None, max_wait_secs: float = 30 * 60
) -> dict[str, Any]:
    """Return how a `MonitoredSession` of another worker begins: it waits for the chief."""
    begin = ChiefSessionCreator(scaffold, master, config)
    return {**begin, "is_chief": False, "max_wait_secs": max_wait_secs}


class MonitoredSession(MonitoredBytesSession):
    """A session that calls the hooks that it gets, and no others.

    Args:
        session_creator: how it begins; None: as a chief in this process.
        hooks: the hooks.
        stop_grace_period_secs: the time for threads to end.
    """

    def __init__(
        self,
        session_creator: dict[str, Any] | None = None,
        hooks: Sequence[Any] | None = None,
        stop_grace_period_secs: float = 120,
    ) -> None:
        none = dict.fromkeys(("save_checkpoint_secs", "save_summaries_steps"), None)
        how = {**none, "log_step_count_steps": None, **(session_creator or {})}
        super().__init__(hooks=hooks, stop_grace_period_secs=stop_grace_period_secs, **how)


class SingularMonitoredSession(MonitoredSession):
    """A `MonitoredSession` of a chief, with the session behind it; it recovers, too.

    Args:
        hooks: the hooks.
        options: those of `ChiefSessionCreator`.
    """

    def __init__(self, hooks: Sequence[Any] | None = None, **options: Any) -> None:
        super().__init__(ChiefSessionCreator(**options), hooks)

    def raw_session(self) -> Any:
        """Return the session without hooks."""
        return self.run_step_fn(lambda step_context: step_context.session)
