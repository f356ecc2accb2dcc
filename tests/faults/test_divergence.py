"""Workers that raise, catch it and go on keep equal variables, and stay in the same step."""

import pytest

from tests.jobs import steps
from tests.processes import Ranks

STEPS = 60


def test_exceptions_leave_equal_variables_on_all_workers(job):
    for seed in range(4):
        outcomes = job.results(steps.wandered, seed, STEPS)
        assert len({state for state, _ in outcomes}) == 1, f"seed {seed}: {outcomes}"
        raised = [text.split() for _, told in outcomes for text in told]
        assert len(raised) > STEPS // 4
        # Each line begins with the step in which it was raised, and ends with who raised when.
        assert all(text[0] == text[-1] for text in raised), f"seed {seed}: {outcomes}"


def test_an_exception_after_the_last_call_of_a_step_is_no_failure_of_the_others(job):
    for who in (0, job.size - 1):
        raised = job.results(steps.failed_at_its_end, who)
        assert raised == [int(rank == who) for rank in range(job.size)]


@pytest.mark.parametrize(
    ("how", "replicas"), [*((how, 1) for how in steps.UPDATES), ("add", 2), ("own sum", 2)]
)
def test_an_interrupt_between_a_sum_and_its_application_is_an_error_on_all(how, replicas):
    """The variables differed from then on, and nobody was told."""
    with Ranks(2, environ={"FAULTS_REPLICAS": str(replicas)}) as job:
        for who in range(2):
            told = job.results(steps.interrupted_after_its_sum, who, how)
            assert any("KeyboardInterrupt" in text for text in told[who])
            assert all("CollectiveMismatchError" in raised[-1] for raised in told), told


@pytest.mark.parametrize("who", [0, 1])
def test_variables_without_names_are_created_after_a_failure(who):
    """The name of the failed attempt was gone on the others, and creation failed from then on."""
    with Ranks(2) as job:
        names = ["Variable", "Variable_1", "Variable_2"]
        assert job.results(steps.created_after_a_failure, who) == [names] * 2


def test_a_variable_is_created_on_all_workers_or_on_none():
    """The chief, which sends the first value, had the variable when another one had failed."""
    with Ranks(2) as job:
        told = job.results(steps.interrupted_in_a_creation, 1)
        assert told == [["WorkerLostError", "w"], ["KeyboardInterrupt", "w"]]


@pytest.mark.parametrize("who", [0, 1])
def test_a_replica_that_was_given_up_breaks_no_later_step_of_the_workers(who):
    with Ranks(2, environ={"FAULTS_REPLICAS": "2"}) as job:
        assert job.results(steps.outlived_by_a_replica, who) == [[16.0]] * 2
