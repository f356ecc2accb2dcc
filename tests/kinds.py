"""The strategies that a contract test runs over, and small helpers for steps on CPUs.

A test that takes the fixture `strategy` runs for every kind and number of replicas; one that needs
replicas which can disagree takes `several`.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from types import CodeType
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import tree
from ndistribute.cluster import resolve
from ndistribute.collective.threads import SMALL_BYTES
from ndistribute.devices import as_array, copy_to
from tests.contract_rows import (
    GPUS,
    STRATEGIES,
    TPUS,
    central,
    cpus,
    ground,
    mirrored,
    served,
    with_host_results,
)
from tests.gpu.imitation.module import imitated_gpus

__all__ = ["central", "cpus", "mirrored", "served"]  # Which tests take from here.

# How the workers meet, and how many devices each of them has, where this process is one that runs
# contract tests: ``auto 1,1 2,1`` are two kinds, the second with two devices on the first worker.
VARIABLE = "CONTRACT_KINDS"
# Whether these devices are GPUs: "imitated" or "real"; they are CPUs otherwise.
GPUS_VARIABLE = "CONTRACT_GPUS"

# No wait of a test may take longer, in seconds.
DEADLINE = 40.0

# So many float64 are reduced by slice owners, not whole by the last replica to arrive.
LARGE = SMALL_BYTES // 8 + 100


def inside_worker() -> bool:
    """Say whether this process is a worker that runs the contract tests."""
    return VARIABLE in os.environ


def worker_kinds() -> dict[str, Callable[[], nd.Strategy]]:
    """Return makers of the strategies that this worker's environment names."""
    how, *layouts = os.environ[VARIABLE].split()
    counts = {layout.replace(",", "-"): tuple(map(int, layout.split(","))) for layout in layouts}
    return {f"{how}-{name}": partial(join, how, count) for name, count in counts.items()}


def join(how: str, counts: tuple[int, ...]) -> nd.MultiWorkerMirroredStrategy:
    """Meet the other workers, each with so many devices."""
    resolver = resolve()
    index = resolver.worker_index
    # A worker that fails must not keep the others waiting.
    options = nd.CommunicationOptions(timeout_seconds=DEADLINE, implementation=how)
    kind, devices = nd.MultiWorkerMirroredStrategy, cpus(counts[index])
    if GPUS_VARIABLE in os.environ:  # Each replica has one of its own.
        kind = with_host_results(kind)
        devices = [f"gpu:{sum(counts[:index]) + i}" for i in range(counts[index])]
    return kind(resolver, options, devices=devices)


def worker_ground() -> AbstractContextManager[Any]:
    """Return what a worker that runs contract tests enters before."""
    imitated = os.environ.get(GPUS_VARIABLE) == "imitated"
    return imitated_gpus(4) if imitated else nullcontext()


# Inside a worker the same tests run over strategies of all workers: `tests/test_over_processes.py`.
SEVERAL = worker_kinds() if inside_worker() else STRATEGIES
ALL = SEVERAL if inside_worker() else {"default": nd.get_strategy, **STRATEGIES}
# The same with those on GPUs; one of them has one replica.
ALL_MEMORIES = SEVERAL if inside_worker() else {**ALL, **GPUS}
SEVERAL_MEMORIES = SEVERAL if inside_worker() else {**STRATEGIES, **GPUS}
SEVERAL_MEMORIES.pop("gpu-second", None)
# With compiled steps: one row runs everything, and the others what depends on the number.
COMPILED = {} if inside_worker() or not find_spec("jax") else TPUS
COMPILED_2 = {kind: make for kind, make in COMPILED.items() if kind == "tpu-2"}


def fixture_over(kinds: Mapping[str, Callable[[], nd.Strategy]], *without: str) -> Any:
    """Return a fixture that makes a strategy of each kind in turn, leaving out what is named."""
    params = [
        pytest.param(kind, marks=pytest.mark.gpu) if kind.startswith("real") else kind
        for kind in kinds
        if kind not in without
    ]

    @pytest.fixture(params=params)
    def made(request: pytest.FixtureRequest) -> Iterator[nd.Strategy]:
        kind, marker = request.param, request.node.get_closest_marker("host_memory")
        if marker and kind in GPUS:
            pytest.skip(f"host memory: {marker.args[0]}")
        if (plain := request.node.get_closest_marker("plain_step")) and kind in TPUS:
            pytest.skip(f"plain steps: {plain.args[0]}")
        with ground(kind), closing(kinds[kind]()) as strategy:
            yield strategy

    return made


strategy = fixture_over(ALL)  # The default one among them.
several = fixture_over(SEVERAL)  # Those of two replicas or more.


@contextmanager
def closing(made: nd.Strategy) -> Iterator[nd.Strategy]:
    """Close a strategy, but for the default one, which belongs to the process."""
    try:
        yield made
    finally:
        if not made.is_default:
            made.close()


def context() -> nd.ReplicaContext:
    """Return this thread's replica; a test that has none fails here."""
    found = nd.get_replica_context()
    assert found is not None
    return found


def rank() -> int:
    return context().replica_id_in_sync_group


def here(nest: Any) -> Any:
    """Return the arrays of a nest in the memory of this replica's device."""
    return tree.map_leaves(lambda array: copy_to(as_array(array), context().device), nest)


def meet() -> Any:
    """Make the simplest collective call."""
    return context().all_reduce("sum", here(1.0))


def replica_ids(strategy: nd.Strategy) -> list[int]:
    """Return the numbers of this process's replicas among all of them."""
    return [replica.replica_id_in_sync_group for replica in strategy.replica_contexts]


def mine(strategy: nd.Strategy, make: Callable[[int], Any] | Sequence[Any]) -> tuple[Any, ...]:
    """Return what belongs to this process's replicas, made from their numbers or out of a list."""
    get = make if callable(make) else make.__getitem__
    return tuple(get(i) for i in replica_ids(strategy))


def each(strategy: nd.Strategy, value: Any) -> tuple[Any, ...]:
    """Return a value once for every replica of this process."""
    return (value,) * len(strategy.devices)


def parts(strategy: nd.Strategy, make: Callable[[int], Any] | Sequence[Any]) -> nd.PerReplica:
    """Return one component for each replica of this process; see `mine`."""
    return nd.PerReplica(mine(strategy, make))


def everyones(strategy: nd.Strategy, make: Callable[[int], Any]) -> list[Any]:
    """Return one component for each replica of all processes."""
    return [make(i) for i in range(strategy.num_replicas_in_sync)]


def one_process(reason: str) -> pytest.MarkDecorator:
    """Leave a test out where replicas are spread over processes, and say why."""
    return pytest.mark.skipif(inside_worker(), reason=f"one process: {reason}")


def host_memory(reason: str) -> pytest.MarkDecorator:
    """Leave out the rows with replicas on GPUs, and say why."""
    return pytest.mark.host_memory(reason)


def plain_step(reason: str) -> pytest.MarkDecorator:
    """Leave out the rows with compiled steps, and say why."""
    return pytest.mark.plain_step(reason)


@contextmanager
def raised_in(
    strategy: nd.Strategy,
    replica: int | None,
    kind: type[BaseException] | tuple[type[BaseException], ...],
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect what a replica raises; in other processes than its own, that a worker was lost.

    Where all replicas raise (None), a process may hear of another's failure before its own.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if inside_worker() and replica is None:
        kinds, match = (*kinds, nd.WorkerLostError), None
    elif inside_worker() and replica not in replica_ids(strategy):
        kinds, match = (nd.WorkerLostError,), None
    with pytest.raises(kinds, match=match) as caught, _meeting_first(strategy):
        yield caught


@contextmanager
def _meeting_first(strategy: nd.Strategy) -> Iterator[None]:
    """Let steps begin with a meeting of the workers, where there are any.

    When all have come, nobody is in an earlier call any more, which a failure could break off.
    """
    if not inside_worker():
        yield
        return
    run = strategy.run

    def meet_and_run(fn: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            meet()
            return fn(*args, **kwargs)

        return run(step, *arguments, **named)

    vars(strategy)["run"] = meet_and_run
    try:
        yield
    finally:
        del vars(strategy)["run"]


def works(strategy: nd.Strategy) -> bool:
    """Say whether a correct step of small and large collectives gives the right values."""
    size = strategy.num_replicas_in_sync

    even = isinstance(strategy, nd.TPUStrategy)  # Its replicas have parts of one shape.

    def step() -> tuple[Any, ...]:
        total = context().all_reduce("sum", {"small": rank(), "large": np.ones(LARGE)})
        rows = np.reshape(rank(), (1,)) if even else np.full(rank(), rank())
        returned = context().merge_call(lambda _, i: i, args=(rank(),))
        return total, context().all_gather(rows, axis=0), returned, rank()

    def is_right(total: Any, rows: Any, returned: Any, number: Any) -> bool:
        return (
            total["small"] == size * (size - 1) // 2
            and bool((total["large"] == size).all())
            and len(rows) == (size if even else size * (size - 1) // 2)
            and bool(returned == number)
        )

    return all(is_right(*results) for results in strategy.local_results(strategy.run(step)))


@contextmanager
def in_thread(fn: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Run a function on another thread beside a ``with`` block; it ends with the block."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(fn)


@contextmanager
def struck_inside(
    action: Callable[[], Any], is_there: Callable[[CodeType], bool]
) -> Iterator[None]:
    """Do something as soon as the main thread is inside of such code."""
    over, main = threading.Event(), threading.main_thread().ident or 0

    def look() -> None:
        while not over.wait(0.0002):
            frame = sys._current_frames().get(main)
            while frame is not None:
                if is_there(frame.f_code):
                    action()
                    return
                frame = frame.f_back

    thread = threading.Thread(target=look, name="striking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(DEADLINE)


def wait_until_in(function: str, idents: Iterable[int | None]) -> None:
    """Wait until each of these threads executes a function of this name, seen in its stack."""
    wanted = list(idents)
    deadline = time.monotonic() + DEADLINE
    pause = threading.Event()
    while time.monotonic() < deadline:
        frames = sys._current_frames()
        current = [frames.get(ident or 0) for ident in wanted]
        if all(frame is not None and frame.f_code.co_name == function for frame in current):
            return
        pause.wait(0.001)
    raise TimeoutError(f"threads {wanted} never came to {function}")


def pool_threads() -> list[threading.Thread]:
    """Return the replica threads that are alive."""
    return [thread for thread in threading.enumerate() if "Strategy(" in thread.name]
