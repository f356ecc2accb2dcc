"""A process that has imported NumPy and the package, and waits until a task needs it.

An import takes 0.6 s of processor time, which a worker that is started again need not wait for.
`Spare` is the launcher's side, `main` that of the process. The script gets the `__main__`, the
arguments and the path that `python` gives it. The listener goes through the Unix socket that
carries the settings: a spare started before a worker was added could not have inherited it.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import pkgutil
import runpy
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ndistribute.launcher.supervisor import Process, Start
from ndistribute.transport.listener import LISTEN_FD

_OF_A_TASK = "TF_CONFIG"
# The imports must look for modules where those of the script do. It binds no name in `__main__`.
_CODE = (
    "if not __import__('sys').flags.safe_path: __import__('sys').path[0] = "
    "__import__('sys').argv[1]\n"
    f"__import__({__name__!r}, fromlist=['main']).main()"
)


def spare_start(task: Start, fd: int = -1) -> Start:
    """Return what starts a spare for tasks that have the command and the settings of `task`."""
    python, *command = task.argv
    if command[0] == "-m":
        path = os.getcwd()
    elif pkgutil.get_importer(command[0]) is not None:  # A folder, or an archive.
        path = os.path.join(os.getcwd(), command[0])
    else:
        path = os.path.dirname(os.path.realpath(command[0]))
    settings = {name: text for name, text in task.settings.items() if name != _OF_A_TASK}
    argv = (python, "-c", _CODE, path, str(fd), *command)
    return replace(task, label="spare", argv=argv, settings=settings, listener=None, inherited=[fd])


class Spare(Process):
    """A started process that waits for a task, without using the processor."""

    def __init__(self, environ: Mapping[str, str], task: Start) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._start = spare_start(task, theirs.fileno())
            super().__init__(environ, self._start)

    def fits(self, task: Start) -> bool:
        """Return True if it waits, and has the settings of a task, but for those of its own."""
        is_fit = task.host is None and self._start.settings.items() <= task.settings.items()
        return is_fit and not self.has_ended()

    def has_ended(self) -> bool:
        return bool(select.select([self.done], [], [], 0)[0])

    def become(self, task: Start) -> bool:
        """Run a task; return False if the process has ended."""
        fds = [] if task.listener is None else [task.listener.fileno()]
        try:
            with self._socket:
                # The end of the stream ends the settings.
                socket.send_fds(self._socket, [json.dumps(dict(task.settings)).encode()], fds)
        except OSError:
            return False
        self.outputs = [(fd, task.label, stream) for fd, _, stream in self.outputs]
        return True

    def dismiss(self) -> int:
        """End the process, and return its exit code."""
        self._socket.close()
        self.hang_up()
        code = self.code()
        self.close()
        return code


def main() -> None:
    """Wait for the settings of a task, and run the command as `python` does."""
    fd, *command = sys.argv[2:]
    with socket.socket(fileno=int(fd)) as connection:
        settings, fds, *_ = socket.recv_fds(connection, 1 << 16, 1)
        while part := connection.recv(1 << 16):
            settings += part
    if not settings:  # The launcher needs it no longer.
        return
    os.environ.update(json.loads(settings))
    for listener in fds:
        os.set_inheritable(listener, True)  # As where it was inherited.
        os.environ[LISTEN_FD] = str(listener)
    sys.orig_argv[:] = [sys.executable, *command]
    try:
        _run(command)
    except Exception as error:
        # Printed as Python does, but without the lines of this file.
        trace = error.__traceback__
        for _ in (main, _run):
            trace = trace and trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv[:] = ["-m", *command[2:]]
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        return
    sys.argv[:] = command
    if pkgutil.get_importer(command[0]) is not None:
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    path = os.path.join(os.getcwd(), command[0])  # As Python does, without making it shorter.
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    namespace = sys.modules["__main__"].__dict__
    namespace |= {"__file__": path, "__cached__": None, "__loader__": loader}
    exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), namespace)  # noqa: S102
