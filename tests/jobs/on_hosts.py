"""Starts the same job on imitated hosts in each of the ways that users have, and reads its results.

`python -m tests.jobs.on_hosts` prints the table of all of them as Markdown.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.hosts.rig import Host, Rig, skip_reason
from tests.jobs import on_hosts_program as program
from tests.processes import find_mpiexec, tf_config
from tests.transport.ends import authority, tls_environ

COUNTS, PER_HOST = (2, 3, 4), (1, 2)
SECONDS = 100.0
PORT = 23450
_PROGRAM = str(Path(program.__file__))
_SECRET = {"NDISTRIBUTE_SECRET": "the secret of these tests"}
Environ = Mapping[str, str]


def together(
    starts: Sequence[tuple[Host, Sequence[str], Environ]], until: int | None = None
) -> str:
    """Run processes on hosts, and return what they write; those after the first `until` serve."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    deadline = time.monotonic() + SECONDS
    text = ""
    with contextlib.ExitStack() as stack:
        for host, _, _ in starts:
            stack.callback(host.end_processes)
        started = [host.start(argv, env, **pipes) for host, argv, env in starts]
        for process in started[:until]:
            said, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            text += said
            if process.returncode:
                raise AssertionError(f"exit code {process.returncode}:\n{text}")
    return text


def command(kind: str = "train") -> list[str]:
    return [sys.executable, _PROGRAM, kind]


def places(rig: Rig, per_host: int) -> list[tuple[Host, int]]:
    """Return host and number on it of each rank."""
    return [(host, local) for host in rig.hosts for local in range(per_host)]


def by_tf_config(
    rig: Rig,
    per_host: int,
    more: Environ = {},  # noqa: B006
    name: Callable[[Host], str] = lambda host: host.name,
) -> str:
    ranks = places(rig, per_host)
    cluster = {"worker": [f"{name(host)}:{PORT + local}" for host, local in ranks]}
    return together(
        [
            (host, command(), {**_SECRET, **more, "TF_CONFIG": tf_config(cluster, "worker", rank)})
            for rank, (host, _) in enumerate(ranks)
        ]
    )


def by_tls(rig: Rig, per_host: int) -> str:
    return by_tf_config(rig, per_host, tls_environ(authority(rig.folder)))


def by_ssh(rig: Rig, per_host: int, *more: str) -> str:
    hosts = ",".join(f"{host.name}:{per_host}" for host in rig.hosts)
    run = [sys.executable, "-m", "ndistribute", "run", *more, "--hosts", hosts]
    return together([(rig.hosts[0], [*run, *command()[1:]], _SECRET)])


def by_hydra(rig: Rig, per_host: int) -> str:
    hosts = ",".join(f"{host.name}:{per_host}" for host in rig.hosts)
    count = str(per_host * len(rig.hosts))
    words = [find_mpiexec() or "", "-launcher", "ssh", "-hosts", hosts, "-n", count, *command()]
    return together([(rig.hosts[0], words, {})])


def by_torchrun(rig: Rig, per_host: int) -> str:
    """Set what torchrun sets, as PyTorch is not installed."""
    ranks = places(rig, per_host)
    common = {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(per_host), **_SECRET}
    common |= {"MASTER_ADDR": rig.hosts[0].name, "MASTER_PORT": "29500"}
    return together(
        [
            (host, command(), {**common, "RANK": str(rank), "LOCAL_RANK": str(local)})
            for rank, (host, local) in enumerate(ranks)
        ]
    )


def by_slurm(rig: Rig, per_host: int) -> str:
    """Set what srun sets, as Slurm is not installed."""
    ranks = places(rig, per_host)
    count = len(rig.hosts)
    common = {"SLURM_STEP_NODELIST": rig.names.format(f"[0-{count - 1}]"), **_SECRET}
    common |= {"SLURM_STEP_TASKS_PER_NODE": f"{per_host}(x{count})", "SLURM_JOB_ID": "7"}
    common |= {"SLURM_STEP_NUM_TASKS": str(len(ranks))}
    return together(
        [
            (
                host,
                command(),
                {**common, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // per_host)},
            )
            for rank, (host, _) in enumerate(ranks)
        ]
    )


def _with_servers(rig: Rig, per_host: int, kind: str, first: str) -> str:
    """Start a server on each host, workers on each, and a chief on the first if there is one."""
    jobs = {"worker": places(rig, per_host), "ps": [(host, 10) for host in rig.hosts]}
    jobs |= {"chief": [(rig.hosts[0], 11)]} if first == "chief" else {}
    cluster = {job: [f"{host.name}:{PORT + n}" for host, n in each] for job, each in jobs.items()}
    starts = [
        (host, command(kind), {**_SECRET, "TF_CONFIG": tf_config(cluster, job, index)})
        for job in sorted(jobs, key=lambda job: job != first)
        for index, (host, _) in enumerate(jobs[job])
    ]
    return together(starts, until=len(jobs[first]))


def by_chief(rig: Rig, per_host: int) -> str:
    return _with_servers(rig, per_host, "servers", "chief")


def by_graph(rig: Rig, per_host: int) -> str:
    return _with_servers(rig, per_host, "graph", "worker")


Launcher = Callable[[Rig, int], str]
# The ways to start a job, and the kind of its program.
LAUNCHERS: dict[str, tuple[Launcher, str]] = {
    "TF_CONFIG": (by_tf_config, "train"),
    "TF_CONFIG with TLS": (by_tls, "train"),
    "ndistribute run --hosts": (by_ssh, "train"),
    "torchrun's variables": (by_torchrun, "train"),
    "Slurm's variables": (by_slurm, "train"),
    "parameter servers and a chief": (by_chief, "servers"),
    "graphs and servers": (by_graph, "graph"),
}
if find_mpiexec():
    LAUNCHERS["mpiexec (hydra)"] = (by_hydra, "train")


def check(text: str, kind: str, count: int) -> None:
    """Compare each result with that of one process."""
    results = [json.loads(found) for found in re.findall(r"RESULT (\[.*?\])", text)]
    assert len(results) == count, text
    for result in results:
        np.testing.assert_allclose(result, program.alone(kind), rtol=1e-12, atol=1e-14)


def run_and_check(name: str, rig: Rig, per_host: int) -> str:
    """Start a job in one of the ways, and compare its results; return what it wrote."""
    launcher, kind = LAUNCHERS[name]
    text = launcher(rig, per_host)
    check(text, kind, 1 if kind == "servers" else per_host * len(rig.hosts))
    return text


def main() -> None:
    if reason := skip_reason():
        sys.exit(reason)
    cells: dict[str, list[str]] = {name: [] for name in LAUNCHERS}
    heads = [f"{count} x {each}" for count in COUNTS for each in PER_HOST]
    for count in COUNTS:
        with Rig(count) as rig:
            for each in PER_HOST:
                for name, row in cells.items():
                    begin = time.monotonic()
                    try:
                        run_and_check(name, rig, each)
                        row.append(f"equal, {time.monotonic() - begin:.1f} s")
                    except (AssertionError, subprocess.TimeoutExpired) as error:
                        print(f"{name}, {count} x {each}: {error}", file=sys.stderr)
                        row.append("**fails**")
    print(f"| hosts x workers on each | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    for name, row in cells.items():
        print(f"| {name} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
