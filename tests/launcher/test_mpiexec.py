"""Jobs through MPI: the command for each family, and real ones where it is installed."""

import os
import re
import sys

import pytest

from ndistribute.errors import MissingDependencyError
from ndistribute.launcher import commands
from tests.jobs.launched import real_mpi as real
from tests.jobs.launched import run

FLAGS = "--allow-run-as-root " * (os.geteuid() == 0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mpich", "-genvall -hosts a:2,b:1 -prepend-rank"),
        ("openmpi", f"--oversubscribe --bind-to none {FLAGS}-x N -x M --host a:2,b:1 --tag-output"),
    ],
)
def test_the_command_for_each_family(family, options):
    hosts = [commands.Host("a", 2), commands.Host("b", 1)]
    mpi = commands.Mpiexec("mpiexec", family, "5.0")
    command = commands.mpiexec_command(mpi, hosts, ["x.py", "a"], ["N", "M"], local=False)
    python = [sys.executable, "-m", "mpi4py", "x.py", "a"]
    assert command == ["mpiexec", "-n", "3", *options.split(), *python]


def test_lines_are_told_apart_by_the_tags_of_either_family():
    assert commands.parse_tagged(b"[12] x [3]") == ("12", b"x [3]")
    assert commands.parse_tagged(b"[1,3]<stderr>: x") == ("3", b"x")
    assert commands.parse_tagged(b"[prterun-a-1@1,3]<stdout>:x") == ("3", b"x")
    assert commands.parse_tagged(b"[mpiexec@a] x") == ("mpiexec", b"[mpiexec@a] x")


def test_a_signal_is_read_from_what_mpich_says():
    assert commands.exit_code(9, [b"EXIT STRING: Killed (signal 9)"]) == 137
    assert commands.exit_code(9, [b"EXIT CODE: 9"]) == 9


def an_mpiexec(folder, text):
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "family", "version"),
    [
        ("HYDRA build details:\n  Version:  4.3.1", "mpich", "4.3.1"),
        ("mpiexec (Open MPI) 5.0.11", "openmpi", "5.0.11"),
        ("mpirun (Open MPI) 4.1.4", "openmpi", "4.1.4"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", "mpich", "2021.9"),
    ],
)
def test_the_family_is_told_by_the_version(tmp_path, monkeypatch, says, family, version):
    path = an_mpiexec(tmp_path, f"echo '{says}'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert commands.find_mpiexec() == commands.Mpiexec(str(path), family, version)


@pytest.mark.parametrize("text", ["echo something else", "exit 3", None])
def test_an_unknown_one_or_none_is_an_error_that_says_how_to_get_one(tmp_path, monkeypatch, text):
    if text:
        an_mpiexec(tmp_path, text)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin" if text else "")
    with pytest.raises(MissingDependencyError, match=r"pip install ndistribute\[mpi\]"):
        commands.find_mpiexec()


@pytest.mark.parametrize("way", [[], pytest.param(["--mpi"], marks=real)], ids=["tcp", "mpi"])
def test_the_rank_that_raised_shows_its_lines_and_those_that_lost_it_one_line_each(script, way):
    path = script("""
import ndistribute as nd

def step():
    context = nd.get_replica_context()
    if context.replica_id_in_sync_group == 1:
        raise KeyError("mine")
    return context.all_reduce("sum", 1.0)

with nd.MultiWorkerMirroredStrategy() as strategy:
    strategy.run(step)
""")
    done = run("run", *way, "-n", "2", path)
    assert done.returncode == 1
    *output, last = done.stderr.splitlines()
    assert last.startswith("ndistribute run: rank 1 failed first (exit code 1)")
    mine, others = ([one for one in output if one.startswith(f"[{rank}]")] for rank in "10")
    assert mine.count("[1] KeyError: 'mine'") == 1
    assert [one.split()[-1] for one in mine if one.startswith("[1]   File")] == ["<module>", "step"]
    (lost,) = others
    assert "WorkerLostError: worker 1 failed: KeyError: 'mine' (" in lost
    assert re.search(r'script.py:\d+: return context.all_reduce\("sum", 1.0\)\)$', lost)
    whole = run("run", "--verbose", *way, "-n", "2", path).stderr
    assert re.search(r"^\[0\]   File .*ndistribute/strategies/base.py", whole, re.MULTILINE)
    _, said, end = whole.partition("ndistribute run: rank 1 failed first (exit code 1)")
    assert said
    assert "[1] KeyError: 'mine'" in end


@real
def test_ranks_under_mpi_have_the_same_settings_and_whole_lines(script):
    path = script("""
from mpi4py import MPI
print("in", "pieces", MPI.COMM_WORLD.size, len(os.environ["NDISTRIBUTE_JOB_ID"]))
print(os.environ.get("TF_CONFIG"), os.environ["OMP_NUM_THREADS"], *sys.argv[1:])
print("error", file=sys.stderr)
""")
    done = run("run", "--mpi", "-n", "2", path, "a b", env={"TF_CONFIG": "{}"})
    assert done.returncode == 0, done.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in "01":
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] in pieces 2 32", f"[{rank}] None {threads} a b"]
    assert sorted(done.stderr.splitlines()) == ["[0] error", "[1] error"]


@real
def test_the_secret_does_not_go_to_other_hosts(script, tmp_path, fake_ssh):
    """Two addresses of this machine stand for the hosts."""
    path = script("""
settings = [name for name, value in os.environ.items() if "s3cr3t" in value]
with open(f"/proc/{os.getppid()}/environ") as environ:
    shown = "s3cr3t" in environ.read()
print(f'rank {rank} {settings} {shown} {os.environ["NDISTRIBUTE_JOB_ID"]}', flush=True)
""")
    secret = "s3cr3t" * 4
    env = {"NDISTRIBUTE_SECRET": secret, "NDISTRIBUTE_JOB_ID": "j1", "PYTHONUNBUFFERED": ""}
    done = run("run", "--mpi", "--hosts", "127.0.0.2:1,127.0.0.3:1", path, env={**fake_ssh, **env})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{n}] rank {n} [] False j1" for n in (0, 1)]
    asked = (tmp_path / "asked").read_text()
    assert "127.0.0.3" in asked
    assert secret not in asked
