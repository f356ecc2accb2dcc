"""What processes do whose replicas meet through NCCL, for test_nccl_workers.py.

As `NCCL_GROUND` says, over the imitation of CuPy 14 or 13, or over CuPy itself with a GPU for each
process (real).
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import zlib

import numpy as np

import ndistribute as nd
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.devices import as_array, to_host
from tests.gpu.imitation.module import imitated_gpus
from tests.gpu.imitation.nccl import FakeError
from tests.kinds import context, here

OPTIONS = nd.CommunicationOptions(timeout_seconds=40.0)
SHORT = nd.CommunicationOptions(timeout_seconds=0.5)
DTYPES = "bool uint16 int32 float16 float32 complex64".split()
GROUND = os.environ.get("NCCL_GROUND", "14")


_imitation = []


@functools.cache
def library():
    """Put the imitation in the place of CuPy in this process."""
    _imitation.append(imitated_gpus(4, int(GROUND)))  # It lasts as long as the process.
    return _imitation[-1].__enter__().cuda.nccl


@functools.cache
def group(rank):
    """Return a strategy whose replicas are on GPUs of their own."""
    if GROUND != "real":
        library()
    counts = [int(count) for count in os.environ.get("REPLICAS", "1").split(",")]
    first, count = sum(counts[:rank]) if len(counts) > 1 else rank, counts[rank % len(counts)]
    devices = [f"gpu:{first + i}" for i in range(count)]
    return nd.MultiWorkerMirroredStrategy(communication_options=OPTIONS, devices=devices)


def step(rank, body):
    """Return what each replica of this process returned."""
    strategy = group(rank)
    return list(strategy.local_results(strategy.run(lambda: body(context().communicator))))


def numbers(rank, length, dtype):
    """Return numbers whose sums and products every dtype holds exactly."""
    return ((np.arange(length) * 7 + rank * 3) % 4).astype(dtype)


def digest(arrays):
    return zlib.crc32(b"".join(to_host(array).tobytes() for array in arrays))


# What they do while nothing fails; the test says what must come out.


def plain_sum(rank, size):
    return step(rank, lambda c: float(to_host(c.all_reduce("sum", here(np.float64(c.rank))))))


def every_op_and_dtype(rank, size):
    def body(communicator):
        results = []
        for op in ReduceOp:
            for dtype in map(np.dtype, DTYPES):
                for length in (0, 1, 1000):
                    everyone = [numbers(r, length, dtype) for r in range(communicator.size)]
                    own = here(everyone[communicator.rank])
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

    return step(rank, body)


def ragged_rows(rank, size):
    def body(communicator):
        def part(r, axis, dtype):
            shape = [2, 3]
            shape[axis] = 2 * r
            return numbers(r, 6 * r if axis == 0 else 4 * r, dtype).reshape(shape)

        for axis in (0, 1):
            leaves = [here(part(communicator.rank, axis, d)) for d in ("f4", "i1")]
            joined = communicator.all_gather(leaves, axis)
            for whole, dtype in zip(joined, ("f4", "i1"), strict=True):
                parts = [part(r, axis, dtype) for r in range(communicator.size)]
                np.testing.assert_array_equal(to_host(whole), np.concatenate(parts, axis))
        assert communicator.all_gather([], 0) == []
        empty = communicator.all_gather(here(np.zeros((0, 3))), 0)
        assert empty.shape == (0, 3)

    step(rank, body)


def copied_from_each(rank, size):
    def body(communicator):
        for root in range(communicator.size):
            nest = [here(numbers(communicator.rank, n, "f4")) for n in (0, 5, 999)]
            for copied, n in zip(communicator.broadcast(nest, root), (0, 5, 999), strict=True):
                np.testing.assert_array_equal(to_host(copied), numbers(root, n, "f4"))

    step(rank, body)


def updates(rank, size):
    """Return which ranges each replica of this process was given to update."""
    prepared = []

    def prepare():
        prepared.append("once")
        return "ready"

    def body(communicator):
        given = []
        everyone = [numbers(r, 70_001, np.float32) for r in range(communicator.size)]
        expected = reduce_arrays(ReduceOp.MEAN, everyone)

        def update(value, leaf, start, stop, total):
            given.append((value, leaf, start, stop))
            if not leaf:
                np.testing.assert_allclose(to_host(total), expected[start:stop], rtol=1e-6)
            total[...] = 0

        own = [here(a) for a in (everyone[communicator.rank], np.ones(3, "f2"))]
        assert communicator.reduce_update("mean", own, prepare, update) == "ready"
        return given

    results = step(rank, body)
    assert prepared == ["once"]
    return results


def local_meeting(rank, size):
    return step(rank, lambda c: c.merge("merge_call", c.rank, list))


def gpus_connected(rank, size):
    """Return the GPUs that were current when communicators were made, and what became of these."""
    plain_sum(rank, size)
    group(rank).close()
    return [(comm.device, comm.state) for comm in library().comms]


def launches_before_meeting(rank, size):
    """Return what came first, in a call of a group that is connected."""
    plain_sum(rank, size)
    order = []
    made, host = library(), group(rank)._workers.backend
    end, meet = made.groupEnd, host.all_reduce

    def noted(name, function):
        return lambda *args: (order.append(name), function(*args))[1]

    made.groupEnd, host.all_reduce = noted("launch", end), noted("compare", meet)
    try:
        plain_sum(rank, size)
    finally:
        del made.groupEnd, host.all_reduce
    return order


def trained(rank, size, implementation):
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

        def train():
            number = context().replica_id_in_sync_group
            with nd.GradientTape() as tape:
                loss = ((here(np.arange(4.0)[None] + number) @ weights) ** 2).sum()
            gradient = tape.gradient(loss, weights)
            rows = nd.IndexedSlices(here(np.ones((1, 2))), here([number]), (5, 2))
            optimizer.apply_gradients([(gradient, weights), (rows, table)])
            return context().all_reduce("mean", loss)

        losses = [strategy.run(train).values[0] for _ in range(3)]
        return {
            "backend": type(strategy.replica_contexts[0].communicator._backend).__name__,
            "weights": to_host(as_array(weights)),
            "table": to_host(as_array(table)),
            "losses": [float(loss) for loss in losses],
        }


# What goes wrong, and how they use the group again afterwards.


def another_call(rank, size, odd, what):
    """Make the same call as all others, but on one worker."""

    def body(communicator):
        array, op = here(np.ones(1000, np.float32)), "sum"
        if rank == odd:
            if what == "gather":
                communicator.all_gather(array, 0)
            if what in ("gather", "skipped"):
                return
            if what == "error":
                raise ArithmeticError("no such digit")
            array, op = (array[:999], op) if what == "shape" else (array, "max")
        communicator.all_reduce(op, array)

    step(rank, body)


def failing_prepare(rank, size, odd):
    def prepare():
        if rank == odd:
            raise KeyError("no such variable")

    def body(communicator):
        own = [here(np.ones(3))]
        communicator.reduce_update("sum", own, prepare, lambda *_: None)
        communicator.all_reduce("sum", own)

    step(rank, body)


def late(rank, size, missing):
    """Come to a call that the others make with a short timeout; one comes never."""

    def body(communicator):
        if rank != missing:
            communicator.all_reduce("sum", here(np.ones(3)), SHORT)
            return
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            group(rank)._workers.peers.check()
            time.sleep(0.01)

    step(rank, body)


def killed(rank, size, victim, number=signal.SIGKILL):
    """Reduce until one process is gone, or stopped, in the middle of a call of the others."""

    def body(communicator):
        array = here(np.ones(100))
        communicator.all_reduce("sum", array)
        if rank == victim:
            os.kill(os.getpid(), number)
        communicator.all_reduce("sum", array)

    step(rank, body)


def lose_links():
    for comm in library().comms:
        comm.lose_link()


def killed_after_launch(rank, size, victim):
    """Lose a process whose call is known to all, but whose GPU never does its part."""
    if rank == victim:
        lose_links()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    plain_sum(rank, size)


def stuck_gpu(rank, size, victim):
    """Let one GPU do nothing that it is asked for."""
    if rank == victim:
        lose_links()

    def body(communicator):
        communicator.all_reduce("sum", here(np.ones(3)), SHORT)
        communicator.all_reduce("sum", here(np.ones(3)))

    step(rank, body)


def broken_link(rank, size, victim):
    """Let NCCL find an error on one worker, after the launch."""
    if rank == victim:
        for comm in library().comms:
            comm.failure = "remote access"
        lose_links()
    plain_sum(rank, size)


def refused_connection(rank, size, victim):
    library().fail_connecting = "no route to the others" if rank == victim else ""
    try:
        plain_sum(rank, size)
    finally:
        library().fail_connecting = ""


def no_unique_id(rank, size):
    def refuse():
        raise FakeError("no interface")

    library().get_unique_id = refuse
    try:
        plain_sum(rank, size)
    finally:
        del library().get_unique_id


def usable_again(rank, size):
    """Use the group again; a failure that a worker has not heard of is raised by its next step."""
    try:
        return plain_sum(rank, size)
    except nd.DistributeError:
        return plain_sum(rank, size)


def recovered(rank, size):
    """Use the group again; return the sums, and what became of all communicators so far."""
    sums = usable_again(rank, size)
    return sums, [comm.state for comm in library().comms]
