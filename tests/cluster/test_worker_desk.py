"""`WorkerDesk`: what a worker answers, to whom, and what it never unpickles."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ndistribute.cluster.coordination.pickles import Pickled, dump, load
from ndistribute.cluster.coordination.worker_desk import INLINE_BYTES, WorkerDesk
from ndistribute.cluster.coordination.worker_requests import (
    Collect,
    Exchange,
    Forgotten,
    Hello,
    Outcomes,
    Run,
    Welcome,
    decode_worker_reply,
)
from ndistribute.cluster.links.origins import current_closure
from ndistribute.cluster.serving.local import LocalTransport
from ndistribute.cluster.wire import records
from ndistribute.cluster.wire.client import Client
from ndistribute.cluster.wire.guard import Guard, UnknownSessionError
from ndistribute.cluster.wire.service import Service
from ndistribute.errors import AuthenticationError
from tests.cluster.errands import Evil, double

pytest.importorskip("cloudpickle")

GATE = threading.Event()
NOTED: list[int] = []


def pass_gate() -> str:
    GATE.wait(timeout=20)
    return "passed"


def note(number: int) -> int:
    NOTED.append(number)
    return len(NOTED)


class Caller:
    """Ask a desk as a service does."""

    def __init__(self, **options: int) -> None:
        self.desk = WorkerDesk("worker:0", **options)
        self.late: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.desk.bind(lambda replies: [self.late.put(reply) for reply in replies] and None)
        self.conversation = self.ask(Hello()).conversation

    def ask(self, request: Any, ticket: int = 1, client: str = "chief") -> Any:
        """Return the answer, None where it is to come later."""
        message = memoryview(bytearray(b"".join(records.encode(request))))
        replies = self.desk.handle(client, ticket, self.desk.read(message))
        message[:] = bytes(len(message))  # The memory may be the coordinator's.
        return replies[0][1] if replies else None

    def exchange(self, turn: int, *closures: tuple, ticket: int = 1, wait: bool = True) -> Any:
        functions = {dump(function).digest: dump(function) for _, function, _ in closures}
        runs = tuple(
            Run("series", number, (dump(function).digest,), dump((args, {})), ())
            for number, function, args in closures
        )
        known = tuple(functions.values())
        return self.ask(Exchange(self.conversation, turn, known, runs, (), wait), ticket)

    def later(self, ticket: int) -> Any:
        came, reply = self.late.get(timeout=20)
        assert came == ticket
        return reply

    def values(self, outcomes: Outcomes) -> dict[int, Any]:
        return {one.number: load(one.value) for one in outcomes.outcomes}


@pytest.fixture
def caller() -> Iterator[Caller]:
    GATE.clear()
    NOTED.clear()
    caller = Caller()
    yield caller
    GATE.set()
    caller.desk.close()


def test_an_outcome_comes_when_it_is_there(caller):
    assert caller.exchange(1, (1, double, (4,)), ticket=9) is None
    assert caller.values(caller.later(9)) == {1: 8}


def test_a_turn_that_is_asked_again_is_answered_again_and_run_once(caller):
    assert caller.exchange(1, (1, pass_gate, ()), ticket=1) is None
    assert caller.exchange(1, (1, pass_gate, ()), ticket=2) is None
    GATE.set()
    assert caller.values(caller.later(2)) == {1: "passed"}
    assert caller.exchange(2, (2, note, (1,)), ticket=3) is None
    reply = caller.later(3)
    assert caller.exchange(2, (2, note, (1,)), ticket=4) is reply
    assert caller.exchange(3, (3, note, (2,)), ticket=5) is None
    assert caller.values(caller.later(5)) == {3: 2}
    assert NOTED == [1, 2]


def test_an_outcome_that_came_between_two_turns_is_in_the_next(caller):
    caller.exchange(1, (1, double, (1,)), (2, double, (2,)), (3, pass_gate, ()), ticket=1)
    first = caller.values(caller.later(1))
    assert first == {1: 2}
    GATE.set()
    found: dict[int, Any] = {}
    for turn in (2, 3):
        if len(found) < 2:
            reply = caller.exchange(turn, ticket=turn)
            found |= caller.values(reply or caller.later(turn))
    assert found == {2: 4, 3: "passed"}


def test_who_can_not_wait_is_answered_at_once(caller):
    assert caller.exchange(1, (1, pass_gate, ()), wait=False).outcomes == ()
    assert caller.exchange(2, ticket=2) is None
    GATE.set()
    assert caller.values(caller.later(2)) == {1: "passed"}


def test_a_long_outcome_is_collected(caller):
    caller.exchange(1, (1, np.ones, (INLINE_BYTES,)), ticket=1)
    (outcome,) = caller.later(1).outcomes
    assert outcome.value is None
    assert outcome.nbytes >= 8 * INLINE_BYTES
    for _ in range(2):
        whole = caller.ask(Collect(caller.conversation, 1))
        np.testing.assert_array_equal(caller.values(whole)[1], np.ones(INLINE_BYTES))
    caller.exchange(2, (2, double, (1,)), ticket=2)
    caller.later(2)
    assert caller.ask(Collect(caller.conversation, 1)) == Forgotten()


def test_a_result_that_is_too_long_is_an_error():
    caller = Caller(result_bytes=1000)
    try:
        caller.exchange(1, (1, np.ones, (1000,)), ticket=1)
        (outcome,) = caller.later(1).outcomes
        assert not outcome.good
        with pytest.raises(ValueError, match=r"returned \d+ bytes: at most 1000 travel"):
            raise load(outcome.value)
    finally:
        caller.desk.close()


def test_a_worker_that_knows_nothing_of_a_conversation_says_so(caller):
    assert caller.ask(Exchange("other", 1, (), (), (), True)) == Forgotten()
    assert caller.ask(Exchange(caller.conversation, 1, (), (), (), True), client="x") == Forgotten()
    assert caller.ask(Exchange(caller.conversation, 7, (), (), (), True)) == Forgotten()
    again = caller.ask(Hello())
    assert isinstance(again, Welcome)
    assert caller.ask(Exchange(caller.conversation, 1, (), (), (), True)) == Forgotten()


def test_what_a_coordinator_left_behind_is_not_run(caller):
    caller.exchange(1, (1, pass_gate, ()), (2, note, (1,)), ticket=1)
    assert caller.desk.leave("chief", True) == []
    assert caller.exchange(2) == Forgotten()
    caller.conversation = caller.ask(Hello()).conversation
    GATE.set()
    caller.exchange(1, (1, double, (2,)), ticket=2)
    assert caller.values(caller.later(2)) == {1: 4}
    assert NOTED == []


def test_two_coordinators_share_a_worker(caller):
    other = caller.ask(Hello(), client="other").conversation
    caller.exchange(1, (1, double, (1,)), ticket=1)
    assert caller.values(caller.later(1)) == {1: 2}
    function = dump(double)
    order = Run("others", 1, (function.digest,), dump(((5,), {})), ())
    assert caller.ask(Exchange(other, 1, (function,), (order,), (), True), 2, "other") is None
    assert caller.values(caller.later(2)) == {1: 10}


def test_a_function_runs_as_its_closure(caller):
    def origins() -> list[tuple[str, int]]:
        origin = current_closure().origin("ps:0")
        return [(origin.series, origin.number >> 16)]

    caller.exchange(1, (7, origins, ()), ticket=1)
    assert caller.values(caller.later(1)) == {7: [("series", 7)]}


def test_what_was_changed_on_its_way_is_not_unpickled(tmp_path):
    evil = dump(Evil(str(tmp_path / "evil")))
    harmless = dump(1)
    with pytest.raises(AuthenticationError, match="changed on its way"):
        load(dataclasses.replace(evil, digest=harmless.digest))
    assert not (tmp_path / "evil").exists()


def test_nothing_is_unpickled_for_a_stranger(tmp_path):
    path = tmp_path / "evil"
    evil = dump(Evil(str(path)))
    order = Run("series", 1, (evil.digest,), evil, ())
    message = records.encode(Exchange("", 1, (evil,), (order,), (), False))
    service = Service(Guard(b"correct horse"), WorkerDesk("worker:0"))
    try:
        transport = LocalTransport(service)
        with pytest.raises(UnknownSessionError):
            transport.call("Call", b"", [b"".join(message)], 1.0)
        with (
            Client(LocalTransport(service), b"wrong horse", "stranger") as stranger,
            pytest.raises(AuthenticationError, match="another secret"),
        ):
            stranger.call(message, 1.0)
        assert not path.exists()
        _run(service, evil)  # Who has the secret may: so the pickle would have made the file.
        assert path.exists()
    finally:
        service.close()


def _run(service: Service, evil: Pickled) -> None:
    with Client(LocalTransport(service), b"correct horse", "chief") as client:
        welcome = decode_worker_reply(client.call(records.encode(Hello()), 10.0), 1000)
        order = Run("series", 1, (evil.digest,), evil, ())
        exchange = Exchange(welcome.conversation, 1, (evil,), (order,), (), True)
        reply = decode_worker_reply(client.call(records.encode(exchange), 10.0), 1 << 20)
        assert not reply.outcomes[0].good


def test_small_and_large_and_odd_arrays_survive():
    values = {
        "rows": np.arange(40_000.0).reshape(200, 200).T,
        "cut": np.arange(100_000)[::3],
        "few": np.float32([1, 2]),
        "text": np.array(["a", None], dtype=object),
        "none": np.zeros((0, 3)),
        "path": Path("x"),
    }
    copies = load(dump(values))
    for name, value in values.items():
        np.testing.assert_array_equal(copies[name], value)
    copies["rows"][0, 0] = 7
    assert values["rows"][0, 0] == 0
