"""The hosts of a job: parsed from a command line or a file, and reached through ssh.

The environment of a process on another host, including the job's secret, goes through the standard
input of ssh, so no command line shows it. When the connection ends, the process ends.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ndistribute.blas import THREAD_VARIABLES
from ndistribute.launcher import reaper
from ndistribute.transport.listener import LISTEN_FD

# No dash at the start, which ssh would take for an option.
_HOST = re.compile(
    r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.@-]*|\[[0-9A-Fa-f:.]+\])"
    r"(?:(?::|\s+(?:slots\s*=\s*)?)(?P<slots>\d+))?(?:\s+max_slots=\d+)?"
)
# The prefixes of the user's variables that are sent to other hosts.
_CARRIED = ("NDISTRIBUTE_", "OMP_", "OPENBLAS_", "MKL_", "NCCL_", "PYTHON")
_NOT_CARRIED = (LISTEN_FD, "NDISTRIBUTE_HOST_ID")


@dataclass(frozen=True)
class Host:
    """A machine and the number of processes on it."""

    name: str
    slots: int


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
    """Return the hosts with their numbers of processes; fill one host after the other."""
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


def ssh_command(host: str) -> list[str]:
    """Return the command for a shell on a host that reads a script from its standard input."""
    return ["ssh", "-o", "BatchMode=yes", "--", host.strip("[]"), "exec /bin/sh -s"]


def remote_script(
    argv: Sequence[str], settings: Mapping[str, str], environ: Mapping[str, str], sharing: int
) -> str:
    """Return the script for the remote shell: change the folder, set variables, run the command."""
    carried = {name: value for name, value in environ.items() if name.startswith(_CARRIED)}
    variables = {**carried, **settings}
    lines = [f"cd {shlex.quote(os.getcwd())} || exit 72"]
    if not any(variables.get(name) for name in THREAD_VARIABLES):
        # Only the host knows the number of its cores.
        lines.append(f"threads=$(( $(nproc 2>/dev/null || echo 1) / {sharing} ))")
        lines.append('[ "$threads" -ge 1 ] || threads=1')
        lines += [f"export {name}=$threads" for name in THREAD_VARIABLES]
    for name, value in variables.items():
        if name not in _NOT_CARRIED:
            lines.append(f"export {name}={shlex.quote(value)}")
    # The reaper's source is an argument, because it shares its standard input with this script.
    grace = str(reaper.GRACE_SECONDS)
    command = [argv[0], "-I", "-S", "-c", inspect.getsource(reaper), grace, *argv]
    return "\n".join([*lines, f"exec {shlex.join(command)}"]) + "\n"
