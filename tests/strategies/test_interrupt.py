"""Ctrl-C: wherever the main thread is when the signal comes, `run` raises it and is usable again.

The signals are real. A replica sends one once it sees, in the main thread's stack, that the moment
has come.
"""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.strategies import replicas
from tests.kinds import (
    DEADLINE,
    LARGE,
    context,
    meet,
    mirrored,
    one_process,
    pool_threads,
    rank,
    wait_until_in,
    works,
)

pytestmark = one_process("an interrupt reaches one of them")

delivered = threading.Event()


@pytest.fixture(autouse=True)
def _interrupts_raise():
    """Make SIGINT raise, also where the tests run in the background of a shell."""

    def interrupt(*_):
        if not delivered.is_set():  # A signal that was sent twice raises once.
            delivered.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_main() -> None:
    """Send a signal, again where it came just before the main thread went to sleep."""
    main = threading.main_thread().ident
    assert main is not None
    delivered.clear()
    deadline = time.monotonic() + DEADLINE
    while not delivered.is_set() and time.monotonic() < deadline:
        signal.pthread_kill(main, signal.SIGINT)
        delivered.wait(0.05)


def interrupt_here() -> None:
    delivered.clear()
    signal.raise_signal(signal.SIGINT)


def wait_until_main_is_in(function: str) -> None:
    wait_until_in(function, [threading.main_thread().ident])


def recovers(strategy):
    working = works(strategy)
    return working and len(pool_threads()) == strategy.num_replicas_in_sync - 1


def interrupted(strategy, step):
    """Run a step that is interrupted; the strategy works afterwards, with its own threads alone."""
    with pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    assert recovers(strategy)


def test_while_main_computes(strategy):
    def step():
        meet()
        if rank() == 0:
            interrupt_here()
        meet()

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            strategy.run(step)
        assert works(strategy)


@pytest.mark.parametrize("size", [1, LARGE])
def test_while_main_waits_in_a_collective(several, size):
    def step():
        meet()
        if rank() == 1:
            wait_until_main_is_in("_wait")
            interrupt_main()
            wait_until_main_is_in("wait")  # It is out of its replica.
            with pytest.raises(nd.WorkerLostError):
                meet()
            return
        context().all_reduce("sum", np.ones(size))

    interrupted(several, step)


def test_while_main_runs_a_merge_call_for_all(several):
    def merged(_):
        interrupt_here()

    def step():
        if rank() == 0:
            # The last to come runs the function.
            wait_until_in("_wait", [thread.ident for thread in pool_threads()])
        context().merge_call(merged)

    interrupted(several, step)


def test_while_main_waits_for_replicas_that_still_compute(several):
    def step():
        if rank() == 1:
            wait_until_main_is_in("wait")
            interrupt_main()
            wait_until_main_is_in("wait")

    for _ in range(5):
        interrupted(several, step)


def test_a_replica_that_does_not_end_is_given_up_after_an_interrupt(monkeypatch):
    monkeypatch.setattr(replicas, "GRACE_SECONDS", 0.05)
    go_on = threading.Event()

    def step():
        if rank() == 1:
            wait_until_main_is_in("wait")
            interrupt_main()
            assert go_on.wait(DEADLINE)

    with mirrored(3) as strategy:
        with pytest.raises(KeyboardInterrupt) as caught:
            strategy.run(step)
        assert any("abandoned" in note for note in caught.value.__notes__)
        assert works(strategy)
        go_on.set()
        assert works(strategy)


def test_a_variable_is_written_on_all_replicas_or_on_none(several):
    with several.scope():
        v = nd.Variable(np.zeros(LARGE), aggregation="sum")

    def step():
        if rank() == 1:
            wait_until_main_is_in("_wait")
            interrupt_main()
            wait_until_main_is_in("wait")
            return
        v.assign_add(np.ones(LARGE))

    with pytest.raises(KeyboardInterrupt):
        several.run(step)
    for part in several.local_results(v):
        assert (part == part[0]).all()
    assert recovers(several)


def test_a_step_that_a_signal_handler_runs_in_the_middle_of_another_is_refused(several):
    def run_again(*_):
        if not delivered.is_set():
            delivered.set()
            several.run(meet)

    def step():
        meet()
        if rank() == 1:
            wait_until_main_is_in("wait")
            interrupt_main()
            wait_until_main_is_in("wait")

    signal.signal(signal.SIGINT, run_again)
    with pytest.raises(RuntimeError, match="signal handler"):
        several.run(step)
    assert recovers(several)


def test_interrupts_at_any_moment_leave_a_strategy_that_works():
    delays = np.random.default_rng(3).uniform(0, 0.002, size=15)
    with mirrored(3) as strategy:
        works(strategy)
        for delay in delays:
            timer = threading.Timer(delay, interrupt_main)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                timer.start()
                deadline = time.monotonic() + DEADLINE
                while time.monotonic() < deadline:
                    strategy.run(meet)
            timer.join()
            assert recovers(strategy)
