"""The `ndistribute` command: parses arguments and calls the code of each subcommand.

No other file of the package writes to the terminal. A subcommand imports what only it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from pkgutil import get_importer

from ndistribute.errors import DistributeError
from ndistribute.launcher.commands import Host, assign, is_this_machine, parse_hosts
from ndistribute.launcher.elastic_job import RESTARTS
from ndistribute.launcher.job import DEFAULT_PORT, JobOptions
from ndistribute.launcher.launch import dry_run, launch
from ndistribute.mistakes import count_of
from ndistribute.version import __version__

_USAGE_ERROR = 2
_BENCHMARKS = (
    "all_reduce compiled cost_model elastic elastic_torch faults graph input models overhead "
    "run_all servers torch_workers training"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `ndistribute` command, and return its exit code.

    Args:
        arguments: the arguments after the command's name; None: those of this process.

    Returns:
        The exit code.
    """
    options = parser().parse_args(arguments)
    try:
        return int(options.act(options))
    except BrokenPipeError:
        # The reader has left, and the interpreter's last flush must not raise an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (DistributeError, ValueError, OSError) as error:
        sys.stderr.write(f"ndistribute: {error}\n")
        return _USAGE_ERROR


def parser() -> argparse.ArgumentParser:
    """Return the parser for the command line."""
    top = argparse.ArgumentParser(
        prog="ndistribute", description="Start, inspect, measure and trace distributed jobs."
    )
    top.add_argument("--version", action="version", version=f"ndistribute {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="start a script in several processes"))
    doctor = commands.add_parser("doctor", help="show what this machine has and what is missing")
    doctor.set_defaults(act=_doctor)
    bench = commands.add_parser("bench", help="run a benchmark of the repository")
    bench.add_argument("name", choices=_BENCHMARKS.split())
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark")
    bench.set_defaults(act=_bench)
    trace = commands.add_parser("trace", help="read what NDISTRIBUTE_TRACE=DIR recorded")
    trace.add_argument("what", choices=("merge", "report"))
    trace.add_argument("directory", type=Path)
    trace.set_defaults(act=_trace)
    page = "show in the browser a job that was run with --dashboard, or traced"
    dashboard = commands.add_parser("dashboard", help=page, description=f"{page.capitalize()}.")
    where = "the job's --log-dir, or the directory of NDISTRIBUTE_TRACE"
    dashboard.add_argument("directory", type=Path, metavar="DIR", help=where)
    dashboard.set_defaults(act=_dashboard)
    return top


def job_options(options: argparse.Namespace) -> JobOptions:
    """Return the options of a job from the parsed arguments of ``run``.

    Raises:
        ValueError: the options contradict each other.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ValueError("the script is missing: ndistribute run -n 2 script.py")
    if options.max_restarts is None:
        options.max_restarts = RESTARTS if options.elastic else 0
    if options.max_restarts < 0:
        raise ValueError(f"--max-restarts must be 0 or more, got {options.max_restarts}.")
    if options.timeout is not None and options.timeout <= 0:
        raise ValueError(f"--timeout must be more than 0 seconds, got {options.timeout}.")
    _check_servers(options)
    _check_elastic(options)
    hosts = _hosts(options)
    if options.dashboard and options.log_dir is None:
        options.log_dir = Path(time.strftime(f"dashboard-%Y%m%d-%H%M%S-{os.getpid()}"))
    if options.elastic:
        _check_places(options, hosts, command[0])
    values = {
        **vars(options),
        "command": ("-m", *command) if options.module else tuple(command),
        "hosts": tuple(hosts),
        "servers": options.servers or 0,
        "min_workers": (options.min_workers or 1) if options.elastic else 0,
        "hosts_file": options.hostfile if options.elastic else None,
        "spares": options.spares or 0,
    }
    return JobOptions(**{field.name: values[field.name] for field in fields(JobOptions)})


def _check_servers(options: argparse.Namespace) -> None:
    """Raise ValueError if options are missing or not allowed with, or without, servers."""
    needs_servers = {
        "--workers": options.workers,
        "--chief": options.chief or None,
        "--snapshot-dir": options.snapshot_dir,
        "--snapshot-seconds": options.snapshot_seconds,
        "--durable": options.durable or None,
    }
    extra = [name for name, value in needs_servers.items() if value is not None]
    if options.servers is None:
        if extra:
            raise ValueError(
                f"{extra[0]} needs parameter servers: add their number, for example --ps 1. To "
                "start workers without servers, use -n."
            )
        return
    if options.workers is None:
        raise ValueError("--ps needs the number of workers too: --workers 2 --ps 1.")
    if options.hosts is not None or options.hostfile is not None or options.mpi:
        raise ValueError(
            "--ps starts all tasks on this machine, without MPI. On several hosts, start each "
            "task yourself, with its own TF_CONFIG: see docs/launching.md."
        )
    numbers = {"--workers": options.workers, "--ps": options.servers}
    for name, value in {**numbers, "--snapshot-seconds": options.snapshot_seconds}.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be more than 0, got {value}.")
    if options.durable and options.snapshot_dir is None:
        raise ValueError("--durable needs a directory for the update log: add --snapshot-dir DIR.")


def _check_elastic(options: argparse.Namespace) -> None:
    """Raise ValueError if options contradict ``--elastic``, or need it."""
    for name, least in {"--min-workers": 1, "--max-workers": 1, "--spares": 0}.items():
        value = getattr(options, name.strip("-").replace("-", "_"))
        if value is not None and not options.elastic:
            raise ValueError(f"{name} works only in elastic jobs: add --elastic.")
        if value is not None and value < least:
            raise ValueError(f"{name} must be {least} or more, got {value}.")
    if options.elastic and (options.mpi or options.servers is not None):
        raise ValueError(
            "--elastic works without MPI and without parameter servers. MPI ends all ranks when "
            "one ends. In a job with servers, --max-restarts restarts each task that fails. "
            "Remove --elastic, or --mpi or --ps."
        )


def _check_places(options: argparse.Namespace, hosts: list[Host], script: str) -> None:
    """Raise ValueError if an elastic job does not fit its hosts, or spares cannot run it."""
    workers = sum(host.slots for host in hosts)
    least, most = options.min_workers or 1, options.max_workers or workers
    if not 1 <= least <= workers <= most:
        raise ValueError(
            f"The job starts {count_of(workers, 'worker')}, but --min-workers and --max-workers "
            f"allow {least} to {most}: change them, -n or the hosts."
        )
    others = [host.name for host in hosts if not is_this_machine(host.name)]
    if options.spares and others:
        what = f"--spares {options.spares} works only if all workers run on this machine:"
        raise ValueError(f"{what} remove --spares, or the host {others[0]}.")
    if options.spares and (script.startswith("-") or get_importer(script) is not None):
        raise ValueError(f"--spares needs a Python file, or a module after -m; got {script!r}.")


def _hosts(options: argparse.Namespace) -> list[Host]:
    hosts = None
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = parse_hosts(options.hostfile.read_text(), "\n")
    if hosts is not None:
        room = sum(host.slots for host in hosts)
        most = options.max_workers and min(options.max_workers, room)
        return assign(hosts, options.processes if options.processes is not None else most)
    if options.processes is None and options.elastic:
        options.processes = options.max_workers or options.min_workers or None
    if options.servers is not None:
        return [Host("localhost", options.workers)]
    if options.processes is None:
        raise ValueError("the number of processes is missing: add -n 2, or --hosts a:2,b:2.")
    return assign([Host("localhost", max(options.processes, 1))], options.processes)


def _add_run(run: argparse.ArgumentParser) -> None:
    run.description = (
        "Start a script in several processes, print their output line by line with their rank, "
        "and stop all of them when one fails. The exit code is that of the first that failed. "
        "With --workers and --ps, the processes are the tasks of a cluster with servers."
    )
    count = run.add_mutually_exclusive_group()
    count.add_argument("-n", dest="processes", type=int, metavar="N", help="number of processes")
    count.add_argument("--workers", type=int, metavar="W", help="number of workers, with --ps")
    run.add_argument("--ps", dest="servers", type=int, metavar="P", help="number of servers")
    run.add_argument("--chief", action="store_true", help="start a chief as well")
    run.add_argument("--snapshot-dir", type=Path, metavar="D", help="directory of server snapshots")
    run.add_argument("--snapshot-seconds", type=float, metavar="S", help="save every S seconds")
    log = "servers log each update in --snapshot-dir before they acknowledge it"
    run.add_argument("--durable", action="store_true", help=log)
    how = run.add_mutually_exclusive_group()
    how.add_argument("--tcp", dest="mpi", action="store_false", help="without MPI (the default)")
    how.add_argument("--mpi", dest="mpi", action="store_true", help="through mpiexec")
    where = run.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A:2,B:2", help="hosts and processes on each, by ssh")
    line = "a file with one host per line, such as: a slots=2; --elastic follows its changes"
    where.add_argument("--hostfile", "--hosts-file", type=Path, metavar="FILE", help=line)
    run.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="the first port on each of several hosts"
    )
    restarts = f"restart K times after failures; with --elastic, each worker (default: {RESTARTS})"
    run.add_argument("--max-restarts", type=int, metavar="K", help=restarts)
    go_on = "restart a worker that ends, while the others continue"
    run.add_argument("--elastic", action="store_true", help=go_on)
    fewest = "end the job if fewer workers are left (default: 1)"
    run.add_argument("--min-workers", type=int, metavar="N", help=fewest)
    run.add_argument("--max-workers", type=int, metavar="N", help="never run more workers")
    in_advance = "keep N processes that have imported in advance, to restart workers faster"
    run.add_argument("--spares", type=int, metavar="N", help=in_advance)
    run.add_argument("--log-dir", type=Path, metavar="DIR", help="write output files to DIR")
    page = "show the job in the browser; its records stay in --log-dir, or in a new folder"
    run.add_argument("--dashboard", action="store_true", help=page)
    run.add_argument("--timeout", type=float, metavar="S", help="stop the job after S seconds")
    run.add_argument("--verbose", action="store_true", help="print whole tracebacks")
    run.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")
    run.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py ...")
    run.set_defaults(act=_run, mpi=False)


def _run(options: argparse.Namespace) -> int:
    job = job_options(options)
    if options.dry_run:
        sys.stdout.writelines(f"{line}\n" for line in dry_run(job))
        return 0
    return launch(job)


def _doctor(options: argparse.Namespace) -> int:
    from ndistribute.launcher.doctor import examine

    findings = examine()
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    lacking = sum(finding.state == "missing" for finding in findings)
    sys.stdout.write(f"\nMissing for `ndistribute run`: {lacking or 'nothing'}\n")
    return 1 if lacking else 0


def _bench(options: argparse.Namespace) -> int:
    # The package may be installed elsewhere than in the clone that is the current directory.
    roots = [Path(__file__).resolve().parents[1], Path.cwd()]
    name = Path("benchmarks", f"{options.name}.py")
    root = next((root for root in roots if (root / name).is_file()), None)
    if root is None:
        raise ValueError(
            f"there is no {name} in {' or '.join(map(str, roots))}: the package does not include "
            "the benchmarks. Clone the repository, run `pip install --editable "
            "'.[bench,test]'` there, and then this command."
        )
    needed = ["cloudpickle", "pytest", *(["matplotlib"] if "--plot" in options.arguments else [])]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"the benchmarks need {' and '.join(missing)}, which this Python does not have: run "
            f"`pip install --editable '.[bench,test]'` in {root}."
        )
    command = [sys.executable, "-m", f"benchmarks.{options.name}", *options.arguments]
    # No timeout: the user chooses how long a benchmark takes, and can press Ctrl-C.
    return subprocess.call(command, cwd=root)


def _trace(options: argparse.Namespace) -> int:
    from ndistribute.trace_report import merge, report

    if not options.directory.is_dir():
        what = f"{options.directory} is not a directory:"
        raise ValueError(f"{what} pass the one that NDISTRIBUTE_TRACE named.")
    done = merge(options.directory) if options.what == "merge" else report(options.directory)
    sys.stdout.write(f"{done}\n")
    return 0


def _dashboard(options: argparse.Namespace) -> int:
    from ndistribute.launcher.dashboard import serve

    if not options.directory.is_dir():
        raise ValueError(f"{options.directory} is not a directory: pass the job's --log-dir.")
    with serve(options.directory) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"{server.address}\nPress Ctrl-C to stop the dashboard.", flush=True)
        signal.pause()
    return 0
