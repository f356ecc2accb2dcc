"""Ctrl-C at each point of `run` where Python looks for signals: nothing is left half done.

Python looks as a function begins and as a call into C returns; a profile function sees just these
points, and raises at the one that is asked for. `run` must raise it at once, and afterwards the
strategy works on this thread and on another, outside any replica.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import pytest

import ndistribute as nd
from tests.kinds import DEADLINE, closing, in_thread, meet, mirrored, one_process, rank, works

pytestmark = one_process("an interrupt reaches one of them")

FILES = (str(Path(nd.__file__).parent), contextlib.__file__)


class InterruptAt:
    """Raise KeyboardInterrupt at one of the points where Python looks for signals."""

    def __init__(self, point: int) -> None:
        self.left = point
        self.place = ""

    def __call__(self, frame, event, argument):
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(FILES):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}, {event} {argument}"
            raise KeyboardInterrupt(self.place)


def step():
    """Meet; then the main thread has to wait for replicas that still compute."""
    return meet() if rank() == 0 else meet() + sum(range(20_000))


def interrupted(strategy, point):
    """Interrupt a run; return where, or nothing if it has fewer points."""
    interrupt = InterruptAt(point)
    start = time.monotonic()
    sys.setprofile(interrupt)
    try:
        strategy.run(step)
    except KeyboardInterrupt:
        pass
    else:
        assert not interrupt.place, f"nothing was raised at {interrupt.place}"
    finally:
        sys.setprofile(None)
    assert time.monotonic() - start < DEADLINE / 2, interrupt.place
    return interrupt.place


@pytest.mark.parametrize("make", [lambda: nd.OneDeviceStrategy("cpu:0"), lambda: mirrored(3)])
def test_an_interrupt_anywhere_in_run_leaves_everything_as_it_was(make):
    with closing(make()) as strategy:
        works(strategy)
        point = 1
        while place := interrupted(strategy, point):
            assert nd.get_replica_context() is nd.get_strategy().replica_contexts[0], place
            assert not nd.has_strategy(), place
            assert works(strategy), place
            with in_thread(lambda: works(strategy)) as other:
                assert other.result(DEADLINE), place
            point += 1
        assert point > 50
