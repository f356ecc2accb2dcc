"""Forks processes for tests from one that has the package imported: a start takes milliseconds.

All tests of a session share one such process. A forked process leaves the loop of the zygote and
runs from the top of the main module, so that it ends as a Python of its own would: with its own
exit status, its `atexit` functions and its last words about an exception.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

__all__ = ["Forked", "Zygote", "close_zygote", "held_by_zygote", "shared_zygote"]

ROOT = Path(__file__).parents[1]
START_SECONDS = 60.0
# What the processes need; none of it may depend on the environment or start a thread.
PRELOADED = (
    *("cloudpickle", "encodings.idna", "pytest"),
    *("ndistribute.coordinator.worker", "tests.processes"),
)
_MOST_FDS = 64
_MOST_BYTES = 1 << 18


class Forked:
    """A process that a zygote has started; it is not reaped before its status is asked for."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._code: int | None = None

    def wait(self, timeout: float) -> int:
        """Wait until the process has ended, and return its exit status as `subprocess` does."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):  # Another thread has just asked.
                ended = os.pidfd_open(self.pid)
                try:
                    poll = select.poll()
                    poll.register(ended, select.POLLIN)
                    if not poll.poll(timeout * 1e3):
                        raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
                finally:
                    os.close(ended)
            self._code = self._zygote.ask(code=self.pid)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process without a warning."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """Start processes by forking. It has no thread; closing it kills what it has started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(START_SECONDS)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(other.fileno())],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                process_group=0,  # An interrupt from the terminal is the tests' business.
            )

    def start(
        self,
        function: str,
        environ: Mapping[str, str],
        files: Mapping[str, int] | None = None,
        output: int | None = None,
    ) -> Forked:
        """Start a process that calls a function.

        Args:
            function: ``module:name``; it takes no arguments.
            environ: its whole environment.
            files: open files that it inherits; each variable of its environment gets the number.
            output: where its standard output and error go; this process's where not given.
        """
        files = dict(files or {})
        outputs = [1, 2] if output is None else [output, output]
        order = {"function": function, "environ": dict(environ), "files": list(files)}
        return Forked(self, self.ask([*outputs, *files.values()], **order))

    def ask(self, fds: list[int] | None = None, **order: Any) -> int:
        """Send an order, and return the number that answers it."""
        with self._lock:
            socket.send_fds(self.socket, [json.dumps(order).encode()], fds or [])
            answer = self.socket.recv(64)
        if not answer:
            raise RuntimeError(f"the zygote has ended with status {self.process.wait(10.0)}")
        return int(answer)

    def close(self) -> None:
        """End all processes."""
        self.socket.close()
        self.process.wait(START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shared_zygote() -> Zygote:
    """Return the zygote of this session; `tests/conftest.py` closes it."""
    with _STARTING:  # Tests start jobs on several threads.
        return _zygote()


_STARTING = threading.Lock()
_zygote = functools.cache(Zygote)


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


def _serve(control: socket.socket) -> Callable[[], Any] | None:
    """Fork on demand until nobody asks any more; in a fork, return what it is to run."""
    codes: dict[int, int] = {}
    started: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_FDS)
        if not message:
            break
        order = json.loads(message)
        if "code" in order:
            pid = order["code"]
            if pid not in codes:
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                started.discard(pid)
            answer = codes[pid]
        else:
            answer = os.fork()
            if not answer:
                control.close()
                return _become(order, fds)
            started.add(answer)
            for fd in fds:
                os.close(fd)
        control.send(str(answer).encode())
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    return None


def _become(order: dict[str, Any], fds: list[int]) -> Callable[[], Any]:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, standard in zip(fds[:2], (1, 2), strict=True):
        os.dup2(fd, standard)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(order["environ"])
    for name, fd in zip(order["files"], fds[2:], strict=True):
        os.set_inheritable(fd, True)
        os.environ[name] = str(fd)
    module, _, name = order["function"].partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def run_script() -> None:
    """Run the file that RUN_SCRIPT names as the main module of this process."""
    path = os.environ["RUN_SCRIPT"]
    main = vars(sys.modules["__main__"])
    main["__file__"] = path
    main["__spec__"] = None
    sys.argv = [path]
    exec(compile(Path(path).read_text(), path, "exec"), main)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _module in PRELOADED:
        importlib.import_module(_module)
    gc.collect()
    gc.freeze()  # Forks then share the memory of what is imported.
    _function = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _function is not None:
        _function()
