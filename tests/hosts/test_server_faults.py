"""Servers and chiefs whose cables are pulled: both wait, and each update counts once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from tests.hosts.rig import Rig, skip_reason

HEARTBEAT, SECRET = 2.0, "a secret of thirty-two characters"
_SERVE = "import ndistribute as nd; r = nd.TFConfigClusterResolver(); \
nd.Server(r.cluster_spec(), r.task_type, r.task_id).join()"
_ADD = """
import sys
import ndistribute as nd
with nd.ParameterServerStrategy(timeout_seconds=float(sys.argv[1])) as strategy:
    with strategy.scope():
        v = nd.Variable(0.0)
    for line in sys.stdin:
        v.assign_add(1.0)
        print(int(v.numpy()), flush=True)
"""


def started(host, job, *program, **options):
    """Start a task of a cluster with a chief on the second host and a server on the first one."""
    rig = host.rig
    cluster = {"ps": [f"{rig.hosts[0].address}:4000"], "chief": [f"{rig.hosts[1].address}:4000"]}
    task = {"cluster": cluster, "task": {"type": job, "index": 0}}
    env = {"TF_CONFIG": json.dumps(task), "NDISTRIBUTE_SECRET": SECRET}
    env["NDISTRIBUTE_HEARTBEAT_SECONDS"] = str(HEARTBEAT)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return host.start([sys.executable, "-c", *program], env, text=True, **pipes, **options)


def ask(chief):
    chief.stdin.write("\n")
    chief.stdin.flush()


@pytest.mark.skipif(bool(skip_reason(ssh=False)), reason=skip_reason(ssh=False) or "none")
def test_a_server_out_of_reach_for_longer_than_the_heartbeat_goes_on():
    """The chief ended after a heartbeat with a timeout, and the server 3 s after that."""
    with Rig(2, ssh=False) as rig:
        server = started(rig.hosts[0], "ps", _SERVE)
        chief = started(rig.hosts[1], "chief", _ADD, "60")
        for number in range(1, 4):
            ask(chief)
            assert chief.stdout.readline() == f"{number}\n"
        rig.cut(rig.hosts[0])
        ask(chief)
        threading.Event().wait(HEARTBEAT + 3 + 3)  # The cable is out for so long.
        assert server.poll() is None
        assert chief.poll() is None
        rig.heal(rig.hosts[0])
        assert chief.stdout.readline() == "4\n"
        chief.communicate(timeout=60)
        assert chief.returncode == 0
        assert server.wait(60) == 0
