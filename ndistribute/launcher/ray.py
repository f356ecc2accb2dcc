"""Starts the tasks of a job on a Ray cluster, with one actor of a placement group per task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

from ndistribute.errors import MissingDependencyError
from ndistribute.launcher.placed import EngineOptions, PlacedTask, Work, run_job


def run(
    fn_or_script: Work,
    num_workers: int,
    num_ps: int = 0,
    *,
    resources: Mapping[str, float] | None = None,
    placement: str = "PACK",
    placement_timeout: float = 300.0,
    **options: Unpack[EngineOptions],
) -> list[Any]:
    """Run a function or a script in every task of a job on a Ray cluster, and wait for the end.

    Each task is a process with `TF_CONFIG` and the job's secret in its environment. The output of
    the tasks appears in this program, with ``[worker:1]`` in front. If a task fails, all tasks end;
    they also end on Ctrl-C, and when this program ends.

    Args:
        fn_or_script: a function that each task calls, or the path of a script that it runs.
        num_workers: the number of workers.
        num_ps: the number of parameter servers, which run the same function or script.
        resources: the resources that Ray reserves for each worker and the chief, for example
            ``{"CPU": 4, "GPU": 1}``; servers get the CPUs only. Default: one CPU.
        placement: the strategy of Ray's placement group, for example ``"SPREAD"``.
        placement_timeout: seconds to wait for the resources.
        options: ``args``, ``chief``, ``max_restarts``, ``min_workers``, ``environ`` and
            ``timeout``; see `EngineOptions`.

    Returns:
        The results of the function in the chief and the workers, in rank order; None for scripts,
        and for a worker of an elastic job that failed too often.

    Raises:
        MissingDependencyError: Ray is not installed.
        WorkerLostError: a script failed, or a task was killed; the message names it.
        TimeoutError: the job took too long, or Ray does not have the resources.
        Exception: the first exception of the function, with a note that names the task.
    """
    try:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        what = "Jobs on Ray need Ray: pip install 'ndistribute[ray]'."
        raise MissingDependencyError(what) from error

    @contextlib.contextmanager
    def place(types: list[str]) -> Iterator[list[Any]]:
        worker = dict(resources or {"CPU": 1})
        server = {"CPU": worker.get("CPU", 1)}
        bundles = [server if kind == "ps" else worker for kind in types]
        if not ray.is_initialized():
            ray.init()
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

    dumps = ray.cloudpickle.dumps
    return run_job(fn_or_script, num_workers, num_ps, options, place, call, dumps)
