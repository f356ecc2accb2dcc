"""What the workers of `tests/strategies/test_multi_worker.py` do; each returns what it saw."""

import json
import os

import numpy as np

import ndistribute as nd
from ndistribute.cluster import ClusterSpec, SimpleClusterResolver, resolve
from tests.kinds import DEADLINE, context, join, parts, rank, replica_ids
from tests.processes import LISTEN

Counts = tuple[int, ...]
OPTIONS = nd.CommunicationOptions(timeout_seconds=DEADLINE)


def first_values(worker, size, how, counts):
    """Create variables of which each worker passes another value."""
    nd.set_seed(worker)  # Also what is drawn differs from worker to worker.
    drawn = np.random.default_rng(worker).normal(size=5)
    with join(how, counts) as strategy:
        with strategy.scope():
            made = {
                "array": nd.Variable(np.full((2, 3), worker + 1.0)),
                "callable": nd.Variable(lambda: drawn),
                "on_read": nd.Variable(worker + 1, synchronization="on_read", aggregation="sum"),
                **{
                    name: nd.Variable(np.array([worker + 1, worker]).astype(name))
                    for name in ("bool", "uint8", "float16", "complex64")
                },
                "empty": nd.Variable(np.zeros((0, 2))),
            }
        made["in run"] = strategy.run(lambda: nd.Variable(lambda: rank() + context().rng.random()))
        return {name: v.numpy().tolist() for name, v in made.items()}


def disagreeing(worker, size, how, counts):
    """Create variables that are others on the last worker, and then the same; return the errors."""
    odd = worker == size - 1
    told = []
    with join(how, counts) as strategy, strategy.scope():
        for make in (
            lambda: nd.Variable(np.zeros(3 if odd else 2)),
            lambda: nd.Variable(np.zeros(2, "f4" if odd else "f8")),
            lambda: nd.Variable(0.0, aggregation="sum" if odd else "mean"),
            lambda: nd.Variable(0.0, synchronization="on_read" if odd else "on_write"),
            lambda: nd.Variable(0.0, name="odd" if odd else "even"),
        ):
            try:
                make()
            except nd.CollectiveMismatchError as error:
                told.append(str(error))
        told.append(nd.Variable(0.0).name)
    return told


def refused(worker, size, how, counts):
    """Pass what only the first worker may not pass; all must hear of it, and go on."""
    wrong = [nd.PerReplica([1.0] * 7), nd.PerReplica([object()] * counts[worker])]
    told = []
    with join(how, counts) as strategy:
        for value in wrong:
            good = parts(strategy, float)
            try:
                strategy.reduce("sum", good if worker else value)
            except (ValueError, TypeError) as error:
                told.append(f"{type(error).__name__}: {error}")
        total = strategy.reduce("sum", parts(strategy, float))
    return [*told, str(float(total))]


def draws(worker, size, how, counts):
    """Draw twice by one seed, with two strategies one after the other."""
    seen = []
    for _ in range(2):
        nd.set_seed(7)
        with join(how, counts) as strategy:
            drawn = [strategy.run(lambda: [context().rng.integers(2**62)])[0] for _ in range(2)]
            seen.append([int(x) for step in drawn for x in strategy.local_results(step)])
    assert seen[0] == seen[1], "a seed gives other numbers in the next strategy"
    return [seen[0]]


def roles(worker, size, jobs):
    """Take the role that stands at this worker's place, in a cluster of all of them."""
    addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    cluster = {}
    for (job, _), address in zip(jobs, addresses, strict=True):
        cluster.setdefault(job, []).append(address)
    job, index = jobs[worker]
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type=job, task_id=index)
    with nd.MultiWorkerMirroredStrategy(resolver, OPTIONS) as strategy:
        assert strategy.cluster_resolver is resolver
        with strategy.scope():
            v = nd.Variable(float(worker), aggregation="sum")
        strategy.run(lambda: v.assign_add(1.0))
        return {
            "ids": replica_ids(strategy),
            "replicas": strategy.num_replicas_in_sync,
            "chief": strategy.is_chief,
            "value": float(v),
            "repr": repr(strategy),
        }


def one_script(worker, size):
    """Do what a user's script does, which does not know how many workers there are."""
    with nd.MultiWorkerMirroredStrategy(communication_options=OPTIONS) as strategy:
        with strategy.scope():
            v = nd.Variable(np.zeros(2), aggregation="mean")
        dataset = nd.Dataset.range(12).batch(6)
        for batch in strategy.distribute_dataset(dataset):
            strategy.run(lambda x: v.assign_add(np.full(2, np.sum(x, dtype=float))), args=(batch,))
        total = v.numpy() * strategy.num_replicas_in_sync
        resolver = resolve()
        return {
            "total": total.tolist(),
            "replicas": strategy.num_replicas_in_sync,
            "workers": 1 if resolver is None else resolver.num_workers,
            "chief": strategy.is_chief,
        }


def two_at_a_time(worker, size, scheme):
    """Make strategies while others are open, at an address that no launcher keeps open."""
    os.close(int(os.environ.pop(LISTEN)))
    config = json.loads(os.environ["TF_CONFIG"])
    config["cluster"]["worker"] = [scheme + address for address in config["cluster"]["worker"]]
    os.environ["TF_CONFIG"] = json.dumps(config)
    seen = []
    strategy = nd.MultiWorkerMirroredStrategy(communication_options=OPTIONS)
    for how in ("auto", "ring"):
        options = nd.CommunicationOptions(implementation=how, timeout_seconds=30)
        again = nd.MultiWorkerMirroredStrategy(communication_options=options)
        for one in (strategy, again, strategy):
            seen += one.run(lambda: context().all_reduce("sum", worker + 1.0)).values
        strategy.close()
        strategy = again  # As a notebook's cell does that runs again.
    strategy.close()
    return seen
