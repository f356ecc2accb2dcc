"""What a worker does for coordinators: run their functions, one at a time, and tell the outcome.

A coordinator sends `Run` and `Forget` over its connection, and the worker pushes an `Outcome` for
each `Run`, in the same order. The connection is the whole conversation: with its end the worker
drops what that coordinator sent. What a function changes on servers goes out under its number, so
it is changed once, however often and wherever the function is run.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from ndistribute.coordinator.pickling import Pickled, dump, load
from ndistribute.coordinator.remote_value import load_arguments
from ndistribute.parameter_server.closure import closure
from ndistribute.parameter_server.messages import Report
from ndistribute.transport.codec import MalformedError, Record

__all__ = ["MAX_FUNCTIONS", "Forget", "Outcome", "Run", "WorkerService", "keep"]

MAX_FUNCTIONS = 256
"""So many functions a worker keeps for a coordinator; the oldest goes first, on both sides."""
RESULT_BYTES = 256 << 20
_TRACE_CHARACTERS = 8192
_END_SECONDS = 2.0
_log = logging.getLogger("ndistribute")


class Run(Record, frozen=True):
    """Run a function; answered by an `Outcome`.

    Args:
        series: the coordinator's name for all its closures, for the servers.
        number: of the closure; the same however often it is sent to workers.
        low_water: the lowest number of a closure of the series that is not over.
        keys: of the function, and of those that make the datasets in the arguments.
        functions: those of them that this connection has not carried yet, by their keys.
        arguments: its args and kwargs.
        inputs: the results of other closures that stand in the arguments.
    """

    series: str
    number: int
    low_water: int
    keys: tuple[str, ...]
    functions: dict[str, Pickled]
    arguments: Pickled
    inputs: tuple[Pickled, ...]


class Forget(Record, frozen=True):
    """Drop what was kept under some keys: datasets, iterators, and what `keep` made."""

    keys: tuple[str, ...]


class Outcome(Record, frozen=True):
    """Say what a closure did.

    Args:
        number: of the closure.
        good: whether it returned.
        value: the result, or the exception.
        seconds: how long it took.
        trace: where the exception was raised, in words.
        reports: how many updates the servers had made when they made the closure's.
    """

    number: int
    good: bool
    value: Pickled
    seconds: float
    trace: str = ""
    reports: tuple[Report, ...] = ()


class _Session:
    """Hold what belongs to the connection of one coordinator."""

    current: _Session | None = None  # Whose closure runs in this process.

    def __init__(self) -> None:
        self.functions: dict[str, Callable[[], Any]] = {}
        self.over = False
        # Only the thread that runs closures uses these: things, and what drops them.
        self._kept: dict[str, tuple[Any, Callable[[Any], object]]] = {}

    def keep(
        self,
        key: str,
        make: Callable[[], Any],
        drop: Callable[[Any], object] = lambda thing: None,
    ) -> Any:
        if key not in self._kept:
            self._kept[key] = make(), drop
        return self._kept[key][0]

    def forget(self, keys: Iterable[str] | None = None) -> None:
        """Drop what stands under some keys; None: all."""
        for key in list(self._kept) if keys is None else keys:
            thing, drop = self._kept.pop(key, (None, bool))
            try:
                drop(thing)
            except Exception:
                _log.exception("a %s could not be dropped", type(thing).__name__)


def keep(key: str, make: Callable[[], Any], drop: Callable[[Any], object]) -> Any:
    """Return what a worker has under a key for the coordinator whose function it runs or loads.

    Args:
        key: no other thing of the coordinator has it.
        make: called with nothing when it is first asked for.
        drop: called with the thing when the coordinator forgets the key, or leaves.

    Raises:
        RuntimeError: this process runs no coordinator's function now.
    """
    session = _Session.current
    if session is None:
        raise RuntimeError(
            "only a function that a ClusterCoordinator sent to this worker can make this here."
        )
    return session.keep(key, make, drop)


class WorkerService:
    """Answer coordinators: run their closures, one at a time, on one thread for all of them.

    It implements `rpc.Service` for connections of the purpose "coordinator".

    Args:
        name: how this worker is called.
        result_bytes: the longest result.
    """

    requests = Run | Forget
    sealed = True

    def __init__(self, name: str, result_bytes: int = RESULT_BYTES) -> None:
        self._name = name
        self._result_bytes = result_bytes
        self._lock = threading.Lock()
        self._sessions: dict[Any, _Session] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def connected(self, peer: Any) -> None:
        """Begin with a coordinator."""
        self._sessions[peer] = _Session()

    def handle(self, peer: Any, call: int, request: Run | Forget) -> None:
        """Queue what a request asks.

        Raises:
            MalformedError: it names a function that did not come over this connection.
        """
        session = self._sessions[peer]
        if isinstance(request, Forget):
            self._submit(functools.partial(session.forget, request.keys))
            return
        known = session.functions
        for key, pickled in request.functions.items():
            known[key] = functools.cache(functools.partial(load, pickled))
        if not known.keys() >= set(request.keys):
            raise MalformedError(f"{peer.name} means a function that it has not sent.")
        functions = {key: known[key] for key in request.keys}
        while len(known) > MAX_FUNCTIONS:
            del known[next(iter(known))]
        self._submit(functools.partial(self._run, peer, session, request, functions))

    def disconnected(self, peer: Any, died: bool) -> None:
        """Drop what a coordinator sent; what runs for it now ends by itself."""
        session = self._sessions.pop(peer, None)
        if session is not None:
            session.over = True
            session.functions.clear()
            if self._thread is not None:  # Else nothing was made for it.
                self._submit(session.forget)

    def close(self) -> None:
        """Run nothing any more; what runs now has a few seconds to end."""
        for peer in list(self._sessions):
            self.disconnected(peer, died=False)
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout=_END_SECONDS)

    def _submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    name = f"ndistribute {self._name} closures"
                    self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                    self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # The next job may be another coordinator's.
                _log.exception("%s failed beside the function that it ran", self._name)

    def _run(
        self, peer: Any, session: _Session, order: Run, functions: dict[str, Callable[[], Any]]
    ) -> None:
        if not session.over:
            peer.send(_run(order, functions, session, self._result_bytes))


_alone = threading.Lock()  # Two workers of one process, as in tests, take turns: see `closure`.


def _run(
    order: Run, functions: dict[str, Callable[[], Any]], session: _Session, limit: int
) -> Outcome:
    """Run a closure, and return what it did; this never raises."""

    def resolve(kind: str, *keys: Any) -> Any:
        if kind == "value":
            return load(order.inputs[keys[0]])
        if kind == "iterator":
            dataset, key = keys
            return session.keep(key, lambda: iter(dataset))
        made = functions[keys[0]]()
        return session.keep(keys[1], made if callable(made) else lambda: made)

    begun = time.perf_counter()
    with _alone:
        _Session.current = session
        try:
            function = functions[order.keys[0]]()
            args, kwargs = load_arguments(order.arguments, resolve)
            with closure(order.series, order.number, order.low_water) as running:
                result = _pickled(function(*args, **kwargs), limit)
            seconds, reports = time.perf_counter() - begun, tuple(running.reports.values())
            return Outcome(order.number, True, result, seconds, reports=reports)
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))[-_TRACE_CHARACTERS:]
            seconds = time.perf_counter() - begun
            return Outcome(order.number, False, _portable(error, limit), seconds, trace)
        finally:
            _Session.current = None


def _pickled(result: Any, limit: int) -> Pickled:
    try:
        pickled = dump(result)
    except Exception as error:
        raise ValueError(
            f"The function returned a {type(result).__name__}, which can not be pickled "
            f"({error}). Return plain values or arrays."
        ) from error
    if pickled.nbytes > limit:
        raise ValueError(
            f"The function returned {pickled.nbytes} bytes: at most {limit} travel. Return less, "
            "or write it to a variable or a file."
        )
    return pickled


def _portable(error: BaseException, limit: int) -> Pickled:
    """Return an exception such that it can be raised elsewhere."""
    if isinstance(error, Exception):
        try:
            pickled = dump(error)
            if pickled.nbytes <= limit and isinstance(load(pickled), Exception):
                return pickled
        except Exception:  # It can not be made from its args, or holds what can not be pickled.
            pass
    # Its own text may be what can not be made.
    text = "".join(traceback.format_exception_only(error)).strip()
    return dump(RuntimeError(text[:_TRACE_CHARACTERS]))
