"""What processes do whose replicas meet through NCCL, for test_nccl_workers.py.

As `NCCL_GROUND` says, over the imitation of CuPy 14 or 13, or over CuPy itself with a GPU for each
process (real).
"""

import functools
import os
import signal
import threading
import time

import numpy as np

import ndistribute as nd
from ndistribute.collective.backend import Update
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.devices import to_host
from tests.gpu.imitation.module import imitated_gpus
from tests.gpu.imitation.nccl import FakeError
from tests.kinds import context, here

OPTIONS = nd.CommunicationOptions(timeout_seconds=40.0)
SHORT = nd.CommunicationOptions(timeout_seconds=0.5)
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


# What they do while nothing fails; the test says what must come out.


def plain_sum(rank, size):
    return step(rank, lambda c: float(to_host(c.all_reduce("sum", here(np.float64(c.rank))))))


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
        assert communicator.reduce_update("mean", own, Update(prepare, update)) == "ready"
        return given

    results = step(rank, body)
    assert prepared == ["once"]
    return results


def local_meeting(rank, size):
    return step(rank, lambda c: c.merge("merge_call", c.rank, list))


def backend_name(rank, size, implementation, device=""):
    """Return how replicas meet which are on GPUs of their own, or all on one device."""
    if GROUND != "real":
        library()
    own = [f"gpu:{rank}"] if GROUND == "real" else [f"gpu:{2 * rank}", f"gpu:{2 * rank + 1}"]
    options = nd.CommunicationOptions(timeout_seconds=40.0, implementation=implementation)
    devices = [device] if device else own
    with nd.MultiWorkerMirroredStrategy(communication_options=options, devices=devices) as strategy:
        return type(strategy.replica_contexts[0].communicator._backend).__name__


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
        communicator.reduce_update("sum", own, Update(prepare, lambda *_: None))
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


def no_unique_id(rank, size, victim):
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
