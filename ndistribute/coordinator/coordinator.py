"""`ClusterCoordinator`: the chief gives functions to whichever worker is free.

The chief has one connection to each worker, and a thread that receives outcomes from it. Whoever
makes work available, a thread that schedules or one that has received an outcome, sends it as well:
there is no other thread to wake.
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

from ndistribute import tree
from ndistribute.cluster.resolvers import ClusterResolver
from ndistribute.coordinator.pickling import Pickled, dump, key_of, load, require_cloudpickle
from ndistribute.coordinator.queue import ClosureQueue
from ndistribute.coordinator.remote_value import Closure, PerWorkerDataset, RemoteValue, dump_for
from ndistribute.coordinator.worker import MAX_FUNCTIONS, Forget, Outcome, Run, WorkerService
from ndistribute.timeline import recorded
from ndistribute.transport.codec import Decoder, MalformedError
from ndistribute.transport.connection import Connection, ConnectionLostError, connect
from ndistribute.transport.handshake import Hello
from ndistribute.transport.secret import credentials_of

_TIMEOUT_SECONDS = 60.0
_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6, 2.0)  # Before a worker is looked for, by failures in a row.
_CONNECT_SECONDS = 5.0
_END_SECONDS = 6.0
_LONG_SECONDS = 0.02  # Beside this a round trip is nothing, so no closure is sent in advance.
_MOST_DEPTH = 8
_LONG_BYTES = 65536  # A socket takes less than this at once, even if nobody reads.
_outcomes: Decoder[Outcome] = Decoder(Outcome)
_log = logging.getLogger("ndistribute")
Connector = Callable[[], Connection]


class ClusterCoordinator:
    """Run functions on workers, in no order, each as soon as a worker is free.

    What a function changes on parameter servers is changed once, when it ends; if its worker dies,
    it runs again elsewhere, but at most 4 times. A process without a cluster is its own worker.

    Args:
        strategy: where the variables are; its cluster has workers, and this process is its chief.
        timeout_seconds: for how long all workers may be away while functions wait; None: as long
            as the strategy waits for servers, else 60 s.

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

    def __init__(self, strategy: Any, *, timeout_seconds: float | None = None) -> None:
        require_cloudpickle()
        self.strategy = strategy
        """The strategy that this coordinator works for."""
        self._pickled: WeakKeyDictionary[Any, tuple[str, Pickled]] = WeakKeyDictionary()
        patience = timeout_seconds or getattr(strategy, "timeout_seconds", None) or _TIMEOUT_SECONDS
        connectors = _connectors(strategy.cluster_resolver)
        self._queue = ClosureQueue(tuple(connectors), patience)
        self._series = f"closures#{secrets.token_hex(8)}"
        self._longest_pause = patience / 4
        self._links = [_Link(self, index, *one) for index, one in enumerate(connectors.items())]
        for link in self._links:
            link.start()
        _coordinators.add(self)
        atexit.register(self.close)  # So that workers see the chief leave, and not die.

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Let a worker call a function, and return at once what stands for the result.

        This waits only while 4096 functions, or 1 GiB of arguments, wait for workers.

        Args:
            fn: sent to each worker once, as it is when it is first scheduled.
            args: for the function. A `RemoteValue` in them becomes its value, for which the
                function waits; the iterator of a per-worker dataset becomes the worker's own.
            kwargs: likewise.

        Raises:
            Exception: what an earlier function has raised; those that no worker had are cancelled.
            RuntimeError: this process is a fork of the one that made the coordinator.
            ValueError: something can not be pickled; it says what.
            WorkerLostError: no worker was there for too long, or a function was run 4 times and
                its worker was lost each time.
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
            closure.arguments = dump_for(closure, (tuple(args), named))
        except Exception as error:
            raise _unpicklable(closure, args, named, error) from error
        for value in closure.inputs:
            if value.owner is not self._queue:
                raise ValueError(f"{name} got {value!r} of another coordinator: fetch it before.")
        self._queue.add(closure)
        self._wake()
        return closure.result

    @recorded(lambda *_, **__: ("wait", ""))
    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions are over.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            CollectiveTimeoutError: they were not over in time; they go on.
            Exception: the first one that a function raised, with a note that says where. The
                coordinator can be used afterwards.
            RuntimeError, WorkerLostError: as `schedule`.
        """
        self._queue.check_process()
        self._wake()  # Nobody did if the call that scheduled something was interrupted.
        self._queue.join(timeout)

    def done(self) -> bool:
        """Return True if all scheduled functions are over; raise what `join` would raise."""
        return self._queue.done()

    def fetch(self, value: Any) -> Any:
        """Return a structure with the results in place of its `RemoteValue` leaves.

        Args:
            value: lists, tuples and dicts of them; other leaves stay.
        """
        return tree.map_leaves(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, value
        )

    def create_per_worker_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Return a dataset that each worker makes for itself; give its `iter` to `schedule`.

        Args:
            dataset: a function that returns one, called on each worker when that first needs it
                (`nd.cluster.worker_index` says there which one it is), or a dataset that is sent.

        Raises:
            ValueError: it can not be pickled.
        """
        return PerWorkerDataset(self._pickled_function(dataset, "the dataset")[1], forget)

    def close(self) -> None:
        """Cancel what is not over, and let the workers go.

        A second call does nothing, nor does one in a fork of this process.
        """
        if self._queue.closing.is_set() or os.getpid() != self._queue.process:
            return
        atexit.unregister(self.close)
        self._queue.close()
        for link in self._links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wake(self) -> None:
        """Give work to workers that have none."""
        while (worker := self._queue.idle_worker()) is not None:
            self._links[worker].fill()

    def _pickled_function(self, function: Any, what: str) -> tuple[str, Pickled]:
        # Only a plain function is the same thing next time; an object may have changed.
        plain = isinstance(function, types.FunctionType)
        if plain and (found := self._pickled.get(function)) is not None:
            return found
        try:
            pickled = dump(function)
        except Exception as error:
            raise ValueError(
                f"{what} can not be sent to workers: {error}. Leave out what it refers to that can "
                "not be pickled, or make it inside of the function."
            ) from error
        found = key_of(pickled), pickled
        if plain:
            self._pickled[function] = found
        return found


_coordinators: WeakSet[ClusterCoordinator] = WeakSet()


def forget(key: str) -> None:
    """Let all workers drop, before their next function, what they `keep` under a key."""
    # No lock is taken, for a finalizer that calls this may run in the middle of anything.
    for coordinator in tuple(_coordinators):
        for link in coordinator._links:
            link.forgotten.append(key)


class _Link:
    """Keep one worker busy: send it closures, and take their outcomes."""

    def __init__(
        self, owner: ClusterCoordinator, index: int, name: str, connector: Connector | None
    ) -> None:
        self._owner, self._queue, self._index = owner, owner._queue, index
        self.name, self._connector = name, connector  # Without one the worker is in this process.
        # Closures are taken and sent under it. Reentrant, for a local worker is lost at once.
        self._sending = threading.RLock()
        self._connection: Connection | _LocalConnection | None = None  # While it is away.
        self._depth = 1  # How many closures it may have.
        self._known: dict[str, None] = {}  # The functions that the worker keeps, as it does.
        self.forgotten: collections.deque[str] = collections.deque()  # What it is to drop.
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
        """Send the worker as much as it may have now, on another thread if this must not wait."""
        with self._sending:
            connection = self._connection
            if connection is None:
                return
            try:
                closures = self._queue.take(self._index, self._depth)
                send = functools.partial(self._send, connection, closures)
                if may_wait or self._thread is None or not any(map(_is_long, closures)):
                    send()
                else:  # Were the worker stopped, this thread would serve nobody else.
                    threading.Thread(target=send, name="ndistribute sender", daemon=True).start()
            except BaseException as error:
                connection.abort(f"a thread that sent was interrupted by {type(error).__name__}")
                raise

    def finish(self, outcome: Outcome) -> None:
        if outcome.reports:
            self._owner.strategy.servers.learn(outcome.reports)
        long = outcome.seconds > _LONG_SECONDS
        self._depth = 1 if long else min(2 * self._depth, _MOST_DEPTH)
        result = _exception(outcome) if outcome.trace else outcome.value
        self._queue.finish(self._index, outcome.number, result, outcome.trace)
        self.fill(may_wait=True)
        self._owner._wake()

    send = finish  # To a worker in this process it is the other end of a connection.

    def arrive(self, connection: Connection | _LocalConnection) -> None:
        with self._sending:
            self._known.clear()
            self.forgotten.clear()
            self._depth = 1
            self._connection = connection
            self._queue.arrive(self._index)
        self.fill(may_wait=True)

    def lose(self, problem: Exception) -> None:
        """Give back what the worker had, which is away, or still away."""
        with self._sending:
            self._connection = None
            self._queue.lose(self._index, problem)

    def _send(self, connection: Connection | _LocalConnection, closures: Sequence[Closure]) -> None:
        with self._sending, contextlib.suppress(ConnectionLostError, TimeoutError):
            # The thread that receives sees a loss too, and gives all back.
            if self.forgotten:
                count = len(self.forgotten)
                connection.send(Forget(tuple(self.forgotten.popleft() for _ in range(count))))
            for closure in closures:
                order = Run(
                    self._owner._series,
                    closure.number,
                    self._queue.low_water,
                    {k: None if k in self._known else v for k, v in closure.functions.items()},
                    closure.arguments,
                    tuple(_payloads(closure)),
                )
                try:
                    connection.send(order)
                except ValueError as error:  # It is too long.
                    self._queue.finish(self._index, closure.number, error)
                    continue
                self._known.update(dict.fromkeys(order.functions))
                while len(self._known) > MAX_FUNCTIONS:
                    del self._known[next(iter(self._known))]

    def _serve(self, connector: Connector) -> None:
        failures = 0
        while not self._queue.closing.is_set():
            connection: Connection | None = None
            problem: Exception = ConnectionLostError("the coordinator is closing.")
            try:
                connection = connector()
                self.arrive(connection)
                while not self._queue.closing.is_set():
                    self.finish(connection.receive()[1])
                    failures = 0
            except Exception as error:
                problem = error
                if connection is not None:
                    # A new error, for it is kept, and the frames of this one hold the connection.
                    problem = ConnectionLostError(str(error))
                    connection.abort(str(error))
                    if not isinstance(error, ConnectionLostError | MalformedError):
                        _log.exception("an outcome could not be taken")
            self.lose(problem)
            if connection is not None:
                connection.close()
            self._owner._wake()
            pause = _PAUSES[min(failures, len(_PAUSES) - 1)]
            failures += 1
            self._queue.closing.wait(timeout=min(pause, self._owner._longest_pause))


def _payloads(closure: Closure) -> list[Pickled]:
    return [value.payload for value in closure.inputs if value.payload is not None]


def _is_long(closure: Closure) -> bool:
    """Return True if a socket might not take all that has to be sent at once."""
    parts = (closure.arguments, *closure.functions.values(), *_payloads(closure))
    return sum(part.nbytes for part in parts) > _LONG_BYTES


class _LocalConnection:
    """Carry records to a worker in this process, by calls."""

    def __init__(self, link: _Link) -> None:
        self._service, self._link = WorkerService(link.name), link
        self.close = self._service.close
        self._service.connected(link)

    def send(self, record: Run | Forget) -> None:
        self._service.handle(self._link, 0, record)

    def abort(self, reason: str) -> None:
        """Send again all that the worker has: nobody knows whether the last record was sent."""
        self._link.lose(ConnectionLostError(reason))
        self._link.arrive(self)


def _connectors(resolver: ClusterResolver | None) -> dict[str, Connector | None]:
    """Return by their names how to connect to workers; None for one in this process."""
    cluster = None if resolver is None else resolver.cluster_spec()
    if resolver is None or not cluster:
        return {"worker:0": None}
    me = f"{resolver.task_type}:{resolver.task_id}"
    if resolver.task_type != "chief":
        raise ValueError(
            f"This process is {me}: a coordinator runs on the chief alone. Give the cluster a job "
            "'chief', or let each worker run its own loop."
        )
    if "worker" not in cluster.jobs:
        raise ValueError(f"The cluster has no workers: its jobs are {cluster.jobs}.")
    credentials = credentials_of(cluster.addresses())
    name = f"{me}#{secrets.token_hex(6)}"

    def connector(index: int) -> Connection:
        return connect(
            cluster.task_address("worker", index),
            credentials,
            Hello(name=name, purpose="coordinator", audience=f"worker:{index}"),
            _outcomes,
            deadline=time.monotonic() + _CONNECT_SECONDS,
            sealed=True,
        )

    indices = cluster.task_indices("worker")
    return {f"worker:{index}": functools.partial(connector, index) for index in indices}


def _unpicklable(
    closure: Closure, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> ValueError:
    """Return the error that says which argument can not be sent."""
    places = {f"args[{index}]": value for index, value in enumerate(args)}
    places |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
    what = f"the arguments of {closure.result.name}"
    for place, value in places.items():
        try:
            dump_for(closure, value)
        except Exception as problem:
            what, error = f"{place} of {closure.result.name}, a {type(value).__name__},", problem
            break
    return ValueError(f"{what} can not be sent to workers: {error}.")


def _exception(outcome: Outcome) -> Exception:
    """Return the exception that a worker sent, or one that says what it was."""
    try:
        error = load(outcome.value)
    except Exception as problem:  # Its class is not known here, say.
        why = traceback.format_exception_only(problem)[-1].strip()
        error = f"{outcome.trace.strip().splitlines()[-1]} (it can not be made here: {why})"
    return error if isinstance(error, Exception) else RuntimeError(str(error))
