"""Starts the tasks of a job on a Dask cluster: an actor on a Dask worker for each of them."""

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
    client: Any = None,
    resources: Mapping[str, float] | None = None,
    placement_timeout: float = 300.0,
    **options: Unpack[JobOptions],
) -> list[Any]:
    """Run a function or a script in every task of a cluster on Dask, and wait for the end.

    Each task is a process of its own beside the Dask worker that it was placed with. All else is as
    in `ndistribute.launcher.ray.run`.

    Args:
        fn_or_script: called in each task; or the path of a script that each task runs.
        num_workers: how many workers of the job; where there are fewer Dask workers, some of those
            have several.
        num_ps: how many parameter servers; they run the same function or script.
        client: a ``distributed.Client``; None for the current one.
        resources: what a Dask worker must have been started with for each worker and the chief,
            for example ``{"GPU": 1}``; nothing by default.
        placement_timeout: how many seconds to wait for Dask workers with the resources.
        options: ``args`` of the function or script, ``chief``, ``max_restarts``, ``environ`` and
            ``timeout``, see `JobOptions`.

    Returns:
        What the function returned in the chief and the workers, in the order of their ranks; None
        for each that ran a script.

    Raises:
        MissingDependencyError: Dask's distributed is not installed.
        ValueError: there is no client.
        TimeoutError: the job took too long, or no Dask worker has the resources.
        Exception: as from `ndistribute.launcher.ray.run`.
    """
    try:
        import distributed
        from distributed.protocol.pickle import dumps
    except ImportError as error:
        raise MissingDependencyError(
            "Jobs on Dask need its distributed: pip install 'ndistribute[dask]'."
        ) from error

    tasks = tasks_of(num_workers, num_ps, options)
    dask = distributed.get_client() if client is None else client
    needs = [{} if kind == "ps" else dict(resources or {}) for kind, _ in tasks]

    @contextlib.contextmanager
    def place() -> Iterator[list[Any]]:
        futures = [
            dask.submit(PlacedTask, _host, actor=True, pure=False, resources=need) for need in needs
        ]
        try:
            distributed.wait(futures, placement_timeout)
            yield dask.gather(futures)
        except distributed.TimeoutError as error:
            raise TimeoutError(
                f"Dask did not place {len(needs)} tasks within {placement_timeout:g} s. Has it "
                f"workers that were started with the resources {dict(resources or {})}?"
            ) from error
        finally:
            dask.cancel(futures)

    def call(actor: Any, method: str, *args: Any) -> Any:
        return getattr(actor, method)(*args).result()

    return run_job(fn_or_script, tasks, options, place, call, dumps)


def _host() -> str:
    """Return the address of the Dask worker that this runs in."""
    import distributed

    address = distributed.get_worker().address
    host: str = distributed.comm.get_address_host(address)
    return "127.0.0.1" if address.startswith("inproc://") else host
