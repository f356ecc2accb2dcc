"""Train the network of train_digits.py with its variables on parameter servers, asynchronously.

Start two servers, and two workers that each run their own training loop, with four commands:

    H="--ps_hosts localhost:7001,localhost:7002 --worker_hosts localhost:7003,localhost:7004"
    python examples/parameter_server.py $H --job_name ps --task_index 0 &
    python examples/parameter_server.py $H --job_name ps --task_index 1 &
    python examples/parameter_server.py $H --job_name worker --task_index 0 &
    python examples/parameter_server.py $H --job_name worker --task_index 1

or with one command, which sets TF_CONFIG for each process:

    ndistribute run --workers 2 --ps 2 examples/parameter_server.py

With a chief (``--chief``, or ``--chief_host`` among the flags above), workers run the steps that it
schedules instead. All processes run this script, which does the work of its process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from train_digits import BATCH, Network, cross_entropy, load_data, report

import ndistribute as nd

Step = Callable[[Any, Any], Any]


def resolver_of(options: argparse.Namespace) -> nd.cluster.ClusterResolver:
    """Return the cluster and the task of this process, from the flags or from TF_CONFIG."""
    if not options.job_name:
        return nd.TFConfigClusterResolver()
    jobs = {"ps": options.ps_hosts, "worker": options.worker_hosts, "chief": options.chief_host}
    cluster = {job: hosts.split(",") for job, hosts in jobs.items() if hosts}
    return nd.SimpleClusterResolver(cluster, task_type=options.job_name, task_id=options.task_index)


def make_step(network: Network, optimizer: nd.optimizers.Optimizer) -> Step:
    """Return the training step, which is the same with and without a chief."""

    def step(images: Any, labels: Any) -> Any:
        with nd.GradientTape() as tape:
            loss = np.sum(cross_entropy(network(images), labels)) / BATCH
        gradients = tape.gradient(loss, network.variables)
        optimizer.apply_gradients(zip(gradients, network.variables, strict=True))
        return loss

    return step


def train_in_own_loop(strategy: nd.Strategy, step: Step, epochs: int, seed: int) -> None:
    """Train on this worker's share of the batches, without waiting for the other workers."""
    training, _ = load_data(seed)
    dataset = nd.Dataset.from_tensor_slices(training).shuffle(len(training[0]), seed=seed)
    batches = strategy.distribute_dataset(dataset.batch(BATCH, drop_remainder=True))
    for epoch in range(1, epochs + 1):
        losses = [strategy.reduce("sum", strategy.run(step, args=batch)) for batch in batches]
        report(f"worker {worker_of(strategy)}, epoch {epoch}, loss {np.mean(losses):.4f}")


def train_by_coordinator(strategy: nd.Strategy, step: Step, epochs: int, seed: int) -> None:
    """Schedule the steps of each epoch on free workers."""
    training, _ = load_data(seed)

    def worker_dataset(context: nd.InputContext) -> nd.Dataset:
        own_seed = seed + context.input_pipeline_id
        dataset = nd.Dataset.from_tensor_slices(training).shuffle(len(training[0]), seed=own_seed)
        return dataset.repeat().batch(BATCH)

    def scheduled(batches: Any) -> Any:
        return strategy.reduce("sum", strategy.run(step, args=next(batches)))

    with nd.ClusterCoordinator(strategy) as coordinator:
        batches = iter(
            coordinator.create_per_worker_dataset(
                lambda: strategy.distribute_datasets_from_function(worker_dataset)
            )
        )
        for epoch in range(1, epochs + 1):
            count = len(training[0]) // BATCH
            losses = [coordinator.schedule(scheduled, args=(batches,)) for _ in range(count)]
            coordinator.join()
            report(f"chief, epoch {epoch}, loss {np.mean(coordinator.fetch(losses)):.4f}")


def worker_of(strategy: nd.Strategy) -> int:
    """Return the index of this worker; 0 without a cluster."""
    return strategy.cluster_resolver.worker_index or 0 if strategy.cluster_resolver else 0


def main() -> None:
    """Run a server, a worker or the chief, as the cluster says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ps_hosts", default="", help="HOST:PORT of each server, with commas")
    parser.add_argument("--worker_hosts", default="", help="HOST:PORT of each worker")
    parser.add_argument("--chief_host", default="", help="HOST:PORT of a chief; none: own loops")
    parser.add_argument("--job_name", default="", choices=["", "ps", "worker", "chief"])
    parser.add_argument("--task_index", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas_to_aggregate", type=int, help="own loops: workers in a step")
    parser.add_argument("--max_staleness", type=int, help="own loops: steps to be ahead at most")
    options = parser.parse_args()
    resolver = resolver_of(options)
    cluster, job = resolver.cluster_spec(), resolver.task_type
    coordinated = "chief" in cluster.jobs
    if job == "ps" or (job == "worker" and coordinated):
        nd.Server(cluster, job, resolver.task_id).join()
        return
    with nd.ParameterServerStrategy(
        resolver,
        replicas_to_aggregate=options.replicas_to_aggregate,
        max_staleness=options.max_staleness,
    ) as strategy:
        with strategy.scope():
            network = Network(64, options.seed)
            optimizer = nd.optimizers.Adam(0.003)
        step = make_step(network, optimizer)
        train = train_by_coordinator if coordinated else train_in_own_loop
        train(strategy, step, options.epochs, options.seed)
        if coordinated or worker_of(strategy) == 0:
            _, (images, labels) = load_data(options.seed)
            accuracy = np.mean(np.argmax(network(images), axis=1) == labels)
            report(f"test accuracy {accuracy:.4f}")
        if not coordinated:
            report(f"worker {worker_of(strategy)}, staleness of updates {strategy.staleness()}")


if __name__ == "__main__":
    main()
