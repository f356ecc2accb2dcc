"""`ClusterCoordinator`: the chief schedules functions on workers that are free.

The chief has one connection to each worker, and one thread per connection that receives outcomes.
The thread that schedules a function or receives an outcome also sends the next function, so it need
not wake another thread.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import logging
import os
import secrets
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

from msgspec.structs import replace

from ndistribute import tree
from ndistribute.cluster.resolvers import ClusterResolver
from ndistribute.coordinator.closures import Closure, ClosureQueue, PerWorkerDataset, RemoteValue
from ndistribute.coordinator.pickling import Pickled, dump, key_of, load, require_cloudpickle
from ndistribute.coordinator.worker import MAX_FUNCTIONS, Forget, Outcome, Run, Stuck, WorkerService
from ndistribute.timeline import recorded
from ndistribute.timers import Attempts
from ndistribute.transport.codec import Decoder, MalformedError
from ndistribute.transport.connection import Connection, ConnectionLostError, connect
from ndistribute.transport.handshake import Hello
from ndistribute.transport.secret import credentials_of
from ndistribute.transport.waiting import WaitReport

_TIMEOUT_SECONDS = 60.0
_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6, 2.0)  # Before reconnecting, by failures in a row.
_CONNECT_SECONDS = 5.0
_END_SECONDS = 6.0
_LONG_SECONDS = 0.02  # Longer closures are not sent in advance.
_MOST_DEPTH = 8
_LONG_BYTES = 65536  # A socket accepts less than this while the peer does not read.
_outcomes: Decoder[Outcome | Stuck] = Decoder(Outcome | Stuck)
_log = logging.getLogger("ndistribute")
Connector = Callable[[], Connection]


class ClusterCoordinator:
    """A coordinator that runs each scheduled function on a worker as soon as one is free.

    Functions may run in any order. The servers apply the updates of a function exactly once, when
    it ends or reads a variable that it updated. If its worker dies, the function runs again on
    another worker, at most 4 times. It must then update the same variables in the same order. A
    process without a cluster is its own worker.

    Args:
        strategy: the strategy of the variables. Its cluster must have workers. This process must be
            its chief, or have no task in it if there is no chief. A strategy has one coordinator:
            until it is closed, a second call returns the same object.
        timeout_seconds: how many seconds functions wait for a worker while none is available; None:
            the timeout of the strategy, or 60 s.

    Raises:
        AuthenticationError: there is no secret.
        MissingDependencyError: cloudpickle is not installed.
        ValueError: the cluster has no workers, or this process is not its chief.

    >>> import ndistribute as nd
    >>> strategy = nd.ParameterServerStrategy()
    >>> with strategy, nd.ClusterCoordinator(strategy) as coordinator:
    ...     squares = [coordinator.schedule(lambda x: x * x, args=(x,)) for x in range(4)]
    ...     coordinator.join()
    ...     coordinator.fetch(squares)
    [0, 1, 4, 9]
    """

    def __new__(cls, strategy: Any, *, timeout_seconds: float | None = None) -> ClusterCoordinator:
        """Return the open coordinator of a strategy, or a new one."""
        known = (each for each in tuple(_coordinators) if each.strategy is strategy)
        return next((each for each in known if each._is_open()), None) or super().__new__(cls)

    def __init__(self, strategy: Any, *, timeout_seconds: float | None = None) -> None:
        if self in _coordinators:
            if timeout_seconds is not None:
                raise ValueError(
                    f"{strategy!r} already has a coordinator: leave out timeout_seconds."
                )
            return
        require_cloudpickle()
        self.strategy = strategy
        """The strategy whose variables the functions use."""
        self._pickled: WeakKeyDictionary[Any, tuple[str, Pickled]] = WeakKeyDictionary()
        timeout = timeout_seconds or getattr(strategy, "timeout_seconds", None) or _TIMEOUT_SECONDS
        connectors = _connectors(strategy.cluster_resolver, timeout)
        self._queue = ClosureQueue(tuple(connectors), timeout)
        self._client_id = f"closures#{secrets.token_hex(8)}"
        self._longest_pause = timeout / 4
        self._links = [
            _Link(self, index, *worker) for index, worker in enumerate(connectors.items())
        ]
        for link in self._links:
            link.start()
        _coordinators.add(self)
        atexit.register(self.close)  # Workers then see a clean end.

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedule a function on a worker, and return a handle to its result at once.

        The call blocks only while 4096 functions, or 1 GiB of arguments, are queued.

        Args:
            fn: the function. It is pickled in the first `schedule` and sent to each worker once, so
                later changes of its state have no effect.
            args: positional arguments. The function waits for each `RemoteValue` among them, and
                gets its value. For the iterator of a per-worker dataset it gets the worker's own
                iterator.
            kwargs: keyword arguments, treated in the same way.

        Returns:
            The handle; `RemoteValue.fetch` returns the result.

        Raises:
            Exception: an earlier function raised it; the queued functions are cancelled.
            RuntimeError: this process is a fork of the one that created the coordinator.
            ValueError: an argument cannot be pickled; the message names it.
            WorkerLostError: no worker was available for too long, or a function ran 4 times and
                lost its worker each time.
        """
        if not callable(fn):
            raise TypeError(f"schedule takes a function, got a {type(fn).__name__}: {fn!r}.")
        if not isinstance(args, tuple | list):
            raise TypeError(f"args is a {type(args).__name__}, not a tuple: write args=(x,).")
        self._queue.check_process()
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        key, function = self._pickled_function(fn, f"the function {name}")
        named = dict(kwargs or {})
        closure = Closure(RemoteValue(self._queue, name), {key: function}, [fn])
        try:
            closure.arguments = closure.dump((tuple(args), named))
        except Exception as error:
            raise _unpicklable(closure, args, named, error) from error
        for value in closure.inputs:
            if value.owner is not self._queue:
                raise ValueError(f"{name} got {value!r} of another coordinator: pass its fetch().")
        self._queue.add(closure)
        self._wake()
        return closure.result

    @recorded(lambda *_, **__: ("wait", ""))
    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions have ended.

        Args:
            timeout: seconds to wait; None: no limit.

        Raises:
            CollectiveTimeoutError: some functions still run after `timeout`; they continue.
            Exception: the first exception of a function, with a note that names its worker. The
                coordinator can be used again.
            RuntimeError, WorkerLostError: as for `schedule`.
        """
        self._queue.check_process()
        self._wake()  # If `schedule` was interrupted.
        self._queue.join(timeout)

    def done(self) -> bool:
        """Return True if all scheduled functions have ended; raise as `join` does."""
        return self._queue.done()

    def fetch(self, value: Any) -> Any:
        """Wait for the `RemoteValue` leaves of a nest, and return the nest with their results.

        Args:
            value: a nest of lists, tuples and dicts; other leaves stay unchanged.
        """
        return tree.map_leaves(lambda x: x.fetch() if isinstance(x, RemoteValue) else x, value)

    def create_per_worker_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Return a dataset that each worker creates for itself; pass its iterator to `schedule`.

        Args:
            dataset: a function that returns a dataset, or a dataset. Each worker calls the function
                when it first uses the dataset; `nd.cluster.worker_index()` returns the worker's
                index there. A dataset is sent to all workers, and each worker gets all of its
                elements. With a `shuffle`, each worker has its own order, even if it has a seed.

        Raises:
            ValueError: the dataset cannot be pickled.
        """
        function = self._pickled_function(dataset, "the dataset")[1]
        return PerWorkerDataset(dataset, function, forget)

    def close(self) -> None:
        """Cancel unfinished functions, and close the connections to the workers.

        A second call does nothing, and neither does a call in a forked process.
        """
        if not self._is_open():
            return
        atexit.unregister(self.close)
        self._queue.close()
        for link in self._links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _is_open(self) -> bool:
        return not self._queue.closing.is_set() and os.getpid() == self._queue.process

    def _wake(self) -> None:
        self._queue.relieve()
        while (worker := self._queue.idle_worker()) is not None:
            self._links[worker].fill()

    def _pickled_function(self, function: Any, what: str) -> tuple[str, Pickled]:
        # Only plain functions are cached; other objects may change between calls.
        plain = isinstance(function, types.FunctionType)
        if plain and (known := self._pickled.get(function)) is not None:
            return known
        try:
            pickled = dump(function)
        except Exception as error:
            raise ValueError(
                f"{what} cannot be sent to workers: {error}. It uses an object that cannot be "
                "pickled: make that object inside the function, or do not use it."
            ) from error
        keyed = key_of(pickled), pickled
        if plain:
            self._pickled[function] = keyed
        return keyed


_coordinators: WeakSet[ClusterCoordinator] = WeakSet()


def forget(key: str) -> None:
    """Tell all workers to drop, before their next function, what they keep under a key."""
    # Without a lock, because finalizers call this at any point.
    for coordinator in tuple(_coordinators):
        for link in coordinator._links:
            link.forgotten.append(key)


class _Link:
    """The connection to one worker: sends closures and receives their outcomes."""

    def __init__(
        self, owner: ClusterCoordinator, index: int, name: str, connector: Connector | None
    ) -> None:
        self._owner, self._queue, self._index = owner, owner._queue, index
        self.name, self._connector = name, connector  # None: the worker is in this process.
        # Held while closures are taken and sent. Reentrant, because a local worker is lost at once.
        self._sending = threading.RLock()
        self._connection: Connection | _LocalConnection | None = None  # None: the worker is away.
        self._depth = 1  # The most closures in flight.
        self._known: dict[str, None] = {}  # The functions that the worker has cached.
        self.forgotten: collections.deque[str] = collections.deque()  # Keys to drop.
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._connector is None:
            self.arrive(_LocalConnection(self))
            return
        serve = functools.partial(self._serve, self._connector)
        self._thread = threading.Thread(target=serve, name=f"ndistribute {self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if (connection := self._connection) is not None:
            connection.close()
        if self._thread is not None:
            self._thread.join(timeout=_END_SECONDS)

    def fill(self, *, may_wait: bool = False) -> None:
        """Send closures up to the limit, on another thread if this one must not block."""
        with self._sending:
            connection = self._connection
            if connection is None:
                return
            try:
                closures = self._queue.take(self._index, self._depth)
                send = functools.partial(self._send, connection, closures)
                if may_wait or self._thread is None or not any(map(_is_long, closures)):
                    send()
                else:  # A stopped worker must not block this thread.
                    threading.Thread(target=send, name="ndistribute sender", daemon=True).start()
            except BaseException as error:
                connection.abort(f"a thread that sent was interrupted by {type(error).__name__}")
                raise

    def finish(self, outcome: Outcome | Stuck) -> None:
        if isinstance(outcome, Stuck):
            self._queue.stick(self._index, outcome.number, outcome.why)
            self._owner._wake()
            return
        if outcome.reports:
            self._owner.strategy.servers.learn(outcome.reports)
        long = outcome.seconds > _LONG_SECONDS
        self._depth = 1 if long else min(2 * self._depth, _MOST_DEPTH)
        result = _exception(outcome) if outcome.trace else outcome.value
        self._queue.finish(self._index, outcome.number, result, outcome.trace)
        self.fill(may_wait=True)
        self._owner._wake()

    send = finish  # For a worker in this process, this is its peer.

    def arrive(self, connection: Connection | _LocalConnection) -> None:
        with self._sending:
            self._known.clear()
            self.forgotten.clear()
            self._depth = 1
            self._connection = connection
            self._queue.arrive(self._index)
        self.fill(may_wait=True)

    def lose(self, problem: Exception) -> None:
        """Return the closures of a lost worker to the queue."""
        with self._sending:
            self._connection = None
            self._queue.lose(self._index, problem)

    def _send(self, connection: Connection | _LocalConnection, closures: Sequence[Closure]) -> None:
        with self._sending, contextlib.suppress(ConnectionLostError, TimeoutError):
            # The receiving thread also detects the loss, and returns the closures.
            if self.forgotten:
                count = len(self.forgotten)
                connection.send(Forget(tuple(self.forgotten.popleft() for _ in range(count))))
            for closure in closures:
                order = Run(
                    self._owner._client_id,
                    closure.number,
                    self._queue.low_water,
                    {k: None if k in self._known else v for k, v in closure.functions.items()},
                    closure.arguments,
                    tuple(_payloads(closure)),
                    dump((closure.attempt, self._owner.strategy)) if closure.attempt > 1 else None,
                )
                try:
                    connection.send(order)
                except ValueError as error:  # The message is too long.
                    self._queue.finish(self._index, closure.number, error)
                    continue
                self._known.update(dict.fromkeys(order.functions))
                while len(self._known) > MAX_FUNCTIONS:
                    del self._known[next(iter(self._known))]

    def _serve(self, connector: Connector) -> None:
        report, closing = WaitReport("the coordinator"), self._queue.closing
        pauses = [min(pause, self._owner._longest_pause) for pause in _PAUSES]
        attempts = Attempts(float("inf"), *pauses, wait=closing.wait)
        for _ in attempts:
            connection: Connection | None = None
            problem: Exception = ConnectionLostError("the coordinator is closing.")
            try:
                connection = connector()
                self.arrive(connection)
                while not closing.is_set():
                    self.finish(connection.receive()[1])
                    attempts.succeed()
            except Exception as error:
                problem = error
                if connection is None:
                    report.tell(f"{self.name} ({problem})")
                else:
                    report = WaitReport("the coordinator")
                    # A new error, because the frames of this one refer to the connection.
                    problem = ConnectionLostError(str(error))
                    connection.abort(str(error))
                    if not isinstance(error, ConnectionLostError | MalformedError):
                        _log.exception("an outcome could not be taken")
            self.lose(problem)
            if connection is not None:
                connection.close()
            self._owner._wake()


def _payloads(closure: Closure) -> list[Pickled]:
    return [value.payload for value in closure.inputs if value.payload is not None]


def _is_long(closure: Closure) -> bool:
    parts = (closure.arguments, *closure.functions.values(), *_payloads(closure))
    return sum(part.nbytes for part in parts) > _LONG_BYTES


class _LocalConnection:
    """The interface of a connection, for a worker in this process."""

    def __init__(self, link: _Link) -> None:
        self._service, self._link = WorkerService(link.name), link
        self.close = self._service.close
        self._service.connected(link)

    def send(self, record: Run | Forget) -> None:
        self._service.handle(self._link, 0, record)

    def abort(self, reason: str) -> None:
        """Send all closures of the worker again, because the last one may not have arrived."""
        self._link.lose(ConnectionLostError(reason))
        self._link.arrive(self)


def _connectors(resolver: ClusterResolver | None, timeout: float) -> dict[str, Connector | None]:
    """Return a function per worker that connects to it, or None for a worker in this process."""
    cluster = None if resolver is None else resolver.cluster_spec()
    if resolver is None or not cluster:
        return {"worker:0": None}
    me = f"{resolver.task_type or 'chief'}:{resolver.task_id or 0}"
    if resolver.task_type not in ("chief", None):
        hint = "Give the cluster a job 'chief', or let each worker run its own loop."
        raise ValueError(f"This process is {me}: a coordinator runs only on the chief. {hint}")
    if "worker" not in cluster.jobs:
        raise ValueError(f"The cluster has no workers: its jobs are {cluster.jobs}.")
    credentials = credentials_of(cluster.addresses())
    name = f"{me}#{secrets.token_hex(6)}"
    hello = Hello(name=name, purpose="coordinator", patience=timeout)

    def connector(index: int) -> Connection:
        address = cluster.task_address("worker", index)
        greeting = replace(hello, audience=f"worker:{index}")
        deadline = time.monotonic() + _CONNECT_SECONDS
        try:
            return connect(address, credentials, greeting, _outcomes, deadline=deadline, macs=True)
        except ConnectionLostError as error:
            raise ConnectionLostError(f"{address}: {error}") from error

    indices = cluster.task_indices("worker")
    return {f"worker:{index}": functools.partial(connector, index) for index in indices}


def _unpicklable(
    closure: Closure, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> ValueError:
    """Return an error that names the argument that cannot be pickled."""
    places = {f"args[{index}]": value for index, value in enumerate(args)}
    places |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
    what = f"the arguments of {closure.result.name}"
    for place, value in places.items():
        try:
            closure.dump(value)
        except Exception as problem:
            what, error = f"{place} of {closure.result.name}, a {type(value).__name__},", problem
            break
    return ValueError(f"{what} cannot be sent to workers: {error}.")


def _exception(outcome: Outcome) -> Exception:
    """Return the exception that a worker sent, or one that describes it."""
    try:
        error = load(outcome.value)
    except Exception as problem:  # For example, its class is unknown here.
        why = traceback.format_exception_only(problem)[-1].strip()
        error = f"{outcome.trace.strip().splitlines()[-1]} (it cannot be made here: {why})"
    return error if isinstance(error, Exception) else RuntimeError(str(error))
