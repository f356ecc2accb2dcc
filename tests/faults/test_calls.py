"""A process that raises, differs, skips, is late or leaves: what all others are told, and when."""

import pytest

from tests.jobs import steps
from tests.jobs.clusters import WIRES
from tests.processes import Ranks


def goes_on(job):
    return job.results(steps.worked_again) == [True] * job.size


def test_a_late_rank_is_named_with_who_waited_and_what_was_called_before(job):
    for who in (0, job.size - 1):
        for rank, outcome in enumerate(job.run(steps.late, who)):
            assert outcome.error == "CollectiveTimeoutError", outcome.traceback
            assert "all_reduce #2: worker " in outcome.text
            assert f"waited 0.5 s for worker {who}" in outcome.text
            if rank != who:
                assert outcome.attributes["rank"] == who
                earlier = f"the last calls of replica {rank}: #1 all_reduce(SUM, int64[100]), #2 "
                assert earlier in outcome.traceback
        assert goes_on(job)


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_a_late_rank_that_comes_after_it_was_asked_for_is_no_mismatch(wire):
    with WIRES[wire]() as job:
        job.results(steps.tardy, 0)


@pytest.mark.parametrize(
    ("wire", "who"), [("shared", 0), ("ring", -1), *((wire, 0) for wire in WIRES if wire == "mpi")]
)
def test_a_rank_that_finishes_early_is_named_and_every_step_before_counts(wire, who):
    with WIRES[wire]() as job:
        outcomes = job.run(steps.finished_early, who % job.size)
        early = outcomes.pop(who)
        assert early.error is None, early.traceback
        for outcome in outcomes:
            assert outcome.error == "WorkerLostError", outcome.traceback
            assert f"worker {who % job.size} " in outcome.text
            assert "has finished" in outcome.text
            assert "the same number of steps" in outcome.text


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_processes_that_failed_in_different_numbers_of_steps_agree_again(wire):
    with WIRES[wire]() as job:
        assert goes_on(job)
        for who in range(job.size):
            for _ in range(2):
                outcomes = job.run(steps.failed_alone, who)
                assert all(outcome.error is not None for outcome in outcomes)
            assert goes_on(job)
            for other in range(job.size):
                job.results(steps.asked_for, other)


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_whoever_waits_is_released_when_its_own_process_closes_the_group(wire):
    with WIRES[wire]() as job:
        outcome = job.run(steps.closed_by_another_thread)[0]
        assert outcome.result() == "worker 0 has left its group."


@pytest.mark.parametrize("who", [0, 1])
def test_a_replica_that_was_given_up_breaks_no_later_step_of_the_workers(who):
    with Ranks(2, environ={"FAULTS_REPLICAS": "2"}) as job:
        assert job.results(steps.outlived_by_a_replica, who) == [[16.0]] * 2
