"""What a client of servers knows of their lives; all else is tested with servers and strategies."""

from __future__ import annotations

from types import SimpleNamespace

from ndistribute.parameter_server.client import ServerClient
from ndistribute.parameter_server.messages import Report


def test_updates_are_lost_between_lives_in_their_order_however_late_one_is_heard_of():
    """What a worker knew of an earlier life, and told late, was counted as lost."""
    caller = SimpleNamespace(name="chief:0#a", instance="", close=lambda: None)
    client = ServerClient(caller, "ps:0")
    for life, began, total in (("1", 0, 10), ("3", 25, 300), ("2", 10, 25), ("4", 300, 300)):
        client.learn(Report("ps:0", life, began, total))
    assert client.lost_updates == 0
    client.learn(Report("ps:0", "5", 290, 295))
    assert client.lost_updates == 10
