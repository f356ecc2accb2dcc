"""`WorkerService` behind a server: what it runs, for whom, and what it never unpickles."""

from __future__ import annotations

import contextlib
import functools
import gc
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ndistribute.coordinator.closures import keep_until_run
from ndistribute.coordinator.coordinator import ClusterCoordinator, forget
from ndistribute.coordinator.pickling import dump, key_of, load
from ndistribute.coordinator.worker import Outcome, Run, WorkerService, keep
from ndistribute.errors import AuthenticationError
from ndistribute.transport.codec import Decoder, MalformedError
from ndistribute.transport.connection import Connection, ConnectionLostError, connect
from ndistribute.transport.handshake import Hello
from ndistribute.transport.rpc import RpcServer
from ndistribute.transport.secret import Credentials
from tests.coordinator.errands import Evil, double
from tests.faults.tasks import wait_until

pytest.importorskip("cloudpickle")

SECONDS = 50.0
GATE = threading.Event()
BEGUN = threading.Event()
NOTED: list[Any] = []


def pass_gate() -> str:
    BEGUN.set()
    GATE.wait(timeout=SECONDS)
    return "passed"


def note(thing: Any) -> int:
    NOTED.append(thing)
    return len(NOTED)


class Caller:
    """A worker, and whoever connects to it."""

    def __init__(self) -> None:
        self.credentials = Credentials(secrets.token_bytes(32), "job")
        self.service = WorkerService("worker:0")
        services = {"coordinator": self.service}
        self.server = RpcServer("localhost:0", self.credentials, "worker:0", services)

    def connect(self, name: str = "chief:0#1", secret: bytes = b"", **options: bool) -> Connection:
        return connect(
            f"localhost:{self.server.port}",
            Credentials(secret or self.credentials.secret, "job"),
            Hello(name=name, purpose="coordinator", audience="worker:0"),
            Decoder(Outcome),
            deadline=time.monotonic() + SECONDS,
            **{"sealed": True, **options},
        )

    def close(self) -> None:
        self.server.close()
        self.service.close()


@pytest.fixture
def caller() -> Iterator[Caller]:
    for event in (GATE, BEGUN):
        event.clear()
    NOTED.clear()
    with contextlib.closing(Caller()) as caller:
        yield caller
        GATE.set()


def order(number: int, function: Callable[..., Any], *args: Any, known: bool = False) -> Run:
    pickled = dump(function)
    key = key_of(pickled)
    return Run("series", number, 1, {key: None if known else pickled}, dump((args, {})), ())


def value(connection: Connection) -> Any:
    _, outcome = connection.receive(time.monotonic() + SECONDS)
    return load(outcome.value)


def test_outcomes_come_as_they_are_there_and_a_function_is_sent_once(caller):
    with contextlib.closing(caller.connect()) as connection:
        connection.send(order(1, double, 4))
        connection.send(order(2, double, 5, known=True))
        connection.send(order(3, pass_gate))
        assert [value(connection), value(connection)] == [8, 10]
        with pytest.raises(TimeoutError):
            connection.receive(time.monotonic() + 0.05)
        GATE.set()
        assert value(connection) == "passed"


def test_a_result_that_is_too_long_is_an_error(caller, monkeypatch):
    monkeypatch.setattr("ndistribute.coordinator.worker.RESULT_BYTES", 1000)
    with contextlib.closing(caller.connect()) as connection:
        connection.send(order(1, np.ones, 1000))
        with pytest.raises(ValueError, match=r"returned \d+ bytes: at most 1000 travel"):
            raise value(connection)


def test_a_function_that_was_not_sent_is_no_outcome(caller):
    with contextlib.closing(caller.connect()) as connection:
        connection.send(order(1, double, 1, known=True))
        with pytest.raises(MalformedError):
            connection.receive(time.monotonic() + SECONDS)


def test_what_a_coordinator_left_behind_is_not_run(caller):
    with contextlib.closing(caller.connect("chief:0#2")) as other:
        with contextlib.closing(caller.connect()) as connection:
            connection.send(order(1, pass_gate))
            connection.send(order(2, note, 1))
            assert BEGUN.wait(SECONDS)
        wait_until(lambda: len(caller.service._sessions) == 1)
        other.send(order(1, double, 2))
        GATE.set()
        assert value(other) == 4
    assert NOTED == []


def test_nothing_is_unpickled_for_a_stranger(caller, tmp_path):
    path = tmp_path / "evil"
    evil = order(1, double, Evil(str(path)))
    with pytest.raises(AuthenticationError, match="another secret"):
        caller.connect(secret=b"another secret, and a long one")
    with contextlib.closing(caller.connect(sealed=False)) as unsealed:  # Its frames have no MAC.
        for _ in range(2):  # The worker takes the next bytes for the MAC.
            unsealed.send(evil)
        with pytest.raises(ConnectionLostError):
            unsealed.receive(time.monotonic() + SECONDS)
    assert not path.exists()
    with contextlib.closing(caller.connect()) as chief:
        chief.send(evil)
        assert isinstance(value(chief), TypeError)
    assert path.exists()  # Whoever has the secret may: so the pickle would have made the file.


class Shop:
    """Like a strategy: where it is sent, the worker makes one of its own, and keeps it."""

    def __init__(self, token: str) -> None:
        self.token = token

    def __reduce__(self) -> tuple[Any, ...]:
        keep_until_run(self)
        return shop_of, (self.token,)


def shop_of(token: str) -> Shop:
    return keep(token, functools.partial(Shop, f"worker's {token}"), lambda shop: note(shop.token))


def token_of(shop: Shop) -> tuple[str, int]:
    return shop.token, id(shop)


def test_a_worker_drops_what_the_chief_dropped():
    NOTED.clear()
    with ClusterCoordinator(SimpleNamespace(cluster_resolver=None)) as coordinator:
        first, second = Shop("first"), Shop("second")
        made = [coordinator.schedule(token_of, (shop,)) for shop in (first, first, second)]
        one, again, other = coordinator.fetch(made)
        assert one == again
        assert (one[0], other[0]) == ("worker's first", "worker's second")
        coordinator.schedule(token_of, (first,)).fetch()
        forget("first")
        assert coordinator.schedule(double, (1,)).fetch() == 2
        assert NOTED == ["worker's first"]
    assert NOTED == ["worker's first", "worker's second"]
    with pytest.raises(RuntimeError, match="only a function that a ClusterCoordinator sent"):
        shop_of("first")


def test_a_scheduled_function_keeps_what_it_refers_to_until_it_has_run():
    GATE.clear()
    with ClusterCoordinator(SimpleNamespace(cluster_resolver=None)) as coordinator:
        try:
            shop, gone = Shop("kept"), threading.Event()
            weakref.finalize(shop, gone.set)
            coordinator.schedule(pass_gate)
            result = coordinator.schedule(token_of, (shop,))
            del shop
            gc.collect()
            assert not gone.is_set()
        finally:
            GATE.set()
        assert result.fetch(SECONDS)[0] == "worker's kept"
        assert gone.wait(SECONDS)


def test_functions_that_differ_in_a_large_array_alone_are_two(caller):
    def sums(fill: float) -> Callable[[], float]:
        array = np.full(100_000, fill)
        return lambda: float(array.sum())

    with ClusterCoordinator(SimpleNamespace(cluster_resolver=None)) as coordinator:
        results = [coordinator.schedule(sums(fill)) for fill in (1.0, 2.0)]
        assert coordinator.fetch(results) == [100_000.0, 200_000.0]


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
    for name, expected in values.items():
        np.testing.assert_array_equal(copies[name], expected)
    copies["rows"][0, 0] = 7
    assert values["rows"][0, 0] == 0
