"""Train the network of train_digits.py as a graph, the way of the first distributed programs.

Start two servers of variables and two workers with four commands:

    H="--ps_hosts localhost:7001,localhost:7002 --worker_hosts localhost:7003,localhost:7004"
    python examples/graph_trainer.py $H --job_name ps --task_index 0 &
    python examples/graph_trainer.py $H --job_name ps --task_index 1 &
    python examples/graph_trainer.py $H --job_name worker --task_index 0 &
    python examples/graph_trainer.py $H --job_name worker --task_index 1

Without these flags it trains in one process. Workers do not wait for each other; with
``--replicas_to_aggregate 2`` they make each step together, and workers beyond this number are
backup workers. With ``--checkpoint_dir`` a training continues where an earlier one ended, also when
one of its processes is killed and started again.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
from train_digits import BATCH, CLASSES, HIDDEN, load_data, report

import ndistribute as nd
from ndistribute import graph as g


class Model(NamedTuple):
    """The tensors of the network and of its training step."""

    images: g.Tensor
    labels: g.Tensor
    loss: g.Tensor
    accuracy: g.Tensor
    train: g.Operation
    hook: g.SessionRunHook


def make_model(options: argparse.Namespace, workers: int) -> Model:
    """Add the network and its training step to the graph."""
    rng = np.random.default_rng(options.seed)

    def dense(inputs: Any, rows: int, columns: int, name: str) -> Any:
        start = rng.normal(0.0, np.sqrt(2.0 / rows), (rows, columns)).astype(np.float32)
        weights = g.Variable(start, name=f"{name}/weights")
        return inputs @ weights + g.Variable(np.zeros(columns, np.float32), name=f"{name}/bias")

    images = g.placeholder(np.float32, [None, 64], "images")
    labels = g.placeholder(np.int64, [None], "labels")
    hidden = np.maximum(dense(images, 64, HIDDEN, "hidden"), 0)
    logits: Any = dense(hidden, HIDDEN, CLASSES, "output")
    shifted = logits - np.max(logits, axis=1, keepdims=True)
    likelihood = np.take_along_axis(shifted, labels[:, None], 1)[:, 0]
    loss = np.mean(np.log(np.sum(np.exp(shifted), axis=1)) - likelihood)
    accuracy = np.mean(np.equal(np.argmax(logits, axis=1), labels))
    g.summary.scalar("loss", loss)
    optimizer: Any = g.AdagradOptimizer(0.1)
    hook = g.SessionRunHook()
    if options.replicas_to_aggregate:
        optimizer = g.SyncReplicasOptimizer(optimizer, options.replicas_to_aggregate, workers)
        hook = optimizer.make_session_run_hook(options.task_index == 0)
    train = optimizer.minimize(loss, g.get_or_create_global_step())
    return Model(images, labels, loss, accuracy, train, hook)


def work(options: argparse.Namespace, target: str, cluster: dict[str, list[str]]) -> None:
    """Train in this worker's loop; the first worker is the chief."""
    (images, labels), (test_images, test_labels) = load_data(options.seed)
    here = f"/job:worker/task:{options.task_index}" if target else "/job:localhost"
    with g.device(g.replica_device_setter(worker_device=here, cluster=cluster)):
        model = make_model(options, len(cluster.get("worker", [""])))
    rng = np.random.default_rng([options.seed, options.task_index])
    steps = 0
    with g.MonitoredTrainingSession(
        target,
        is_chief=options.task_index == 0,
        checkpoint_dir=options.checkpoint_dir or None,
        save_checkpoint_steps=50,
        hooks=[model.hook, g.StopAtStepHook(last_step=options.steps)],
        max_wait_secs=60,
    ) as session:
        while not session.should_stop():
            rows = rng.integers(0, len(labels), BATCH)
            session.run(model.train, {model.images: images[rows], model.labels: labels[rows]})
            steps += 1
        feeds = {model.images: test_images, model.labels: test_labels}
        accuracy, total = session.run([model.accuracy, g.get_or_create_global_step()], feeds)
    report(f"worker {options.task_index}: {steps} runs, step {total}, test accuracy {accuracy:.4f}")


def main() -> None:
    """Run a server of variables, or a worker, as the flags say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ps_hosts", default="", help="HOST:PORT of each server, with commas")
    parser.add_argument("--worker_hosts", default="", help="HOST:PORT of each worker")
    parser.add_argument("--job_name", default="", choices=["", "ps", "worker"])
    parser.add_argument("--task_index", type=int, default=0)
    parser.add_argument("--replicas_to_aggregate", type=int, help="the workers of a step")
    parser.add_argument("--checkpoint_dir", default="", help="the folder of checkpoints")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.job_name:
        work(options, "", {})
        return
    cluster = {"ps": options.ps_hosts.split(","), "worker": options.worker_hosts.split(",")}
    server = nd.Server(cluster, options.job_name, options.task_index)
    if options.job_name == "ps":
        server.join()
        return
    work(options, server.target, cluster)


if __name__ == "__main__":
    main()
