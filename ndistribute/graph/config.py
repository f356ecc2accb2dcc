"""`ConfigProto`: the options of a session, under the names of `tf.compat.v1.ConfigProto`."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

__all__ = ["ConfigProto"]


@dataclass(kw_only=True)
class ConfigProto:
    """The options of a session.

    Args:
        allow_soft_placement: whether an operation whose device does not exist in its task runs on
            the task's CPU; else it is an error.
        log_device_placement: whether to log where operations run.
        operation_timeout_in_ms: the most milliseconds that a step may take; 0: no limit.
        device_filters: has no effect: a session uses only tasks on which operations are placed.
        gpu_options: has no effect; neither have the options below.

    >>> ConfigProto(allow_soft_placement=True).operation_timeout_in_ms
    0
    """

    allow_soft_placement: bool = False
    log_device_placement: bool = False
    operation_timeout_in_ms: int = 0
    device_filters: list[str] = field(default_factory=list)
    gpu_options: Any = field(default_factory=SimpleNamespace)
    graph_options: Any = field(default_factory=SimpleNamespace)
    rpc_options: Any = field(default_factory=SimpleNamespace)
    device_count: dict[str, int] = field(default_factory=dict)
    intra_op_parallelism_threads: int = 0
    inter_op_parallelism_threads: int = 0
    use_per_session_threads: bool = False
    isolate_session_state: bool = False
