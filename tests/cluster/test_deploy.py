"""The templates in deploy/ agree with themselves and with the package; no cluster runs them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from ndistribute.cluster import SlurmClusterResolver, TFConfigClusterResolver, resolve

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))


def documents():
    return [document for path in KUBERNETES for document in yaml.safe_load_all(path.read_text())]


def the(kind):
    (found,) = [document for document in documents() if document["kind"] == kind]
    return found


def variables(container):
    return {entry["name"]: entry for entry in container["env"]}


def values_of(node, key):
    """Yield what stands under a key anywhere in a document."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from values_of(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from values_of(value, key)


def test_secrets_that_are_referred_to_exist_and_hold_nothing_yet():
    secret = the("Secret")
    assert secret["stringData"] == {"secret": ""}
    references = [r for d in documents() for r in values_of(d, "secretKeyRef")]
    assert {(r["name"], r["key"]) for r in references} == {(secret["metadata"]["name"], "secret")}
    assert len(references) == 2


def test_each_pod_reads_its_own_place_from_its_tf_config():
    service, job = the("Service"), the("Job")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environ = variables(container)
    order = [entry["name"] for entry in container["env"]]
    assert order.index("WORKER_INDEX") < order.index("TF_CONFIG")
    assert "job-completion-index" in environ["WORKER_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert spec["completionMode"] == "Indexed"
    name, domain = job["metadata"]["name"], service["metadata"]["name"]
    (port,) = [entry["port"] for entry in service["spec"]["ports"]]
    assert container["ports"] == [{"containerPort": port}]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == domain
    workers = range(spec["completions"])
    assert spec["parallelism"] == len(workers)
    for index in workers:
        config = environ["TF_CONFIG"]["value"].replace("$(WORKER_INDEX)", str(index))
        me = resolve({"TF_CONFIG": config})
        assert isinstance(me, TFConfigClusterResolver)
        assert me.worker_index == index
        assert me.worker_addresses == tuple(f"{name}-{i}.{domain}:{port}" for i in workers)


def test_the_secret_reaches_every_process_by_its_variable():
    (worker,) = the("Job")["spec"]["template"]["spec"]["containers"]
    launcher = the("MPIJob")["spec"]["mpiReplicaSpecs"]["Launcher"]
    for container in (worker, *launcher["template"]["spec"]["containers"]):
        assert "secretKeyRef" in variables(container)["NDISTRIBUTE_SECRET"]["valueFrom"]


def test_mpi_starts_as_many_ranks_as_there_are_slots():
    spec = the("MPIJob")["spec"]
    roles = spec["mpiReplicaSpecs"]
    assert set(roles) == {"Launcher", "Worker"}
    (launcher,) = roles["Launcher"]["template"]["spec"]["containers"]
    command = launcher["command"]
    ranks = int(command[command.index("-n") + 1])
    assert ranks == roles["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert roles["Launcher"]["replicas"] == 1
    assert spec["mpiImplementation"] == "MPICH"
    (worker,) = roles["Worker"]["template"]["spec"]["containers"]
    assert worker["image"] == launcher["image"]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == worker["ports"][0]["containerPort"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_slurm_script_is_one_that_bash_reads(path):
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", path.read_text(), re.MULTILINE))
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time"} <= set(options)


# Stands for srun and mpiexec: notes its command line and what the workers would see.
FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo "$FAMILY"; exit 0; }
echo "$(basename "$0") $*"
cat "${NDISTRIBUTE_SECRET_FILE:-/dev/null}" | wc -c
[ -z "$NDISTRIBUTE_SECRET_FILE" ] || stat -c %a "$NDISTRIBUTE_SECRET_FILE"
printf %s "$NDISTRIBUTE_SECRET" | wc -c
echo "$OMP_NUM_THREADS"
"""


@pytest.fixture
def imitated(tmp_path):
    """Run a batch script in an environment with imitations of Slurm's and MPI's commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("srun", "mpiexec"):
        (commands / name).write_text(FAKE)
        (commands / name).chmod(stat.S_IRWXU)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}

    def run(script, **more):
        environ = {**slurm, "SLURM_CPUS_PER_TASK": "4", **more}
        environ["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", DEPLOY / "slurm" / script, "train.py", "a b"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.split("\n")

    return run


def test_the_slurm_script_makes_a_secret_that_only_its_owner_reads(imitated, tmp_path):
    said = imitated("train.sbatch")
    assert said[0] == ("srun --distribution=block --kill-on-bad-exit=1 --label python train.py a b")
    assert said[1:5] == ["64", "600", "0", "4"]
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("HYDRA build details:", ""),
        (
            "mpiexec (Open MPI) 5.0.11",
            "-x NDISTRIBUTE_SECRET -x OMP_NUM_THREADS -x PYTHONUNBUFFERED --bind-to none ",
        ),
    ],
)
def test_the_mpi_script_passes_the_secret_by_name_alone(imitated, family, options):
    said = imitated("train-mpi.sbatch", FAMILY=family)
    assert said[0] == f"mpiexec -n 4 {options}python -m mpi4py train.py a b"
    assert said[1:4] == ["0", "64", "4"]


def test_the_tasks_of_the_slurm_script_find_each_other():
    text = (DEPLOY / "slurm" / "train.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    step = {
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_JOB_ID": "7",
    }
    found = [resolve({**step, "SLURM_PROCID": str(rank)}) for rank in range(nodes * tasks)]
    assert all(isinstance(me, SlurmClusterResolver) for me in found)
    assert [me.worker_index for me in found] == list(range(nodes * tasks))
    assert len({json.dumps(me.worker_addresses) for me in found}) == 1
