"""Runs the tasks of a job where an engine such as Ray or Dask has placed them.

The engine keeps one `PlacedTask` on the machine of each task, which starts the task in a process of
its own. `run_job` drives them from the program that asked for the job.
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
from ndistribute.launcher.launch import JOB_ID, job_environment, task_starts
from ndistribute.launcher.output import Console, Writer, exit_text, last_report
from ndistribute.launcher.supervisor import Process, Start, Supervisor, restart_delay
from ndistribute.transport.listener import listen

Work = Callable[..., Any] | str | os.PathLike[str]

_FOLLOW_SECONDS = 0.25
_CHUNK_BYTES = 1 << 20
# Ray kills the children of an actor that it ends, but not theirs: with a shell between, the reaper
# lives on and ends the task with all that it started. Both streams go into one.
_APART = ("/bin/sh", "-c", 'exec 2>&1; "$@"; exit $?', "sh")
_CALL = f"import sys; from {__name__} import main; sys.exit(main(int(sys.argv[1])))"


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
    """Start one task of a job on this machine, whose address it can find, and follow it."""

    def __init__(self, find_host: Callable[[], str]) -> None:
        host = find_host()
        self._host = f"[{host}]" if ":" in host else host
        # Kept as long as the task is placed: nobody takes the port between two starts.
        self._port = listen(f"{self._host}:0")

    def address(self) -> str:
        """Return where the task listens; who connects early waits for it."""
        return f"{self._host}:{self._port.getsockname()[1]}"

    def start(self, work: bytes | list[str], environ: Mapping[str, str], grace: float) -> None:
        """Start a script with arguments, or a pickle for `main`; also again after its end."""
        self._told = False
        # It holds the call, and in its place what it came to.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (read when the task has ended)
        command = work
        if isinstance(work, bytes):
            self._file.write(work)
            self._file.seek(0)
            command = ["-c", _CALL, str(self._file.fileno())]
        # What this process can import, the task can.
        environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
        argv = [sys.executable, *command]
        start = Start("", argv, environ, listener=self._port, saving=grace)
        process = Process(os.environ, start, _APART, [self._file.fileno()])
        # The engine may drop this object without a call: the task ends then as well.
        self._process, self._close = process, weakref.finalize(self, process.close)

    def follow(self, end: bool) -> tuple[bytes, int | None, bytes]:
        """Return what the task wrote, its exit code or None, and the pickle that `main` left."""
        process, output = self._process, self._process.outputs[0][0]
        if end and not self._told:
            self._told = True  # Told twice, it would not wait for the grace.
            process.ask_to_end()
        ready = select.select([output, process.done], [], [], _FOLLOW_SECONDS)[0]
        chunk = os.read(output, _CHUNK_BYTES) if output in ready else b""
        # Without a chunk it may have closed its output, and go on.
        if chunk or not ready or not select.select([process.done], [], [], _FOLLOW_SECONDS)[0]:
            return chunk, None, b""
        code = process.code()
        self._close()
        with self._file as file:
            file.seek(0)
            return b"", code, file.read()


def tasks_of(num_workers: int, num_ps: int, options: JobOptions) -> list[tuple[str, int]]:
    """Return the type and index of each task; servers first, for all others need them."""
    if num_workers < 1 or num_ps < 0:
        raise ValueError(f"A job has at least one worker; got {num_workers=} and {num_ps=}.")
    counts = {"ps": num_ps, "chief": int(options.get("chief", False)), "worker": num_workers}
    return [(kind, index) for kind, count in counts.items() for index in range(count)]


def run_job(
    fn_or_script: Work,
    tasks: Sequence[tuple[str, int]],
    options: JobOptions,
    place: Callable[[], contextlib.AbstractContextManager[Sequence[Any]]],  # Of `PlacedTask`s.
    call: Callable[..., Any],  # Calls a method of one, by its handle and name, from any thread.
    dumps: Callable[[Any], bytes],
) -> list[Any]:
    """Run a job to its end, and return what the chief and the workers returned."""
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
    most = options.get("max_restarts", 0)
    again, alone = (0, most) if tasks[0][0] == "ps" else (most, 0)
    console = Console(_InProgram(), _InProgram())
    attempt = 0
    while True:
        console.begin(attempt)
        placed: dict[str, _Placed] = {}
        with place() as handles:
            addresses = [call(handle, "address") for handle in handles]
            starts = task_starts(tasks, addresses, environ, {})
            calls = {s.label: partial(call, h) for s, h in zip(starts, handles, strict=True)}
            begin = partial(_Placed, environ, placed, calls, work)
            supervisor = Supervisor(begin, console, deadline, alone)
            outcome = supervisor.run(starts, restart_delay(attempt - 1))
        if outcome.reason == "timeout":
            raise TimeoutError("The job took longer than its timeout, and was stopped.")
        if outcome.label is None:
            return [placed[start.label].loaded() for start in starts if start.task_type != "ps"]
        if outcome.reason == "unsaved" or attempt == again:
            raise _failure(placed[outcome.label], console.kept(outcome.label))
        attempt += 1
        console.say(f"{outcome.label} failed: all start again ({attempt} of {again}).")


class _InProgram(Writer):
    """Shows output where the program that called shows its own, such as in a notebook."""

    def __init__(self) -> None:
        self.error = None

    def write(self, data: bytes) -> None:
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()


class _Placed(Process):
    """A task as its supervisor knows it; a thread calls what the engine has placed."""

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
        # The thread closes its ends of them when the task has ended.
        self._output, self._end = socket.socketpair(), socket.socketpair()
        self.outputs = [(self._output[0].fileno(), start.label, "stderr")]
        self.done = self._end[0].fileno()
        self.kill = self._end[1].close
        follow = partial(self._follow, work, {**environ, **start.settings}, start.grace)
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
        except Exception as error:  # The engine's process or the machine there is gone.
            self._code, self.lost = 1, error
        finally:
            self._output[1].close()
            self._end[1].close()

    def loaded(self) -> Any:
        """Return what a function returned or raised; None if the task left nothing."""
        # It comes through the engine, from a process that was started by way of it.
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
    """Call the function that an open file holds, and leave a pickle of its result there."""
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
