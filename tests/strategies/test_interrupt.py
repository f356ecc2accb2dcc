"""Ctrl-C: wherever the main thread is when the signal comes, `run` raises it and is usable again.

The signals are real. A replica sends one once it sees, in the main thread's stack, that the moment
has come. The last test raises at each point of `run` where Python looks for signals: as a function
begins and as a call into C returns, which a profile function sees.
"""

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.strategies import replicas
from tests.kinds import (
    DEADLINE,
    LARGE,
    closing,
    context,
    host_memory,
    in_thread,
    meet,
    mirrored,
    one_process,
    plain_step,
    pool_threads,
    rank,
    wait_until_in,
    works,
)

pytestmark = [
    one_process("an interrupt reaches one of them"),
    plain_step("replicas wait on threads of their own"),
]

FILES = (str(Path(nd.__file__).parent), contextlib.__file__)
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


def wait_until_main_is_in(function: str) -> None:
    wait_until_in(function, [threading.main_thread().ident])


def interrupted(strategy, step):
    """Run a step that is interrupted; the strategy works afterwards, with its own threads alone."""
    with pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    assert works(strategy)
    assert len(pool_threads()) == strategy.num_replicas_in_sync - 1


@host_memory("the main thread waits for a stream")
def test_while_main_waits_in_a_collective_or_a_write(several):
    """The write is made on all replicas or on none."""
    with several.scope():
        v = nd.Variable(np.zeros(LARGE), aggregation="sum")

    for call in (meet, lambda: v.assign_add(np.ones(LARGE))):

        def step(call=call):
            meet()
            if rank() == 1:
                wait_until_main_is_in("_wait")
                interrupt_main()
                wait_until_main_is_in("wait")  # It is out of its replica.
                with pytest.raises(nd.WorkerLostError):
                    meet()
                return
            call()

        interrupted(several, step)
    for part in several.local_results(v):
        assert (part == part[0]).all()


def test_while_main_runs_a_merge_call_for_all(several):
    def merged(_):
        delivered.clear()
        signal.raise_signal(signal.SIGINT)

    def step():
        if rank() == 0:
            # The last to come runs the function.
            wait_until_in("_wait", [thread.ident for thread in pool_threads()])
        context().merge_call(merged)

    interrupted(several, step)


def compute_on():
    """Let replica 1 compute until the main thread waits for it and was interrupted."""
    if rank() == 1:
        wait_until_main_is_in("wait")
        interrupt_main()
        wait_until_main_is_in("wait")


def test_while_main_waits_for_replicas_that_still_compute(several):
    for _ in range(3):
        interrupted(several, compute_on)


def test_a_step_that_a_signal_handler_runs_in_the_middle_of_another_is_refused(several):
    def run_again(*_):
        if not delivered.is_set():
            delivered.set()
            several.run(meet)

    signal.signal(signal.SIGINT, run_again)
    with pytest.raises(RuntimeError, match="signal handler"):
        several.run(compute_on)
    assert works(several)


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


def interrupted_at(strategy, point):
    """Interrupt a run; return where, or nothing if it has fewer points."""
    interrupt = InterruptAt(point)

    def step():
        """Meet; then the main thread has to wait for replicas that still compute."""
        return meet() if rank() == 0 else meet() + sum(range(20_000))

    sys.setprofile(interrupt)
    try:
        strategy.run(step)
    except KeyboardInterrupt:
        pass
    else:
        assert not interrupt.place, f"nothing was raised at {interrupt.place}"
    finally:
        sys.setprofile(None)
    return interrupt.place


@pytest.mark.parametrize("make", [lambda: nd.OneDeviceStrategy("cpu:0"), lambda: mirrored(3)])
def test_an_interrupt_anywhere_in_run_leaves_everything_as_it_was(make):
    with closing(make()) as strategy:
        works(strategy)
        point = 1
        while place := interrupted_at(strategy, point):
            assert nd.get_replica_context() is nd.get_strategy().replica_contexts[0], place
            assert not nd.has_strategy(), place
            assert works(strategy), place
            with in_thread(lambda: works(strategy)) as other:
                assert other.result(DEADLINE), place
            point += 1
        assert point > 50
