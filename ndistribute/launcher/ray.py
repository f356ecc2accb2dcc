"""Starts the tasks of a job on a Ray cluster: an actor of a placement group for each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

from ndistribute.errors import MissingDependencyError
from ndistribute.launcher.placed import JobOptions, PlacedTask, Work, run_job, tasks_of

__all__ = ["run"]


def run(
    fn_or_script: Work,
    num_workers: int,
    num_ps: int = 0,
    *,
    resources: Mapping[str, float] | None = None,
    placement: str = "PACK",
    placement_timeout: float = 300.0,
    **options: Unpack[JobOptions],
) -> list[Any]:
    """Run a function or a script in every task of a cluster on Ray, and wait for the end.

    Each task is a process of its own with `TF_CONFIG` and the job's secret in its environment. What
    the tasks write appears here, marked ``[worker:1]``. When one fails, all are ended; so are they
    on Ctrl-C, and when this program is gone.

    Args:
        fn_or_script: called in each task; or the path of a script that each task runs.
        num_workers: how many workers.
        num_ps: how many parameter servers; they run the same function or script.
        resources: what Ray reserves for each worker and the chief, for example
            ``{"CPU": 4, "GPU": 1}``; a server gets the CPUs alone. One CPU by default.
        placement: the strategy of Ray's placement group, for example ``"SPREAD"``.
        placement_timeout: how many seconds to wait for the resources.
        options: ``args`` of the function or script, ``chief``, ``max_restarts``, ``environ`` and
            ``timeout``, see `JobOptions`.

    Returns:
        What the function returned in the chief and the workers, in the order of their ranks; None
        for each that ran a script.

    Raises:
        MissingDependencyError: Ray is not installed.
        WorkerLostError: a script failed, or a task was killed; the message names it.
        TimeoutError: the job took too long, or Ray has not the resources.
        Exception: what the function raised first, with a note that names the task.
    """
    try:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        raise MissingDependencyError(
            "Jobs on Ray need Ray: pip install 'ndistribute[ray]'."
        ) from error

    tasks = tasks_of(num_workers, num_ps, options)
    worker = dict(resources or {"CPU": 1})
    server = {"CPU": worker.get("CPU", 1)}
    bundles = [server if kind == "ps" else worker for kind, _ in tasks]
    if not ray.is_initialized():
        ray.init()

    @contextlib.contextmanager
    def place() -> Iterator[list[Any]]:
        group = ray.util.placement_group(bundles, strategy=placement)
        actors = []
        try:
            if not group.wait(placement_timeout):
                raise TimeoutError(
                    f"Ray did not reserve {bundles} within {placement_timeout:g} s. The cluster "
                    f"has {ray.cluster_resources()}: ask for fewer resources or tasks."
                )
            for number, bundle in enumerate(bundles):
                placed = ray.remote(PlacedTask).options(
                    num_cpus=bundle.get("CPU", 0),
                    num_gpus=bundle.get("GPU", 0),
                    resources={k: n for k, n in bundle.items() if k not in ("CPU", "GPU")},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
                )
                actors.append(placed.remote(ray.util.get_node_ip_address))
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)
            ray.util.remove_placement_group(group)

    def call(actor: Any, method: str, *args: Any) -> Any:
        return ray.get(getattr(actor, method).remote(*args))

    return run_job(fn_or_script, tasks, options, place, call, ray.cloudpickle.dumps)
