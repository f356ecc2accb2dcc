"""A worker of `faults.py`: it steps until a fault hits it or another, and says when it knew.

Requests and answers are lines of JSON over a connection to the parent; times are of the clock that
all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["DEADLY", "FAULTS", "LATE_SECONDS", "main"]

DEADLY = ("killed", "exits", "stopped", "finishes")
FAULTS = ("raises", "other shape", "other op", "skips a call", "late", *DEADLY)

LATE_SECONDS = 0.5
_WAIT_SECONDS = 30.0
_SMALL, _LARGE = 1000, 500_000


def main() -> None:
    """Join the others, and serve requests until the parent closes the connection."""
    import ndistribute as nd

    host, port = os.environ["FAULTS_ADDRESS"].split(":")
    link = socket.create_connection((host, int(port)), timeout=_WAIT_SECONDS)
    link.settimeout(None)

    def answer(**fields: Any) -> None:
        link.sendall(json.dumps(fields).encode() + b"\n")

    options = nd.CommunicationOptions(
        implementation=os.environ["FAULTS_WIRE"], timeout_seconds=_WAIT_SECONDS
    )
    with nd.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
        worker = _Worker(strategy, answer)
        answer(rank=worker.rank, pid=os.getpid())
        worker.recover()
        answer(ready=True)
        for line in link.makefile():
            request = json.loads(line)
            if request["do"] == "fault":
                worker.fault(request["fault"], request["who"], request["steps"])
            else:
                answer(**worker.cost(request["bytes"], request["repetitions"], request["calls"]))


class _Worker:
    def __init__(self, strategy: Any, answer: Callable[..., None]) -> None:
        self._strategy = strategy
        self._answer = answer
        self._workers = strategy._workers
        self.rank: int = self._workers.rank

    def recover(self) -> None:
        """Step until a step succeeds: each failure is told once."""
        import ndistribute as nd

        while True:
            try:
                return self._steps(2)
            except nd.DistributeError as error:
                last = str(error)
                if "start the job again" in last:
                    raise

    def fault(self, fault: str, who: int, steps: int) -> None:
        """Step, let the fault hit the victim, and answer when this process knew of it."""
        import ndistribute as nd

        if self.rank == who:
            self._steps(steps)
            self._be_hit(fault)
        else:
            try:
                self._steps(steps)  # What is told of a fault may overtake the last sum's data.
                while True:
                    self._steps(1, LATE_SECONDS if fault == "late" else _WAIT_SECONDS)
            except nd.DistributeError as error:
                when = time.monotonic()
                self._answer(when=when, error=type(error).__name__)
        if fault not in DEADLY:
            self.recover()
            self._answer(whole=True)

    def cost(self, size: int, repetitions: int, calls: int) -> dict[str, Any]:
        """Time an all-reduce with the calls compared and without, in turns."""
        from ndistribute.collective.backend import Call
        from ndistribute.collective.reduce_op import ReduceOp

        value = np.ones(size // 4, np.float32)
        total = np.empty_like(value)
        call = Call(1, "all_reduce", "SUM", ((value.dtype, value.shape),))
        backend = self._workers.backend
        seconds: dict[str, list[float]] = {"on": [], "off": []}

        def timed(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                backend.all_reduce(call, [value], [total], ReduceOp.SUM, _WAIT_SECONDS)
            return (time.perf_counter() - start) / count

        timed(calls + 2)
        for number in range(repetitions):
            order = ("on", "off") if number % 2 else ("off", "on")
            for way in order:
                if way == "off":
                    with _nothing_compared():
                        seconds[way].append(timed(calls))
                else:
                    seconds[way].append(timed(calls))
        if not (total == self._workers.size).all():
            raise ArithmeticError("the sum is wrong")
        return seconds

    def _be_hit(self, fault: str) -> None:
        import ndistribute as nd

        context = nd.get_replica_context

        def step() -> None:
            if fault == "raises":
                raise ValueError("a bad batch")
            if fault == "other shape":
                context().all_reduce("sum", np.ones(_SMALL + 1))
            if fault == "other op":
                context().all_reduce("max", np.ones(_SMALL))
            if fault == "late":
                self._wait_until_broken()

        self._answer(struck=time.monotonic())
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "exits":
            os._exit(1)
        elif fault == "finishes":
            self._strategy.close()
        else:
            try:
                self._strategy.run(step)
                self._wait_until_broken()
            except (ValueError, nd.DistributeError):
                return

    def _wait_until_broken(self) -> None:
        pause = threading.Event()
        deadline = time.monotonic() + _WAIT_SECONDS
        while self._workers.peers.cause is None and time.monotonic() < deadline:
            pause.wait(0.001)

    def _steps(self, count: int, timeout: float = _WAIT_SECONDS) -> None:
        import ndistribute as nd

        options = nd.CommunicationOptions(timeout_seconds=timeout)

        def step() -> None:
            context = nd.get_replica_context()
            for size in (_SMALL, _LARGE):
                total = context.all_reduce("sum", np.ones(size), options)
                if not (total == context.num_replicas_in_sync).all():
                    raise ArithmeticError("the sum is wrong")

        for _ in range(count):
            self._strategy.run(step)


@contextmanager
def _nothing_compared() -> Iterator[None]:
    """Put a constant in the place of what is told of a call, and nothing in that of comparing."""
    from ndistribute.collective import header, ring, segment

    constant = bytes(header.HEADER_BYTES)
    modules: dict[Any, dict[str, Any]] = {
        segment: {"encode": lambda call, count, step: constant},
        ring: {
            "encode": lambda call, count, step, generation: constant,
            "compare": lambda mine, theirs, my_rank, their_rank: None,
        },
    }
    before = {
        module: {name: getattr(module, name) for name in new} for module, new in modules.items()
    }
    _put(modules)
    try:
        yield
    finally:
        _put(before)


def _put(modules: dict[Any, dict[str, Any]]) -> None:
    for module, functions in modules.items():
        for name, function in functions.items():
            setattr(module, name, function)


if __name__ == "__main__":
    main()
