"""NCCL between processes: NumPy's values everywhere, and errors in the place of hangs.

The processes are real. What they launch is done by an imitation of NCCL that waits for ever where
NCCL does; with the marker `gpu` by NCCL itself, on two GPUs.
"""

import signal

import pytest

from ndistribute.collective.select import nccl_obstacle
from ndistribute.devices import list_devices
from tests.gpu.placing import REAL
from tests.jobs import nccl as nccl_job
from tests.processes import Ranks


def of_all(results):
    """Return what the replicas of all workers returned, in order."""
    return [value for values in results for value in values]


def need_two_gpus():
    if len(list_devices("gpu")) < 2:
        pytest.skip("needs 2 GPUs")


@pytest.fixture(scope="module")
def pair():
    with Ranks(2, environ={"REPLICAS": "2,1"}) as made:
        yield made


@pytest.fixture
def fresh():
    """Processes that no other test has used."""
    with Ranks(2, environ={"REPLICAS": "1,2"}) as made:
        yield made


def test_each_replica_updates_its_whole_copy_and_prepares_once(pair):
    for given in of_all(pair.results(nccl_job.updates)):
        assert given == [("ready", 0, 0, 70_001), ("ready", 1, 0, 3)]


def test_merge_meets_the_replicas_of_the_process_alone(pair):
    met = pair.results(nccl_job.local_meeting)
    numbers = iter(range(sum(map(len, met))))
    assert met == [[[next(numbers) for _ in replicas]] * len(replicas) for replicas in met]


def test_each_gpu_is_current_when_it_is_connected_and_ended_when_the_group_is_closed():
    with Ranks(2, environ={"REPLICAS": "3,1"}) as made:
        found = made.results(nccl_job.gpus_connected)
    assert found == [[(gpu, "destroyed") for gpu in gpus] for gpus in ([0, 1, 2], [3])]


def test_calls_are_compared_while_the_gpus_work(pair):
    assert pair.results(nccl_job.launches_before_meeting) == [["launch", "compare"]] * 2


@pytest.mark.parametrize("ground", ["14", *REAL])
@pytest.mark.parametrize("connected", [False, True])
def test_a_call_that_differs_or_an_exception_is_an_error_everywhere_and_the_next_step_works(
    ground, connected
):
    """Also of the first call, before NCCL connects, and where GPUs wait for another call."""
    if ground == "real":
        need_two_gpus()
    with Ranks(2, environ={"NCCL_GROUND": ground}) as made:
        for what in ("shape", "op", "gather", "skipped", "error"):
            if connected:
                assert made.results(nccl_job.usable_again) == [[1.0], [1.0]]
            for odd in range(2):
                outcomes = made.run(nccl_job.another_call, odd, what)
                told = {o.error for i, o in enumerate(outcomes) if what == "shape" or i != odd}
                if what == "error":
                    assert told == {"WorkerLostError"}
                    assert "no such digit" in outcomes[1 - odd].text
                    assert outcomes[odd].error == "ArithmeticError"
                else:
                    assert told == {"CollectiveMismatchError"}, what
                assert made.results(nccl_job.usable_again) == [[1.0], [1.0]]


@pytest.mark.gpu
def test_a_gpu_whose_peer_was_killed_is_released():
    need_two_gpus()
    for victim in (0, 1):
        with Ranks(2, environ={"NCCL_GROUND": "real"}) as made:
            outcomes = made.run(nccl_job.killed, victim)
            assert outcomes[1 - victim].error == "WorkerLostError"


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
    ("failure", "connected", "error", "text"),
    [
        (nccl_job.stuck_gpu, True, "CollectiveTimeoutError", "all_reduce #"),
        (nccl_job.late, True, "CollectiveTimeoutError", ""),
        (nccl_job.broken_link, True, "WorkerLostError", "remote access"),
        (nccl_job.refused_connection, False, "WorkerLostError", "no route to the others"),
        (nccl_job.no_unique_id, False, "WorkerLostError", "no interface"),
    ],
)
def test_what_a_worker_nccl_or_a_gpu_fails_to_do_is_an_error_everywhere(
    fresh, failure, connected, error, text
):
    if connected:
        fresh.results(nccl_job.plain_sum)
    outcomes = fresh.run(failure, 1)
    assert {outcome.error for outcome in outcomes} == {error}
    assert all(text in outcome.text for outcome in outcomes)
    check_recovery(fresh)


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


@pytest.mark.parametrize(
    ("implementation", "device", "ground", "backend"),
    [
        ("auto", "", "14", "NcclBackend"),
        ("auto", "", "13", "NcclBackend"),
        ("ring", "", "14", "ReplicaLevelBackend"),
        ("auto", "gpu:0", "14", "ReplicaLevelBackend"),  # In host memory, as they share it.
        ("nccl", "gpu:0", "14", "workers 0 and 1 share the GPU"),
        ("nccl", "cpu:0", "14", "worker 0 has a replica on a CPU"),
    ],
)
def test_gpus_of_their_own_meet_through_nccl_and_who_asks_in_vain_is_told_why(
    implementation, device, ground, backend
):
    with Ranks(2, environ={"NCCL_GROUND": ground}) as made:
        for outcome in made.run(nccl_job.backend_name, implementation, device):
            assert outcome.value == backend or (
                outcome.error == "ValueError" and backend in outcome.text
            ), outcome


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
