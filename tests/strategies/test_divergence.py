"""Replicas that raise, catch it and go on keep equal variables, and stay in the same step."""

import re
import sys
import zlib

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.collective.communicator import Communicator
from tests.kinds import context, here, inside_worker, meet, parts, plain_step, rank, replica_ids

pytestmark = plain_step("replicas fail on threads of their own")

STEPS = 60
between_workers = pytest.mark.skipif(not inside_worker(), reason="one process is interrupted whole")
# On which worker something happens.
FIRST, LAST = (pytest.param(last, id=name) for last, name in enumerate(("first", "last")))


def is_here(strategy, last):
    """Return True on one worker: that with the last replica, or that with the first one."""
    replica = strategy.num_replicas_in_sync - 1 if last else 0
    return replica in replica_ids(strategy)


def attempted(strategy, step, count):
    """Run steps in spite of what some raise; return in which steps what was raised."""
    raised = []
    for number in range(count):
        try:
            strategy.run(step, args=(number,))
        except (ArithmeticError, KeyboardInterrupt, nd.DistributeError) as error:
            raised.append(f"{number} {type(error).__name__} {error}")
            if isinstance(error, nd.CollectiveMismatchError):
                break
    return raised


def interrupt_at(event, is_it):
    """Interrupt this thread at the next call of a function or return from it."""

    def look(frame, what, _):
        if what == event and is_it(frame.f_code):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)


def are_equal(strategy, *values):
    """Return True if values are the same in all processes."""
    digest = zlib.crc32(b"".join(np.asarray(value).tobytes() for value in values))
    digests = strategy.gather(parts(strategy, lambda _: np.array([digest])), axis=0)
    return len(set(digests.tolist())) == 1


def are_told(strategy, raised, variable):
    """Return True if all learn that variables may differ; if all failed in time, they do not."""
    if "CollectiveMismatchError" in raised[-1]:
        return True
    try:
        return are_equal(strategy, variable)
    except nd.CollectiveMismatchError:  # The last step failed too late for some.
        return True


@pytest.mark.parametrize("seed", range(4))
def test_exceptions_leave_equal_variables_on_all(several, seed):
    """All draw the same plan: which replica raises in which step, and before which call."""
    random, size = np.random.default_rng(seed), several.num_replicas_in_sync
    with several.scope():
        weights = nd.Variable(np.zeros(int(random.choice([3, 20_000]))))
        count = nd.Variable(np.float64(0), aggregation="sum")
    optimizer = nd.optimizers.SGD(0.5, momentum=0.5)
    plan = [(int(random.integers(-size, size)), int(random.integers(4))) for _ in range(STEPS)]

    def step(number):
        gradient = here(np.full(weights.shape, 0.1 * number + rank()))
        calls = [
            lambda: optimizer.apply_gradients([(gradient, weights)]),
            lambda: context().all_reduce("mean", here(np.ones(4))),
            lambda: count.assign_add(number + rank()),
            lambda: None,
        ]
        for moment, call in enumerate(calls):
            if (rank(), moment) == plan[number]:
                raise ArithmeticError(f"step {number}")
            call()

    raised = attempted(several, step, STEPS)
    attempted(several, lambda _: meet(), 2)  # All have heard of all failures then.
    assert len(raised) > STEPS // 8
    # Each text begins with the step in which it was raised, and names that of the failure.
    assert all(set(re.findall(r"step (\d+)", text)) == {text.split()[0]} for text in raised), raised
    assert are_equal(several, weights, count, optimizer.iterations)


def test_an_exception_after_the_last_call_of_a_step_is_no_failure_of_the_others(several):
    for last in range(2):

        def step(number, last=last):
            meet()
            if number == 3 and rank() == (several.num_replicas_in_sync - 1) * last:
                raise ArithmeticError("boom")

        assert len(attempted(several, step, 6)) == is_here(several, last)


@between_workers
def test_an_update_that_one_process_alone_can_not_make_is_an_error_on_all(several):
    def rate(step):
        if is_here(several, last=True) and step == 1:
            raise ArithmeticError("no rate")
        return 0.1

    with several.scope():
        variable, optimizer = nd.Variable(np.zeros(100)), nd.optimizers.SGD(rate)
    pairs = [(np.ones(100), variable)]
    raised = attempted(several, lambda _: optimizer.apply_gradients(pairs), 4)
    assert are_told(several, raised, variable)


# In which function an interrupt comes, and what is done with a sum there.
UPDATES = {
    "add": ("apply_once", lambda table, _: table.assign_add(np.ones((4, 2)))),
    "broadcast": ("apply_once", lambda table, _: table.assign_add(np.ones((4, 2)))),
    "rows": (
        "update_rows",
        lambda table, optimizer: optimizer.apply_gradients(
            [(nd.IndexedSlices(np.ones((1, 2)), np.array([1]), (4, 2)), table)]
        ),
    ),
    "clipped": (
        "update_block",
        lambda table, optimizer: optimizer.apply_gradients([(np.ones((4, 2)), table)]),
    ),
    "own sum": (
        "reduce_update",
        lambda table, optimizer: optimizer.apply_gradients(
            [(context().all_reduce("sum", np.ones((4, 2))), table)],
            skip_gradients_aggregation=True,
        ),
    ),
}


@between_workers
@pytest.mark.parametrize("last", [FIRST, LAST])
@pytest.mark.parametrize("how", UPDATES)
def test_an_interrupt_between_a_sum_and_its_application_is_an_error_on_all(several, how, last):
    """The variables differed from then on, and nobody was told."""
    function, update = UPDATES[how]
    with several.scope():
        aggregation = "only_first_replica" if how == "broadcast" else "sum"
        table = nd.Variable(np.zeros((4, 2)), aggregation=aggregation)
        optimizer = nd.optimizers.SGD(1.0, clipvalue=1.0 if how == "clipped" else None)
        optimizer.build([table])

    def step(number):
        if number == 1 and is_here(several, last):
            interrupt_at("call", lambda code: code.co_name == function)
        update(table, optimizer)
        meet()

    raised = attempted(several, step, 5)
    assert any("KeyboardInterrupt" in text for text in raised) or not is_here(several, last)
    assert are_told(several, raised, table), raised


@between_workers
@pytest.mark.parametrize("last", [FIRST, LAST])
def test_variables_without_names_are_created_after_a_failure(several, last):
    """The name of the failed attempt was gone on the others, and creation failed from then on."""
    made = []

    def step(number):
        if number < 2 and is_here(several, last):
            raise ArithmeticError("boom")
        return [nd.Variable(1.0) for _ in range(2)] if not made else meet()

    for number in range(5):
        try:
            created = several.run(step, args=(number,))
        except (ArithmeticError, nd.DistributeError):
            continue
        made += [] if made else created
    with several.scope():
        made.append(nd.Variable(1.0))
    assert [variable.name for variable in made] == ["Variable", "Variable_1", "Variable_2"]


@between_workers
def test_a_variable_is_created_on_all_workers_or_on_none(several):
    """The chief, which sends the first value, had the variable when another one had failed."""
    odd, told = is_here(several, last=True), []
    for number in range(2):
        try:
            with several.scope():
                if odd and number == 0:
                    interrupt_at("return", lambda code: code is Communicator.broadcast.__code__)
                told.append(nd.Variable(1.0, name="w").name)
        except (KeyboardInterrupt, nd.DistributeError) as error:
            told.append(type(error).__name__)
    assert told == ["KeyboardInterrupt" if odd else "WorkerLostError", "w"]
