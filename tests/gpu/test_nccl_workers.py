"""NCCL between processes: NumPy's values everywhere, and errors in the place of hangs.

The processes are real. What they launch is done by an imitation of NCCL that waits for ever where
NCCL does; with the marker `gpu` by NCCL itself, on two GPUs.
"""

from __future__ import annotations

import signal

import numpy as np
import pytest

from ndistribute.collective.select import nccl_obstacle
from ndistribute.devices import list_devices
from tests.gpu import nccl_job
from tests.gpu.placing import REAL
from tests.processes import Ranks, find_mpiexec

LAYOUTS = {
    "uneven": ({"REPLICAS": "2,1,1", "NCCL_GROUND": "13"}, "tcp", 3),
    "over-mpi": ({}, "mpi", 2),
}


def of_all(results):
    """Return what the replicas of all workers returned, in order."""
    return [value for values in results for value in values]


def need_two_gpus():
    if len(list_devices("gpu")) < 2:
        pytest.skip("needs 2 GPUs")


@pytest.fixture(scope="module", params=[*LAYOUTS, *REAL])
def ranks(request):
    """Processes with replicas over the imitation, or with one GPU each."""
    environ, wire, size = LAYOUTS.get(request.param, ({"NCCL_GROUND": "real"}, "tcp", 2))
    if request.param == "real":
        need_two_gpus()
    if wire == "mpi" and find_mpiexec() is None:
        pytest.skip("needs mpiexec")
    with Ranks(size, wire, environ) as made:
        yield made


@pytest.fixture(scope="module")
def pair():
    with Ranks(2, environ={"REPLICAS": "2,1"}) as made:
        yield made


@pytest.fixture
def fresh():
    """Processes that no other test has used."""
    with Ranks(2, environ={"REPLICAS": "1,2"}) as made:
        yield made


def test_reductions_give_numpys_values_and_equal_bits(ranks):
    assert len(set(of_all(ranks.results(nccl_job.every_op_and_dtype)))) == 1


def test_ragged_rows_are_joined_in_the_order_of_workers(ranks):
    ranks.results(nccl_job.ragged_rows)


def test_broadcast_copies_from_any_replica_of_any_worker(ranks):
    ranks.results(nccl_job.copied_from_each)


def test_each_replica_updates_its_whole_copy_and_prepares_once(ranks):
    for given in of_all(ranks.results(nccl_job.updates)):
        assert given == [("ready", 0, 0, 70_001), ("ready", 1, 0, 3)]


def test_merge_meets_the_replicas_of_the_process_alone(ranks):
    met = ranks.results(nccl_job.local_meeting)
    numbers = iter(range(sum(map(len, met))))
    assert met == [[[next(numbers) for _ in replicas]] * len(replicas) for replicas in met]


def test_each_gpu_is_current_when_it_is_connected_and_ended_when_the_group_is_closed():
    with Ranks(2, environ={"REPLICAS": "3,1"}) as made:
        found = made.results(nccl_job.gpus_connected)
    assert found == [[(gpu, "destroyed") for gpu in gpus] for gpus in ([0, 1, 2], [3])]


def test_calls_are_compared_while_the_gpus_work(pair):
    assert pair.results(nccl_job.launches_before_meeting) == [["launch", "compare"]] * 2


DIFFERENT = ("shape", "op", "gather", "skipped")


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_are_an_error_everywhere_and_the_next_step_works(pair, what):
    pair.results(nccl_job.recovered)
    for odd in range(2):
        outcomes = pair.run(nccl_job.another_call, odd, what)
        told = [o.error for i, o in enumerate(outcomes) if what != "skipped" or i != odd]
        assert set(told) == {"CollectiveMismatchError"}
        check_recovery(pair)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_gpus_that_wait_for_another_call_are_released():
    need_two_gpus()
    for what in (*DIFFERENT, "error"):
        with Ranks(2, environ={"NCCL_GROUND": "real"}) as made:
            assert made.results(nccl_job.plain_sum) == [[1.0], [1.0]]
            outcomes = made.run(nccl_job.another_call, 1, what)
            assert outcomes[0].error in ("CollectiveMismatchError", "WorkerLostError"), what
            assert made.results(nccl_job.usable_again) == [[1.0], [1.0]]


@pytest.mark.gpu
def test_a_gpu_whose_peer_was_killed_is_released():
    need_two_gpus()
    for victim in (0, 1):
        with Ranks(2, environ={"NCCL_GROUND": "real"}) as made:
            outcomes = made.run(nccl_job.killed, victim)
            assert outcomes[1 - victim].error == "WorkerLostError"


def test_an_exception_on_one_worker_reaches_the_others(pair):
    pair.results(nccl_job.recovered)
    outcomes = pair.run(nccl_job.another_call, 1, "error")
    assert [outcome.error for outcome in outcomes] == ["WorkerLostError", "ArithmeticError"]
    assert "no such digit" in outcomes[0].text
    check_recovery(pair)


@pytest.mark.parametrize("what", ["shape", "error"])
def test_a_first_call_that_differs_is_found_before_nccl_connects(fresh, what):
    outcomes = fresh.run(nccl_job.another_call, 1, what)
    assert outcomes[0].error in ("CollectiveMismatchError", "WorkerLostError")
    check_recovery(fresh)


def test_an_update_that_can_not_start_is_an_error_everywhere(pair):
    pair.results(nccl_job.recovered)
    outcomes = pair.run(nccl_job.failing_prepare, 0)
    assert [o.error for o in outcomes] in (
        ["WorkerLostError", "WorkerLostError"],  # Told by the replica that waited for the other.
        ["KeyError", "WorkerLostError"],
    )
    assert "no such variable" in outcomes[1].text
    check_recovery(pair)


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (nccl_job.stuck_gpu, "CollectiveTimeoutError", "all_reduce #"),
        (nccl_job.broken_link, "WorkerLostError", "remote access"),
        (nccl_job.refused_connection, "WorkerLostError", "no route to the others"),
    ],
)
def test_what_nccl_or_a_gpu_fails_to_do_is_an_error_everywhere(fresh, failure, error, text):
    if failure is not nccl_job.refused_connection:
        fresh.results(nccl_job.plain_sum)
    outcomes = fresh.run(failure, 1)
    assert {outcome.error for outcome in outcomes} == {error}
    assert all(text in outcome.text for outcome in outcomes)
    check_recovery(fresh)


def test_a_unique_id_that_can_not_be_made_is_an_error_everywhere(fresh):
    outcomes = fresh.run(nccl_job.no_unique_id)
    assert {outcome.error for outcome in outcomes} == {"WorkerLostError"}
    assert "no interface" in outcomes[1].text
    check_recovery(fresh)


def test_a_late_worker_is_a_timeout_everywhere(pair):
    pair.results(nccl_job.recovered)
    outcomes = pair.run(nccl_job.late, 1)
    assert {outcome.error for outcome in outcomes} == {"CollectiveTimeoutError"}
    check_recovery(pair)


@pytest.mark.parametrize("moment", [nccl_job.killed, nccl_job.killed_after_launch])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_known_at_once(fresh, moment, victim):
    fresh.results(nccl_job.plain_sum)
    outcomes = fresh.run(moment, victim)
    assert outcomes[victim].error == "Lost"
    assert outcomes[1 - victim].error == "WorkerLostError"
    assert f"worker {victim}" in outcomes[1 - victim].text


def test_a_stopped_worker_is_known_when_its_heartbeats_stay_away():
    with Ranks(2, environ={"NDISTRIBUTE_HEARTBEAT_SECONDS": "1"}) as made:
        made.start(nccl_job.killed, 1, signal.SIGSTOP)
        (outcome,) = made.collect(ranks=[0])
        made.signal(1, signal.SIGKILL)
        assert outcome.error == "WorkerLostError"
        assert "worker 1" in outcome.text


def trained(environ, implementation):
    with Ranks(2, environ=environ) as made:
        return made.run(nccl_job.trained, implementation)


@pytest.mark.parametrize("ground", ["14", *REAL])
def test_training_over_nccl_gives_what_it_gives_over_a_ring(ground):
    if ground == "real":
        need_two_gpus()
    first, second = (o.result() for o in trained({"NCCL_GROUND": ground}, "auto"))
    expected, _ = (o.result() for o in trained({"NCCL_GROUND": ground}, "ring"))
    assert (first["backend"], expected["backend"]) == ("NcclBackend", "TwoLevelBackend")
    for name in ("weights", "table", "losses"):
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], expected[name], rtol=1e-12)


def test_a_gpu_that_two_workers_share_meets_in_host_memory():
    outcomes = trained({"DEVICES": "gpu:0"}, "auto")
    assert [outcome.result()["backend"] for outcome in outcomes] == ["TwoLevelBackend"] * 2


@pytest.mark.parametrize(
    ("devices", "reason"),
    [("gpu:0", "workers 0 and 1 share the GPU"), ("cpu:0", "worker 0 has a replica on a CPU")],
)
def test_who_asks_for_nccl_in_vain_is_told_why(devices, reason):
    for outcome in trained({"DEVICES": devices}, "nccl"):
        assert outcome.error == "ValueError"
        assert reason in outcome.text


def check_recovery(ranks):
    """Check that the next step works, over new communicators."""
    for sums, states in ranks.results(nccl_job.recovered):
        replicas = len(sums)
        assert set(sums) == {3.0}
        assert states[-replicas:] == ["open"] * replicas
        assert set(states[:-replicas]) <= {"aborted", "connecting"}


GPU_A, GPU_B = "gpu 0000:3B:00.0", "gpu 0000:5E:00.0"


@pytest.mark.parametrize(
    ("identities", "hosts", "obstacle"),
    [
        ([[GPU_A], [GPU_B]], "xx", None),
        ([[GPU_A, GPU_B], [GPU_A]], "xy", None),
        ([[GPU_A], [GPU_B, GPU_A]], "xx", "workers 0 and 1 share the GPU 0000:3B:00.0"),
        ([[GPU_B], [GPU_A, GPU_A]], "xx", "two replicas of worker 1 share the GPU 0000:3B:00.0"),
        ([[GPU_A], ["cpu"]], "xx", "worker 1 has a replica on a CPU"),
        ([["gpu"], [GPU_A]], "xx", "worker 0 has no NCCL: pip install"),
    ],
)
def test_nccl_needs_a_gpu_of_its_own_for_each_replica(identities, hosts, obstacle):
    found = nccl_obstacle(identities, list(hosts))
    assert found is None if obstacle is None else obstacle in str(found)
