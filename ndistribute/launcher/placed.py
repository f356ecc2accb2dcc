"""Runs the tasks of a job that an engine such as Ray or Dask has placed on its machines.

The engine runs one `PlacedTask` on the machine of each task, which starts the task as a process.
`run_job` controls them from the program that started the job.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

from ndistribute.errors import DistributeError, WorkerLostError
from ndistribute.launcher.commands import JOB_ID
from ndistribute.launcher.elastic_job import RESTARTS, ElasticSupervisor
from ndistribute.launcher.job import JobOptions
from ndistribute.launcher.launch import job_environment, task_starts
from ndistribute.launcher.output import Console, Writer, exit_text, last_report
from ndistribute.launcher.supervisor import Process, Start, TaskSupervisor, restart_delay
from ndistribute.transport.listener import reserve, set_accepting

Work = Callable[..., Any] | str | os.PathLike[str]

_FOLLOW_SECONDS = 0.25
_CHUNK_BYTES = 1 << 20
# Ray kills the children of an actor, but not their children. With a shell in between, the reaper
# survives and ends the task with its descendants. The shell also merges both output streams.
_APART = ("/bin/sh", "-c", 'exec 2>&1; "$@"; exit $?', "sh")
_CALL = f"import sys; from {__name__} import main; sys.exit(main(int(sys.argv[1])))"


class EngineOptions(TypedDict, total=False):
    """The options that all engines accept.

    Args:
        args: arguments of the function or script.
        chief: whether the job has a chief.
        max_restarts: how many times to restart after a failure: all tasks of a job of workers, the
            failed task of a job with servers, each worker (5 times by default) of an elastic job.
        min_workers: makes the job elastic: a worker that fails is restarted alone, and the others
            continue while at least this many remain.
        environ: variables to set in every task, in addition to those of the calling program that
            start with ``NDISTRIBUTE_``.
        timeout: seconds after which the job is stopped.
    """

    args: Sequence[Any]
    chief: bool
    max_restarts: int
    min_workers: int
    environ: Mapping[str, str]
    timeout: float | None


class PlacedTask:
    """Starts one task of a job on this machine, and reports its output and its end."""

    def __init__(self, find_host: Callable[[], str]) -> None:
        host = find_host()
        self._host = f"[{host}]" if ":" in host else host
        # Kept between restarts, so that no other process takes the port.
        self._port = reserve(self._host)
        self._address = f"{self._host}:{self._port.getsockname()[1]}"

    def address(self) -> str:
        """Return the address of the task, where early connections wait for its first start."""
        return self._address

    def start(self, work: bytes | list[str], environ: Mapping[str, str], grace: float) -> None:
        """Start a script with arguments, or a pickled call for `main`; may be called again."""
        self._asked_to_end = False
        set_accepting(self._port, True)
        # Contains the call, and later the result.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (read when the task has ended)
        command = work
        if isinstance(work, bytes):
            self._file.write(work)
            self._file.seek(0)
            command = ["-c", _CALL, str(self._file.fileno())]
        # The task can import what this process can.
        environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
        argv = [sys.executable, *command]
        files = [self._file.fileno()]
        start = Start(
            "", argv, environ, listener=self._port, saving=grace, around=_APART, inherited=files
        )
        process = Process(os.environ, start)
        # If the engine drops this object, the task must end.
        self._process, self._close = process, weakref.finalize(self, process.close)

    def follow(self, end: bool) -> tuple[bytes, int | None, bytes]:
        """Return new output of the task, its exit code or None, and its pickled result."""
        process, output = self._process, self._process.outputs[0][0]
        if end and not self._asked_to_end:
            self._asked_to_end = True  # A second request would skip the grace period.
            process.ask_to_end()
        ready = select.select([output, process.done], [], [], _FOLLOW_SECONDS)[0]
        chunk = os.read(output, _CHUNK_BYTES) if output in ready else b""
        # The task may still run after it has closed its output.
        if chunk or not ready or not select.select([process.done], [], [], _FOLLOW_SECONDS)[0]:
            return chunk, None, b""
        code = process.code()
        self._close()
        set_accepting(self._port, False)  # A refusal tells others that it has ended.
        with self._file as file:
            file.seek(0)
            return b"", code, file.read()


def run_job(
    fn_or_script: Work,
    num_workers: int,
    num_ps: int,
    options: EngineOptions,
    # Yields a handle to a `PlacedTask` for each task, given its type.
    place: Callable[[list[str]], contextlib.AbstractContextManager[Sequence[Any]]],
    call: Callable[..., Any],  # Calls a method of a handle by name, from any thread.
    dumps: Callable[[Any], bytes],
) -> list[Any]:
    """Run a job to its end, and return the results of the chief and the workers."""
    if num_workers < 1 or num_ps < 0:
        raise ValueError(f"A job has at least one worker; got {num_workers=} and {num_ps=}.")
    # Servers first, because the others need them.
    counts = {"ps": num_ps, "chief": int(options.get("chief", False)), "worker": num_workers}
    tasks = [(kind, index) for kind, count in counts.items() for index in range(count)]
    work: bytes | list[str]
    if callable(fn_or_script):
        work = dumps((fn_or_script, tuple(options.get("args", ())), dumps))
    else:
        work = [os.fspath(fn_or_script), *map(str, options.get("args", ()))]
    timeout = options.get("timeout")
    deadline = None if timeout is None else time.monotonic() + timeout
    environ = {k: v for k, v in os.environ.items() if k.startswith("NDISTRIBUTE_")}
    environ |= options.get("environ", {})
    environ[JOB_ID] = job_environment(environ)[JOB_ID]
    least = options.get("min_workers", 0)
    if "min_workers" in options and (num_ps or not 0 < least <= num_workers):
        what = f"min_workers must be between 1 and num_workers={num_workers}, and needs num_ps=0"
        raise ValueError(f"{what}; got {least} and {num_ps=}.")
    most = options.get("max_restarts", RESTARTS if least else 0)
    again, alone = (0, most) if num_ps or least else (most, 0)
    console = Console(_InProgram(), _InProgram())
    attempt = 0
    while True:
        console.begin(attempt)
        placed: dict[str, _Placed] = {}
        with place([kind for kind, _ in tasks]) as handles:
            addresses = [call(handle, "address") for handle in handles]
            starts = task_starts(tasks, addresses, environ, {})
            calls = {s.label: partial(call, h) for s, h in zip(starts, handles, strict=True)}
            begin = partial(_Placed, environ, placed, calls, work)
            supervisor = TaskSupervisor(begin, console, deadline, alone)
            if least:
                limits = JobOptions((), (), min_workers=least)
                same = partial(_as_before, starts)
                supervisor = ElasticSupervisor(
                    begin, console, deadline, alone, options=limits, start_all=same
                )
            outcome = supervisor.run(starts, restart_delay(attempt - 1))
        if outcome.reason == "timeout":
            raise TimeoutError("The job took longer than its timeout, and was stopped.")
        if outcome.label is None:
            tasks_done = [placed[start.label] for start in starts if start.task_type != "ps"]
            return [task.loaded() if task.code() == 0 else None for task in tasks_done]
        if outcome.reason == "unsaved" or attempt == again:
            raise _failure(placed[outcome.label], console.kept(outcome.label))
        attempt += 1
        console.say(f"{outcome.label} failed: all tasks are restarted ({attempt} of {again}).")


def _as_before(starts: list[Start], options: JobOptions) -> list[Start]:
    return starts


class _InProgram(Writer):
    """Writes to the standard output of the calling program, for example a notebook."""

    def __init__(self) -> None:
        self.error = None

    def write(self, data: bytes) -> None:
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()


class _Placed(Process):
    """The supervisor's view of a task; a thread calls the `PlacedTask` of the engine."""

    def __init__(
        self,
        environ: Mapping[str, str],
        placed: dict[str, _Placed],
        calls: Mapping[str, Callable[..., Any]],
        work: bytes | list[str],
        start: Start,
    ) -> None:
        placed[start.label] = self
        self._call = calls[start.label]
        self.name = f"{start.label} at {self._call('address')}"
        self.rank = int(start.label.rpartition(":")[2])
        self.result = b""
        self._code: int | None = None
        self._asked = threading.Event()
        # The thread closes its ends when the task has ended.
        self._output, self._end = socket.socketpair(), socket.socketpair()
        self.outputs = [(self._output[0].fileno(), start.label, "stderr")]
        self.done = self._end[0].fileno()
        self.kill = self._end[1].close
        environ = {**environ, **start.settings}
        follow = partial(self._follow, work, environ, start.grace)
        threading.Thread(target=follow, name="ndistribute task", daemon=True).start()

    def ask_to_end(self) -> None:
        self._asked.set()

    hang_up = ask_to_end

    def code(self) -> int:
        return 1 if self._code is None else self._code

    def close(self) -> None:
        self._output[0].close()
        self._end[0].close()

    def _follow(self, *work: Any) -> None:
        try:
            self._call("start", *work)
            while self._code is None:
                chunk, self._code, self.result = self._call("follow", self._asked.is_set())
                self._output[1].sendall(chunk)
        except Exception as error:  # The engine's process or its machine is lost.
            self._code, self.lost = 1, error
        finally:
            self._output[1].close()
            self._end[1].close()

    def loaded(self) -> Any:
        """Return the result or the exception of the function, or None if there is none."""
        # It comes from a process that the engine has started.
        return pickle.loads(self.result) if self.result else None  # noqa: S301


def _failure(task: _Placed, said: list[bytes]) -> Exception:
    if task.lost is not None:
        lost = WorkerLostError(f"{task.name} is lost: {task.lost}", rank=task.rank)
        lost.__cause__ = task.lost
        return lost
    error = task.loaded()
    if isinstance(error, Exception):
        error.add_note(f"It was raised by {task.name}; its traceback is in the output.")
        return error
    report = b"\n".join(last_report(said)).decode(errors="replace")
    what = f"{task.name} ended with {exit_text(task.code())}."
    return WorkerLostError(f"{what} Its last output:\n{report}" if report else what, rank=task.rank)


def main(fd: int) -> int:
    """Call the function that an open file contains, and write its pickled result to the file."""
    with open(fd, "r+b") as file:
        function, args, dumps = pickle.load(file)  # noqa: S301 (written by `PlacedTask`)
        file.seek(0)
        file.truncate()
        code = 0
        try:
            result = dumps(function(*args))
        except Exception as error:
            code = 1
            traceback.print_exc()
            try:
                result = dumps(error)
                pickle.loads(result)  # noqa: S301 (some exceptions pickle, but do not come back)
            except Exception:
                text = "".join(traceback.format_exception_only(error))
                result = dumps(DistributeError(text))
        file.write(result)
    return code
