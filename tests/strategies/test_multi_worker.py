"""`MultiWorkerMirroredStrategy` in real processes: what is one for all workers, and what is not.

Where a result depends on the number of replicas alone, it is that of as many replicas in one
process. `tests/test_over_processes.py` runs the other contract tests over workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from tests import worker_steps
from tests.kinds import context, mirrored
from tests.processes import Ranks

WORKERS, COUNTS, REPLICAS = 3, (1, 2, 1), 4


@pytest.fixture(scope="module", params=["ring", "hosts"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """Return what runs a step on all workers and collects what each returned."""
    hosts = "aba" if request.param == "hosts" else "aaa"
    how = "ring" if request.param == "ring" else "auto"
    with Ranks(WORKERS, environ=[{"NDISTRIBUTE_HOST_ID": host} for host in hosts]) as ranks:

        def collect(step: Callable[..., Any]) -> list[Any]:
            outcomes = ranks.run(step, how, COUNTS, timeout=40)
            return [outcome.result() for outcome in outcomes]

        yield collect


def test_variables_start_from_the_chiefs_value(run):
    first, *others = run(worker_steps.first_values)
    assert others == [first] * (WORKERS - 1)
    assert first["array"] == [[1.0] * 3] * 2
    assert first["callable"] == np.random.default_rng(0).normal(size=5).tolist()
    assert first["on_read"] == REPLICAS
    assert first["bool"] == [True, False]
    assert first["uint8"] == first["float16"] == first["complex64"] == [1, 0]
    assert first["empty"] == []
    nd.set_seed(0)
    assert first["in run"] == context().rng.random()


def test_workers_that_create_different_variables_are_all_told(run):
    first, *others = run(worker_steps.disagreeing)
    assert others == [first] * (WORKERS - 1)
    *told, following = first
    here = "worker 2 created variable 'Variable{}' (ON_WRITE, NONE) of shape ({},) and dtype {}, "
    there = (
        "worker 0 created variable 'Variable' (ON_WRITE, NONE) of shape (2,) and dtype float64. "
    )
    assert told[0].startswith(here.format("", 3, "float64") + there)
    assert told[1].startswith(here.format("", 2, "float32") + there)
    for error, (own, chiefs) in zip(
        told[2:], (("SUM", "MEAN"), ("READ", "WRITE"), ("odd", "even")), strict=True
    ):
        assert own in error.partition("worker 0")[0]
        assert chiefs in error.partition("worker 0")[2]
    assert following == "Variable"  # No name was taken.


def test_what_one_worker_may_not_pass_is_an_error_on_all_and_they_go_on(run):
    for worker, (count, kind, total) in enumerate(run(worker_steps.refused)):
        assert count.startswith("ValueError: worker 0")
        assert "component" in count
        assert kind.startswith("TypeError: worker 0")
        assert "object" in kind
        assert float(total) == sum(range(REPLICAS)), worker


def test_replicas_of_all_workers_draw_streams_of_their_own(run):
    drawn = [numbers for (numbers,) in run(worker_steps.draws)]
    everything = [number for numbers in drawn for number in numbers]
    assert len(set(everything)) == 2 * REPLICAS
    nd.set_seed(7)
    with mirrored(REPLICAS) as strategy:
        steps = [strategy.run(lambda: context().rng.integers(2**62)).values for _ in range(2)]
    place = 0
    for count, numbers in zip(COUNTS, drawn, strict=True):
        assert numbers == [int(x) for step in steps for x in step[place : place + count]]
        place += count


def test_a_chief_leads_an_evaluator_works_alone_and_a_parameter_server_takes_no_part():
    jobs = [("worker", 0), ("evaluator", 0), ("chief", 0), ("ps", 0)]
    with Ranks(len(jobs)) as job:
        *outcomes, server = job.run(worker_steps.roles, jobs)
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
        for worker, outcome in enumerate(workers.run(worker_steps.one_script)):
            assert outcome.result() == {**expected, "chief": worker == 0}
    with Ranks(1, environ={"TF_CONFIG": ""}) as alone:
        (seen,) = alone.run(worker_steps.one_script)
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
        for outcome in ranks.run(worker_steps.two_at_a_time, "grpc://"):
            assert outcome.result() == [6.0] * 6
