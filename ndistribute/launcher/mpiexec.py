"""The command that starts a job through MPI: which mpiexec, and its options.

MPICH and Open MPI share no option but `-n`. Variables are passed by name, never by value.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ndistribute.errors import MissingDependencyError
from ndistribute.launcher.hosts import Host

# The label of mpiexec's own output lines.
MPIEXEC = "mpiexec"
_HOW = "Install both with: pip install ndistribute[mpi]"
# Open MPI writes [1,0]<stdout>: and, since version 5, [job@1,0]<stdout>: ; MPICH writes [0] .
_TAG = re.compile(rb"\[(?:[^\]\s]*,)?(?P<rank>\d+)\](?:<std(?:out|err|diag)>:)? ?")


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec: its path, its family and its version."""

    path: str
    family: str
    version: str


def find_mpiexec() -> Mpiexec:
    """Return the mpiexec beside this Python, where wheels install it, or the one on the path."""
    if importlib.util.find_spec("mpi4py") is None:
        raise MissingDependencyError(f"--mpi needs mpi4py, which is not installed. {_HOW}")
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise MissingDependencyError(f"--mpi needs mpiexec, and there is none. {_HOW}")
    command = [path, "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingDependencyError(f"{path} --version failed: {error}. {_HOW}") from error
    text = said.stdout + said.stderr
    number = re.search(r"\d+\.\d+(?:\.\d+)?", text)
    version = number[0] if number else "of unknown version"
    if "HYDRA" in text or "Intel(R) MPI" in text:
        return Mpiexec(path, "mpich", version)
    if re.search("Open MPI|OpenRTE|prte", text, re.IGNORECASE):
        return Mpiexec(path, "openmpi", version)
    raise MissingDependencyError(
        f"{path} is neither MPICH's nor Open MPI's; it says {text[:80]!r}. {_HOW}"
    )


def mpiexec_command(
    mpi: Mpiexec,
    hosts: Sequence[Host],
    python: Sequence[str],
    variables: Sequence[str],
    *,
    local: bool = True,
    redirect: str = "",
) -> list[str]:
    """Return the command line that starts a job through MPI; `variables` are names."""
    where = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    command = [mpi.path, "-n", str(sum(host.slots for host in hosts))]
    if mpi.family == "mpich":
        # All variables, because MPI itself may need some of them.
        command += ["-genvall", *([] if local else ["-hosts", where])]
        command += [] if redirect else ["-prepend-rank"]
    else:
        # Otherwise all threads of a rank would share one core.
        command += ["--oversubscribe", "--bind-to", "none"]
        command += [] if redirect else ["--tag-output"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += [] if local else ["--host", where]
        command += [part for name in variables for part in ("-x", name)]
    # The runner of mpi4py aborts the job when a rank raises; otherwise the others would wait.
    shell = ["/bin/sh", "-c", redirect, "sh"] if redirect else []
    return [*command, *shell, sys.executable, "-m", "mpi4py", *python]


def rank_pipes(ranks: int, opened: contextlib.ExitStack) -> tuple[list[tuple[int, str, str]], str]:
    """Return pipes from the ranks of this machine, and a shell script that makes ranks use them.

    Output that goes through mpiexec is labelled per write, and a line may take several writes.
    """
    outputs, cases = [], ""
    for rank in map(str, range(ranks)):
        cases += f'{rank}) exec "$@"'
        for number, stream in ((1, "stdout"), (2, "stderr")):
            reader, writer = os.pipe()
            for fd in (reader, writer):
                opened.callback(os.close, fd)
            outputs.append((reader, rank, stream))
            cases += f" {number}>/proc/{os.getpid()}/fd/{writer}"
        cases += ";; "
    rank = "${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-$PMIX_RANK}}"
    return outputs, f'case "{rank}" in {cases}esac; exec "$@"'


def exit_code(code: int, said: Sequence[bytes]) -> int:
    """Return the exit code; MPICH reports signals in its output only."""
    match = re.search(rb"EXIT STRING: .*\(signal (\d+)\)", b"\n".join(said))
    return 128 + int(match[1]) if match else code


def parse_tagged(line: bytes) -> tuple[str, bytes]:
    """Return the rank of a line, or `MPIEXEC` for its own lines, and the text."""
    match = _TAG.match(line)
    return (match["rank"].decode(), line[match.end() :]) if match else (MPIEXEC, line)
