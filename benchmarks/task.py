"""A task of a cluster of parameter servers: a server of either side, or one that uses servers.

Started as ``python -m benchmarks.task ROLE``, with `TF_CONFIG` saying which task it is. Where its
input is a pipe, it answers a line ``facts`` in it, and ends once its starter closes it, or dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from benchmarks.case import OURS, PEER

__all__ = ["Calls", "facts", "main"]

_AT_WORK = 20
_PLACES = 1000
_PACKAGE = str(Path(__file__).parents[1] / "ndistribute")
_told_to_end = threading.Event()
Answer = Callable[..., None]


class Calls:
    """Count calls of the package's Python functions, on this thread and those that begin later."""

    def __init__(self) -> None:
        self._files: list[str] = []
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def taken(self) -> dict[str, Any]:
        """Return how many there were since the last time, and in which files."""
        files, self._files = self._files, []
        return {"calls": len(files), "files": sorted(set(files))}

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(_PACKAGE):
            self._files.append(name)


def facts(calls: Calls | None = None) -> dict[str, Any]:
    """Return how many threads and sockets this process has, and how much memory, in MB."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # That of the folder itself, say.
            links.append(os.readlink(entry.path))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "sockets": sum(link.startswith("socket:") for link in links),
        **{name: int(status[key].split()[0]) / 1e3 for name, key in _MEMORY.items()},
        **(calls.taken() if calls else {}),
    }


_MEMORY = {"resident": "VmRSS", "shared": "RssShmem", "peak": "VmHWM"}


def main() -> None:
    """Be what the command line says."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Whatever a library prints must not end up among the answers.

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    calls = Calls() if "BENCHMARK_CALLS" in os.environ else None
    if "BENCHMARK_BEATS" in os.environ:
        from ndistribute.transport import failure_detector

        failure_detector._BEATS = int(os.environ["BENCHMARK_BEATS"])
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_obey, args=(answer, calls), daemon=True).start()
    roles = {OURS: _serve, PEER: _serve_theirs, "command": _command, "loop": _loop, "hold": _hold}
    {**roles, "staleness": _staleness}[sys.argv[1]](answer)


def _obey(answer: Answer, calls: Calls | None) -> None:
    """Answer what the starter asks; end this process once it closes the pipe, or dies."""
    rest = b""
    while piece := os.read(0, 4096):  # By no object that the end of the interpreter would wait for.
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line == b"facts":
                answer(**facts(calls))
            else:
                _told_to_end.set()
    os._exit(0)


def _serve(answer: Answer) -> None:
    import ndistribute as nd

    config = json.loads(os.environ["TF_CONFIG"])
    nd.Server(config["cluster"], config["task"]["type"], config["task"]["index"]).join()


def _serve_theirs(answer: Answer) -> None:
    from benchmarks.peer import server

    config = json.loads(os.environ["TF_CONFIG"])
    server(config["cluster"], config["task"]["type"], config["task"]["index"]).join()


def _command(answer: Answer) -> None:
    """Schedule work on all workers until somebody ends this process."""
    import ndistribute as nd

    with nd.ParameterServerStrategy() as strategy, nd.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            count = nd.Variable(np.int64(0))

        def step() -> None:
            count.assign_add(1)

        def schedule(times: int) -> None:
            for _ in range(times):
                coordinator.schedule(step)

        schedule(_AT_WORK)
        coordinator.join()
        answer(working=True)
        while True:
            schedule(1000)


def _loop(answer: Answer) -> None:
    """Train in step with the others until one of them is lost."""
    import ndistribute as nd

    cluster = nd.TFConfigClusterResolver().cluster_spec()
    workers = len(cluster.task_indices("worker"))
    with nd.ParameterServerStrategy(replicas_to_aggregate=workers) as strategy:
        with strategy.scope():
            weights = nd.Variable(np.zeros(_PLACES))
        optimizer = nd.optimizers.SGD(1.0)
        step = 0
        try:
            while True:
                optimizer.apply_gradients([(np.ones(_PLACES), weights)])
                step += 1
                if step == _AT_WORK:
                    answer(working=True)
        except nd.DistributeError as error:
            answer(when=time.monotonic(), error=type(error).__name__)


def _staleness(answer: Answer) -> None:
    from benchmarks.staleness import train

    train(answer)


def _hold(answer: Answer) -> None:
    """Change each variable so many times and read it; hold what was read until told to end."""
    import ndistribute as nd

    asked = os.environ["BENCHMARK_VARIABLES"]
    times, count, places = (int(number) for number in asked.split("x"))
    with nd.ParameterServerStrategy() as strategy:
        with strategy.scope():
            zeros = np.broadcast_to(np.float32(0), (places,))
            variables = [nd.Variable(zeros) for _ in range(count)]
        gradient = np.ones(places, np.float32)
        for _ in range(times):
            for variable in variables:
                variable.assign_add(gradient)
        answer(held=sum(variable.numpy().nbytes for variable in variables))
        _told_to_end.wait()


if __name__ == "__main__":
    main()
