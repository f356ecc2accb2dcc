"""A process that is killed, stopped or interrupted: the others know it in time; nobody hangs."""

import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.jobs import steps
from tests.jobs.clusters import HEARTBEAT, WIRES

SILENT = "it sent nothing for"


@contextlib.contextmanager
def one_job_for_each_victim(wire):
    size = 2 if wire in ("shared", "mpi") else 3
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        starting = [pool.submit(WIRES[wire]) for _ in range(size)]
        jobs = [stack.enter_context(job.result()) for job in starting]
        for job in jobs:
            job.start(steps.worked, 1)
        for job in jobs:
            assert [o.result() for o in job.collect()] == [True] * job.size
        yield jobs


def strike_all(jobs, moment, number, folder):
    """Strike another rank in each job, and return what each of the others is told."""
    for who, job in enumerate(jobs):
        job.start(steps.struck, who, moment, number, str(folder / f"struck{who}"))
    told = []
    for who, job in enumerate(jobs):
        others = [rank for rank in range(job.size) if rank != who]
        told += [outcome.result() for outcome in job.collect(ranks=others)]
    return told


@pytest.mark.parametrize(
    ("wire", "moment"),
    [
        *(("shared", moment) for moment in ("inside", "amid", "outside")),
        *(("ring", moment) for moment in ("inside", "amid")),
        ("hosts", "amid"),
    ],
)
def test_a_killed_rank_is_named_to_all_others_at_once(wire, moment, tmp_path):
    """MPI's own launcher ends the whole job when it sees a process killed; see test_mpi."""
    with one_job_for_each_victim(wire) as jobs:
        for told in strike_all(jobs, moment, signal.SIGKILL, tmp_path):
            assert SILENT not in told, told
        for who, job in enumerate(jobs):
            for outcome in job.run(steps.worked, ranks=[r for r in range(job.size) if r != who]):
                assert outcome.error == "WorkerLostError", outcome.traceback
                assert "was lost. Start the job again" in outcome.text


@pytest.mark.parametrize(
    ("wire", "moment"),
    [
        *(("shared", "inside"), ("ring", "outside"), ("hosts", "inside")),
        *((wire, "outside") for wire in WIRES if wire == "mpi"),
    ],
)
def test_a_stopped_rank_is_named_when_the_heartbeats_stay_away(wire, moment, tmp_path):
    with one_job_for_each_victim(wire) as jobs:
        try:
            every = strike_all(jobs, moment, signal.SIGSTOP, tmp_path)
        finally:
            for who, job in enumerate(jobs):
                job.signal(who, signal.SIGCONT)
        # Rank 0 notices the silence, and tells the others.
        assert all(SILENT in told for told in every), every
        for who, job in enumerate(jobs):  # Who wakes up learns that the others gave it up.
            told = job.collect(ranks=[who])[0]
            assert told.error == "WorkerLostError"
            assert f"worker {who} " in told.text or "closed its connection" in told.text


@pytest.mark.parametrize("wire", ["shared", "ring"])
def test_a_stop_that_is_shorter_than_the_timeout_does_no_harm(wire, tmp_path):
    with WIRES[wire]() as job:
        job.run(steps.worked, 1)
        job.start(steps.worked, 50)
        pause = threading.Event()
        for number in range(3 * job.size):
            job.signal(number % job.size, signal.SIGSTOP)
            pause.wait(HEARTBEAT / 10)
            job.signal(number % job.size, signal.SIGCONT)
        assert [o.result() for o in job.collect()] == [True] * job.size


@pytest.mark.parametrize("wire", WIRES)
def test_an_interrupted_rank_raises_so_do_the_others_and_all_go_on(wire):
    with WIRES[wire]() as job:
        job.run(steps.worked, 1)
        for who in range(job.size):
            outcomes = job.run(steps.disturbed, who, "interrupt", 0, steps.LARGE, True)
            for rank, outcome in enumerate(outcomes):
                expected = "KeyboardInterrupt" if rank == who else "WorkerLostError"
                assert outcome.error == expected, outcome.traceback
                if rank != who:
                    assert f"worker {who} failed: KeyboardInterrupt" in outcome.text
            assert job.results(steps.worked_again) == [True] * job.size
