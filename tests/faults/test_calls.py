"""A process that raises, differs, skips, is late or leaves: what all others are told, and when.

Whoever catches what it is told and goes on has the same variables as all others, in the same step.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import steps
from tests.faults.jobs import WIRES
from tests.processes import AT_ONCE, Ranks

STEPS = 60


@pytest.fixture(scope="module", params=WIRES)
def job(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A job on each wire, which goes on after each fault."""
    with WIRES[request.param]() as ranks:
        for outcome in ranks.run(steps.worked, 1):
            outcome.result()
        yield ranks


def goes_on(job: Ranks) -> bool:
    return [o.result() for o in job.run(steps.worked_again)] == [True] * job.size


@pytest.mark.parametrize("moment", ["before", "between"])
def test_an_exception_is_named_to_all_others_with_the_rank_that_raised_it(
    job: Ranks, moment: str
) -> None:
    for who in (0, job.size - 1):
        outcomes = job.run(steps.failed, who, moment)
        assert (outcomes[who].error, outcomes[who].text) == ("ValueError", "boom")
        for rank in set(range(job.size)) - {who}:
            assert outcomes[rank].error == "WorkerLostError", outcomes[rank].traceback
            assert f"worker {who} failed: ValueError: boom" in outcomes[rank].text
            assert outcomes[rank].attributes["rank"] == who
            assert outcomes[rank].seconds < AT_ONCE
        assert goes_on(job)


@pytest.mark.parametrize("how", steps.DIFFERENCES)
def test_calls_that_differ_are_a_mismatch_on_all_ranks_at_once(job: Ranks, how: str) -> None:
    for who in (0, job.size - 1):
        for outcome in job.run(steps.differed, who, how):
            assert outcome.error == "CollectiveMismatchError", outcome.traceback
            assert "the same" in outcome.text
            assert outcome.seconds < AT_ONCE
        assert goes_on(job)


def test_a_call_that_one_rank_makes_alone_is_a_mismatch_on_all_at_once(job: Ranks) -> None:
    for who in (0, job.size - 1):
        for outcome in job.run(steps.called_more, who):
            assert outcome.error == "CollectiveMismatchError", outcome.traceback
            assert outcome.seconds < AT_ONCE
        assert goes_on(job)


def test_a_late_rank_is_named_with_who_waited_and_what_was_called_before(job: Ranks) -> None:
    for who in (0, job.size - 1):
        for rank, outcome in enumerate(job.run(steps.late, who)):
            assert outcome.error == "CollectiveTimeoutError", outcome.traceback
            assert "all_reduce #2: worker " in outcome.text
            assert f"waited 0.5 s for worker(s) {who}" in outcome.text
            assert outcome.seconds < AT_ONCE
            if rank != who:
                assert outcome.attributes["rank"] == who
                earlier = f"the last calls of replica {rank}: #1 all_reduce(SUM, int64[100]), #2 "
                assert earlier in outcome.traceback
        assert goes_on(job)


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_a_late_rank_that_comes_after_it_was_asked_for_is_no_mismatch(wire: str) -> None:
    with WIRES[wire]() as job:
        for outcome in job.run(steps.tardy, 0):
            outcome.result()


@pytest.mark.parametrize(
    ("wire", "who"), [("shared", 0), ("ring", -1), *((wire, 0) for wire in WIRES if wire == "mpi")]
)
def test_a_rank_that_finishes_early_is_named_and_every_step_before_counts(
    wire: str, who: int
) -> None:
    with WIRES[wire]() as job:
        outcomes = job.run(steps.finished_early, who % job.size)
        early = outcomes.pop(who)
        assert early.error is None, early.traceback
        for outcome in outcomes:
            assert outcome.error == "WorkerLostError", outcome.traceback
            assert f"worker {who % job.size} " in outcome.text
            assert "has finished" in outcome.text
            assert "the same number of steps" in outcome.text
            assert outcome.seconds < AT_ONCE


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_processes_that_failed_in_different_numbers_of_steps_agree_again(wire: str) -> None:
    with WIRES[wire]() as job:
        assert goes_on(job)
        for who in range(job.size):
            for _ in range(2):
                outcomes = job.run(steps.failed_alone, who)
                assert all(outcome.error is not None for outcome in outcomes)
            assert goes_on(job)
            for other in range(job.size):
                for outcome in job.run(steps.asked_for, other):
                    outcome.result()


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_whoever_waits_is_released_when_its_own_process_closes_the_group(wire: str) -> None:
    with WIRES[wire]() as job:
        outcome = job.run(steps.closed_by_another_thread)[0]
        assert outcome.result() == "worker 0 has left its group."
        assert outcome.seconds < AT_ONCE


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_update_that_one_process_alone_can_not_make_is_an_error_on_all(replicas: int) -> None:
    with Ranks(2, environ={"FAULTS_REPLICAS": str(replicas)}) as job:
        for outcome in job.run(steps.updated_alone, 1):
            assert "CollectiveMismatchError" in outcome.result()


def test_exceptions_leave_equal_variables_on_all_workers(job: Ranks) -> None:
    for seed in range(4):
        outcomes = [outcome.result() for outcome in job.run(steps.wandered, seed, STEPS)]
        assert len({state for state, _ in outcomes}) == 1, f"seed {seed}: {outcomes}"
        raised = [text.split() for _, told in outcomes for text in told]
        assert len(raised) > STEPS // 4
        # Each line begins with the step in which it was raised, and ends with who raised when.
        assert all(text[0] == text[-1] for text in raised), f"seed {seed}: {outcomes}"


def test_an_exception_after_the_last_call_of_a_step_is_no_failure_of_the_others(job: Ranks) -> None:
    for who in (0, job.size - 1):
        outcomes = job.run(steps.failed_at_its_end, who)
        assert [o.result() for o in outcomes] == [[3] * (rank == who) for rank in range(job.size)]


def test_a_failure_in_the_first_step_after_a_recovery_is_one_of_that_step(job: Ranks) -> None:
    for who in (0, job.size - 1):
        outcomes = [outcome.result() for outcome in job.run(steps.failed_again, who)]
        assert len({state for state, _ in outcomes}) == 1, f"{outcomes}"
        for _, told in outcomes:
            assert [text.split()[0] for text in told] == ["2", "3", "4"], f"{outcomes}"
            assert all(text.split()[0] == text.split()[-1] for text in told), f"{outcomes}"
