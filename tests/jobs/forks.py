"""A worker that forks while it trains, and says what became of its updates and of the forks."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import ndistribute as nd

ENDS = ("_exit", "close", "own", "return")


def main() -> int:
    """Train on one thread, fork on another, print what came of it; a fork returns its own."""
    refused = True
    with contextlib.closing(
        nd.ParameterServerStrategy(devices=["cpu:0", "cpu:1"])
    ) as strategy:  # A fork is in no scope of it, and makes a strategy of its own.
        with strategy.scope():
            weights, count = nd.Variable(np.zeros(20_000)), nd.Variable(0.0)
            optimizer = nd.optimizers.SGD(1.0)
        over, acknowledged = threading.Event(), [0]

        def train() -> None:
            while not over.is_set():
                optimizer.apply_gradients([(np.ones(20_000), weights)])
                strategy.run(lambda: None)
                count.assign_add(1.0)
                acknowledged[0] += 1

        def make() -> None:
            with strategy.scope():
                nd.Variable(1.0)

        def refuses() -> bool:
            works: tuple[Callable[[], object], ...] = (
                count.numpy,
                lambda: weights[3],
                lambda: count.assign(100.0),
                lambda: strategy.run(lambda: None),
                lambda: optimizer.apply_gradients([(np.ones(20_000), weights)]),
                make,
            )
            return all(map(_is_refused, works))

        thread = threading.Thread(target=train)
        thread.start()
        codes = []
        for end in ENDS:
            _wait_for(lambda seen=acknowledged[0]: acknowledged[0] > seen + 5)
            child = os.fork()
            if not child:
                refused = refuses()
                if end == "_exit":
                    os._exit(0 if refused else 1)
                if end == "close":
                    strategy.close()
                if end == "own":
                    refused = refused and _sees_training()
                return 0 if refused else 1
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        _wait_for(lambda seen=acknowledged[0]: acknowledged[0] > seen + 5)
        over.set()
        thread.join()
        found = [float(count), -float(weights[0]), -float(weights[-1]), optimizer.iterations]
    print(json.dumps({"codes": codes, "acknowledged": acknowledged[0], "found": found}))
    return 0


def _sees_training() -> bool:
    """Return True if a strategy that a fork makes for itself sees what its parent trains."""
    with nd.ParameterServerStrategy() as own, own.scope():
        weights, count = nd.Variable(np.zeros(20_000)), nd.Variable(0.0)
        return bool(weights[0] <= -5 and float(count) >= 5)


def leave_a_fork() -> int:
    """Say which process a fork is that lives on, and wait to be killed."""
    with nd.ParameterServerStrategy() as strategy:
        with strategy.scope():
            nd.Variable(np.zeros(100_000)).assign_add(np.ones(100_000))
        child = os.fork()
        if child:
            print(child, flush=True)
        threading.Event().wait()
    return 0


def _is_refused(work: Callable[[], object]) -> bool:
    try:
        work()
    except RuntimeError as error:
        return "is a fork of process" in str(error) and "Make a strategy here" in str(error)
    return False


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50.0
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.001)


if __name__ == "__main__":
    sys.exit(main() if sys.argv[1:] != ["leave"] else leave_a_fork())
