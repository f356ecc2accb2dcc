"""Hosts whose own names mean other addresses there, or that cannot reach each other."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.hosts.rig import Rig, skip_reason
from tests.jobs import on_hosts as jobs
from tests.processes import HANG_SECONDS, find_mpiexec, tf_config

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-")

DEBIAN, INNER = "127.0.1.1", "172.17.0.1"
OWN_ADDRESSES = [pytest.param(DEBIAN, id="Debian"), pytest.param(INNER, id="inner")]
JOIN = """
import sys
import ndistribute as nd
options = nd.CommunicationOptions(timeout_seconds=float(sys.argv[1]))
with nd.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
    print("joined", flush=True)
    strategy.reduce("SUM", strategy.run(lambda: 1.0))
"""


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Keep the hosts for all tests that ask for the same own address."""
    with Rig(2, own_address=request.param) as rig:
        yield rig


@pytest.mark.parametrize("rig", OWN_ADDRESSES, indirect=True, scope="module")
@pytest.mark.parametrize(
    "launcher",
    [
        name if name == "TF_CONFIG" else pytest.param(name, marks=pytest.mark.hosts)
        for name in jobs.LAUNCHERS
    ],
)
def test_what_a_host_calls_itself_does_not_matter(rig, launcher):
    jobs.run_and_check(launcher, rig, 1 if launcher == "TF_CONFIG" else 2)


@pytest.mark.hosts
@pytest.mark.skipif(not find_mpiexec(), reason="there is no mpiexec")
def test_mpi_distinguishes_hosts_with_the_same_name():
    with Rig(2) as rig:
        for host in rig.hosts:
            with (rig.folder / host.name / "hosts").open("a") as file:
                file.write(f"{DEBIAN} box\n")
            host.run(["hostname", "box"]).check_returncode()
        names = ",".join(host.name for host in rig.hosts)
        words = ["-launcher", "ssh", "-localhost", "node0", "-hosts", names, "-n", "2"]
        start = [find_mpiexec() or "", *words, *jobs.command()]
        jobs.check(jobs.together([(rig.hosts[0], start, {})]), "train", 2)


def ended(rig: Rig, seconds: int) -> list[str]:
    """Return what the workers of a job that fails have written, one on each host."""
    cluster = {"worker": [f"{host.name}:{jobs.PORT}" for host in rig.hosts]}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with contextlib.ExitStack() as stack:
        started = []
        for rank, host in enumerate(rig.hosts):
            place = {"TF_CONFIG": tf_config(cluster, "worker", rank)}
            env = {"NDISTRIBUTE_SECRET": "the secret of these tests", **place}
            started.append(host.start([sys.executable, "-c", JOIN, str(seconds)], env, **pipes))
            stack.callback(started[-1].kill)
        said = [process.communicate(timeout=HANG_SECONDS)[0] for process in started]
        assert all(process.returncode for process in started), said
    return said


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("refused", "No route to host (node1 is 10.77.0.2 here)"),
        pytest.param("silent", "that host does not answer: check the", marks=pytest.mark.hosts),
    ],
)
def test_a_data_port_out_of_reach_is_named_on_all_workers(how, why):
    with Rig(3, ssh=False) as rig:
        first, last = rig.hosts[1:]
        if how == "silent":  # Its answers are lost, as those that a firewall drops.
            first.run(f"ip route add blackhole {last.address}".split()).check_returncode()
        else:
            last.run(f"ip route add unreachable {first.address}".split()).check_returncode()
        reason = f"Worker 2 could not reach the data port of worker 1 at node1:{jobs.PORT}: {why}"
        for text in ended(rig, 12 if how == "silent" else 4):
            assert "joined" in text
            assert reason in text, text
