"""A replica that does not come in time: who waited for whom, and that the strategy goes on."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import DEADLINE, LARGE, context, each, meet, pool_threads, rank, works

SOON = nd.CommunicationOptions(timeout_seconds=0.2)


def late(strategy, who, call):
    """Let one replica come only when another has given up; return what run raised."""
    given_up = threading.Event()

    def step():
        meet()
        if rank() == who:
            assert given_up.wait(DEADLINE)
        try:
            call()
        finally:
            given_up.set()

    start = time.monotonic()
    with pytest.raises(nd.CollectiveTimeoutError) as caught:
        strategy.run(step)
    assert time.monotonic() - start < DEADLINE
    assert works(strategy)
    assert len(pool_threads()) == strategy.num_replicas_in_sync - 1
    return caught.value


CALLS = {
    "all_reduce": lambda: context().all_reduce("sum", 1.0, options=SOON),
    "all_reduce of much": lambda: context().all_reduce("sum", np.ones(LARGE), options=SOON),
    "all_gather": lambda: context().all_gather(np.zeros(2), axis=0, options=SOON),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_error_names_who_waited_for_whom(call):
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        for who in (0, 1):
            error = late(strategy, who, CALLS[call])
            assert f"replica {1 - who} waited 0.2 s for replica(s) {who}" in str(error)
            assert f"{call.split()[0]} #2" in str(error)
            assert (error.rank, error.op, error.sequence) == (who, call.split()[0], 2)
            assert isinstance(error, TimeoutError)
            assert isinstance(error, nd.errors.DistributeError)
            assert "timeout_seconds" in str(error)
            notes = "\n".join(error.__notes__)
            assert "last calls" in notes
            assert "raised in replica" in notes


def test_every_replica_is_told():
    told = []
    given_up = threading.Event()

    def step():
        if rank() == 2:
            assert given_up.wait(DEADLINE)
        try:
            context().all_reduce("sum", 1.0, options=SOON)
        except nd.CollectiveTimeoutError as error:
            told.append((rank(), error.rank))
            raise
        finally:
            given_up.set()

    with nd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        with pytest.raises(nd.CollectiveTimeoutError):
            strategy.run(step)
        assert sorted(told) == [(0, 2), (1, 2), (2, 2)]
        assert works(strategy)


def test_in_time_is_in_time(several):
    size = several.num_replicas_in_sync
    result = several.run(lambda: context().all_reduce("sum", 1, nd.CommunicationOptions(0, 5.0)))
    assert result.values == each(several, size)


def test_options_that_make_no_sense_are_refused():
    for name, wrong in (
        ("timeout_seconds", 0),
        ("timeout_seconds", -1),
        ("bytes_per_pack", -1),
        ("implementation", "carrier pigeon"),
        ("wire_dtype", "int8"),
    ):
        with pytest.raises(ValueError, match=str(wrong)):
            nd.CommunicationOptions(**{name: wrong})


def test_an_implementation_is_named():
    for member in nd.CommunicationImplementation:
        options = nd.CommunicationOptions(implementation=member.name.lower())
        assert options.implementation is member
        assert options == nd.CommunicationOptions(implementation=member)
