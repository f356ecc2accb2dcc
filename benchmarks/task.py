"""A task of a cluster of parameter servers, for either side.

It serves until nobody needs it any more, or its starter closes the pipe that is its input, or dies.

Started as ``python -m benchmarks.task SIDE``, with `TF_CONFIG` saying which task it is.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading

from benchmarks.case import OURS

__all__ = ["end_with_starter", "main"]


def main() -> None:
    """Serve the task that the environment names."""
    end_with_starter()
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, task = config["cluster"], config["task"]
    if sys.argv[1] == OURS:
        import ndistribute as nd

        nd.Server(cluster, task["type"], task["index"]).join()
        return
    from benchmarks.peer import server

    server(cluster, task["type"], task["index"]).join()


def end_with_starter() -> None:
    """Let this process end once the other end of its input is closed, if that is a pipe."""

    def wait() -> None:
        while os.read(0, 4096):  # By no object that the end of the interpreter would wait for.
            pass
        os._exit(0)

    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
