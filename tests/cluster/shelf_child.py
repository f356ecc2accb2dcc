"""A process that reads a shelf of another, or has one of its own; it does what it is told."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute.cluster.shelf.layout import Place
from ndistribute.cluster.shelf.reader import ShelfReader
from ndistribute.cluster.shelf.shelf import Shelf

ROOT = Path(__file__).parents[2]


class Child:
    """Run this file as a process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.shelf_child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def begin(self, *command: Any) -> None:
        """Tell it to do something."""
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """Return what came of it."""
        return json.loads(self._process.stdout.readline())

    def tell(self, *command: Any) -> Any:
        self.begin(*command)
        return self.end()

    @property
    def has_said_more(self) -> bool:
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def open_shelf(path: str) -> ShelfReader:
    """Return a reader of a file of another process."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return ShelfReader(fd)
    finally:
        os.close(fd)


def read_all(path: str, places: Sequence[Sequence[int]], enough: int) -> dict[str, int]:
    """Read float64 variables again and again until told to stop, and count what was seen."""
    reader = open_shelf(path)
    outs = [np.zeros(place[2] // 8) for place in places]
    seen, torn, missed = set(), 0, 0
    say("reading")  # Before that, the two commands could come at once.
    while True:
        stop = select.select([sys.stdin], [], [], 0)[0]
        versions = reader.read([Place(*place) for place in places], [out.view for out in outs])
        if versions is None:
            missed += 1
        else:
            values = {value for out in outs for value in (out.min(), out.max())}
            torn += values != {float(versions[0])} or len(set(versions)) != 1
            seen.add(versions[0])
            if len(seen) == enough:
                say("enough")
                enough = 0
        if stop:
            sys.stdin.readline()
            reader.close()
            return {"seen": len(seen), "last": max(seen), "torn": torn, "missed": missed}


def say(reply: Any) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def main() -> None:
    held = []
    for line in iter(sys.stdin.readline, ""):
        what, *rest = json.loads(line)
        reply: Any = None
        match what:
            case "read":
                reply = read_all(*rest)
            case "hold":
                held.append(open_shelf(*rest))
                reply = held[-1]._turns.take(time.monotonic() + 10.0)
            case "release":
                held.pop().close()
            case "keep":
                shelf = Shelf()
                held.append(shelf)
                slot = shelf.put(np.ones(3), 1).place.slot
                reply = f"/proc/{os.getpid()}/fd/{shelf.shared_file()}", slot
        say(reply)


if __name__ == "__main__":
    main()
