"""`MultiWorkerMirroredStrategy` in real processes: roles, scripts and options of workers.

`tests/test_over_processes.py` runs the contract tests over workers.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.cluster import ClusterSpec, SimpleClusterResolver, resolve
from tests.kinds import DEADLINE, context, replica_ids
from tests.processes import LISTEN, Ranks

OPTIONS = nd.CommunicationOptions(timeout_seconds=DEADLINE)


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


def test_a_chief_leads_an_evaluator_works_alone_and_a_parameter_server_takes_no_part():
    jobs = [("worker", 0), ("evaluator", 0), ("chief", 0), ("ps", 0)]
    with Ranks(len(jobs)) as job:
        *outcomes, server = job.run(roles, jobs)
    worker, evaluator, chief = (outcome.result() for outcome in outcomes)
    assert "worker 1 of 2" in worker.pop("repr")
    assert chief.pop("repr") != evaluator["repr"]
    assert chief == {"ids": [0], "replicas": 2, "chief": True, "value": 4.0}
    assert worker == {"ids": [1], "replicas": 2, "chief": False, "value": 4.0}
    assert (evaluator["ids"], evaluator["replicas"], evaluator["value"]) == ([0], 1, 2.0)
    assert (server.error, "ps" in server.text) == ("ValueError", True)


def test_one_script_runs_on_many_workers_and_on_one():
    expected = {"total": [66.0, 66.0], "replicas": 2, "workers": 2}
    with Ranks(2) as workers:
        for worker, outcome in enumerate(workers.run(one_script)):
            assert outcome.result() == {**expected, "chief": worker == 0}
    with Ranks(1, environ={"TF_CONFIG": ""}) as alone:
        (seen,) = alone.run(one_script)
    assert seen.result() == {**expected, "replicas": 1, "workers": 1, "chief": True}


def unlike(rank: int, size: int, name: str, values: Sequence[Any]) -> str:
    options = nd.CommunicationOptions(timeout_seconds=30, **{name: values[rank]})
    with pytest.raises(ValueError, match="pass the same options on all workers") as error:
        nd.MultiWorkerMirroredStrategy(communication_options=options)
    return str(error.value)


def test_workers_with_different_options_are_told_so() -> None:
    with Ranks(2) as two:
        for name, values in (
            ("implementation", ["auto", "ring"]),
            ("wire_dtype", [None, "float16"]),
        ):
            (text,) = {outcome.result() for outcome in two.run(unlike, name, values)}
            assert f"{values[1]!r}" in text


def test_two_strategies_over_one_tf_config_work_at_a_time():
    with Ranks(3) as ranks:
        for outcome in ranks.run(two_at_a_time, "grpc://"):
            assert outcome.result() == [6.0] * 6
