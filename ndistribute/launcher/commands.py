"""The commands that start processes elsewhere: on other hosts through ssh, and through MPI.

The launcher sends the environment of a process on another host, including the job's secret, through
the standard input of ssh, so no command line shows it. The process ends when the connection ends,
or when one end does not answer within the heartbeat timeout. MPICH and Open MPI share only the
option `-n`. They get variables by name, never by value.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ndistribute.blas import LAUNCHER_VARIABLES, THREAD_VARIABLES
from ndistribute.errors import MissingDependencyError
from ndistribute.launcher import reaper
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.listener import LISTEN_FD

# A name must not start with a dash, which ssh would take for an option.
_HOST = re.compile(
    r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.@-]*|\[[0-9A-Fa-f:.]+\])"
    r"(?:(?::|\s+(?:slots\s*=\s*)?)(?P<slots>\d+))?(?:\s+max_slots=\d+)?"
)
# The prefixes of the user's variables that are sent to other hosts.
_CARRIED = ("NDISTRIBUTE_", "OMP_", "OPENBLAS_", "MKL_", "NCCL_", "PYTHON")
_NOT_CARRIED = (LISTEN_FD, "NDISTRIBUTE_HOST_ID")
JOB_ID = "NDISTRIBUTE_JOB_ID"
# Marks a job's reapers on other hosts, to find them in the list of processes.
_JOB_MARK = "# of the job {}."
# Shells read ahead, so `sh -s` would consume an early order to end that follows the script.
_READ_SCRIPT = 'exec /bin/sh -c \'read -r size && eval "$(head -c "$size")"\''
# A loaded machine may send a beat late.
_SHORTEST_SILENCE_SECONDS = 2.0
# The label of mpiexec's own output lines.
MPIEXEC = "mpiexec"
_HOW = "Install both with: pip install ndistribute[mpi]"
# Open MPI writes [1,0]<stdout>: and, since version 5, [job@1,0]<stdout>: ; MPICH writes [0] .
_TAG = re.compile(rb"\[(?:[^\]\s]*,)?(?P<rank>\d+)\](?:<std(?:out|err|diag)>:)? ?")


@dataclass(frozen=True)
class Host:
    """A machine and the number of processes on it."""

    name: str
    slots: int


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec: its path, its family (``mpich`` or ``openmpi``) and its version."""

    path: str
    family: str
    version: str


def parse_hosts(text: str, separator: str = ",") -> list[Host]:
    """Return the hosts of a list such as ``a:2,b``, or of a file with one host per line."""
    entries = [entry.partition("#")[0].strip() for entry in text.split(separator)]
    hosts: dict[str, Host] = {}
    for entry in entries if separator == "," else filter(None, entries):
        match = _HOST.fullmatch(entry)
        if match is None or match["slots"] == "0":
            raise ValueError(f"{entry!r} is not HOST or HOST:PROCESSES.")
        name = match["name"]
        if name in hosts:
            raise ValueError(f"the host {name!r} is named twice: write {name}:2 for two processes.")
        hosts[name] = Host(name, int(match["slots"] or 1))
    if not hosts:
        raise ValueError("the hostfile names no host.")
    return list(hosts.values())


def assign(hosts: Sequence[Host], processes: int | None) -> list[Host]:
    """Return the hosts with their numbers of processes; each host is filled before the next."""
    room = sum(host.slots for host in hosts)
    left = room if processes is None else processes
    if left < 1:
        raise ValueError(f"-n must be at least 1, got {left}.")
    if left > room:
        raise ValueError(f"-n {left} is more than the {room} processes that the hosts take.")
    used = []
    for host in hosts:
        used.append(replace(host, slots=min(host.slots, left)))
        left -= used[-1].slots
    return [host for host in used if host.slots]


def is_this_machine(name: str) -> bool:
    """Return True if the name is one of this machine's names."""
    mine = socket.gethostname().lower()
    known = {"localhost", "127.0.0.1", "::1", mine, mine.partition(".")[0]}
    return name.strip("[]").lower() in known


def host_silence(environ: Mapping[str, str]) -> float:
    """Return the seconds of silence after which launcher and host count each other as lost."""
    return max(silence_seconds(environ), _SHORTEST_SILENCE_SECONDS)


def ssh_command(host: str, silence: float) -> list[str]:
    """Return the command for a shell on a host that reads the text of `remote_script`.

    It ends with exit code 255 when the host does not answer for `silence` seconds.
    """
    options = ["BatchMode=yes", f"ConnectTimeout={silence:.0f}"]
    # ssh gives up when the request after the last allowed one is due.
    interval = max(1, int(silence / 4))
    most = max(1, round(silence / interval) - 1)
    options += [f"ServerAliveInterval={interval}", f"ServerAliveCountMax={most}"]
    arguments = [part for option in options for part in ("-o", option)]
    return ["ssh", *arguments, "--", host.strip("[]"), _READ_SCRIPT]


def former_tasks_end(silence: float, task: str = "", grace: float = 0.0) -> str:
    """Return a shell command that waits until no reaper of the job, or of a task, runs on a host.

    Reapers that lost their connection end by themselves within `silence` seconds and their grace.
    """
    mark = _JOB_MARK.format(f"${JOB_ID}{task}")
    return (
        f"left={silence + grace + 10:.0f}; "
        f'while echo "{mark}" | grep -qsFf - /proc/[0-9]*/cmdline; do '
        '[ "$told" ] || echo "waiting until the tasks of the last attempt end"; told=1; '
        "left=$((left - 1)); [ $left -gt 0 ] || exit 1; sleep 1; done"
    )


def remote_script(
    argv: Sequence[str],
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    sharing: int,
    task: str = "",
    grace: float = reaper.GRACE_SECONDS,
) -> str:
    """Return a script that changes the folder, sets variables and runs the command.

    Its size precedes it. If `task` names a task that restarts alone, the script first waits until
    earlier processes of this task, whose connection was cut, have ended.
    """
    carried = {name: value for name, value in environ.items() if name.startswith(_CARRIED)}
    variables = {**carried, **settings}
    lines = [f"cd {shlex.quote(os.getcwd())} || exit 72"]
    if not any(variables.get(name) for name in THREAD_VARIABLES):
        # Only the host itself knows how many cores it has.
        lines.append(f"threads=$(( $(nproc 2>/dev/null || echo 1) / {sharing} ))")
        lines.append('[ "$threads" -ge 1 ] || threads=1')
        lines += [f"export {name}=$threads" for name in LAUNCHER_VARIABLES]
    for name, value in variables.items():
        if name not in _NOT_CARRIED:
            lines.append(f"export {name}={shlex.quote(value)}")
    # The reaper's source is an argument, because it shares its standard input with this script.
    source = inspect.getsource(reaper) + _JOB_MARK.format(settings.get(JOB_ID, "") + task)
    limits = str(grace), f"{host_silence(environ):g}"
    lines += [former_tasks_end(host_silence(environ), task, grace)] if task else []
    command = [sys.executable, "-I", "-S", "-c", source, *limits, *argv]
    script = "\n".join([*lines, f"exec {shlex.join(command)}"])
    return f"{len(script.encode())}\n{script}"


def find_mpiexec() -> Mpiexec:
    """Return the mpiexec beside this Python, where wheels install it, or that on the path."""
    if importlib.util.find_spec("mpi4py") is None:
        raise MissingDependencyError(f"--mpi needs mpi4py, which is not installed. {_HOW}")
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise MissingDependencyError(f"--mpi needs mpiexec, which is not on the PATH. {_HOW}")
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
    what = f"{path} belongs neither to MPICH nor to Open MPI; it prints {text[:80]!r}. {_HOW}"
    raise MissingDependencyError(what)


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
    if mpi.family == "mpich":
        # All variables, because MPI itself may need some of them.
        options, tag, place = ["-genvall"], "-prepend-rank", "-hosts"
    else:
        # Otherwise all threads of a rank would share one core.
        options, tag, place = ["--oversubscribe", "--bind-to", "none"], "--tag-output", "--host"
        options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        options += [part for name in variables for part in ("-x", name)]
    options += ([] if local else [place, where]) + ([] if redirect else [tag])
    # The runner of mpi4py aborts the job when a rank raises; otherwise the others would wait.
    shell = ["/bin/sh", "-c", redirect, "sh"] if redirect else []
    command = [mpi.path, "-n", str(sum(host.slots for host in hosts)), *options, *shell]
    return [*command, sys.executable, "-m", "mpi4py", *python]


def rank_pipes(ranks: int, opened: contextlib.ExitStack) -> tuple[list[tuple[int, str, str]], str]:
    """Return pipes from this machine's ranks, and a shell script that makes ranks use them.

    Without the pipes, mpiexec would label each write, and a line may take several writes.
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
