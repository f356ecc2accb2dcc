"""A process that does the work of contenders, one repetition whenever it is told to.

It reads one JSON object a line from a socket, and answers each with one. Between requests it
sleeps, so that only one contender of a run is active at any time. It ends when its input ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import time
import traceback
from collections.abc import Iterable
from typing import Any, TextIO

from benchmarks.machine import busy_seconds, libraries, own_seconds

__all__ = ["main", "rank"]


class _Case:
    """A contender's work, set up and warm."""

    def __init__(self, module: str, maker: str, params: dict[str, Any]) -> None:
        self._stack = contextlib.ExitStack()
        make = getattr(importlib.import_module(module), maker)
        self._step, self.check = self._stack.enter_context(make(**params))

    def run(self, steps: int) -> dict[str, float]:
        """Do the work, and return the seconds of wall clock, of our cores, and of others'."""
        step = self._step
        gc.collect()
        all_cores, own, start = busy_seconds(), own_seconds(), time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - start
        own = own_seconds() - own
        others = max(0.0, busy_seconds() - all_cores - own)
        return {"seconds": seconds, "own_cpu": own, "others_cpu": others}

    def close(self) -> None:
        """Let go of what the work holds."""
        self._stack.close()
        gc.collect()


def main() -> None:
    """Serve requests until the parent goes away."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["BENCHMARK_DOOR"])
        with line.makefile("r") as requests, line.makefile("w") as answers:
            answers.write(json.dumps({"rank": rank()}) + "\n")
            answers.flush()
            _serve(requests, answers)


def rank() -> int:
    """Return which process of its team this is."""
    for name in ("BENCHMARK_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError("the environment does not say which rank this is")


def _serve(requests: Iterable[str], answers: TextIO) -> None:
    cases: dict[str, _Case] = {}
    with contextlib.suppress(ConnectionError):
        for line in requests:
            try:
                answer = _handle(json.loads(line), cases)
            except Exception:
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        for case in cases.values():
            case.close()


def _handle(request: dict[str, Any], cases: dict[str, _Case]) -> dict[str, Any]:
    name = request.get("case", "")
    match request["do"]:
        case "describe":
            return libraries(request["packages"])
        case "open":
            cases[name] = _Case(request["module"], request["maker"], request["params"])
            return {"check": cases[name].check}
        case "run":
            return dict(cases[name].run(request["steps"]))
        case "close":
            cases.pop(name).close()
            return {}
    raise ValueError(f"no such request: {request}")


if __name__ == "__main__":
    main()
