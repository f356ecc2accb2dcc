"""What a client of servers knows of their lives; all else is tested with servers and strategies."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from ndistribute.parameter_server.client import ServerClient, Servers
from ndistribute.parameter_server.messages import Report
from ndistribute.parameter_server.server import LocalServer
from tests.parameter_server.calls import add, read

THREADS, ROUNDS = 8, 150


def test_updates_are_lost_between_lives_in_their_order_however_late_one_is_heard_of():
    """What a worker knew of an earlier life, and told late, was counted as lost."""
    caller = SimpleNamespace(name="chief:0#a", instance="", start=None, close=lambda: None)
    client = ServerClient(caller, "ps:0")
    for life, began, total in (("1", 0, 10), ("3", 25, 300), ("2", 10, 25), ("4", 300, 300)):
        client.learn(Report("ps:0", life, began, total))
    assert client.lost_updates == 0
    client.learn(Report("ps:0", "5", 290, 295))
    assert client.lost_updates == 10


def test_threads_that_change_at_once_lose_nothing_of_each_other():
    callers = [LocalServer().connect("worker:0#a", 20.0) for _ in range(2)]
    servers = Servers([ServerClient(caller, f"ps:{i}") for i, caller in enumerate(callers)])
    servers.create({i: [("v", np.zeros(()))] for i in range(2)})

    def change(_: int) -> None:
        for _ in range(ROUNDS):
            servers.change({i: [add("v", np.ones(()))] for i in range(2)})

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(change, range(THREADS)))
    finally:
        sys.setswitchinterval(before)
    for reply in servers.ask({i: read("v") for i in range(2)}).values():
        assert reply.arrays[0] == THREADS * ROUNDS
    servers.close()


def test_a_client_may_be_closed_again_in_the_middle_of_a_request():
    """A closed strategy that was collected there waited for the server's lock for ever."""
    server = LocalServer()
    caller = server.connect("worker:0#a", 20.0)
    caller.close()
    with server._lock:
        caller.close()
