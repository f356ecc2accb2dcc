"""Forks tasks of a cluster from a process that has everything imported, so that a start takes ms.

It reads one JSON object a line, an environment, starts a task with it and answers with its pid; an
end is told as a pid and a status. When its input ends, so do all tasks. It makes no thread. What a
task does is a function of `loops.py`, named by TASK_RUNS, or else it serves; TASK_LIMITS are set
before, and TASK_USER is whose process it becomes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import selectors
import signal
import sys
import traceback
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Serve until the input ends."""
    for name in ("cloudpickle", "encodings.idna", "ndistribute.coordinator.worker"):
        importlib.import_module(name)
    nd = importlib.import_module("ndistribute")
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(tell)
    pids: set[int] = set()
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(told, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if told in ready:
                os.read(told, 4096)
                _reap(pids)
            if 0 not in ready:
                continue
            piece = os.read(0, 1 << 16)
            if not piece:
                break
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                pids.add(_start(nd, json.loads(line)))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _start(nd: Any, environ: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        _say(started=pid)
        return pid
    status = 70
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(environ["TASK_LOG"], os.O_WRONLY | os.O_APPEND), 2)
        os.dup2(2, 1)
        os.environ.update(environ)
        for name, value in json.loads(environ.get("TASK_LIMITS", "{}")).items():
            resource.setrlimit(getattr(resource, name), (value, value))
        if "TASK_USER" in environ:
            os.setuid(int(environ["TASK_USER"]))
        config = json.loads(environ["TF_CONFIG"])
        task = config["task"]
        if "TASK_RUNS" in environ:
            getattr(importlib.import_module("tests.faults.loops"), environ["TASK_RUNS"])()
        else:
            nd.Server(config["cluster"], task["type"], task["index"]).join()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stderr.flush()
        os._exit(status)


def _reap(pids: set[int]) -> None:
    for pid in list(pids):
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pids.discard(pid)
                _say(ended=pid, code=os.waitstatus_to_exitcode(status))


def _say(**fields: int) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    main()
