"""Processes that have imported NumPy and the package, and wait until a task needs one.

Importing takes 0.6 s of processor time; with a spare, a restarted worker does not wait for it.
`Spares` is the launcher's side, `main` is the process's side. The script gets the same `__main__`,
arguments and path as from `python`. The launcher sends the listener with the settings through a
Unix socket, because a spare may have started before the worker, and its listener, was added.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from ndistribute.launcher.output import exit_text
from ndistribute.launcher.supervisor import Process, Start
from ndistribute.transport.listener import LISTEN_FD

# The imports must search the same path as the script's. No name remains in `__main__`.
_CODE = (
    "import sys; n = not sys.flags.safe_path; sys.path[:n] = sys.argv[1:1 + n]; del sys, n; "
    f"__import__({__name__!r}, fromlist=['main']).main()"
)


def spare_start(task: Start, fd: int = -1) -> Start:
    """Return the `Start` of a spare for tasks with the command and settings of `task`."""
    python, script, *_ = task.argv
    path = os.getcwd() if script == "-m" else os.path.dirname(os.path.realpath(script))
    settings = {name: text for name, text in task.settings.items() if name != "TF_CONFIG"}
    argv = (python, "-c", _CODE, path, str(fd), *task.argv[1:])
    return replace(task, label="spare", argv=argv, settings=settings, listener=None, inherited=[fd])


class Spares:
    """Starts tasks; on this machine, in processes that have imported in advance."""

    def __init__(self, number: int, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._number, self._environ, self._say = number, environ, say
        self._waiting: list[Spare] = []

    def begin(self, task: Start) -> Process:
        """Return the process of a task, which is a spare or a new process."""
        for spare in self._waiting:
            if spare.fits(task) and not spare.has_ended():
                self._waiting.remove(spare)
                spare.become(task)
                return spare
        return Process(self._environ, task)

    def fill(self, task: Start) -> None:
        """Start spares for the settings of a task until there are enough."""
        for spare in self._waiting[:]:
            if spare.has_ended():  # The next spare might end as well.
                self._number -= 1
                why = exit_text(spare.code())
                self._say(f"a spare ended unexpectedly ({why}); spares left: {self._number}.")
            if spare.has_ended() or not spare.fits(task):
                self._waiting.remove(spare)
                spare.dismiss()
        while len(self._waiting) < self._number:
            self._waiting.append(Spare(self._environ, task))

    def close(self) -> None:
        for spare in self._waiting:
            spare.dismiss()


class Spare(Process):
    """A started process that waits for a task, without using the processor."""

    def __init__(self, environ: Mapping[str, str], task: Start) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._start = spare_start(task, theirs.fileno())
            super().__init__(environ, self._start)

    def fits(self, task: Start) -> bool:
        """Return True if the spare has a task's settings, except those of that task alone."""
        return task.host is None and self._start.settings.items() <= task.settings.items()

    def has_ended(self) -> bool:
        return bool(select.select([self.done], [], [], 0)[0])

    def become(self, task: Start) -> None:
        """Run a task; if the process ends at this moment, that counts as the task's end."""
        fds = [] if task.listener is None else [task.listener.fileno()]
        with self._socket, contextlib.suppress(OSError):
            # The end of the stream ends the settings.
            socket.send_fds(self._socket, [json.dumps(dict(task.settings)).encode()], fds)
        self.outputs = [(fd, task.label, stream) for fd, _, stream in self.outputs]

    def dismiss(self) -> None:
        self._socket.close()
        self.ask_to_end()
        self.hang_up()  # At once.
        with contextlib.suppress(subprocess.TimeoutExpired):  # Its reaper ends it later.
            self.code()
        self.close()


def main() -> None:
    """Wait for the settings of a task, and run the command as `python` does."""
    fd, *command = sys.argv[2:]
    with socket.socket(fileno=int(fd)) as connection:
        settings, fds, *_ = socket.recv_fds(connection, 1 << 16, 1)
        while part := connection.recv(1 << 16):
            settings += part
    if not settings:  # The launcher no longer needs this spare.
        return
    os.environ.update(json.loads(settings))
    for listener in fds:
        os.set_inheritable(listener, True)  # As without a spare.
        os.environ[LISTEN_FD] = str(listener)
    sys.orig_argv[:] = [sys.executable, *command]
    try:
        _run(*command)
    except Exception as error:
        # Printed as Python does, but without the lines of this file.
        trace = error.__traceback__
        for _ in (main, _run):
            trace = trace and trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _run(script: str, *arguments: str) -> None:
    sys.argv[:] = script, *arguments
    if script == "-m":
        del sys.argv[1]
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        return
    path = os.path.join(os.getcwd(), script)  # As Python does, without normalisation.
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    namespace = sys.modules["__main__"].__dict__
    namespace |= {"__file__": path, "__cached__": None, "__loader__": loader}
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    exec(code, namespace)  # noqa: S102 (the user's script)
