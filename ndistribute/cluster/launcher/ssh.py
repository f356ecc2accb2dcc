"""How a process on another host is started: through ssh, told what to do on its standard input.

The environment, and with it the job's secret, never stands on a command line, where every user of
either machine could read it. The connection's end is the process's end: the remote side runs it
under the guardian, which ends it when standard input is closed.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Mapping, Sequence

from ndistribute.cluster.launcher import guardian
from ndistribute.cluster.launcher.blas_kernel import THREAD_VARIABLES

__all__ = ["remote_script", "ssh_command"]

# What goes along of the user's environment; the rest belongs to this machine.
_CARRIED = ("NDISTRIBUTE_", "OMP_", "OPENBLAS_", "MKL_", "NCCL_", "PYTHON")
# Each process has its own, or it would be a path of this machine's.
_KEPT = ("NDISTRIBUTE_LISTEN_FD", "NDISTRIBUTE_HOST_ID", guardian.MARK)


def ssh_command(host: str) -> list[str]:
    """Return the command that runs a shell on a host, which reads what to do from its input.

    >>> ssh_command("b")
    ['ssh', '-o', 'BatchMode=yes', '--', 'b', 'exec /bin/sh -s']
    """
    return ["ssh", "-o", "BatchMode=yes", "--", host.strip("[]"), "exec /bin/sh -s"]


def remote_script(
    job: str,
    argv: Sequence[str],
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    ranks_on_host: int,
    directory: str | None = None,
) -> str:
    """Return what the remote shell reads: go to the same folder, set the environment, run.

    Args:
        job: the mark by which the remote guardian knows what belongs to this process.
        argv: the process's command line.
        settings: its variables; they come before the user's.
        environ: the launcher's environment, of which the part about the job goes along.
        ranks_on_host: how many processes share the cores of the host.
        directory: where to run, the launcher's own folder by default.
    """
    carried = {
        name: value
        for name, value in environ.items()
        if name.startswith(_CARRIED) and name not in _KEPT
    }
    variables = {**carried, **settings}
    lines = [f"cd {shlex.quote(directory or os.getcwd())} || exit 72"]
    if not any(variables.get(name) for name in THREAD_VARIABLES):
        lines += _thread_lines(ranks_on_host)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    guard = [argv[0], "-I", "-S", "-c", inspect.getsource(guardian), "run", job, *argv]
    # Read as a whole before it runs, since what it runs shares this input.
    return "\n".join([*lines, f"exec {shlex.join(guard)}"]) + "\n"


def _thread_lines(ranks: int) -> list[str]:
    """Share the cores of the host, which only it knows."""
    return [
        f"threads=$(( $(nproc 2>/dev/null || echo 1) / {ranks} ))",
        '[ "$threads" -ge 1 ] || threads=1',
        *(f"export {name}=$threads" for name in THREAD_VARIABLES),
    ]
