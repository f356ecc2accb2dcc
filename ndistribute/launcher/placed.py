"""Runs the tasks of a job where an engine such as Ray or Dask has placed them.

The engine keeps one `PlacedTask` on the machine of each task, which starts the task in a process of
its own and ends it with all that it started. `run_job` drives them from the program that asked for
the job; of the engine it knows how to place such objects and how to call their methods.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import IO, Any, TypedDict

from ndistribute.cluster.seconds import seconds_of
from ndistribute.errors import DistributeError, WorkerLostError
from ndistribute.launcher import reaper
from ndistribute.launcher.launch import job_environment, task_environment
from ndistribute.launcher.output import Lines, ending, last_report, tells_of_another
from ndistribute.launcher.supervisor import TaskState, Verdict, restart_delay, verdict

__all__ = ["JobOptions", "PlacedTask", "Work", "run_job", "tasks_of"]

Work = Callable[..., Any] | str | os.PathLike[str]

_FOLLOW_SECONDS = 0.25
_CHUNK_BYTES = 1 << 20
_KEPT_LINES = 400
_CALL = f"import sys; from {__name__} import main; sys.exit(main(*map(int, sys.argv[1:])))"
# How long the rest has to end by itself once the work is done, and the others have to report what
# failed when one only says that it lost another.
_ENDING_SECONDS, _REPORT_SECONDS = 10.0, 3.0
_SAVING_SECONDS = 600.0
_log = logging.getLogger("ndistribute")


class JobOptions(TypedDict, total=False):
    """What all engines take.

    Args:
        args: of the function or script.
        chief: whether there is a chief beside servers and workers.
        max_restarts: how many times what failed is started again: a job of workers as a whole, one
            with servers task by task.
        environ: variables to set in every task. Those of the calling program that begin with
            ``NDISTRIBUTE_`` go along.
        timeout: seconds after which everything is stopped.
    """

    args: Sequence[Any]
    chief: bool
    max_restarts: int
    environ: Mapping[str, str]
    timeout: float | None


class PlacedTask:
    """Start one task of a job on this machine, and follow it to its end.

    Args:
        find_host: returns this machine's address, by which the others of the job reach it.
    """

    def __init__(self, find_host: Callable[[], str]) -> None:
        host = find_host()
        self._held = contextlib.ExitStack()
        # Kept as long as the task is placed: nobody takes the port between two starts.
        self._port = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._held.enter_context(self._port)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((host, 0))
        self._host = f"[{host}]" if ":" in host else host
        # The engine may drop this object, or end this process, without a call: the task ends then.
        weakref.finalize(self, self._held.close)
        self._process: subprocess.Popen[bytes]
        self._result: IO[bytes]

    def address(self, listens: bool) -> str:
        """Return where the task will listen.

        Args:
            listens: whether its socket listens from now on, so that others can connect before the
                task has started. Beside servers a task opens a socket of its own.
        """
        if listens:
            self._port.listen(128)
        return f"{self._host}:{self._port.getsockname()[1]}"

    def start(self, work: bytes | list[str], environ: Mapping[str, str], saving: float) -> None:
        """Start the task, or start it again after it has ended.

        Args:
            work: a script and its arguments, or a pickle for `main`.
            environ: what is added to this process's environment.
            saving: how long a server has for its last snapshot; 0 if it writes none.
        """
        port = self._port.fileno()
        with tempfile.TemporaryFile() as call:
            self._result = tempfile.TemporaryFile()  # noqa: SIM115 (read when the task has ended)
            files = [call.fileno(), self._result.fileno()]
            command = work if isinstance(work, list) else ["-c", _CALL, *map(str, files)]
            if isinstance(work, bytes):
                call.write(work)
                call.seek(0)
            grace = str(max(saving, reaper.GRACE_SECONDS))
            reaping = [sys.executable, "-I", "-S", reaper.__file__, grace, sys.executable, *command]
            settings = {
                # What this process can import, the task can.
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                **environ,
                "NDISTRIBUTE_LISTEN_FD": str(port),
            }
            self._process = subprocess.Popen(
                # Ray kills the children of an actor that it ends, but not theirs: the shell stands
                # between, so that the reaper lives on and ends the task with all that it started.
                ["/bin/sh", "-c", '"$@"; exit $?', "sh", *reaping],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                pass_fds=[*files, port],
                start_new_session=True,
            )
        if self._process.stdin is not None:
            self._held.callback(self._process.stdin.close)

    def follow(self) -> tuple[bytes, int | None, bytes]:
        """Return what the task has written, its exit code, and the pickle that `main` has left.

        The code is None while it runs, and 128 plus the number if a signal ended it.
        """
        process, output = self._process, self._process.stdout or sys.stdin
        ready, _, _ = select.select([output], [], [], _FOLLOW_SECONDS)
        chunk = os.read(output.fileno(), _CHUNK_BYTES) if ready else b""
        if ready and not chunk:  # It has closed its output.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_FOLLOW_SECONDS)
        code = process.poll()
        if chunk or code is None:
            return chunk, None, b""
        output.close()
        with self._result as file:
            file.seek(0)
            return b"", code if code >= 0 else 128 - code, file.read()

    def stop(self) -> None:
        """Ask for the end of the task with all that it started; `follow` tells when it has come."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # It has ended already.
                self._process.stdin.write(b".")
                self._process.stdin.flush()


def tasks_of(num_workers: int, num_ps: int, options: JobOptions) -> list[tuple[str, int]]:
    """Return the type and index of each task; servers first, for all others need them.

    Raises:
        ValueError: there is no worker.

    >>> tasks_of(2, 1, {"chief": True})
    [('ps', 0), ('chief', 0), ('worker', 0), ('worker', 1)]
    """
    if num_workers < 1 or num_ps < 0:
        raise ValueError(f"A job has at least one worker; got {num_workers=} and {num_ps=}.")
    counts = {"ps": num_ps, "chief": int(options.get("chief", False)), "worker": num_workers}
    return [(kind, index) for kind, count in counts.items() for index in range(count)]


def run_job(
    fn_or_script: Work,
    tasks: Sequence[tuple[str, int]],
    options: JobOptions,
    place: Callable[[], contextlib.AbstractContextManager[Sequence[Any]]],
    call: Callable[..., Any],
    dumps: Callable[[Any], bytes],
) -> list[Any]:
    """Run a job to its end, and return what the chief and the workers returned.

    Args:
        fn_or_script: what each task runs.
        tasks: see `tasks_of`.
        options: what the user asked for.
        place: gives a handle of a `PlacedTask` for each task, for a ``with`` block.
        call: calls a method of one, by handle and name, and returns its result. Several threads
            do so at once.
        dumps: pickles functions and results.

    Raises:
        WorkerLostError: a task failed without an exception of its own: a script, or a process that
            was killed. The message has the end of its output.
        TimeoutError: the job took too long.
        Exception: what a function raised first, with a note that names the task.
    """
    work: bytes | list[str]
    if callable(fn_or_script):
        work = dumps((fn_or_script, tuple(options.get("args", ())), dumps))
    else:
        work = [os.fspath(fn_or_script), *map(str, options.get("args", ()))]
    timeout = options.get("timeout")
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    restarts = options.get("max_restarts", 0)
    alone = tasks[0][0] == "ps"
    environ = {k: v for k, v in os.environ.items() if k.startswith("NDISTRIBUTE_")}
    environ |= options.get("environ", {})
    attempt = 0
    while True:
        with place() as placed:
            known = [_Task(*task, handle) for task, handle in zip(tasks, placed, strict=True)]
            running = _Attempt(known, work, environ, call, restarts if alone else 0)
            failed = running.run(restart_delay(attempt), deadline)
        if failed is None:
            return [_loaded(task) for task in known if task.computes]
        if alone or attempt == restarts:
            raise _failure(failed)
        attempt += 1
        _log.warning("%s failed: all start again (%d of %d)", failed, attempt, restarts)


class _Task:
    """A task as the program that asked for the job knows it."""

    def __init__(self, kind: str, index: int, handle: Any) -> None:
        self.kind = kind
        self.index = index
        self.handle = handle
        self.address = ""
        self.lines = Lines()
        self.kept: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self.starts = 0
        self.code: int | None = None
        self.result = b""
        self.lost: Exception | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.index} at {self.address}"

    @property
    def computes(self) -> bool:
        return self.kind != "ps"

    @property
    def state(self) -> TaskState:
        told = bool(self.code) and tells_of_another(list(self.kept))
        return TaskState(self.kind, self.code, told)


class _Attempt:
    """One attempt: a thread follows each task, and the caller's thread decides on what ends."""

    def __init__(
        self,
        tasks: Sequence[_Task],
        work: bytes | list[str],
        environ: Mapping[str, str],
        call: Callable[..., Any],
        restarts: int,
    ) -> None:
        self._tasks = tasks
        self._work = work
        self._environ = environ
        self._call = call
        self._restarts = restarts
        self._cluster: dict[str, list[str]] = {}
        self._job = job_environment({**os.environ, **environ})
        self._stopping = threading.Event()
        self._output = threading.Lock()

    def run(self, delay: float, deadline: float) -> _Task | None:
        """Return the task that failed, None if the job ended well; nothing of it is left then."""
        with ThreadPoolExecutor(len(self._tasks), "ndistribute-task") as pool:
            try:
                listens = all(task.computes for task in self._tasks)
                for task in self._tasks:
                    task.address = self._call(task.handle, "address", listens)
                    self._cluster.setdefault(task.kind, []).append(task.address)
                running = {pool.submit(self._follow, task, delay) for task in self._tasks}
                return self._supervise(pool, running, deadline)
            finally:
                self._stopping.set()  # Each thread ends its task.

    def _supervise(
        self, pool: ThreadPoolExecutor, running: set[Future[_Task]], deadline: float
    ) -> _Task | None:
        told: _Task | None = None  # One that only says that it lost another.
        until = math.inf  # When the rest no longer matters.
        while running:
            left = min(until, deadline) - time.monotonic()
            done, running = wait(running, max(0.0, min(left, 3600.0)), FIRST_COMPLETED)
            if not done and time.monotonic() >= until:
                break
            if not done and time.monotonic() >= deadline:
                raise TimeoutError("The job took longer than its timeout, and was stopped.")
            for task in (future.result() for future in done):
                follows = verdict(task.state, [t.state for t in self._tasks], self._restarts)
                if follows is Verdict.FAIL or (follows is Verdict.AGAIN and task.lost):
                    return task
                if follows is Verdict.AGAIN:
                    self._restarts -= 1
                    _log.warning("%s had %s, and is started again", task, ending(task.code or 0))
                    running.add(pool.submit(self._follow, task, restart_delay(task.starts)))
                elif follows is Verdict.WAIT:
                    told = told or task
                    until = min(until, time.monotonic() + _REPORT_SECONDS)
                elif follows is Verdict.FINISH:
                    told = None
                    until = min(until, time.monotonic() + _ENDING_SECONDS)
        return told

    def _follow(self, task: _Task, delay: float) -> _Task:
        """Start a task and show its output until it has ended; end it where the job ends."""
        task.code, task.starts = None, task.starts + 1
        environ = task_environment(self._cluster, task.kind, task.index, self._job, sharing=None)
        environ = {**self._environ, **environ}
        saves = not task.computes and "NDISTRIBUTE_SNAPSHOT_DIR" in environ
        try:
            if self._stopping.wait(delay):
                return task
            name = "NDISTRIBUTE_SNAPSHOT_WAIT_SECONDS"
            saving = seconds_of(environ, name, _SAVING_SECONDS) if saves else 0.0
            self._call(task.handle, "start", self._work, environ, saving)
            stopped = False
            while task.code is None:
                if self._stopping.is_set() and not stopped:
                    self._call(task.handle, "stop")
                    stopped = True
                chunk, task.code, task.result = self._call(task.handle, "follow")
                self._show(task, task.lines.feed(chunk))
            self._show(task, task.lines.close())
        except Exception as error:  # The engine's process or the machine there is gone.
            task.code, task.lost = 1, error
        return task

    def _show(self, task: _Task, lines: Sequence[bytes]) -> None:
        task.kept.extend(lines)
        mark = f"[{task.kind}:{task.index}]"
        text = "".join(f"{mark} {line.decode(errors='replace')}\n" for line in lines)
        with self._output:
            sys.stdout.write(text)
            sys.stdout.flush()


def _failure(task: _Task) -> Exception:
    if task.lost is not None:
        lost = WorkerLostError(f"{task} is lost: {task.lost}", rank=task.index)
        lost.__cause__ = task.lost
        return lost
    error = _loaded(task)
    if isinstance(error, Exception):
        error.add_note(f"It was raised by {task}; its traceback is in the output.")
        return error
    report = b"\n".join(last_report(list(task.kept))).decode(errors="replace")
    what = f"{task} ended with {ending(task.code or 0)}."
    return WorkerLostError(
        f"{what} Its last output:\n{report}" if report else what, rank=task.index
    )


def _loaded(task: _Task) -> Any:
    """Return what a function returned or raised; None if the task left nothing."""
    # It comes through the engine, from a process that was started by way of it.
    return pickle.loads(task.result) if task.result else None  # noqa: S301


def main(call_fd: int, result_fd: int) -> int:
    """Call the function that one open file holds, and leave a pickle of its result in another."""
    with open(call_fd, "rb") as file:
        function, args, dumps = pickle.load(file)  # noqa: S301 (written by `PlacedTask`)
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
    with open(result_fd, "wb") as file:
        file.write(result)
    return code
