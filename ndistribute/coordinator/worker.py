"""The worker of a coordinator: runs functions one at a time, and sends their outcomes.

A coordinator sends `Run` and `Forget` over its connection. The worker sends an `Outcome` for each
`Run`, in the same order; it sends a `Stuck` before it if it does not reach a server. When the
connection ends, the worker drops all objects of the coordinator. Each update that a function sends
to a server carries the function's number and its own, so all attempts together make each update
once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ndistribute.cluster.resolvers import ClusterResolver, enter_task, worker_index
from ndistribute.coordinator.pickling import Pickled, dump, load
from ndistribute.data import Dataset, DistributedDataset
from ndistribute.data.pipeline import seeds_of
from ndistribute.parameter_server.client import closure
from ndistribute.parameter_server.messages import Report
from ndistribute.task.server import SERVICES, ServedTask, TaskService
from ndistribute.timeline import recorded
from ndistribute.transport.codec import MalformedError, Record

MAX_FUNCTIONS = 256
"""The most functions that a worker caches per coordinator; both drop the oldest first."""
RESULT_BYTES = 256 << 20
_TRACE_CHARACTERS = 8192
# The C library reuses up to twice the largest freed block. Without this, the arrays of each step
# are new pages, which took a sixth of a step of an MLP.
_FREED_BYTES = 24 << 20
_SHUTDOWN_SECONDS = 2.0
_log = logging.getLogger("ndistribute")
Loader = Callable[[], Any]


class Run(Record, frozen=True):
    """Run a function; the reply is an `Outcome`."""

    client_id: str  # The client id of the coordinator's closures.
    number: int  # The closure, the same in every attempt.
    low_water: int  # The lowest number of an unfinished closure.
    # By key: the function, and those that create datasets; None if it was sent before.
    functions: dict[str, Pickled | None]
    arguments: Pickled
    inputs: tuple[Pickled, ...]  # Results of other closures in the arguments.
    again: Pickled | None = None  # If it may have run before: the attempt, and the strategy.


class Forget(Record, frozen=True):
    """Drop the objects that are kept under these keys: datasets, iterators and others."""

    keys: tuple[str, ...]


class Outcome(Record, frozen=True):
    """The outcome of a closure."""

    number: int
    value: Pickled  # The result, or the exception.
    seconds: float
    trace: str = ""  # The traceback; empty if the function returned.
    reports: tuple[Report, ...] = ()  # The totals of the servers after its updates.


class Stuck(Record, frozen=True):
    """A closure waits for a server that this worker does not reach, and keeps waiting."""

    number: int
    why: str  # The server, and why the worker does not reach it.


class _Session:
    """The objects that belong to the connection of one coordinator."""

    current: _Session | None = None  # The session of the running closure.

    def __init__(self) -> None:
        self.functions: dict[str, Loader] = {}
        self.over = False
        # Only the thread that runs closures uses these: objects, and functions that drop them.
        self.objects: dict[str, tuple[Any, Callable[[Any], object] | None]] = {}
        self.inputs: tuple[Pickled, ...] = ()  # The values of the running closure, as below.
        self.running: dict[str, Loader] = {}

    def forget(self, keys: Iterable[str] | None = None) -> None:
        """Drop the objects under these keys; None: all objects."""
        for key in list(self.objects) if keys is None else keys:
            thing, drop = self.objects.pop(key, (None, None))
            try:
                if drop is not None:
                    drop(thing)
            except Exception:
                _log.exception("a %s could not be dropped", type(thing).__name__)


def keep(key: str, make: Loader, drop: Callable[[Any], object] | None = None) -> Any:
    """Return the object that the worker keeps under a key; create it at the first call."""
    objects = _session().objects
    if key not in objects:
        objects[key] = make(), drop
    return objects[key][0]


def kept_dataset(function_key: str, key: str) -> Any:
    """Return this worker's own dataset, with its own order; create it at the first call."""
    # All datasets of these bytes share one object. Its seeds would change twice, so this is a copy.
    load_anew = inspect.unwrap(_session().running[function_key])

    def make() -> Any:
        made = load_anew()
        if callable(made):
            return made()
        for seeds in seeds_of(made._node) if isinstance(made, Dataset | DistributedDataset) else ():
            seeds.fold(worker_index())
        return made

    return keep(key, make)


def input_value(index: int) -> Any:
    """Return the result of another closure that is an input of the running one."""
    return load(_session().inputs[index])


def _session() -> _Session:
    if _Session.current is None:
        why = "only a function that a ClusterCoordinator sent to this worker can make this here."
        raise RuntimeError(why)
    return _Session.current


class WorkerService(TaskService):
    """Run the closures of all coordinators, one at a time; a service of its task."""

    requests: Any = Run | Forget
    macs = True

    def __init__(self, name: str, task: ClusterResolver | None = None) -> None:
        self._name = name
        self._task = task  # The task of this process, set when a coordinator connects.
        self._sessions: dict[Any, _Session] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread_name = f"ndistribute {name} closures"
        self._thread = threading.Thread(target=self._work, name=thread_name, daemon=True)
        self._thread.start()

    def connected(self, peer: Any) -> None:
        if self._task is not None:
            enter_task(self._task)
        self._sessions[peer] = _Session()

    def handle(self, peer: Any, call: int, request: Run | Forget) -> None:
        """Queue a request; raise `MalformedError` if its function was never sent."""
        session = self._sessions[peer]
        if isinstance(request, Forget):
            self._jobs.put(functools.partial(session.forget, request.keys))
            return
        known = session.functions
        for key, pickled in request.functions.items():
            if pickled is not None:
                known[key] = functools.cache(functools.partial(load, pickled))
        if not known.keys() >= request.functions.keys():
            raise MalformedError(f"{peer.name} refers to a function that it has not sent.")
        functions = {key: known[key] for key in request.functions}
        while len(known) > MAX_FUNCTIONS:
            del known[next(iter(known))]
        self._jobs.put(functools.partial(self._run, peer, session, request, functions))

    def disconnected(self, peer: Any, died: bool) -> None:
        """Drop the objects of a coordinator; its running closure ends by itself."""
        if (session := self._sessions.pop(peer, None)) is not None:
            session.over = True
            self._jobs.put(session.forget)

    def close(self) -> None:
        """Run no more closures, and wait a few seconds for the running one."""
        for peer in list(self._sessions):
            self.disconnected(peer, died=False)
        self._jobs.put(None)
        self._thread.join(timeout=_SHUTDOWN_SECONDS)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # The next job may belong to another coordinator.
                _log.exception("%s failed outside the function that it ran", self._name)
            del job  # Release the arguments while no closure comes.

    def _run(self, peer: Any, session: _Session, order: Run, functions: dict[str, Loader]) -> None:
        """Run a closure, unless its coordinator has left, and send the outcome."""
        if session.over:
            return
        begun, trace = time.perf_counter(), ""
        reports: tuple[Report, ...] = ()
        with _one_at_a_time:
            _Session.current, session.inputs, session.running = session, order.inputs, functions
            try:
                value, reports = self._call(peer, order, next(iter(functions.values())))
            except BaseException as error:
                trace = "".join(traceback.format_exception(error))[-_TRACE_CHARACTERS:]
                value = self._dump_error(error)
            finally:
                _Session.current = None
                session.inputs, session.running = (), {}
        peer.send(Outcome(order.number, value, time.perf_counter() - begun, trace, reports))

    @recorded(lambda *_: ("compute", ""))
    def _call(self, peer: Any, order: Run, function: Loader) -> tuple[Pickled, tuple[Report, ...]]:
        called = function()
        args, kwargs = load(order.arguments)
        with closure(order.client_id, order.number, order.low_water) as running:
            running.stuck = lambda why: peer.send(Stuck(order.number, why))
            if order.again is not None:
                running.begin_again(*load(order.again))
            value = self._dump(called(*args, **kwargs))
        return value, tuple(running.reports.values())

    def _dump(self, result: Any) -> Pickled:
        try:
            pickled = dump(result)
        except Exception as error:
            raise ValueError(
                f"The function returned a {type(result).__name__}, which cannot be pickled "
                f"({error}). Return plain values or arrays."
            ) from error
        if pickled.nbytes > RESULT_BYTES:
            raise ValueError(
                f"The function returned {pickled.nbytes} bytes: at most {RESULT_BYTES} can be "
                "sent. Return less, or write it to a variable or a file."
            )
        return pickled

    def _dump_error(self, error: BaseException) -> Pickled:
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                return self._dump(error)
        text = "".join(traceback.format_exception_only(error)).strip()
        return dump(text[:_TRACE_CHARACTERS])


def _serve(task: ServedTask) -> WorkerService | None:
    if task.job != "worker":
        return None
    me = ClusterResolver(task.cluster, task.job, task.index)
    if "chief" in task.cluster.jobs:
        enter_task(me)
    np.empty(_FREED_BYTES, np.uint8)  # Freed at once, without touching its pages.
    return WorkerService(task.name, me)


SERVICES["coordinator"] = _serve
_one_at_a_time = threading.Lock()  # Two workers in one process take turns; see `closure`.
