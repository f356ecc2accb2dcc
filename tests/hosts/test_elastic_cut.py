"""Elastic workers whose network is cut: one side at most goes on, and loses no sample."""

import json
import subprocess
import sys

import pytest

from tests.hosts.rig import Rig, skip_reason
from tests.jobs.elastic import PROGRAM, Audience
from tests.processes import HANG_SECONDS, tf_config

pytestmark = pytest.mark.skipif(bool(skip_reason(ssh=False)), reason=skip_reason(ssh=False) or "-")
HEARTBEAT, TIMEOUT, HOSTS = 1, 5.0, 4


class HostCrew(Audience):
    """A worker on each host of a rig.

    Args:
        options: see `WorkerOptions`.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.workers = []

    def __enter__(self):
        self.rig = self._held.enter_context(Rig(HOSTS, ssh=False, shared=[self.folder]))
        cluster = {"worker": [f"{host.address}:4000" for host in self.rig.hosts]}
        common = {
            "NDISTRIBUTE_SECRET": "the secret of these tests",
            "NDISTRIBUTE_HEARTBEAT_SECONDS": str(HEARTBEAT),
            "ELASTIC_DOOR": self.door,
            "ELASTIC_OPTIONS": json.dumps(vars(self.options)),
        }
        for index, host in enumerate(self.rig.hosts):
            self._held.callback(host.end_processes)
            config = {"TF_CONFIG": tf_config(cluster, "worker", index)}
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            self.workers.append(
                host.start([sys.executable, PROGRAM], {**common, **config}, **pipes)
            )
        return self

    def ends(self, index):
        """Wait for the end of a worker; return its exit status, and what it said."""
        said = self.workers[index].communicate(timeout=HANG_SECONDS)[1]
        return self.workers[index].returncode, said


def cut(rig, halves, do="cut"):
    """Cut, or heal, what is between two sides."""
    for host in halves[0]:
        for other in halves[1]:
            getattr(rig, do)(rig.hosts[host], rig.hosts[other])


SIDES = {
    "the half with rank 0": ((0, 1), (2, 3)),
    "the majority without rank 0": ((1, 2, 3), (0,)),
    "the majority with rank 0": ((0, 1, 3), (2,)),
}


@pytest.mark.parametrize(
    "name",
    [name if "half" in name else pytest.param(name, marks=pytest.mark.hosts) for name in SIDES],
)
def test_one_side_of_a_cut_goes_on_and_the_other_says_why_not(name):
    going, waiting = SIDES[name]
    options = {"epochs": 30, "rows": 120, "batch": 24, "seconds": 0.02, "timeout": TIMEOUT}
    with HostCrew(**options) as crew:
        crew.wait_for(lambda: len(crew.living) == HOSTS)
        crew.wait_for_steps(5)
        cut(crew.rig, (going, waiting))
        crew.wait_for(lambda: all(crew.steps(k)[-1]["size"] == len(going) for k in going))
        for index in waiting:
            code, said = crew.ends(index)
            assert code == 1
            assert "does not answer, and may continue the job with other workers" in said
        crew.wait_for(lambda: not crew.living & set(going))
        assert crew.results.keys() == set(going)
        assert crew.faults() == []
        last = {index: crew.steps(index)[-1]["size"] for index in waiting}
        assert last == dict.fromkeys(waiting, HOSTS), "a side that waits has gone on"


@pytest.mark.hosts
def test_a_worker_that_was_cut_off_and_returns_joins_anew_or_ends():
    going, waiting = SIDES["the majority without rank 0"]
    options = {"epochs": 1, "rows": 4800, "batch": 24, "seconds": 0.02, "reduces": False}
    with HostCrew(**options) as crew:
        crew.wait_for(lambda: len(crew.living) == HOSTS)
        crew.wait_for_steps(5)
        cut(crew.rig, (going, waiting))
        crew.wait_for(lambda: all(crew.steps(k)[-1]["size"] == len(going) for k in going))
        crew.wait_for_steps(10, *going)
        cut(crew.rig, (going, waiting), "heal")
        crew.wait_for(lambda: not crew.living)
        assert crew.results.keys() >= set(going)
        assert crew.faults() == []
        text = "which joins it again" if 0 in crew.results else "continues without this worker"
        assert text in crew.ends(0)[1]
