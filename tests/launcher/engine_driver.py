"""The program of a user of Ray or Dask: it starts a small cluster, and runs the jobs it is told.

It is a process of its own, as these engines leave threads and files in the process that uses them.
Each line that it reads is a job, and it answers each with a line.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.launcher import engine_work

logging.basicConfig(level=logging.ERROR)


@contextlib.contextmanager
def ray_cluster(directory: str) -> Iterator[Callable[..., Any]]:
    import ray

    from ndistribute.launcher.ray import run

    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=80 << 20,
        _temp_dir=directory,
    )
    try:
        yield run
    finally:
        ray.shutdown()


@contextlib.contextmanager
def dask_cluster(directory: str) -> Iterator[Callable[..., Any]]:
    from distributed import Client, LocalCluster

    from ndistribute.launcher.dask import run

    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=None,
            local_directory=directory,
            resources={"SLOT": 2},
        ) as cluster,
        Client(cluster),
    ):
        yield run


def carry_out(run: Callable[..., Any], job: dict[str, Any]) -> dict[str, Any]:
    function = getattr(engine_work, job["work"], None)
    answer: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            answer["results"] = run(function or job["work"], **job["options"])
        except (Exception, KeyboardInterrupt) as error:
            answer["error"] = type(error).__name__
            answer["text"] = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return {**answer, "output": output.getvalue().splitlines()}


def main() -> None:
    engine, directory = sys.argv[1:]
    with {"ray": ray_cluster, "dask": dask_cluster}[engine](directory) as run:
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(carry_out(run, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
