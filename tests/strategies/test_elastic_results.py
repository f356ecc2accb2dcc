"""What is known of results, new variables and counts when elastic workers are lost or come."""

import signal
import threading

import numpy as np
import pytest

from ndistribute.collective.membership import WorkerReport
from ndistribute.strategies.elastic_results import LoopResults, outcome_of
from ndistribute.strategies.elastic_state import ReplicatedState
from tests.jobs import elastic_scenes
from tests.processes import Ranks, wait_until


def test_a_reduction_of_results_from_before_a_loss_warns_once_and_the_job_goes_on():
    with Ranks(3) as ranks:
        *remain, lost = ranks.run(elastic_scenes.use_results_later, "reduce")
    assert lost.error == "Lost"
    for sums, warnings in (each.result() for each in remain):
        assert sums == [28.0, 28.0, 210.0, 210.0]  # Of 0 to 7, as 8 to 11 are lost; then of all.
        assert warnings == 1


@pytest.mark.parametrize("how", ["run", "gather"])
def test_results_from_before_a_loss_are_refused_where_a_part_must_not_be_missing(how):
    with Ranks(3) as ranks:
        *remain, _ = ranks.run(elastic_scenes.use_results_later, how)
    for each in remain:
        assert each.error == "WorkerLostError"
        assert "before the workers changed (membership " in each.text
        assert "in the step that makes them" in each.text


@pytest.mark.parametrize("name", ["late", "gradient_sum"])
def test_a_variable_that_not_all_have_made_when_a_worker_is_lost_gets_the_agreed_value(name):
    with Ranks(3) as ranks:
        *remain, lost = ranks.run(elastic_scenes.make_in_a_step, name)
    assert lost.error == "Lost"
    for value, weights, agreed, sums in (each.result() for each in remain):
        assert value == 1.0 + 2.0  # Rank 0's first value, and the number of replicas.
        assert weights == [-1.0] * 3
        assert len(agreed) == 1
        assert sums == 1  # The commit carries no sums of gradients.


@pytest.mark.parametrize("how", ["apply_gradients", "merge_call"])
def test_a_step_is_made_and_counted_once_if_a_second_worker_is_lost_in_the_change(how):
    with Ranks(4) as ranks:
        *remain, _, _ = ranks.run(elastic_scenes.lose_at_the_end, how)
    for seen, weight in (each.result() for each in remain):
        assert seen == 4.0 + 2.0 + 2.0  # Of the second step, what those count who remain.
        assert weight == -3.0


def test_only_those_who_lack_the_sums_add_up_what_they_have_counted():
    new, old = WorkerReport(3, uncounted=True), WorkerReport(3)
    assert outcome_of([new, new]).uncounted
    mixed = outcome_of([new, old])
    assert (mixed.uncounted, mixed.source) == (False, 1)
    behind = WorkerReport(2, prepared=True)  # Its group of the change before did not form.
    assert outcome_of([behind, new]).uncounted
    mixed = outcome_of([behind, new, old])
    assert (mixed.uncounted, mixed.source) == (False, 2)


@pytest.fixture
def late(tmp_path):
    """Run a scene whose rank 2 is started when the others wait for it."""

    def run(*how):
        with Ranks(3) as ranks:
            ranks.start(elastic_scenes.come_late, str(tmp_path), *how, ranks=[0, 1])
            wait_until((tmp_path / "waits").exists)
            ranks.start(elastic_scenes.come_late, str(tmp_path), *how, ranks=[2])
            return ranks.collect()

    return run


def test_a_newcomer_gets_what_others_have_read_after_loops_that_it_skips(late):
    first, second, newcomer = (each.result() for each in late())
    reads, weights = first
    assert [total for total, _ in reads] == [66.0, 276.0, 630.0]
    assert weights == 66.0 + 276.0 + 630.0
    assert first == second == newcomer


def test_a_newcomer_that_ends_before_it_has_joined_says_so(late):
    first, _, newcomer = late("breaks")
    assert first.result()[1] == 972.0
    assert newcomer.error == "NotAMember"
    assert "without having joined its job" in newcomer.text


def test_a_newcomer_whose_job_ends_meanwhile_ends_as_one_that_hands_over(late, capfd):
    first, _, newcomer = late("waits")
    assert first.result()[1] == 972.0
    assert (newcomer.error, newcomer.text) == ("SystemExit", str(128 + signal.SIGTERM))
    assert (
        "the job ended before worker:2 could join it. This worker has no" in capfd.readouterr().err
    )


def test_values_that_others_have_not_read_are_no_zeros():
    others, newcomer = LoopResults(), LoopResults()
    others.note("a reduction", np.ones(2))
    others.note("a gathered value", np.zeros(1 << 22))
    others.end(1)
    newcomer.replay(1, others.of(1))
    assert newcomer.next("a reduction").tolist() == [1.0, 1.0]
    for what in ("a reduction", "a gathered value", "the value of 'seen'"):
        with pytest.raises(Exception, match=f"{what} is not available: it follows a loop"):
            newcomer.next(what)
    assert newcomer.of(1) == others.of(1)  # For a newcomer after this one.


def test_a_second_replica_that_adds_a_state_waits_until_it_is_loaded():
    class Holder:
        loaded = False

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            begun.set()
            assert goes_on.wait(10.0)
            self.loaded = True

    begun, goes_on, seen = threading.Event(), threading.Event(), []
    state, holder = ReplicatedState(), Holder()
    state.receive_plain({0: {"calls": 1}})

    def add():
        state.add_plain(holder)
        seen.append(holder.loaded)

    threads = [threading.Thread(target=add) for _ in range(2)]
    threads[0].start()
    assert begun.wait(10.0)
    threads[1].start()
    threads[1].join(0.2)  # It ends at once if it does not wait.
    goes_on.set()
    for thread in threads:
        thread.join(10.0)
    assert seen == [True, True]
