"""What processes with an NCCL group do while nothing fails; the tests say what must come out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute.collective.communicator import Communicator
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.device import as_array, copy_to, to_host
from tests.collective.nccl_job import (
    DTYPES,
    GROUND,
    digest,
    dtype_named,
    here,
    job,
    numbers,
    plain_sum,
    world,
)


def every_op_and_dtype(rank: int, size: int) -> list[int]:
    def body(communicator: Communicator) -> int:
        results = []
        names = DTYPES if GROUND == "host" else [name for name in DTYPES if name != "bfloat16"]
        for op in ReduceOp:
            for dtype in map(dtype_named, names):
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
                    np.testing.assert_array_equal(
                        to_host(own), numbers(communicator.rank, length, dtype)
                    )
                    results.append(total)
        return digest(results)

    return job().step(body)


def noisy_sums(rank: int, size: int) -> list[int]:
    def body(communicator: Communicator) -> int:
        rng = np.random.default_rng(communicator.rank)
        nest = {"a": rng.normal(size=(30, 5)), "b": np.float32(rng.normal()), "c": np.zeros(0)}
        totals = [communicator.all_reduce("mean", nest) for _ in range(2)]
        assert digest(totals[0].values()) == digest(totals[1].values())
        return digest(totals[0].values())

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


def rows_of_a_table(rank: int, size: int) -> list[int]:
    def body(communicator: Communicator) -> int:
        everyone = []
        for r in range(communicator.size):
            rng = np.random.default_rng(r)
            everyone.append((rng.normal(size=(4 + r, 3)), rng.integers(0, 5, 4 + r)))
        values, indices = everyone[communicator.rank]
        own = IndexedSlices(here(communicator, values), here(communicator, indices), (9, 3))
        total = communicator.all_reduce("sum", own)
        expected = np.zeros((9, 3))
        for values, indices in everyone:
            np.add.at(expected, indices, values)
        np.testing.assert_allclose(to_host(total.to_dense()), expected, rtol=1e-12)
        return digest([total.values, total.indices])

    return job().step(body)


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
    comms = world().comms[-len(job().streams) :]
    return [comm.device for comm in comms], [stream.device.index for stream in job().streams]


def launches_before_meeting(rank: int, size: int) -> list[str]:
    """Return what came first, in a call of a group that is connected."""
    plain_sum(rank, size)
    order: list[str] = []
    made, host = world(), job().workers.backend
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


def trained(rank: int, size: int, implementation: str) -> dict[str, Any]:
    """Train a matrix and rows of a table; return how replicas meet, and what came of it."""
    if GROUND != "real":
        world()
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
