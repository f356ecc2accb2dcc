"""Divide one network over two tasks: by its layers, or by the columns of its matrices.

    python examples/graph_model_parallel.py

It shows model parallelism as a graph program. Vertical: the first layers lie on one task and the
last ones on another; a batch is cut into micro-batches, so that both tasks compute at a time.
Horizontal: each task has half of the columns of the first layer and half of the rows of the second,
and the halves of the result are added. Each gives the loss and the gradients of one task.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from train_digits import report

import ndistribute as nd
from ndistribute import graph as g

TASKS = ["/job:worker/task:0", "/job:worker/task:1"]
WIDTH, CLASSES = 512, 10


def serve(cluster: dict[str, list[str]], index: int, listening: Any) -> None:
    """Run the server of a task until this process is ended."""
    server = nd.Server(cluster, "worker", index)
    listening.set()
    server.join()


@contextlib.contextmanager
def servers() -> Iterator[str]:
    """Start the server of each task in a process of its own; yield the target of a session."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in TASKS]
        for one in sockets:
            one.bind(("localhost", 0))
        cluster = {"worker": [f"localhost:{one.getsockname()[1]}" for one in sockets]}
    spawn = multiprocessing.get_context("spawn")
    listening = [spawn.Event() for _ in TASKS]
    processes = [
        spawn.Process(target=serve, args=(cluster, index, event))
        for index, event in enumerate(listening)
    ]
    for process in processes:
        process.start()
    for event in listening:
        event.wait(60)
    try:
        yield cluster["worker"][0]
    finally:
        for process in processes:
            process.terminate()
            process.join(30)


def loss_of(x: Any, labels: Any, weights: list[Any], tasks: list[str]) -> Any:
    """Return the summed loss of two layers, the first on one task and the second on another."""
    with nd.device(tasks[0]):
        hidden = np.maximum(x @ weights[0], 0)
    with nd.device(tasks[1]):
        return np.sum(nd.models.nn.softmax_cross_entropy(hidden @ weights[1], labels))


def vertical(x: Any, labels: Any, weights: list[Any], micro_batches: int) -> Any:
    """Return the loss with a layer on each task, and several micro-batches under way."""
    parts = zip(np.split(x, micro_batches), np.split(labels, micro_batches), strict=True)
    return sum(loss_of(*part, weights, TASKS) for part in parts)


def horizontal(x: Any, labels: Any, halves: list[list[Any]]) -> Any:
    """Return the loss with half of both matrices on each task."""
    sums = []
    for task, (columns, rows) in zip(TASKS, halves, strict=True):
        with nd.device(task):
            sums.append(np.maximum(x @ columns, 0) @ rows)
    with nd.device(TASKS[1]):
        return np.sum(nd.models.nn.softmax_cross_entropy(sums[0] + sums[1], labels))


def variable(value: Any, task: str) -> g.Variable:
    """Return a variable on a task."""
    with nd.device(task):
        return g.Variable(value)


def measured(session: g.Session, loss: Any, sources: list[Any], feeds: Any, steps: int) -> Any:
    """Return the loss, its gradients, and the milliseconds of a step."""
    session.run(g.global_variables_initializer())
    fetches = [loss, *g.gradients(loss, sources)]
    values = session.run(fetches, feeds)
    operations = [one.op for one in fetches]
    start = time.perf_counter()
    for _ in range(steps):
        session.run(operations, feeds)
    return values[0], values[1:], 1e3 * (time.perf_counter() - start) / steps


def main() -> None:
    """Compute the loss and the gradients in each way, and compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    first, last = rng.normal(0, 0.05, (WIDTH, WIDTH)), rng.normal(0, 0.05, (WIDTH, CLASSES))
    data = rng.normal(size=(options.batch, WIDTH)), rng.integers(0, CLASSES, options.batch)
    half = WIDTH // 2
    with servers() as target, g.Graph().as_default():
        x = g.placeholder(np.float64, [None, WIDTH])
        labels = g.placeholder(np.int64, [None])
        feeds = {x: data[0], labels: data[1]}
        whole = [variable(first, TASKS[0]), variable(last, TASKS[0])]
        layers = [variable(first, TASKS[0]), variable(last, TASKS[1])]
        left = [variable(first[:, :half], TASKS[0]), variable(last[:half], TASKS[0])]
        right = [variable(first[:, half:], TASKS[1]), variable(last[half:], TASKS[1])]
        with g.Session(target) as session:
            alone = loss_of(x, labels, whole, [TASKS[0]] * 2)
            expected, slopes, took = measured(session, alone, whole, feeds, options.steps)
            report(f"one task: loss {expected:.6f}, {took:.1f} ms a step")
            for count in (1, 4):
                loss = vertical(x, labels, layers, count)
                found, ours, took = measured(session, loss, layers, feeds, options.steps)
                away = max(abs(a - b).max() for a, b in zip(ours, slopes, strict=True))
                report(
                    f"vertical, {count} micro-batches: loss {found:.6f}, {took:.1f} ms a step, "
                    f"gradients differ by {away:.1e}"
                )
            loss = horizontal(x, labels, [left, right])
            found, ours, took = measured(session, loss, left + right, feeds, options.steps)
            joined = [np.concatenate(ours[0::2], axis=1), np.concatenate(ours[1::2])]
            away = max(abs(a - b).max() for a, b in zip(joined, slopes, strict=True))
            report(
                f"horizontal: loss {found:.6f}, {took:.1f} ms a step, "
                f"gradients differ by {away:.1e}"
            )


if __name__ == "__main__":
    main()
