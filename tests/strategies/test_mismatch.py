"""Replicas that disagree about a collective: all hear of it at once, and the next call works.

Each step catches its error, so that a test sees what every replica was told, and goes on; where
replicas are spread over processes, these meet again in the next step.
"""

import re

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import (
    LARGE,
    context,
    here,
    inside_worker,
    meet,
    mirrored,
    one_process,
    plain_step,
    pool_threads,
    raised_in,
    rank,
    works,
)

pytestmark = plain_step("the replicas of a program make the same calls")


def told(strategy, call, *, before=0):
    """Return the error that each replica caught in a call, having made some others before."""

    errors = []

    def step():
        try:
            for _ in range(before):
                meet()  # One worker may learn here what another learns in the next call.
            call()
            meet()  # A replica that is alone in its process merges without meeting any other.
        except nd.CollectiveMismatchError as error:
            errors.append(error)
            if inside_worker():
                raise
        assert meet() == strategy.num_replicas_in_sync

    if inside_worker():
        with pytest.raises(nd.CollectiveMismatchError):
            strategy.run(step)
    else:
        strategy.run(step)
    assert len(errors) == len(strategy.devices)
    assert works(strategy)
    assert len(pool_threads()) == len(strategy.devices) - 1
    return errors


def all_reduce(value, op="sum"):
    return context().all_reduce(op, here(value))


DISAGREEMENTS = {
    "shapes": (
        lambda odd: all_reduce(np.zeros(5 if odd else 4, np.float32)),
        "float32[5]",
        "float32[4]",
    ),
    "dtypes": (
        lambda odd: all_reduce(np.zeros(4, "f4" if odd else "f8")),
        "float32[4]",
        "float64[4]",
    ),
    "small and large": (
        lambda odd: all_reduce(np.zeros(1 if odd else LARGE)),
        "float64[1]",
        f"float64[{LARGE}]",
    ),
    "large shapes": (
        lambda odd: all_reduce(np.zeros(LARGE + odd)),
        f"float64[{LARGE + 1}]",
        f"float64[{LARGE}]",
    ),
    "order": (
        lambda odd: [all_reduce(1.0, op) for op in (("max", "sum") if odd else ("sum", "max"))],
        "MAX",
        "SUM",
    ),
    "ops": (lambda odd: all_reduce(1.0, "max" if odd else "sum"), "MAX", "SUM"),
    "leaves": (lambda odd: all_reduce([1.0] * (2 + odd)), "float64[]", "float64[]"),
    "widths of rows": (
        lambda odd: context().all_gather(np.zeros((2, 3 + odd)), axis=0),
        "[*,4]",
        "[*,3]",
    ),
    "gathered axes": (
        lambda odd: context().all_gather(np.zeros((2, 2)), axis=int(odd)),
        "axis=1",
        "axis=0",
    ),
    "kinds": (
        lambda odd: context().merge_call(lambda _: None) if odd else all_reduce(1.0),
        "merge_call",
        "all_reduce",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_every_replica_is_told_call_replica_got_and_expected(several, what):
    call, got, expected = DISAGREEMENTS[what]
    last = several.num_replicas_in_sync - 1
    for error in told(several, lambda: call(rank() == last), before=2):
        said = str(error)
        assert isinstance(error, ValueError)
        assert isinstance(error, nd.errors.DistributeError)
        assert error.op in said
        if inside_worker():
            assert re.search("replica|worker", said)
            continue
        assert f"#3: replica {last} called " in said
        assert "replica 0 called " in said
        assert said.index(got) < said.index("replica 0 called ") < said.rindex(expected)
        assert (error.rank, error.sequence) == (last, 3)


@one_process("all replicas of the test are here")
def test_whichever_replica_is_the_odd_one():
    with mirrored(4) as strategy:
        for odd in range(4):
            for error in told(strategy, lambda odd=odd: all_reduce(np.zeros(4 + (rank() == odd)))):
                assert error.rank == (odd or 1)


def skips(strategy, step):
    """Run a step in which replicas make different numbers of calls; return what run raised."""
    with pytest.raises(nd.CollectiveMismatchError) as caught:
        strategy.run(step)
    assert works(strategy)
    assert len(pool_threads()) == strategy.num_replicas_in_sync - 1
    return caught.value


def test_a_replica_that_returns_early_leaves_nobody_waiting(several):
    def step():
        for _ in range(2 if rank() == 1 else 3):
            all_reduce(np.ones(3))

    with raised_in(several, None, nd.CollectiveMismatchError):
        several.run(step)
        several.run(lambda: all_reduce(np.ones(4)))  # A worker alone with it hears of it now.
    assert works(several)


@one_process("what is said of a worker is another text")
@pytest.mark.parametrize(("made", "size"), [(0, 1), (1, LARGE), (2, 1)])
def test_an_error_names_the_replica_that_returned_early(several, made, size):
    for early in (0, several.num_replicas_in_sync - 1):

        def step(early=early):
            for call in range(3):
                if rank() == early and call == made:
                    return
                all_reduce(np.ones(size))

        error = skips(several, step)
        assert (error.rank, error.sequence) == (early, made + 1)
        assert f"replica {early} returned after {made}" in str(error)


@one_process("processes do not meet in a merge_call")
def test_unequal_numbers_of_merge_call(several):
    for eager in (0, several.num_replicas_in_sync - 1):
        calls = []

        def step(eager=eager, calls=calls):
            context().merge_call(lambda _: calls.append(1))
            if rank() == eager:
                context().merge_call(lambda _: calls.append(2))

        assert isinstance(skips(several, step), RuntimeError)
        assert calls == [1]
