"""What processes do whose replicas meet through NCCL, for test_nccl_workers.py.

As `NCCL_GROUND` says, over the imitation of CuPy 14 or 13, or over CuPy itself with a GPU for each
process (real).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute.collective import select
from ndistribute.collective.communicator import CommunicationOptions, Communicator
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.nccl import make_nccl_backends
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.collective.threads import Rendezvous, ThreadBackend
from ndistribute.collective.workers import ReplicaGroup, Workers
from ndistribute.device import Device, as_array, copy_to, to_host
from ndistribute.errors import DistributeError
from ndistribute.stream import Stream
from tests.collective.backend_calls import joined_peers
from tests.gpu.imitation.module import modules
from tests.gpu.imitation.nccl import FakeError, FakeNccl
from tests.gpu.imitation.world import set_world

OPTIONS = CommunicationOptions(timeout_seconds=40.0)
DTYPES = "bool uint16 int32 float16 float32 complex64".split()
GROUND = os.environ.get("NCCL_GROUND", "14")


@functools.cache
def library() -> FakeNccl:
    """Put the imitation in the place of CuPy in this process."""
    world, found = modules(4, int(GROUND))
    sys.modules.update(found)
    set_world(world)
    nccl: FakeNccl = found["cupy.cuda.nccl"]
    return nccl


class Job:
    """The replicas of this process in a group with those of the others."""

    def __init__(self) -> None:
        peers = joined_peers()
        counts = [int(count) for count in os.environ.get("REPLICAS", "1").split(",")]
        count = counts[peers.rank % len(counts)]
        if GROUND != "real":
            library()
        first = sum(counts[r % len(counts)] for r in range(peers.rank)) if GROUND == "real" else 0
        devices = [Device(f"gpu:{first + i}") for i in range(count)]
        host = select._process_backend(peers, CommunicationOptions(), "TF_CONFIG" not in os.environ)
        self.workers = Workers(peers, host, devices, OPTIONS)
        self.streams = [Stream(device) for device in devices]
        rendezvous = Rendezvous(count)
        backends = make_nccl_backends(rendezvous, self.streams, self.workers)
        communicators = []
        for index, backend in enumerate(backends):
            local = ThreadBackend(rendezvous, self.streams, index, owner=0, owners=1)
            communicators.append(Communicator(backend, OPTIONS, local=local))
        self.group = ReplicaGroup(
            communicators, rendezvous, self.streams, self.workers, backends[0].close
        )
        self.threads = ThreadPoolExecutor(count)

    def step(self, body: Callable[[Communicator], Any]) -> list[Any]:
        """Run a step on each replica of this process, as a strategy does."""
        self.group.begin()
        try:
            futures = [
                self.threads.submit(self._replica, index, body)
                for index in range(len(self.streams))
            ]
            wait(futures, timeout=50.0)
            return [future.result(timeout=0.0) for future in futures]
        finally:
            self.group.end()

    def _replica(self, index: int, body: Callable[[Communicator], Any]) -> Any:
        stream = self.streams[index]
        try:
            with stream.use():
                result = body(self.group.communicators[index])
                stream.synchronize()
            self.group.leave(index)
        except BaseException as error:
            self.group.abort(error)
            raise
        return result


@functools.cache
def job() -> Job:
    return Job()


def here(communicator: Communicator, array: Any) -> Any:
    """Return a host array on a replica's device."""
    return copy_to(np.asarray(array), job().streams[communicator.local_rank].device)


def numbers(rank: int, length: int, dtype: Any) -> Any:
    """Return numbers whose sums and products every dtype holds exactly."""
    return ((np.arange(length) * 7 + rank * 3) % 4).astype(dtype)


def digest(arrays: Any) -> int:
    return zlib.crc32(b"".join(to_host(array).tobytes() for array in arrays))


# What they do while nothing fails; the test says what must come out.


def plain_sum(rank: int, size: int) -> list[float]:
    return job().step(lambda c: float(to_host(c.all_reduce("sum", here(c, np.float64(c.rank))))))


def every_op_and_dtype(rank: int, size: int) -> list[int]:
    def body(communicator: Communicator) -> int:
        results = []
        for op in ReduceOp:
            for dtype in map(np.dtype, DTYPES):
                for length in (0, 1, 1000):
                    everyone = [numbers(r, length, dtype) for r in range(communicator.size)]
                    own = here(communicator, everyone[communicator.rank])
                    total = to_host(communicator.all_reduce(op, own))
                    if op is ReduceOp.MEAN and dtype.kind in "iub":
                        everyone = [part.astype(np.float64) for part in everyone]
                    expected = reduce_arrays(op, everyone)
                    assert total.dtype == expected.dtype
                    np.testing.assert_allclose(
                        total.astype(complex), expected.astype(complex), rtol=1e-2
                    )
                    results.append(total)
        return digest(results)

    return job().step(body)


def ragged_rows(rank: int, size: int) -> None:
    def body(communicator: Communicator) -> None:
        def part(r: int, axis: int, dtype: str) -> Any:
            shape = [2, 3]
            shape[axis] = 2 * r
            return numbers(r, 6 * r if axis == 0 else 4 * r, dtype).reshape(shape)

        for axis in (0, 1):
            leaves = [here(communicator, part(communicator.rank, axis, d)) for d in ("f4", "i1")]
            joined = communicator.all_gather(leaves, axis)
            for whole, dtype in zip(joined, ("f4", "i1"), strict=True):
                parts = [part(r, axis, dtype) for r in range(communicator.size)]
                np.testing.assert_array_equal(to_host(whole), np.concatenate(parts, axis))
        assert communicator.all_gather([], 0) == []
        empty = communicator.all_gather(here(communicator, np.zeros((0, 3))), 0)
        assert empty.shape == (0, 3)

    job().step(body)


def copied_from_each(rank: int, size: int) -> None:
    def body(communicator: Communicator) -> None:
        for root in range(communicator.size):
            nest = [here(communicator, numbers(communicator.rank, n, "f4")) for n in (0, 5, 999)]
            for copied, n in zip(communicator.broadcast(nest, root), (0, 5, 999), strict=True):
                np.testing.assert_array_equal(to_host(copied), numbers(root, n, "f4"))

    job().step(body)


def updates(rank: int, size: int) -> list[list[Any]]:
    """Return which ranges each replica of this process was given to update."""
    prepared: list[str] = []

    def prepare() -> str:
        prepared.append("once")
        return "ready"

    def body(communicator: Communicator) -> list[Any]:
        given = []
        everyone = [numbers(r, 70_001, np.float32) for r in range(communicator.size)]
        expected = reduce_arrays(ReduceOp.MEAN, everyone)

        def update(value: str, leaf: int, start: int, stop: int, total: Any) -> None:
            given.append((value, leaf, start, stop))
            if not leaf:
                np.testing.assert_allclose(to_host(total), expected[start:stop], rtol=1e-6)
            total[...] = 0

        own = [here(communicator, a) for a in (everyone[communicator.rank], np.ones(3, "f2"))]
        assert communicator.reduce_update("mean", own, prepare, update) == "ready"
        return given

    results = job().step(body)
    assert prepared == ["once"]
    return results


def local_meeting(rank: int, size: int) -> list[list[int]]:
    return job().step(lambda c: c.merge("merge_call", c.rank, list))


def gpus_connected(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return which GPUs were current when communicators were made, and which should have been."""
    plain_sum(rank, size)
    comms = library().comms[-len(job().streams) :]
    return [comm.device for comm in comms], [stream.device.index for stream in job().streams]


def launches_before_meeting(rank: int, size: int) -> list[str]:
    """Return what came first, in a call of a group that is connected."""
    plain_sum(rank, size)
    order: list[str] = []
    made, host = library(), job().workers.backend
    end, meet = made.groupEnd, host.all_reduce
    untold: Any = (made, host)

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            order.append(name)
            return function(*args)

        return run

    untold[0].groupEnd, untold[1].all_reduce = noted("launch", end), noted("compare", meet)
    try:
        plain_sum(rank, size)
    finally:
        del untold[0].groupEnd, untold[1].all_reduce
    return order


def closed(rank: int, size: int) -> list[str]:
    """Return what became of the communicators when the group was closed."""
    plain_sum(rank, size)
    job().group.close()
    return [comm.state for comm in library().comms]


def trained(rank: int, size: int, implementation: str) -> dict[str, Any]:
    """Train a matrix and rows of a table; return how replicas meet, and what came of it."""
    if GROUND != "real":
        library()
    options = nd.CommunicationOptions(timeout_seconds=40.0, implementation=implementation)
    own = [f"gpu:{rank}"] if GROUND == "real" else [f"gpu:{2 * rank}", f"gpu:{2 * rank + 1}"]
    devices = os.environ["DEVICES"].split(",") if "DEVICES" in os.environ else own
    with nd.MultiWorkerMirroredStrategy(communication_options=options, devices=devices) as strategy:
        with strategy.scope():
            weights = nd.Variable(np.ones((4, 2)) * (1 + rank))
            table = nd.Variable(np.ones((5, 2)))
            optimizer = nd.optimizers.SGD(0.01, momentum=0.9)

        def step() -> Any:
            context = nd.get_replica_context()
            assert context is not None
            number = context.replica_id_in_sync_group
            features = copy_to(np.arange(4.0)[None] + number, context.device)
            with nd.GradientTape() as tape:
                loss = ((features @ weights) ** 2).sum()
            gradient = tape.gradient(loss, weights)
            where = copy_to(np.array([number]), context.device)
            rows = IndexedSlices(copy_to(np.ones((1, 2)), context.device), where, (5, 2))
            optimizer.apply_gradients([(gradient, weights), (rows, table)])
            return context.all_reduce("mean", loss)

        losses = [strategy.run(step).values[0] for _ in range(3)]
        return {
            "backend": type(strategy.replica_contexts[0].communicator._backend).__name__,
            "weights": to_host(as_array(weights)),
            "table": to_host(as_array(table)),
            "losses": [float(loss) for loss in losses],
        }


# What goes wrong, and how they use the group again afterwards.


def another_call(rank: int, size: int, odd: int, what: str) -> None:
    """Make the same call as all others, but on one worker."""

    def body(communicator: Communicator) -> None:
        array, op = here(communicator, np.ones(1000, np.float32)), "sum"
        if rank == odd and what == "shape":
            array = array[:999]
        elif rank == odd and what == "op":
            op = "max"
        elif rank == odd and what == "gather":
            communicator.all_gather(array, 0)
            return
        elif rank == odd and what == "skipped":
            return
        elif rank == odd and what == "error":
            raise ArithmeticError("no such digit")
        communicator.all_reduce(op, array)

    job().step(body)


def failing_prepare(rank: int, size: int, odd: int) -> None:
    def prepare() -> None:
        if rank == odd:
            raise KeyError("no such variable")

    def body(communicator: Communicator) -> None:
        own = [here(communicator, np.ones(3))]
        communicator.reduce_update("sum", own, prepare, lambda *_: None)
        communicator.all_reduce("sum", own)

    job().step(body)


def late(rank: int, size: int, missing: int, seconds: float) -> None:
    """Come to a call that the others make with a short timeout; one comes never."""

    def body(communicator: Communicator) -> None:
        if rank != missing:
            short = CommunicationOptions(timeout_seconds=seconds)
            communicator.all_reduce("sum", here(communicator, np.ones(3)), short)
            return
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            job().workers.peers.check()
            time.sleep(0.01)

    job().step(body)


def killed(rank: int, size: int, victim: int, number: int = signal.SIGKILL) -> None:
    """Reduce until one process is gone, or stopped, in the middle of a call of the others."""

    def body(communicator: Communicator) -> None:
        array = here(communicator, np.ones(100))
        communicator.all_reduce("sum", array)
        if rank == victim:
            os.kill(os.getpid(), number)
        communicator.all_reduce("sum", array)

    job().step(body)


def killed_after_launch(rank: int, size: int, victim: int) -> None:
    """Lose a process whose call is known to all, but whose GPU never does its part."""
    if rank == victim:
        for comm in library().comms:
            comm.lose_link()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    plain_sum(rank, size)


def stuck_gpu(rank: int, size: int, victim: int) -> None:
    """Let one GPU do nothing that it is asked for."""
    if rank == victim:
        for comm in library().comms:
            comm.lose_link()

    def body(communicator: Communicator) -> None:
        short = CommunicationOptions(timeout_seconds=0.5)
        communicator.all_reduce("sum", here(communicator, np.ones(3)), short)
        communicator.all_reduce("sum", here(communicator, np.ones(3)))

    job().step(body)


def broken_link(rank: int, size: int, victim: int) -> None:
    """Let NCCL find an error on one worker, after the launch."""
    if rank == victim:
        for comm in library().comms:
            comm.failure = "remote access"
            comm.lose_link()
    plain_sum(rank, size)


def refused_connection(rank: int, size: int, victim: int) -> None:
    library().fail_connecting = "no route to the others" if rank == victim else ""
    try:
        plain_sum(rank, size)
    finally:
        library().fail_connecting = ""


def no_unique_id(rank: int, size: int) -> None:
    def refuse() -> Any:
        raise FakeError("no interface")

    made: Any = library()
    made.get_unique_id = refuse
    try:
        plain_sum(rank, size)
    finally:
        del made.get_unique_id


def usable_again(rank: int, size: int) -> list[float]:
    """Make the group whole again and use it.

    A failure that a worker has not heard of yet is raised by its next step.
    """
    try:
        return plain_sum(rank, size)
    except DistributeError:
        return plain_sum(rank, size)


def recovered(rank: int, size: int) -> tuple[list[float], list[str]]:
    """Use the group again; return the sums, and what became of all communicators so far."""
    sums = usable_again(rank, size)
    return sums, [comm.state for comm in library().comms]
