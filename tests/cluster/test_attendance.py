"""What a server concludes from who came and left, without clocks, sockets or processes."""

from __future__ import annotations

import pytest

from ndistribute.cluster.serving.attendance import Attendance, Outlook
from ndistribute.cluster.spec import ClusterSpec

LED = {"chief": ["a:1"], "worker": ["a:2", "a:3"], "ps": ["a:4"], "evaluator": ["a:5"]}
ALONE = {"worker": ["a:2", "a:3"], "ps": ["a:4"], "evaluator": ["a:5"]}


def attending(cluster, **options) -> Attendance:
    options.setdefault("return_seconds", 60.0)
    return Attendance(ClusterSpec(cluster), grace_seconds=2.0, **options)


def after(attendance: Attendance, *events: str) -> Outlook | None:
    """Return the outlook after events ``+client``, ``-client`` and ``!client``, one a second."""
    for now, event in enumerate(events, start=1):
        sign, client = event[0], event[1:]
        if sign == "+":
            attendance.came(client)
        else:
            attendance.left(client, died=sign == "!", now=float(now))
    return attendance.outlook()


@pytest.mark.parametrize(
    ("events", "outlook"),
    [
        ([], None),
        (["+worker:0#a", "-worker:0#a"], None),
        (["+chief:0#a", "!worker:0#a"], None),
        (["+chief:0#a", "+worker:0#a", "-chief:0#a"], Outlook(5.0)),
        (["+chief:0#a", "-chief:0#a", "+chief:0#b"], None),
        (["+chief:0#a", "+chief:0#b", "-chief:0#a"], None),
        (["+chief:0#a", "!chief:0#a"], Outlook(2.0, "the chief died")),
        (["!chief:0#a"], Outlook(1.0, "the chief died")),
        (["+chief:0#a", "+chief:0#b", "!chief:0#a"], Outlook(3.0, "the chief died")),
    ],
)
def test_a_cluster_with_a_chief_lives_as_long_as_the_chief(events, outlook):
    assert after(attending(LED), *events) == outlook


@pytest.mark.parametrize(
    ("events", "at"),
    [
        ([], None),
        (["+evaluator:0#a", "!evaluator:0#a"], None),
        (["+worker:0#a", "+worker:1#a", "-worker:0#a"], None),
        (["+worker:0#a", "+worker:1#a", "-worker:0#a", "-worker:1#a"], 6.0),
        (["+evaluator:0#a", "+worker:0#a", "-worker:0#a", "+worker:1#a", "-worker:1#a"], 7.0),
        (["+worker:0#a", "+worker:1#a", "-worker:0#a", "-worker:1#a", "+worker:0#b"], None),
    ],
)
def test_without_a_chief_every_worker_comes_and_leaves_first(events, at):
    outlook = after(attending(ALONE), *events)
    assert outlook == (None if at is None else Outlook(at))


def test_a_worker_that_dies_is_waited_for_once_all_others_are_gone():
    attendance = attending(ALONE)
    both = ["+worker:0#a", "+worker:1#a"]
    assert after(attendance, *both, "!worker:0#a") is None
    outlook = after(attendance, "-worker:1#a")
    assert outlook is not None
    assert outlook.at == 61.0
    assert "worker:0 died and did not come back within 60 s" in outlook.lost
    assert after(attendance, "+worker:0#b") is None
    assert after(attendance, "-worker:0#b") == Outlook(3.0)


def test_a_death_that_is_noticed_after_the_return_does_not_count():
    events = ["+worker:1#a", "-worker:1#a", "+worker:0#a", "+worker:0#b"]
    assert after(attending(ALONE), *events, "-worker:0#b", "!worker:0#a") == Outlook(8.0)


def test_a_worker_that_never_came_is_named():
    outlook = after(attending(ALONE), "+worker:0#a", "-worker:0#a")
    assert outlook is not None
    assert outlook.at == 62.0
    assert "worker:1 never came" in outlook.lost


def test_a_server_that_was_started_again_can_not_have_seen_all_of_them():
    attendance = attending(ALONE, resumed=True)
    assert after(attendance, "+worker:0#a", "-worker:0#a") == Outlook(62.0)


def test_a_cluster_of_servers_alone_is_served_for_ever():
    cluster = {"ps": ["a:1"]}
    assert after(attending(cluster), "+worker:0#a", "-worker:0#a", "!chief:0#a") is None
