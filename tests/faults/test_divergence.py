"""Workers that raise, catch it and go on keep equal variables, and stay in the same step."""

from __future__ import annotations

import pytest

from tests.faults import steps
from tests.faults.jobs import has_mpi
from tests.processes import Ranks

RUNS, STEPS = 4, 60
JOBS = {
    "shared": lambda: Ranks(2),
    "ring": lambda: Ranks(3, environ={"FAULTS_WIRE": "ring"}),
    "hosts": lambda: Ranks(4, environ=[{"NDISTRIBUTE_HOST_ID": h} for h in ("a", "b", "a", "b")]),
}
if has_mpi():
    JOBS["mpi"] = lambda: Ranks(2, "mpi", environ={"FAULTS_WIRE": "mpi"})


@pytest.mark.parametrize("wire", JOBS)
def test_exceptions_leave_equal_variables_on_all_workers(wire: str) -> None:
    with JOBS[wire]() as job:
        for seed in range(RUNS):
            outcomes = [outcome.result() for outcome in job.run(steps.wandered, seed, STEPS)]
            assert len({state for state, _ in outcomes}) == 1, f"seed {seed}: {outcomes}"
            raised = [text.split() for _, told in outcomes for text in told]
            assert len(raised) > STEPS // 4
            # Each line begins with the step in which it was raised, and ends with who raised when.
            assert all(text[0] == text[-1] for text in raised), f"seed {seed}: {outcomes}"


@pytest.mark.parametrize("wire", JOBS)
def test_an_exception_after_the_last_call_of_a_step_is_no_failure_of_the_others(wire: str) -> None:
    with JOBS[wire]() as job:
        for who in range(job.size):
            outcomes = job.run(steps.failed_at_its_end, who)
            for rank, outcome in enumerate(outcomes):
                assert outcome.result() == ([3] if rank == who else [])


@pytest.mark.parametrize("wire", JOBS)
def test_a_failure_in_the_first_step_after_a_recovery_is_one_of_that_step(wire: str) -> None:
    with JOBS[wire]() as job:
        for who in range(job.size):
            outcomes = [outcome.result() for outcome in job.run(steps.failed_again, who)]
            assert len({state for state, _ in outcomes}) == 1, f"{outcomes}"
            for _, told in outcomes:
                assert [text.split()[0] for text in told] == ["2", "3", "4"], f"{outcomes}"
                assert all(text.split()[0] == text.split()[-1] for text in told), f"{outcomes}"


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("before", ["apply_once", "update_rows", "update_block"])
def test_an_interrupt_between_a_sum_and_its_application_is_an_error_on_all(
    replicas: int, before: str
) -> None:
    """The variables differed from then on, and nobody was told."""
    with Ranks(2, environ={"FAULTS_REPLICAS": str(replicas)}) as job:
        for who in range(2):
            outcomes = job.run(steps.interrupted_after_its_sum, who, before)
            raised = [outcome.result() for outcome in outcomes]
            assert "KeyboardInterrupt" in raised[who]
            assert all(told.count("CollectiveMismatchError") == 1 for told in raised), raised


@pytest.mark.parametrize("who", [0, 1])
def test_a_replica_that_was_given_up_breaks_no_later_step_of_the_workers(who: int) -> None:
    with Ranks(2, environ={"FAULTS_REPLICAS": "2"}) as job:
        for outcome in job.run(steps.outlived_by_a_replica, who):
            assert outcome.result() == [16.0]
