"""A replica that does not come in time: who waited for whom, and that the strategy goes on."""

import threading

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import DEADLINE, LARGE, context, meet, mirrored, pool_threads, rank, works

SOON = nd.CommunicationOptions(timeout_seconds=0.2)
CALLS = {
    "all_reduce": lambda: context().all_reduce("sum", np.ones(LARGE), options=SOON),
    "all_gather": lambda: context().all_gather(np.zeros(2), axis=0, options=SOON),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("late", [0, 1])
def test_the_error_names_who_waited_for_whom(name, late):
    given_up = threading.Event()

    def step():
        meet()
        if rank() == late:
            assert given_up.wait(DEADLINE)
        try:
            CALLS[name]()
        finally:
            given_up.set()

    with mirrored(2) as strategy:
        with pytest.raises(nd.CollectiveTimeoutError) as caught:
            strategy.run(step)
        assert works(strategy)
        assert len(pool_threads()) == 1
    error = caught.value
    assert f"replica {1 - late} waited 0.2 s for replica {late}" in str(error)
    assert f"{name} #2" in str(error)
    assert "timeout_seconds" in str(error)
    assert (error.rank, error.op, error.sequence) == (late, name, 2)
    assert isinstance(error, TimeoutError)
    notes = "\n".join(error.__notes__)
    assert "last calls" in notes
    assert "raised in replica" in notes


def test_options_of_a_call_set_its_timeout_alone():
    packed = nd.CommunicationOptions(bytes_per_pack=8)
    with mirrored(2) as strategy:
        halves = nd.CommunicationOptions(wire_dtype="float16")
        with pytest.raises(ValueError, match="wire_dtype has no effect in a call"):
            strategy.run(lambda: context().all_reduce("sum", 1.0, halves))
        communicator = strategy.run(lambda: context().communicator).values[0]
        assert communicator._timeout_of(packed) == communicator._timeout_of(None)
        assert communicator._timeout_of(nd.CommunicationOptions(timeout_seconds=3)) == 3


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
    for member in nd.CommunicationImplementation:
        options = nd.CommunicationOptions(implementation=member.name.lower())
        assert options == nd.CommunicationOptions(implementation=member)
