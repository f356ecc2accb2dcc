"""Elastic workers that are killed, stopped and started again: no sample is lost or counted twice.

The workers count each sample in the update of the step. More random kills: ``FAULTS_RUNS``.
"""

import os
import random
import signal

import pytest

from tests.jobs.elastic import Crew, Drama, play, random_drama

RUNS = int(os.environ.get("FAULTS_RUNS", "2"))
SEED = int(os.environ.get("FAULTS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
STEPS = {"epochs": 3, "rows": 96, "batch": 12, "seconds": 0.002}


def check(drama):
    faults, recoveries, killed = play(drama)
    assert not faults, f"{drama}:\n" + "\n".join(faults)
    return recoveries, killed


@pytest.mark.timeout(max(120, RUNS * 20))
def test_random_kills_at_random_moments_lose_no_sample_and_count_none_twice():
    print(f"FAULTS_SEED={SEED}")
    for number in range(RUNS):
        drama = random_drama(random.Random(f"{SEED} {number}"), options=STEPS)
        faults, _, _ = play(drama)
        assert not faults, f"FAULTS_SEED={SEED}: run {number}: {drama}:\n" + "\n".join(faults)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("wire", ["ring", "two groups"])
def test_the_others_go_on_when_one_is_killed(wire, rank):
    recoveries, killed = check(Drama(3, wire, "one", ((3, 0.001, (rank,)),), STEPS))
    assert len(recoveries) == killed == 1


@pytest.mark.parametrize(
    ("point", "dies"),
    [
        ("has sent one plan", 0),
        ("before the state is sent", 1),
        ("between updates", 1),
        ("after the commit", 0),
        ("an epoch begins", 2),
    ],
)
def test_a_second_one_dies_during_the_change(point, dies):
    drama = Drama(4, "shared memory", "in a change", ((3, 0.001, (3,)),), STEPS, point, dies)
    check(drama)


@pytest.mark.parametrize("point", ["an epoch begins", "all begin an epoch"])
def test_an_epoch_in_whose_beginning_one_dies_has_the_same_order(point):
    check(Drama(3, "shared memory", "alone", (), STEPS, point, 1))


def test_a_worker_that_is_started_again_joins_and_has_the_same_weights():
    options = {**STEPS, "epochs": 6, "seconds": 0.01}
    with Crew(3, **options) as crew:
        crew.start_all()
        crew.wait_for_steps(3)
        crew.kill(0)
        crew.start(0)
        crew.wait_for(lambda: any(each["size"] == 3 for each in crew.steps(0)[3:]))
        assert crew.wait_to_the_end() == {0: 0, 1: 0, 2: 0}
        assert crew.faults() == []
        assert len(crew.results) == 3


def test_a_sample_that_is_left_out_is_noticed():
    with Crew(2, drop=(1, 3), **STEPS) as crew:
        crew.start_all()
        crew.wait_to_the_end()
        assert any("1 samples were lost, 0 counted twice" in fault for fault in crew.faults())


@pytest.mark.parametrize(("epochs", "rows"), [(1, 1800), (60, 30)])
def test_a_worker_that_was_stopped_joins_anew_or_ends(epochs, rows):
    options = {"epochs": epochs, "rows": rows, "batch": 15, "seconds": 0.01, "reduces": False}
    with Crew(3, environ={"NDISTRIBUTE_HEARTBEAT_SECONDS": "0.5"}, **options) as crew:
        crew.start_all()
        crew.wait_for_steps(3)
        crew.send(0, signal.SIGSTOP)
        crew.wait_for(lambda: all(crew.steps(index)[-1]["size"] == 2 for index in (1, 2)))
        crew.wait_for_steps(4, 1, 2)
        crew.send(0, signal.SIGCONT)
        codes = crew.wait_to_the_end()
        assert (codes[1], codes[2]) == (0, 0)
        assert crew.faults() == []
        said = crew.said("worker:0")
        assert "the job continues without this worker" in said
        # Its loop is still the one in which it was stopped, or is over.
        assert codes[0] == 0 if epochs == 1 else "joins the loop that is running" in said


def test_a_worker_that_gets_sigterm_hands_over():
    with Crew(3, **STEPS) as crew:
        crew.start_all()
        crew.wait_for_steps(3)
        crew.send(1, signal.SIGTERM)
        codes = crew.wait_to_the_end()
        assert codes == {0: 0, 1: 128 + signal.SIGTERM, 2: 0}
        assert crew.faults() == []
