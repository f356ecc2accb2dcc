"""What a server concludes from who came and left, without clocks, sockets or processes."""

from __future__ import annotations

import pytest

from ndistribute.cluster.spec import ClusterSpec
from ndistribute.coordinator.server import CUT_SECONDS, ExitPolicy, Outlook

LED = {"chief": ["a:1"], "worker": ["a:2", "a:3"], "ps": ["a:4"], "evaluator": ["a:5"]}
ALONE = {"worker": ["a:2", "a:3"], "ps": ["a:4"], "evaluator": ["a:5"]}
BOTH = ["+worker:0#a", "+worker:1#a"]


def policy_of(cluster) -> ExitPolicy:
    return ExitPolicy(ClusterSpec(cluster), started=0.0, start_seconds=100.0, return_seconds=60.0)


def after(policy: ExitPolicy, *events: str) -> Outlook | None:
    """Return the outlook after events ``+client``, ``-client`` and ``!client``, one a second."""
    for now, event in enumerate(events, start=1):
        sign, client = event[0], event[1:]
        if sign == "+":
            policy.came(client)
        else:
            policy.left(client, died=sign == "!", now=float(now))
    return policy.outlook()


NOBODY = Outlook(100.0, "chief:0 did not come within 100 s of the start")


def died(now: float) -> Outlook:
    return Outlook(now + CUT_SECONDS, "the chief died")


@pytest.mark.parametrize(
    ("events", "outlook"),
    [
        ([], NOBODY),
        (["+worker:0#a", "-worker:0#a"], NOBODY),
        (["+chief:0#a", "!worker:0#a"], None),
        (["+chief:0#a", "+worker:0#a", "-chief:0#a"], Outlook(5.0)),
        (["+chief:0#a", "-chief:0#a", "+chief:0#b"], None),
        (["+chief:0#a", "+chief:0#b", "-chief:0#a"], None),
        (["+chief:0#a", "!chief:0#a"], died(2.0)),
        (["!chief:0#a"], died(1.0)),
        (["+chief:0#a", "+chief:0#b", "!chief:0#a"], died(3.0)),
        (["+chief:0#a", "!chief:0#a", "+chief:0#b"], died(2.0)),
        (["+chief:0#a", "!chief:0#a", "+chief:0#a"], None),
        (["+chief:0#a", "!chief:0#a", "+chief:0#a", "-chief:0#a"], Outlook(6.0)),
    ],
)
def test_a_cluster_with_a_chief_lives_as_long_as_the_chief(events, outlook):
    assert after(policy_of(LED), *events) == outlook


@pytest.mark.parametrize(
    ("events", "outlook"),
    [
        (["+evaluator:0#a", "!evaluator:0#a"], 100.0),
        ([*BOTH, "-worker:0#a"], None),
        ([*BOTH, "-worker:0#a", "-worker:1#a"], 6.0),
        (["+evaluator:0#a", "+worker:0#a", "-worker:0#a", "+worker:1#a", "-worker:1#a"], 7.0),
        ([*BOTH, "-worker:0#a", "-worker:1#a", "+worker:0#b"], None),
        # A death that is noticed after the return does not count.
        ([*BOTH, "-worker:1#a", "+worker:0#b", "-worker:0#b", "!worker:0#a"], 8.0),
    ],
)
def test_without_a_chief_every_worker_comes_and_leaves_first(events, outlook):
    found = after(policy_of(ALONE), *events)
    assert (found and found.at) == outlook
    if outlook != 100.0 and found:
        assert not found.lost


def test_a_worker_that_dies_is_waited_for_once_all_others_are_gone():
    policy = policy_of(ALONE)
    assert after(policy, *BOTH, "!worker:0#a") is None
    outlook = after(policy, "-worker:1#a")
    assert outlook is not None
    assert outlook.at == 61.0
    assert "worker:0 died and did not come back within 60 s" in outlook.lost
    assert after(policy, "+worker:0#b") is None
    assert after(policy, "-worker:0#b") == Outlook(3.0)


def test_a_worker_that_never_came_is_named_unless_an_earlier_life_may_have_seen_it():
    policy = policy_of(ALONE)
    outlook = after(policy, "+worker:0#a", "-worker:0#a")
    assert outlook is not None
    assert outlook.at == 62.0
    assert "worker:1 never came" in outlook.lost
    policy.resumed = True
    assert policy.outlook() == Outlook(62.0)


def test_a_cluster_of_servers_alone_is_served_for_ever():
    assert after(policy_of({"ps": ["a:1"]}), "+worker:0#a", "-worker:0#a", "!chief:0#a") is None
