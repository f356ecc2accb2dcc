"""Starts the processes of jobs for tests and benchmarks, gives them work, and ends them.

`Ranks` runs functions on processes that stay; `Tasks` is a cluster whose tasks are killed, stopped
and started again. They are forked from a process that has imported the package, so that a start
takes milliseconds, or started by a real `mpiexec`, or each with an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import resource
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
START_SECONDS = 60.0
END_SECONDS = 40.0
# A deadline against hangs alone, longer than anything takes on a loaded machine. How fast something
# is, benchmarks measure.
HANG_SECONDS = 50.0
LISTEN = "NDISTRIBUTE_LISTEN_FD"
# Where processes find a stand-in for scikit-learn that takes no second to import.
QUICK = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "quick"), str(ROOT)])}
# What forked processes need; none of it may depend on the environment or start a thread.
_PRELOADED = "cloudpickle encodings.idna pytest ndistribute.coordinator.worker".split()
_MODULE = "tests.processes"


def environment(*more: Mapping[str, str]) -> dict[str, str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    for each in more:
        environ.update(each)
    return environ


def python_says(*words: object, **options: Any) -> str:
    """Run Python to its end, which must be a good one, and return what it prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = {**pipes, "env": environment(), "timeout": 110, **options}
    ran = subprocess.run([sys.executable, *map(str, words)], check=False, **options)
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"
    return ran.stdout


def tf_config(cluster: Mapping[str, Sequence[str]], job: str, index: int) -> str:
    """Return a `TF_CONFIG`."""
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


class Forked:
    """A process that the zygote has started; it is not reaped before its status is asked for."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._code: int | None = None
        self._asking = threading.Lock()

    def wait(self, timeout: float) -> int:
        """Wait until the process has ended, and return its exit status as `subprocess` does."""
        with self._asking:  # Once its code is known it is reaped, and its number may come back.
            ended = os.pidfd_open(self.pid) if self._code is None else None
        if ended is not None:
            try:
                if not wait([ended], timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            finally:
                os.close(ended)
        with self._asking:
            if self._code is None:
                self._code = self._zygote.ask(code=self.pid)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        with self._asking:
            if self._code is None:
                os.kill(self.pid, number)


class Zygote:
    """Forks processes. It has no thread; closing it kills what it has started.

    A fork runs from the top of the main module, so that it ends as a Python of its own would: with
    its own exit status, its `atexit` functions and its last words about an exception.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(START_SECONDS)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(other.fileno())],
                cwd=ROOT,
                env=environment(QUICK),
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                process_group=0,  # An interrupt from the terminal is the tests' business.
            )

    def start(
        self, function: str, environ: Mapping[str, str], output: int = 1, listen: int | None = None
    ) -> Forked:
        """Start a process that calls a function of this module in an environment.

        Its output goes to an open file; it may inherit a listening socket.
        """
        fds = [output, 2 if output == 1 else output, *([] if listen is None else [listen])]
        return Forked(self, self.ask(fds, function=function, environ=dict(environ)))

    def ask(self, fds: Sequence[int] = (), **order: Any) -> int:
        """Send an order, and return the number that answers it."""
        with self._lock:
            socket.send_fds(self.socket, [json.dumps(order).encode()], list(fds))
            answer = self.socket.recv(64)
        if not answer:
            raise RuntimeError(f"the zygote has ended with status {self.process.wait(10.0)}")
        return int(answer)

    def close(self) -> None:
        """End all processes."""
        self.socket.close()
        self.process.wait(START_SECONDS)


_zygote = functools.cache(Zygote)
_STARTING = threading.Lock()  # Tests start jobs on several threads.


def shared_zygote() -> Zygote:
    """Return the zygote of this session; `tests/conftest.py` closes it."""
    with _STARTING:
        return _zygote()


def close_zygote() -> None:
    """End the zygote of this session, if there is one."""
    if _zygote.cache_info().currsize:
        _zygote().close()
        _zygote.cache_clear()


def held_by_zygote() -> tuple[int, int] | tuple[None, None]:
    """Return the process and the open file of the session's zygote, if there is one."""
    if not _zygote.cache_info().currsize:
        return None, None
    return _zygote().process.pid, _zygote().socket.fileno()


def fork_on_demand(fd: int) -> Callable[[], Any] | None:
    """Be the zygote until nobody asks any more; in a fork, return what it is to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # Forks then share the memory of what is imported.
    control = socket.socket(fileno=fd)
    started: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 18, 8)
        if not message:
            break
        order = json.loads(message)
        if "code" in order:
            started.remove(order["code"])
            answer = os.waitstatus_to_exitcode(os.waitpid(order["code"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                control.close()
                return _become(order, fds)
            started.add(answer)
            for inherited in fds:
                os.close(inherited)
        control.send(str(answer).encode())
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    return None


def _become(order: dict[str, Any], fds: list[int]) -> Callable[[], Any]:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, standard in zip(fds, (1, 2), strict=False):
        os.dup2(fd, standard)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(order["environ"])
    for fd in fds[2:]:
        os.set_inheritable(fd, True)
        os.environ[LISTEN] = str(fd)
    return globals()[order["function"]]  # type: ignore[no-any-return]


@dataclass
class Outcome:
    """What a function did on one process: returned, raised, or ended with the process."""

    value: Any = None
    error: str | None = None  # The name of the exception's class; "Lost" where the process ended.
    text: str = ""
    traceback: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)

    def result(self) -> Any:
        """Return what the function returned; raise what it raised, with the remote traceback."""
        if self.error is not None:
            raise AssertionError(f"{self.error}: {self.text}\n{self.traceback}")
        return self.value


# Starts processes: from the job and the environment of each, and the command that all run.
Starter = Callable[[Sequence[str], Sequence[Mapping[str, str]], Sequence[str]], list[Any]]


class Ranks:
    """Keep some processes that run the same function together.

    Args:
        size: how many.
        wire: ``"tcp"`` for `TF_CONFIG` and sockets, ``"python"`` for the same with a new
            interpreter for each, where the environment matters at import, ``"mpi"`` for `mpiexec`;
            or what starts the processes, in other namespaces for example.
        environ: more environment variables; a list gives each rank its own.
        jobs: which job of the cluster each rank is a task of; all are workers otherwise.
        python: their interpreter.
    """

    def __init__(
        self,
        size: int,
        wire: str | Starter = "tcp",
        environ: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
        *,
        jobs: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        self.size = size
        self.pids: list[int] = []
        self._pidfds: list[int] = []  # A number may come back when its process is reaped.
        self._lines: list[Connection] = []
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        door = f"{self._directory.name}/door"
        each = [environ] * size if isinstance(environ, Mapping) else (list(environ) or [{}] * size)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(door)
            listener.listen(size)
            starters: dict[str, Starter] = {"mpi": _start_over_mpi}
            start = starters.get(wire, _start_over_tcp) if isinstance(wire, str) else wire
            self._processes = start(
                list(jobs) or ["worker"] * size,
                [{"RANKS_DOOR": door, **one} for one in each],
                [python, "-m", _MODULE] if wire != "tcp" else [],
            )
            try:
                self._welcome(listener)
            except BaseException:
                for process in self._processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.send_signal(signal.SIGKILL)
                self.close()
                raise

    def _welcome(self, listener: socket.socket) -> None:
        listener.settimeout(START_SECONDS)
        came: dict[int, tuple[int, Connection]] = {}
        while len(came) < self.size:
            peer, _ = listener.accept()
            # The number in this namespace, which the process may not know itself.
            pid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            line = Connection(peer.detach())
            self._lines.append(line)
            if not line.poll(START_SECONDS):
                raise TimeoutError("a process that was started says nothing")
            came[line.recv()] = (pid, line)
        self.pids = [came[rank][0] for rank in range(self.size)]
        self._lines = [came[rank][1] for rank in range(self.size)]
        self._pidfds += map(os.pidfd_open, self.pids)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        ranks: Sequence[int] | None = None,
    ) -> list[Outcome]:
        """Call ``function(rank, size, *args)`` on every process and return what each one did.

        The function is found by its module's name and its own. A process that has no answer after
        `timeout` seconds is killed, and with it the whole group.
        """
        self.start(function, *args, ranks=ranks)
        return self.collect(timeout, ranks)

    def results(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a function returned on every process; raise what it raised on one."""
        return [outcome.result() for outcome in self.run(function, *args)]

    def start(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> None:
        """Begin what `collect` ends."""
        for rank in range(self.size) if ranks is None else ranks:
            with contextlib.suppress(OSError):
                self._lines[rank].send((function.__module__, function.__qualname__, args))

    def collect(self, timeout: float = 60.0, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """Return the outcomes of what was started."""
        deadline = time.monotonic() + timeout
        outcomes = []
        for rank in range(self.size) if ranks is None else ranks:
            try:
                if self._lines[rank].poll(max(0.01, deadline - time.monotonic())):
                    outcomes.append(self._lines[rank].recv())
                    continue
                self.kill()
                outcomes.append(Outcome(error="Hang", text=f"rank {rank}: {timeout:g} s are over"))
            except (OSError, EOFError) as error:
                outcomes.append(Outcome(error="Lost", text=str(error)))
        return outcomes

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one process."""
        signal.pidfd_send_signal(self._pidfds[rank], number)

    def end(self, rank: int) -> None:
        """Kill one process, and wait until it holds nothing any more."""
        self.signal(rank, signal.SIGKILL)
        assert wait([self._pidfds[rank]], HANG_SECONDS)

    def kill(self) -> None:
        """Kill every process."""
        for pidfd in self._pidfds:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def close(self) -> None:
        """End every process; kill those that do not end in time."""
        for line in self._lines:
            line.close()
        deadline = time.monotonic() + 20.0
        late = []
        for process in self._processes:
            try:
                process.wait(timeout=max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(process.pid)
                self.kill()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=10.0)
        while self._pidfds:
            os.close(self._pidfds.pop())
        self._directory.cleanup()
        if late:
            raise AssertionError(f"processes {late} did not end by themselves.")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_mpiexec(python: str = sys.executable) -> str | None:
    """Return the `mpiexec` beside a Python, or another one."""
    beside = Path(python).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _start_over_tcp(
    jobs: Sequence[str], each: Sequence[Mapping[str, str]], command: Sequence[str]
) -> list[Any]:
    """Start tasks of a cluster, each with the socket where it listens; fork without a command."""
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in jobs]
        cluster: dict[str, list[str]] = {}
        for job, door in zip(jobs, doors, strict=True):
            cluster.setdefault(job, []).append(f"127.0.0.1:{door.getsockname()[1]}")
        common = {"NDISTRIBUTE_SECRET": secrets.token_hex(16), "RANKS_SIZE": str(len(jobs))}
        started: list[Any] = []
        for rank, (door, extra) in enumerate(zip(doors, each, strict=True)):
            config = tf_config(cluster, jobs[rank], list(jobs[:rank]).count(jobs[rank]))
            environ = environment(common, {"TF_CONFIG": config, "RANKS_RANK": str(rank)}, extra)
            if not command:
                started.append(shared_zygote().start("serve", environ, listen=door.fileno()))
                continue
            environ[LISTEN] = str(door.fileno())
            started.append(_popen(command, environ, pass_fds=[door.fileno()]))
        return started


def _start_over_mpi(
    jobs: Sequence[str], each: Sequence[Mapping[str, str]], command: Sequence[str]
) -> list[Any]:
    mpiexec = find_mpiexec(command[0])
    if mpiexec is None:
        raise FileNotFoundError("no mpiexec: pip install 'ndistribute[mpi]'")
    words = [mpiexec, *os.environ.get("RANKS_MPIEXEC", "").split()]
    for rank, extra in enumerate(each):
        # By env, for each MPI has a flag of its own for this.
        environ = ["env", *(f"{name}={value}" for name, value in extra.items())]
        words += [":"] * (rank > 0) + ["-n", "1", *environ, *command]
    common = environment()
    common.pop("TF_CONFIG", None)
    return [_popen(words, common)]


def _popen(command: Sequence[str], environ: dict[str, str], **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environ, cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0, **more
    )


def serve() -> None:
    """Be a rank: call what is asked for until nobody asks any more."""
    names = [("RANKS_RANK", "RANKS_SIZE"), ("PMI_RANK", "PMI_SIZE")]
    names += [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
    rank, size = next((int(os.environ[r]), int(os.environ[s])) for r, s in names if r in os.environ)
    with Client(os.environ["RANKS_DOOR"]) as line, contextlib.suppress(EOFError, OSError):
        line.send(rank)
        while True:
            line.send(_outcome(*line.recv(), rank, size))


def _outcome(module: str, name: str, args: tuple[Any, ...], rank: int, size: int) -> Outcome:
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        outcome = Outcome(value=function(rank, size, *args))
    except BaseException as error:
        outcome = Outcome(
            error=type(error).__name__,
            text=str(error),
            traceback="".join(traceback.format_exception(error)),
            attributes={
                name: getattr(error, name)
                for name in ("rank", "op", "sequence")
                if hasattr(error, name)
            },
        )
    return outcome


class Tasks:
    """Run the servers and workers of a cluster, to do harm to them.

    Args:
        workers: how many.
        servers: how many.
        chief: whether the cluster has one; it is this process.
        environ: what the tasks have in their environment besides.
    """

    def __init__(
        self, workers: int = 2, servers: int = 1, chief: bool = True, **environ: str
    ) -> None:
        self._held = contextlib.ExitStack()
        jobs = {"ps": servers, "worker": workers, "chief": int(chief)}
        self.cluster = _reserve(jobs, self._held)
        self.environ = {"NDISTRIBUTE_SECRET": secrets.token_hex(16), **environ}
        self._processes: dict[tuple[str, int], Forked] = {}
        self._outputs = Path(self._held.enter_context(tempfile.TemporaryDirectory()))

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for job, index in self._processes:
            self.kill(job, index)
        if error is not None:
            error.add_note(f"What the tasks said:\n{self.said()}")
        self._held.close()

    def start(self, job: str, index: int, **environ: str) -> None:
        """Start a task that was not started before, or has ended since.

        Args:
            job: of the task.
            index: in the job.
            environ: what it has in its environment besides; see `run_task`.
        """
        own = {"TF_CONFIG": tf_config(self.cluster, job, index)}
        with (self._outputs / f"{job}:{index}").open("ab") as output:
            self._processes[job, index] = shared_zygote().start(
                "run_task", environment(self.environ, own, environ), output.fileno()
            )

    def start_all(self, job: str | None = None, **environ: str) -> None:
        """Start every server and worker, or every task of a job; see `start`."""
        for each in ("ps", "worker") if job is None else (job,):
            for index in range(len(self.cluster.get(each, ()))):
                self.start(each, index, **environ)

    def pid(self, job: str, index: int) -> int:
        """Return which process a task is."""
        return self._processes[job, index].pid

    def send(self, job: str, index: int, number: signal.Signals) -> None:
        """Send a task a signal."""
        self._processes[job, index].send_signal(number)

    def stop(self, job: str, index: int) -> None:
        """Stop a task, and wait until it has stopped."""
        self.send(job, index, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid(job, index)}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def kill(self, job: str, index: int) -> None:
        """End a task without a warning, and wait until it has ended."""
        self.send(job, index, signal.SIGKILL)
        self.code(job, index)

    def code(self, job: str, index: int, timeout: float = END_SECONDS) -> int:
        """Wait until a task has ended, and return its exit status."""
        try:
            return self._processes[job, index].wait(timeout)
        except subprocess.TimeoutExpired:
            late = f"{job}:{index} has not ended in {timeout} s:\n{self.said()}"
            raise TimeoutError(late) from None

    def resolver(self, job: str = "chief", index: int = 0) -> Any:
        """Return the resolver of a task that this process is."""
        from ndistribute.cluster import SimpleClusterResolver

        return SimpleClusterResolver(self.cluster, task_type=job, task_id=index)

    def said(self, *tasks: str) -> str:
        """Return what all tasks, or some such as ``worker:0``, have written so far."""
        named = tasks or [f"{job}:{index}" for job, index in self._processes]
        return "".join((self._outputs / name).read_text(errors="replace") for name in named)


def run_task() -> None:
    """Be a task, as the environment says.

    TASK_SCRIPT is a script to run, with TASK_ARGUMENTS, or TASK_RUNS a function of
    `tests/jobs/loops.py`; other tasks serve, and end after TASK_CUT_SECONDS without their chief.
    TASK_LIMITS are set before, and TASK_USER is whose process it becomes.
    """
    for name, value in json.loads(os.environ.get("TASK_LIMITS", "{}")).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if "TASK_USER" in os.environ:
        os.setuid(int(os.environ["TASK_USER"]))
    if "TASK_SCRIPT" in os.environ:
        path = os.environ["TASK_SCRIPT"]
        main = vars(sys.modules["__main__"])
        main["__file__"], main["__spec__"] = path, None
        sys.argv = [path, *os.environ.get("TASK_ARGUMENTS", "").split()]
        sys.path.insert(0, str(Path(path).parent))
        exec(compile(Path(path).read_text(), path, "exec"), main)
    elif "TASK_RUNS" in os.environ:
        getattr(importlib.import_module("tests.jobs.loops"), os.environ["TASK_RUNS"])()
    else:
        server = importlib.import_module("ndistribute.task.server")
        server.CUT_SECONDS = float(os.environ.get("TASK_CUT_SECONDS", server.CUT_SECONDS))
        config = json.loads(os.environ["TF_CONFIG"])
        server.Server(config["cluster"], config["task"]["type"], config["task"]["index"]).join()


def wait_until(condition: Callable[[], bool], seconds: float = 50.0) -> None:
    """Wait for what no event tells of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it has not come about in {seconds:g} s"
        threading.Event().wait(0.002)


def free_addresses(jobs: Mapping[str, int]) -> dict[str, list[str]]:
    """Return a cluster with so many tasks of each job, at addresses where nobody listens now."""
    with contextlib.ExitStack() as held:
        return _reserve(jobs, held)


def _own_ports() -> Iterator[int]:
    """Yield ports that neither other tests take nor outgoing connections, in a random order."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    ports = range(10_000 + worker, lowest, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    while True:
        yield from random.sample(ports, len(ports)) or [0]


_ports = _own_ports()


def _reserve(jobs: Mapping[str, int], held: contextlib.ExitStack) -> dict[str, list[str]]:
    """Return such a cluster; while it is held, the system gives its ports to nobody else."""
    cluster: dict[str, list[str]] = {}
    for job, count in jobs.items():
        for _ in range(count):
            bound = held.enter_context(socket.socket())
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for port in _ports:
                with contextlib.suppress(OSError):  # Somebody listens there.
                    bound.bind(("127.0.0.1", port))
                    break
            cluster.setdefault(job, []).append(f"127.0.0.1:{bound.getsockname()[1]}")
    return cluster


if __name__ == "__main__":
    # Under its own name, so that what is pickled here is found there.
    _module = importlib.import_module(_MODULE)
    _function = _module.fork_on_demand(int(sys.argv[1])) if sys.argv[1:] else _module.serve
    if _function is not None:
        _function()
