"""What the processes of the fault tests run, over the strategy; the tests say what must come out.

The victim of a fault strikes itself, from a thread that looks where the main one is: so a fault
hits a process inside a collective, and not most of the time.
"""

import functools
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

import ndistribute as nd
from ndistribute.strategies import replicas
from tests.kinds import context, struck_inside

DEADLINE = 40.0
SMALL, LARGE = 100, 300_000
_COLLECTIVE_FILES = ("shared_memory.py", "ring.py")


@functools.cache
def strategy():
    """Return this process's strategy, made by the first call on all processes."""
    options = nd.CommunicationOptions(
        implementation=os.environ.get("FAULTS_WIRE", "auto"), timeout_seconds=DEADLINE
    )
    replicas = int(os.environ.get("FAULTS_REPLICAS", "1"))
    return nd.MultiWorkerMirroredStrategy(
        communication_options=options, devices=[f"cpu:{k}" for k in range(replicas)]
    )


def peers():
    return strategy()._workers.peers


def total(number=1, length=SMALL, timeout=DEADLINE):
    """Make a sum over all replicas and check each element of it."""
    here = context()
    size = here.num_replicas_in_sync
    own = np.arange(length) + (here.replica_id_in_sync_group + 1) * number
    expected = size * np.arange(length) + size * (size + 1) // 2 * number
    options = nd.CommunicationOptions(timeout_seconds=timeout)
    if not np.array_equal(here.all_reduce("sum", own, options), expected):
        raise ArithmeticError(f"worker {here.replica_id_in_sync_group} got a wrong sum")


def worked(rank, size, steps=3):
    """Say that correct steps give correct sums."""
    for number in range(steps):
        strategy().run(total, args=(number,))
        strategy().run(total, args=(number, LARGE))
    return True


def worked_again(rank, size):
    """Say the same after a failure of which this process may not have heard yet."""
    try:
        return worked(rank, size)
    except nd.DistributeError:
        return worked(rank, size)


def until_told(rank, size, length=SMALL, timeout=DEADLINE):
    """Run steps until one raises, as one of them must."""
    deadline = time.monotonic() + DEADLINE
    number = 0
    while time.monotonic() < deadline:
        number += 1
        strategy().run(total, args=(number, length, timeout))
    raise TimeoutError(f"worker {rank} was told nothing")


def _wait_for(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def broken():
    """Wait until this process knows that another one failed."""
    _wait_for(lambda: peers().has_failure)


def in_collective(code):
    return code.co_filename.endswith(_COLLECTIVE_FILES)


def strike(number, note):
    """Note it, and send this process a signal."""
    Path(note).write_text("now")
    os.kill(os.getpid(), number)


def struck(rank, size, who, moment, number, note):
    """Let one process be struck, and return what the others are told.

    The moments: ``"inside"`` a collective where the victim waits for the others, who come when it
    is struck; ``"amid"`` a collective that all are in; ``"outside"`` of any step.
    """
    strategy()
    if rank == who and moment == "outside":
        strike(number, note)
    elif rank == who:
        with struck_inside(lambda: strike(number, note), in_collective):
            if moment == "inside":
                strategy().run(total, args=(1, LARGE))
            until_told(rank, size, LARGE)
    elif moment == "inside":
        _wait_for(lambda: Path(note).exists() and Path(note).read_text())
    try:
        until_told(rank, size, LARGE)
    except nd.WorkerLostError as error:
        if error.rank == who and rank != who:
            return str(error)
        raise
    return None


def late(rank, size, who):
    """Let one process come too late."""

    def step():
        total()
        if rank == who:
            broken()
        options = nd.CommunicationOptions(timeout_seconds=0.5)
        context().all_reduce("sum", np.ones(4), options=options)

    strategy().run(step)
    strategy().run(total)  # The late one may have found all that it needed.


def finished_early(rank, size, who):
    """Let one process close its strategy while the others go on."""
    worked(rank, size, 1)
    if rank == who:
        strategy().close()
        return
    until_told(rank, size)


def tardy(rank, size, who):
    """Let one process come just when the others ask where it is, 0.2 s after they came."""
    strategy().run(total)
    for number in range(6):
        if rank == who:
            time.sleep(0.2 + number * 0.001)
        strategy().run(total)


def disturbed(rank, size, who, fault, after, length, inside):
    """Let a fault hit one process when it has made some steps, inside a collective or not."""
    if fault == "pause":
        worked(rank, size, 15)
        return
    for number in range(after):
        strategy().run(total, args=(number, length))
    if rank != who:
        until_told(rank, size, length, timeout=0.5 if fault == "late" else DEADLINE)
    elif fault in _STRIKES and inside:
        with struck_inside(_STRIKES[fault], in_collective):
            until_told(rank, size, length)
    elif fault in _STRIKES:
        _STRIKES[fault]()
        until_told(rank, size, length)
    else:
        _disturb_from_inside(fault, after, length)


_STRIKES = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
}


def _disturb_from_inside(fault, after, length):
    def step():
        # Who raises at the end of a step fails nobody: the others would wait for its next one.
        for _ in range(0 if fault in ("skip", "raise") else after % 3):
            total(length=length)
        if fault == "raise":
            raise ValueError("boom")
        if fault == "late":
            broken()
        if fault == "differ":
            context().all_reduce("max", np.ones(7))

    strategy().run(step)
    broken()
    strategy().run(total)


def failed_alone(rank, size, who):
    """Fail on one process in a step, while the others are in none and hear of it in the next."""
    if rank != who:
        broken()
    strategy().run(boom if rank == who else total)


def boom():
    raise ValueError("boom")


def asked_for(rank, size, who):
    """Let one process come so late that the others ask where it is."""
    if rank == who:
        time.sleep(0.3)
    strategy().run(total)


def closed_by_another_thread(rank, size):
    """Close the group while the main thread waits in a collective that nobody else makes."""
    strategy().run(total)
    if rank == 0:
        try:
            with struck_inside(strategy()._workers.peers.close, in_collective):
                strategy().run(total)
        except nd.WorkerLostError as error:
            return str(error)
    return ""


def outlived_by_a_replica(rank, size, who):
    """Give up a replica of one process, which goes on in a later step; return what came out."""
    replicas.GRACE_SECONDS = 0.05
    go_on, over = threading.Event(), threading.Event()

    def failing(_):
        here = context()
        if here.replica_id_in_sync_group // 2 == who:
            if here.local_replica_id == 0:
                raise ArithmeticError("boom")
            try:
                go_on.wait(DEADLINE)
                total()  # Of a step that is over.
            finally:
                over.set()
        total()

    def step(number):
        total(2 * number)
        if number == 1 and rank == who and context().local_replica_id == 0:
            go_on.set()
            over.wait(DEADLINE)
        total(2 * number + 1, LARGE)
        count.assign_add(1.0)

    with strategy().scope():
        count = nd.Variable(0.0, aggregation="sum")
    with suppress(ArithmeticError, nd.WorkerLostError):
        strategy().run(failing, args=(0,))
    for number in range(4):
        strategy().run(step, args=(number,))
    return [float(count)]
