"""The templates in deploy/ agree with themselves and with the package; no cluster runs them."""

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


DOCUMENTS = [one for path in KUBERNETES for one in yaml.safe_load_all(path.read_text())]


def the(kind):
    (found,) = [document for document in DOCUMENTS if document["kind"] == kind]
    return found


def variables(container):
    return {entry["name"]: entry for entry in container["env"]}


def test_the_secret_exists_empty_and_reaches_every_process_by_its_variable():
    secret = the("Secret")
    assert secret["stringData"] == {"secret": ""}
    (worker,) = the("Job")["spec"]["template"]["spec"]["containers"]
    roles = the("MPIJob")["spec"]["mpiReplicaSpecs"]
    for container in (worker, *roles["Launcher"]["template"]["spec"]["containers"]):
        reference = variables(container)["NDISTRIBUTE_SECRET"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": secret["metadata"]["name"], "key": "secret"}


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


def test_a_task_of_slurm_starts_again_at_its_address_as_the_documentation_says(tmp_path):
    text = (DEPLOY.parent / "docs" / "launching.md").read_text()
    (command,) = re.findall(r"^  (srun .*\n .*)$", text, re.MULTILINE)
    fakes = {
        # The third of four tasks.
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"',
        "python": 'env > env.$(ls env.* | wc -l)\n[ "$(ls env.* | wc -l)" = 3 ]',
    }
    for name, script in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_PROCID": "2", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**env, **step}, check=True)
    lives = [
        SlurmClusterResolver(environ=dict(line.split("=", 1) for line in path.read_text().split()))
        for path in sorted(tmp_path.glob("env.*"))
    ]
    assert [life.master("worker", 2) for life in lives] == ["grpc://n2:10112"] * 3
    assert [life.worker_index for life in lives] == [2] * 3


# Stands for srun and mpiexec: notes its command line and what the workers would see.
FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo "$FAMILY"; exit 0; }
echo "$(basename "$0") $*"
cat "${NDISTRIBUTE_SECRET_FILE:-/dev/null}" | wc -c
[ -z "$NDISTRIBUTE_SECRET_FILE" ] || stat -c %a "$NDISTRIBUTE_SECRET_FILE"
printf %s "$NDISTRIBUTE_SECRET" | wc -c
echo "$OMP_NUM_THREADS"
"""


SRUN = "srun --distribution=block --kill-on-bad-exit=1 --label python"
HYDRA = "mpiexec -n 4 python -m mpi4py"
PASSED = "-x NDISTRIBUTE_SECRET -x OMP_NUM_THREADS -x PYTHONUNBUFFERED --bind-to none"
OPEN_MPI = f"mpiexec -n 4 {PASSED} python -m mpi4py"


@pytest.mark.parametrize(
    ("script", "family", "command", "seen"),
    [
        # A secret in a file that only its owner reads, or in a variable that is passed by name.
        ("train.sbatch", "", SRUN, "64 600 0 4"),
        ("train-mpi.sbatch", "HYDRA build details:", HYDRA, "0 64 4"),
        ("train-mpi.sbatch", "mpiexec (Open MPI) 5.0.11", OPEN_MPI, "0 64 4"),
    ],
)
def test_a_batch_script_starts_the_tasks_with_a_secret(tmp_path, script, family, command, seen):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("srun", "mpiexec"):
        (commands / name).write_text(FAKE)
        (commands / name).chmod(stat.S_IRWXU)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", DEPLOY / "slurm" / script, "train.py", "a b"],
        env={**slurm, "SLURM_CPUS_PER_TASK": "4", "FAMILY": family, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, *said = done.stdout.splitlines()
    assert (first, " ".join(said)) == (f"{command} train.py a b", seen)
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_the_tasks_of_the_slurm_script_find_each_other():
    text = (DEPLOY / "slurm" / "train.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert {"cpus-per-task", "time"} <= set(options)
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
