"""This process as one of the tasks: it commands the others, or looks at what they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

import ndistribute as nd
from tests.faults.tasks import Tasks

__all__ = ["DEADLINE", "commanded", "taking_part"]

DEADLINE = 60.0


@contextmanager
def taking_part(tasks: Tasks, job: str = "evaluator", **options: Any) -> Iterator[Any]:
    """Yield this process's strategy as a task of a cluster."""
    options.setdefault("timeout_seconds", DEADLINE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tasks.environ.items():
            patch.setenv(name, value)
        with closing(nd.ParameterServerStrategy(tasks.resolver(job), **options)) as strategy:
            yield strategy


@contextmanager
def commanded(tasks: Tasks, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the strategy and the coordinator of the tasks' chief, which this process is."""
    with (
        taking_part(tasks, "chief", **options) as strategy,
        nd.ClusterCoordinator(strategy) as coordinator,
    ):
        yield strategy, coordinator
