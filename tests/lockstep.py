"""Runs pytest inside every worker of a job, all in lockstep: the same tests in the same order.

Each test joins the workers anew, so that one which fails on some of them does not lead the next
ones astray: they meet again where the strategy is made.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.worker_kinds import worker_kinds

__all__ = ["Lockstep", "run_pytest"]

ROOT = Path(__file__).parent.parent
_FIXTURES = {"strategy", "several"}


@dataclass
class Lockstep:
    """What one worker's pytest did."""

    code: int = -1
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    output: str = ""


class _Recorder:
    """Keep the tests that run over the workers' strategies, and what becomes of them."""

    def __init__(self) -> None:
        self.seen = Lockstep()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # What makes its strategies itself makes local ones, which need no workers.
        items[:] = [item for item in items if _FIXTURES & set(getattr(item, "fixturenames", ()))]

    def pytest_runtest_logstart(self) -> None:
        # A test that failed leaves its exception behind, and good-byes would speak of it.
        for name in ("last_value", "last_exc"):
            sys.__dict__.pop(name, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.seen.failures[f"{report.nodeid} ({report.when})"] = report.longreprtext[-3000:]
        elif report.skipped:
            self.seen.skipped.append(report.nodeid)
        elif report.when == "call":
            self.seen.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.seen.failures[report.nodeid] = report.longreprtext[-3000:]


def run_pytest(rank: int, size: int, arguments: Sequence[str]) -> Lockstep:
    """Run tests on this worker, while the others run the same."""
    recorder = _Recorder()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "timeout=60"]
    os.chdir(ROOT)
    # What a process keeps for life, such as MPI's own memory, is no leak of the first test.
    next(iter(worker_kinds().values()))().close()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        plugins: list[Any] = [recorder]
        recorder.seen.code = int(pytest.main([*options, *arguments], plugins=plugins))
    recorder.seen.output = output.getvalue()[-3000:]
    return recorder.seen
