"""What goes wrong in processes with an NCCL group, and how they use it again afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np

from ndistribute.collective.communicator import Communicator
from ndistribute.collective.options import CommunicationOptions
from ndistribute.errors import DistributeError
from tests.collective.fake_nccl import FakeError
from tests.collective.nccl_job import here, job, plain_sum, world


def another_call(rank: int, size: int, odd: int, what: str) -> None:
    """Make the same call as all others, but on one worker."""

    def body(communicator: Communicator) -> None:
        array, op = here(communicator, np.ones(1000, np.float32)), "sum"
        if rank == odd and what == "shape":
            array = array[:999]
        elif rank == odd and what == "dtype":
            array = array.astype(np.int32)
        elif rank == odd and what == "op":
            op = "max"
        elif rank == odd and what == "kind":
            communicator.broadcast(array)
            return
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
        for comm in world().comms:
            comm.lose_link()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    plain_sum(rank, size)


def stuck_gpu(rank: int, size: int, victim: int) -> None:
    """Let one GPU do nothing that it is asked for."""
    if rank == victim:
        made: Any = world()
        for comm in made.comms:
            comm.launch = lambda calls: None

    def body(communicator: Communicator) -> None:
        short = CommunicationOptions(timeout_seconds=0.5)
        communicator.all_reduce("sum", here(communicator, np.ones(3)), short)
        communicator.all_reduce("sum", here(communicator, np.ones(3)))

    job().step(body)


def broken_link(rank: int, size: int, victim: int) -> None:
    """Let NCCL find an error on one worker, after the launch."""
    if rank == victim:
        for comm in world().comms:
            comm.lose_link("remote access")
    plain_sum(rank, size)


def refused_connection(rank: int, size: int, victim: int) -> None:
    world().fail_connecting = rank == victim
    try:
        plain_sum(rank, size)
    finally:
        world().fail_connecting = False


def no_unique_id(rank: int, size: int) -> None:
    def refuse() -> Any:
        raise FakeError("no interface")

    made: Any = world()
    original = made.get_unique_id
    made.get_unique_id = refuse
    try:
        plain_sum(rank, size)
    finally:
        made.get_unique_id = original


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
    return sums, [comm.state for comm in world().comms]
