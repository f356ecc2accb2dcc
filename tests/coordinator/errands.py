"""Functions that the tests send to workers: they import nothing heavy, so a worker starts soon."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from ndistribute.cluster import worker_index


def double(value: Any) -> Any:
    return 2 * value


def index() -> int:
    return worker_index()


def meet(fifo: str, side: str) -> int:
    """Return this worker's index, once another worker is at the other side of the fifo."""
    os.close(os.open(fifo, os.O_RDONLY if side == "in" else os.O_WRONLY))
    return worker_index()


def once(path: str, number: int) -> int:
    """Send this process a signal, but not when it was done before."""
    count = len(Path(path).read_bytes()) if os.path.exists(path) else 0
    with Path(path).open("ab") as file:
        file.write(b".")
    if not count:  # To this thread: else it may go on until another one takes the signal.
        signal.pthread_kill(threading.get_ident(), number)
    return worker_index()


def fail(text: str) -> None:
    raise LookupError(text)


class Evil:
    """Make a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)
