"""A replica that fails: the others are released, `run` raises what it raised, and life goes on."""

import re
import threading
from dataclasses import replace

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.strategies import replicas
from tests.kinds import (
    DEADLINE,
    LARGE,
    context,
    cpus,
    each,
    here,
    host_memory,
    meet,
    mirrored,
    one_process,
    plain_step,
    pool_threads,
    raised_in,
    rank,
    replica_ids,
    works,
)

pytestmark = plain_step("replicas fail on threads of their own")


class MineError(Exception):
    pass


def recovers(strategy):
    """Say whether a strategy works after a fault, with its own threads and no other."""
    working = works(strategy)
    return working and len(pool_threads()) == len(strategy.devices) - 1


@pytest.mark.parametrize(("calls", "size"), [(0, 1), (1, LARGE), (2, 1)])
def test_each_replica_in_turn_before_between_and_after_collectives(several, calls, size):
    for who in range(several.num_replicas_in_sync):
        error = MineError(who)

        def step(who=who, error=error):
            for call in range(3):
                if rank() == who and call == calls:
                    raise error
                if call < 2:
                    context().all_reduce("sum", here(np.ones(size)))
            meet()

        with raised_in(several, who, MineError) as caught:
            several.run(step)
        if who in replica_ids(several):
            assert caught.value is error
            assert any(f"replica {who} " in note for note in error.__notes__)
        assert recovers(several)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration])
def test_any_exception_leaves_run_as_it_was_raised(strategy, kind):
    error = kind("mine")

    def step():
        raise error

    with raised_in(strategy, None, kind) as caught:
        strategy.run(step)
    if not isinstance(caught.value, nd.WorkerLostError):
        assert caught.value is error
        assert len(error.__notes__) == 1
    assert works(strategy)


def test_the_others_are_told_who_failed(several):
    told = {}

    def step():
        if rank() == 1:
            raise MineError("the cause")
        try:
            meet()
        except nd.WorkerLostError as lost:
            told[rank()] = lost
            raise

    with raised_in(several, 1, MineError) as caught:
        several.run(step)
    if isinstance(caught.value, MineError):
        assert sorted(told) == [i for i in replica_ids(several) if i != 1]
        assert all(lost.__cause__ is caught.value for lost in told.values())
    else:
        told[None] = caught.value  # The process may have been told before its replicas met.
        assert re.search(r"worker \d+ failed: MineError: the cause", str(caught.value))
        assert f"worker {caught.value.rank} failed" in str(caught.value)
    for lost in told.values():
        assert "the cause" in str(lost)
        assert isinstance(lost, ConnectionError)
    assert recovers(several)


def test_the_first_failure_is_the_one_that_is_raised():
    def step():
        if rank() == 2:
            raise MineError("first")
        with pytest.raises(nd.WorkerLostError):
            meet()
        raise KeyError("later")

    with mirrored(3) as strategy:
        with pytest.raises(MineError, match="first"):
            strategy.run(step)
        assert recovers(strategy)


def test_an_exception_in_a_merge_call_reaches_every_replica_and_hinders_no_later_call(several):
    def step():
        with pytest.raises((ZeroDivisionError, nd.WorkerLostError)):
            context().merge_call(lambda _: 1 / 0)
        return meet()

    assert several.run(step).values == each(several, several.num_replicas_in_sync)
    assert recovers(several)


@one_process("settings of the steps' threads")
@host_memory("GPUs raise no floating-point errors")
def test_a_floating_point_error_of_one_slice_owner_releases_the_others(several):
    # Only the last slice of the sum overflows; its owner raises between the two meetings.
    x = np.ones(LARGE)
    x[-1] = np.finfo(float).max

    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        several.run(lambda: context().all_reduce("sum", x))
    assert recovers(several)


class Holding(nd.MirroredStrategy):
    """A strategy whose groups hold something on devices; it counts those that gave it back."""

    ended = 0

    def make_group(self):
        return replace(super().make_group(), end_devices=self.end)

    def end(self):
        self.ended += 1


def test_a_replica_that_does_not_end_is_given_up_after_a_failure(monkeypatch):
    monkeypatch.setattr(replicas, "GRACE_SECONDS", 0.05)
    go_on = threading.Event()

    def step():
        if rank() == 0:
            raise MineError
        assert go_on.wait(DEADLINE)
        meet()

    with Holding(cpus(3)) as strategy:
        v = nd.Variable(0.0, aggregation="sum")
        with pytest.raises(MineError) as caught:
            strategy.run(step)
        assert any("abandoned" in note for note in caught.value.__notes__)
        assert strategy.ended == 1
        assert works(strategy)
        assert strategy.run(lambda: v.assign_add(1.0)) is v
        go_on.set()  # Its call is refused, and its thread ends: see the leak check.
        assert works(strategy)
        assert float(v) == 3
    assert strategy.ended == 2


def test_a_group_that_can_not_be_made_anew_is_made_by_the_next_step(monkeypatch):
    monkeypatch.setattr(replicas, "GRACE_SECONDS", 0.05)
    go_on = threading.Event()

    def step():
        if rank() == 0:
            raise MineError
        assert go_on.wait(DEADLINE)
        with pytest.raises(nd.WorkerLostError):
            meet()

    def refuse():
        raise MemoryError

    with mirrored(2) as strategy:
        with monkeypatch.context() as patched:
            patched.setattr(strategy, "make_group", refuse)
            with pytest.raises(MemoryError):
                strategy.run(step)
        assert works(strategy)  # The replica that was abandoned has no part in it.
        go_on.set()
        assert works(strategy)
