"""A process that ends is known at once, a stopped one after a while, and a busy one lives."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ndistribute.transport.connection import Connection
from ndistribute.transport.failure_detector import (
    FailureDetector,
    detector,
    probe_when_idle,
    silence_seconds,
)
from tests.processes import wait_until
from tests.transport.ends import SECONDS, Child, Echo, one_end, pair, serving, sockets

SILENCE = 1.6
ENVIRON = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(SILENCE)}
CALL = "client.call(Note('here'), 10).text"


@pytest.fixture
def job(request) -> Iterator[tuple[Echo, Child]]:
    """Yield a service, and a process that is its client."""
    environ = {**ENVIRON, "NDISTRIBUTE_UNIX_SOCKETS": getattr(request, "param", "1")}
    with serving(environ=environ) as (echo, address), Child(environ) as child:
        child.run(f"client = client_of({address!r})")
        assert child.run(CALL) == "here"
        yield echo, child


@pytest.mark.parametrize("job", ["0", "1"], ids=["tcp", "unix"], indirect=True)
def test_a_process_that_is_stopped_is_lost_after_the_set_time_and_not_before(job):
    echo, child = job
    stopped = time.monotonic()
    child.signal(signal.SIGSTOP)
    wait_until(lambda: echo.gone)
    _, died, when = echo.gone[0]
    assert died
    assert when - stopped >= SILENCE * 0.8
    child.signal(signal.SIGCONT)
    assert child.run(CALL) == "here"  # It comes back as on a new connection.
    assert len(echo.here) > 1


def test_a_process_that_lets_none_of_its_threads_run_for_some_beats_lives(job):
    echo, child = job
    child.run("import ctypes")
    # This call of the C library does not release the interpreter's lock.
    began = time.monotonic()
    child.run(f"ctypes.PyDLL(None).usleep({int(SILENCE * 0.6e6)})")
    assert time.monotonic() - began >= SILENCE * 0.6
    assert child.run(CALL) == "here"
    assert len(echo.here) == 1
    assert not echo.gone


def test_a_process_that_was_stopped_itself_does_not_blame_the_others(job):
    """After a pause of its own it hears first what came meanwhile."""
    echo, child = job
    with serving() as (patient, address):
        child.run(f"other = client_of({address!r})")
        assert child.run(CALL.replace("client", "other")) == "here"
        child.signal(signal.SIGSTOP)
        wait_until(lambda: echo.gone)
        child.signal(signal.SIGCONT)
        assert child.run(CALL.replace("client", "other")) == "here"
        assert len(patient.here) == 1


def test_what_is_no_time_is_an_error_where_a_server_or_a_connection_is_made(monkeypatch):
    text, environ = "0", {"NDISTRIBUTE_HEARTBEAT_SECONDS": "0"}
    for wrong in ("-1", "0.001", "inf", "nan", "soon"):
        with pytest.raises(ValueError, match=r"must be a number of seconds, at least 0\.01"):
            silence_seconds({"NDISTRIBUTE_HEARTBEAT_SECONDS": wrong})
    with pytest.raises(ValueError, match="NDISTRIBUTE_HEARTBEAT_SECONDS"), serving(environ=environ):
        pass
    monkeypatch.setenv("NDISTRIBUTE_HEARTBEAT_SECONDS", text)
    one, other = sockets()
    with other, pytest.raises(ValueError, match="NDISTRIBUTE_HEARTBEAT_SECONDS"):
        one_end(one, "a")
    assert one.fileno() == -1


class Watched:
    """What the detector calls, in place of a connection."""

    beat_within = 0.08

    def __init__(self, own: FailureDetector, last: bool = False) -> None:
        self.ticks = 0
        self._own, self._last = own, last

    def tick(self, now: float, excused: bool) -> None:
        self.ticks += 1
        if self._last:
            self._own.forget(self)
        raise LookupError("a fault of one")


def test_a_fault_of_one_connection_does_not_stop_the_heartbeats_of_the_others(caplog):
    own = FailureDetector()
    watched = [Watched(own), Watched(own)]
    for one in watched:
        own.watch(one)
    wait_until(lambda: min(one.ticks for one in watched) > 3)
    for one in watched:
        own.forget(one)
    assert "could not be watched" in caplog.text
    assert own._thread is None
    own.watch(last := Watched(own, last=True))  # It is forgotten on the detector's own thread.
    wait_until(lambda: own._thread is None)
    assert last.ticks == 1


def test_what_is_collected_in_the_middle_of_watch_ends_no_thread_that_is_needed():
    """The new connection was watched by nobody then."""
    own = FailureDetector()

    class Late(Watched):
        def __hash__(self) -> int:  # Called in the middle, as a finalizer may be.
            own.forget(gone)
            return id(self)

    gone, late = Watched(own), Late(own)
    own.watch(late)
    wait_until(lambda: late.ticks > 1)
    own.forget(late)


def test_garbage_is_closed_on_a_thread_of_its_own_whatever_it_was_found_in():
    own, done = FailureDetector(), threading.Event()
    one, garbage = Watched(own), Watched(own)
    for each in (one, garbage):
        own.watch(each)

    def close() -> None:
        own.forget(garbage)
        done.set()

    with own._lock, ThreadPoolExecutor(1) as pool:  # As in the middle of `watch`.
        pool.submit(own.close_soon, close).result(SECONDS)
    assert done.wait(SECONDS)
    own.forget(one)
    own.close_soon(done.clear)  # Nothing is connected, so nothing is in the way.
    assert not done.is_set()


def test_nothing_is_kept_alive_by_being_watched_and_one_thread_serves_all():
    with pair() as one, pair() as other:
        threads = os.listdir("/proc/self/task")
        with pair():
            assert len(os.listdir("/proc/self/task")) == len(threads)
        assert all(isinstance(end, Connection) for end in detector._watched)
        assert len(detector._watched) == 4
        del one, other
    assert detector._thread is None


def test_a_time_that_is_too_long_for_the_kernel_is_shortened(monkeypatch):
    for never in ("1e6", "1e12", "1e300"):
        monkeypatch.setenv("NDISTRIBUTE_HEARTBEAT_SECONDS", never)
        silence = silence_seconds()
        with socket.create_server(("127.0.0.1", 0)) as sock:
            probe_when_idle(sock, silence)
        assert 2 * 86400 < silence < threading.TIMEOUT_MAX
