"""Bounded staleness: nobody begins a step before the last is near enough, and nobody hangs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.cluster.protocol.replies import Released
from ndistribute.cluster.protocol.requests import Acknowledge, AwaitClock, Leave, Origin
from ndistribute.cluster.store import Store
from tests.cluster.store.calls import Calls


@pytest.fixture
def calls():
    return Calls()


class Members:
    """Members of a group of clocks."""

    def __init__(self, calls, slack, count):
        self.calls = calls
        self.slack = slack
        self.count = count
        self._numbers = {}

    def begin(self, client, clock):
        """Say that a client begins a step, and return the key of the answer."""
        number = self._numbers[client] = self._numbers.get(client, 0) + 1
        request = AwaitClock(Origin(client, number), "steps", clock, self.slack, self.count)
        return self.calls.send(client, request)

    def may(self, client, clock):
        """Return whether a client may begin a step at once."""
        return isinstance(self.calls.answers.get(self.begin(client, clock)), Released)


def test_all_wait_until_all_came_and_then_none_runs_away(calls):
    members = Members(calls, slack=1, count=2)
    first = members.begin("a", 0)
    assert first not in calls.answers
    assert members.may("b", 0)
    assert calls.answers[first] == Released(2)
    assert members.may("a", 1)
    ahead = members.begin("a", 2)
    assert ahead not in calls.answers
    assert members.may("b", 1)
    assert calls.answers[ahead] == Released(2)


def test_with_no_slack_all_begin_a_step_together(calls):
    members = Members(calls, slack=0, count=3)
    for clock in range(3):
        keys = [members.begin(client, clock) for client in "abc"]
        assert [calls.answers[key] for key in keys] == [Released(3)] * 3


def test_a_member_that_left_holds_nobody_back(calls):
    members = Members(calls, slack=0, count=2)
    members.begin("a", 0)
    members.begin("b", 0)
    ahead = members.begin("a", 1)
    assert ahead not in calls.answers
    calls.ask("chief", Leave("b"))
    assert calls.answers[ahead] == Released(1)
    assert members.may("a", 2)


def test_a_member_that_never_came_is_waited_for_though_another_left(calls):
    members = Members(calls, slack=0, count=3)
    members.begin("worker:0#1", 0)
    members.begin("worker:1#1", 0)
    calls.ask("chief", Leave("worker:1#1"))
    waits = members.begin("worker:1#2", 0)
    assert waits not in calls.answers
    assert members.may("worker:2#1", 0)
    assert calls.answers[waits] == Released(3)


def test_a_restarted_member_takes_its_own_place_even_before_its_death_is_known(calls):
    members = Members(calls, slack=0, count=2)
    members.begin("worker:0#1", 0)
    members.begin("worker:1#1", 0)
    ahead = members.begin("worker:0#1", 1)
    assert members.may("worker:1#2", 1)
    assert calls.answers[ahead] == Released(2)
    calls.ask("chief", Leave("worker:1#1"))
    assert members.begin("worker:0#1", 2) not in calls.answers  # The second one is still there.


def test_a_member_that_begins_anew_does_not_make_others_wait_for_what_they_did(calls):
    members = Members(calls, slack=1, count=2)
    for clock in range(10):
        members.begin("worker:0#1", clock)
        members.begin("worker:1#1", clock)
    calls.ask("chief", Leave("worker:1#1"))
    assert members.may("worker:1#2", 0)
    assert members.may("worker:0#1", 10)
    ahead = members.begin("worker:0#1", 11)
    assert ahead not in calls.answers
    assert members.may("worker:1#2", 1)
    assert calls.answers[ahead] == Released(2)


def test_a_member_that_comes_with_a_higher_clock_waits_for_the_others(calls):
    members = Members(calls, slack=1, count=1)
    members.begin("a", 3)
    assert members.begin("b", 5) not in calls.answers
    assert members.may("a", 4)


def test_a_client_stands_at_a_clock_once(calls):
    members = Members(calls, slack=0, count=2)
    first = members.begin("a", 0)
    second = members.begin("a", 0)
    assert calls.answers[first].kind == "superseded"
    members.begin("b", 0)
    assert calls.answers[second] == Released(2)


@pytest.mark.parametrize(("clock", "slack", "count"), [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_numbers_without_sense_are_refused(calls, clock, slack, count):
    request = AwaitClock(Origin("a", 1), "steps", clock, slack, count)
    assert calls.ask("a", request).kind == "mismatch"


def test_all_must_say_the_same_number_of_members(calls):
    Members(calls, slack=0, count=2).begin("a", 0)
    reply = calls.ask("b", AwaitClock(Origin("b", 1), "steps", 0, 0, 3))
    assert reply.kind == "mismatch"


def test_a_restored_store_knows_how_far_all_were(calls):
    members = Members(calls, slack=1, count=2)
    for clock in range(3):
        members.begin("a", clock)
        members.begin("b", clock)
    members.begin("a", 3)
    members.calls = Calls(Store.restore(*calls.store.snapshot()))
    assert members.calls.store.clients == {"a", "b"}
    ahead = members.begin("a", 4)
    assert ahead not in members.calls.answers
    assert members.may("b", 3)
    assert members.calls.answers[ahead] == Released(2)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 2))
def test_nobody_is_ever_more_than_the_slack_ahead_and_somebody_always_may_go(data, count, slack):
    """Workers that step in any order, ask again, die, and come again."""
    draw, calls = data.draw, Calls()
    members = Members(calls, slack, count)
    lives = dict.fromkeys(range(count), 0)
    clocks = dict.fromkeys(range(count), 0)  # Of those that are there: the step they ask for,
    keys = {worker: members.begin(f"w:{worker}#0", 0) for worker in range(count)}
    for _ in range(draw(st.integers(0, 40))):
        going = [worker for worker in clocks if keys[worker] in calls.answers]
        assert going or not clocks, "all wait for each other"
        if clocks:
            least = min(clocks.values())
            assert all(clocks[worker] - least <= slack for worker in going)
        worker = draw(st.sampled_from(range(count)))
        what = draw(st.sampled_from(["step", "step", "step", "again", "die"]))
        name = f"w:{worker}#{lives[worker]}"
        if worker not in clocks:
            lives[worker] += 1
            clocks[worker] = max(clocks.values(), default=0)  # It knows the step from a variable.
            keys[worker] = members.begin(f"w:{worker}#{lives[worker]}", clocks[worker])
        elif what == "die":
            calls.ask("server", Leave(name))
            del clocks[worker], keys[worker]
        elif worker not in going or what == "again":
            keys[worker] = members.begin(name, clocks[worker])
        else:
            clocks[worker] += 1
            keys[worker] = members.begin(name, clocks[worker])
            calls.ask(name, Acknowledge(name, 1))
