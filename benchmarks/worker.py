"""A process that does the work of contenders, one repetition whenever it is told to.

It reads one JSON object a line from standard input and answers each with one. Between requests it
sleeps, so that only one contender of a run is active at any time. It ends when its input ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

from benchmarks.machine import busy_seconds, libraries

__all__ = ["main"]

# A first step may trace, page memory in, or start threads.
WARM_STEPS = 3


class _Case:
    """A contender's work, set up and warm."""

    def __init__(self, module: str, maker: str, params: dict[str, Any]) -> None:
        self._stack = contextlib.ExitStack()
        make = getattr(importlib.import_module(module), maker)
        self._step, self.check = self._stack.enter_context(make(**params))

    def steps_in(self, seconds: float) -> int:
        """Warm up, and return how many steps take about this long."""
        self.run(WARM_STEPS)
        steps = 1
        while True:
            # The fastest of three, lest a hiccup makes repetitions short from then on.
            took = min(self.run(steps)["seconds"] for _ in range(3))
            if took >= seconds / 2:
                return max(1, round(steps * seconds / took))
            steps = max(2 * steps, int(steps * seconds / max(took, 1e-9) / 2))

    def run(self, steps: int) -> dict[str, float]:
        """Do the work, and return the seconds of wall clock, of our cores, and of others'."""
        step = self._step
        gc.collect()
        all_cores, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - start
        own = time.process_time() - own
        others = max(0.0, busy_seconds() - all_cores - own)
        return {"seconds": seconds, "own_cpu": own, "others_cpu": others}

    def close(self) -> None:
        """Let go of what the work holds."""
        self._stack.close()
        gc.collect()


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    # Whatever a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    cases: dict[str, _Case] = {}
    for line in sys.stdin:
        try:
            answer = _handle(json.loads(line), cases)
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
    for case in cases.values():
        case.close()


def _handle(request: dict[str, Any], cases: dict[str, _Case]) -> dict[str, Any]:
    name = request.get("case", "")
    match request["do"]:
        case "describe":
            return libraries(request["packages"])
        case "open":
            cases[name] = _Case(request["module"], request["maker"], request["params"])
            return {"check": cases[name].check, "steps": cases[name].steps_in(request["seconds"])}
        case "run":
            return dict(cases[name].run(request["steps"]))
        case "close":
            cases.pop(name).close()
            return {}
    raise ValueError(f"no such request: {request}")


if __name__ == "__main__":
    main()
