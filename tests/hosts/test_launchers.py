"""The same job on several hosts, started in each way: results are those of one process.

The short part, two hosts and one worker on each, is in `make test`; `make hosts-test` runs all.
"""

import itertools
from collections.abc import Iterator

import pytest

from tests.hosts.rig import Rig, skip_reason
from tests.jobs import on_hosts as jobs
from tests.jobs.on_hosts_program import MARKER

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-")

SIZES = [
    pytest.param(hosts, each, marks=[pytest.mark.hosts] * ((hosts, each) != (2, 1)))
    for hosts, each in itertools.product(jobs.COUNTS, jobs.PER_HOST)
]


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Keep the hosts for all tests that ask for as many of them."""
    with Rig(request.param) as rig:
        yield rig


@pytest.mark.parametrize(("rig", "per_host"), SIZES, indirect=["rig"], scope="module")
@pytest.mark.parametrize("launcher", jobs.LAUNCHERS)
def test_a_job_gives_the_result_of_one_process(rig, per_host, launcher):
    jobs.run_and_check(launcher, rig, per_host)


@pytest.mark.hosts
@pytest.mark.parametrize("launcher", jobs.LAUNCHERS)
def test_a_job_runs_over_ipv6_alone(launcher):
    if launcher == "mpiexec (hydra)":
        pytest.skip("MPICH's proxies look for an address of IPv4 of the host that starts them")
    with Rig(2, ipv6=True) as rig:
        jobs.run_and_check(launcher, rig, 1)


def test_addresses_are_numbers_of_ipv6():
    with Rig(2, ipv6=True, ssh=False) as rig:
        text = jobs.by_tf_config(rig, 1, name=lambda host: f"[{host.address}]")
        jobs.check(text, "train", 2)


@pytest.mark.parametrize("protected", [False, True], ids=["plain", "tls"])
def test_tls_hides_the_data_on_the_wire(protected, tmp_path):
    start = jobs.by_tls if protected else jobs.by_tf_config
    with Rig(2, ssh=False) as rig:
        with rig.recorded(tmp_path / "frames"):
            jobs.check(start(rig, 1), "train", 2)
        frames = (tmp_path / "frames").read_bytes()
    assert len(frames) > MARKER.nbytes
    assert (MARKER.tobytes()[:64] in frames) is not protected


@pytest.mark.parametrize("network", [0, 1])
def test_addresses_choose_one_of_two_networks(network):
    with Rig(2, networks=2, ssh=False) as rig:
        job = jobs.by_tf_config(rig, 1, name=lambda host: host.name + "-1" * network)
        jobs.check(job, "train", 2)
        sent = [rig.hosts[0].bytes_sent(each) for each in range(2)]
    assert sent[network] > MARKER.nbytes / 2 > sent[1 - network]
