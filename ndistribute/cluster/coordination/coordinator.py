"""`ClusterCoordinator`: the chief gives functions to whichever worker is free."""

from __future__ import annotations

import atexit
import os
import secrets
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from ndistribute import tree
from ndistribute.cluster.coordination import standins
from ndistribute.cluster.coordination.closures import MOST_INPUTS, Closure
from ndistribute.cluster.coordination.dispatch import Dispatch
from ndistribute.cluster.coordination.per_worker import PerWorkerDataset, Registry
from ndistribute.cluster.coordination.pickles import Pickled, dump, require
from ndistribute.cluster.coordination.remote_value import RemoteValue
from ndistribute.cluster.coordination.worker_clients import connect_workers
from ndistribute.cluster.coordination.worker_link import WorkerLink
from ndistribute.cluster.links.totals import Report
from ndistribute.cluster.protocol.spans import Span
from ndistribute.cluster.seconds import seconds_of

__all__ = ["ClusterCoordinator"]

_TIMEOUT_SECONDS = 60.0


class ClusterCoordinator:
    """Run functions on workers, in no order, each as soon as a worker is free.

    What a function changes on parameter servers is changed once, when it ends; if its worker dies,
    it runs again elsewhere. A process without a cluster is its own worker.

    Args:
        strategy: where the variables are; its cluster has workers, and this process is its chief.
        timeout_seconds: for how long all workers may be away while functions wait; None: as long
            as the strategy waits for servers, else 60 s.

    Raises:
        AuthenticationError: there is no secret.
        MissingDependencyError: cloudpickle or gRPC is not installed.
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
        require()
        self._strategy = strategy
        silence = seconds_of(os.environ, "NDISTRIBUTE_HEARTBEAT_SECONDS", 10.0)
        series = f"closures#{secrets.token_hex(8)}"
        clients = connect_workers(strategy.cluster_resolver)
        patience = timeout_seconds or getattr(strategy, "timeout_seconds", None) or _TIMEOUT_SECONDS

        def acknowledge(ended: Sequence[Span]) -> None:
            if strategy.servers is not None:
                strategy.servers.acknowledge(series, ended)

        def learn(reports: Sequence[Report]) -> None:
            if reports:
                strategy.servers.learn(reports)

        self._dispatch = Dispatch(tuple(clients), patience, acknowledge)
        self._links = [
            WorkerLink(index, name, client, self._dispatch, series, learn, silence)
            for index, (name, client) in enumerate(clients.items())
        ]
        self._registry = Registry(self._forget)
        self._pickled: weakref.WeakKeyDictionary[Callable[..., Any], Pickled]
        self._pickled = weakref.WeakKeyDictionary()
        for link in self._links:
            link.start()
        atexit.register(self.close)  # So that workers see the chief leave, and not die.

    @property
    def strategy(self) -> Any:
        """Return the strategy that this coordinator works for."""
        return self._strategy

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
            Exception: what a function that was scheduled before has raised. Those that no worker
                had yet are cancelled then, and nothing runs any more.
            ValueError: something can not be pickled; it says what.
            WorkerLostError: no worker was there for too long.
        """
        if not callable(fn):
            raise TypeError(f"schedule takes a function, got a {type(fn).__name__}: {fn!r}.")
        if not isinstance(args, tuple | list):
            raise TypeError(f"args is a {type(args).__name__}, not a tuple: write args=(x,).")
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        function = self._pickled_function(fn, f"the function {name}")
        named = dict(kwargs or {})
        with standins.collecting() as collector:
            try:
                arguments = dump((tuple(args), named))
            except Exception as error:
                raise _unpicklable(name, args, named, error) from error
        result = RemoteValue(self._dispatch, name)
        inputs, datasets = tuple(collector.values), tuple(collector.functions)
        self._check_inputs(name, inputs)
        self._dispatch.add(
            Closure(name, function, datasets, arguments, inputs, collector.kept, result)
        )
        return result

    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions are over.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            CollectiveTimeoutError: they were not over in time; they go on.
            Exception: the first one that a function raised, with a note that says where. The
                coordinator can be used afterwards.
            WorkerLostError: no worker was there for too long.
        """
        self._dispatch.join(timeout)

    def done(self) -> bool:
        """Say whether all scheduled functions are over; raise what `join` would raise."""
        return self._dispatch.done()

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
        return PerWorkerDataset(self._registry, self._pickled_function(dataset, "the dataset"))

    def close(self) -> None:
        """Cancel what is not over, and let the workers go; a second call does nothing."""
        if self._dispatch.closing.is_set():
            return
        atexit.unregister(self.close)
        self._dispatch.close()
        for link in self._links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def _forget(self, number: int) -> None:
        for link in self._links:
            link.forgotten.append(number)

    def _pickled_function(self, function: Any, what: str) -> Pickled:
        # Only a plain function is the same thing next time; an object may have changed.
        plain = isinstance(function, types.FunctionType)
        found = self._pickled.get(function) if plain else None
        if found is None:
            try:
                found = dump(function)
            except Exception as error:
                raise ValueError(
                    f"{what} can not be sent to workers: {error}. Leave out what it refers to "
                    "that can not be pickled, or make it inside of the function."
                ) from error
            if plain:
                self._pickled[function] = found
        return found

    def _check_inputs(self, name: str, inputs: Sequence[RemoteValue]) -> None:
        if len(inputs) > MOST_INPUTS:
            raise ValueError(
                f"{name} got {len(inputs)} results of other functions, and at most {MOST_INPUTS} "
                "travel together: combine them in several steps."
            )
        for value in inputs:
            if not value.belongs_to(self._dispatch):
                raise ValueError(f"{name} got {value!r} of another coordinator: fetch it before.")


def _unpicklable(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> ValueError:
    """Return the error that says which argument can not be sent."""
    places = {f"args[{index}]": value for index, value in enumerate(args)}
    places |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
    for place, value in places.items():
        try:
            with standins.collecting():
                dump(value)
        except Exception as problem:
            return ValueError(
                f"{place} of {name}, a {type(value).__name__}, can not be sent to workers: "
                f"{problem}."
            )
    return ValueError(f"the arguments of {name} can not be sent to workers: {error}.")
