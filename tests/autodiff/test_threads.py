"""Replicas are threads: each has its own tape, and variables may be shared."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ndistribute.autodiff import GradientTape, Tracked
from ndistribute.context import Frame, current_frame, entered
from tests.autodiff.standin import StandInVariable

THREADS = 4


def test_threads_record_for_themselves():
    w = StandInVariable(np.ones((3, 2)))
    barrier = threading.Barrier(THREADS)

    def step(k):
        x = np.full((5, 3), k + 1.0)
        results = []
        for _ in range(20):
            barrier.wait(timeout=50)
            with GradientTape() as tape:
                h = np.tanh(x @ w) * np.float64(k)
                barrier.wait(timeout=50)
                loss = np.sum(h * h)
            results.append(tape.gradient(loss, w))
        return results

    def alone(k):
        x = np.full((5, 3), k + 1.0)
        with GradientTape() as tape:
            h = np.tanh(x @ w) * np.float64(k)
            loss = np.sum(h * h)
        return tape.gradient(loss, w)

    with ThreadPoolExecutor(THREADS) as pool:
        for k, results in enumerate(pool.map(step, range(THREADS))):
            for result in results:
                np.testing.assert_array_equal(result, alone(k))


def test_a_tracked_array_is_a_constant_to_another_thread():
    with GradientTape() as tape:
        x = tape.watch(3.0)

        def other():
            assert current_frame().recorder is None
            plain = x * x
            with GradientTape() as own:
                y = own.watch(2.0)
                z = x * y
            return plain, own.gradient(z, [x, y])

        with ThreadPoolExecutor(1) as pool:
            plain, (to_x, to_y) = pool.submit(other).result(timeout=50)
        z = x * x
    assert not isinstance(plain, Tracked)
    assert to_x is None
    assert to_y == 3
    assert tape.gradient(z, x) == 6


def test_a_replica_that_runs_inline_does_not_record_for_its_caller():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with entered(Frame(None, None)):
            with GradientTape() as inner:
                y = inner.watch(2.0)
                product = y * x
            assert inner.gradient(product, y) == 3
            assert current_frame().recorder is None
        z = x * x
    assert tape.gradient(z, x) == 6
