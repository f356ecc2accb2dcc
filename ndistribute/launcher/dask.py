"""Starts the tasks of a job on a Dask cluster, with one actor on a Dask worker per task."""

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
    client: Any = None,
    resources: Mapping[str, float] | None = None,
    placement_timeout: float = 300.0,
    **options: Unpack[EngineOptions],
) -> list[Any]:
    """Run a function or a script in every task of a job on a Dask cluster, and wait for the end.

    Each task is a process beside its Dask worker. Otherwise see `ndistribute.launcher.ray.run`.

    Args:
        fn_or_script: a function that each task calls, or the path of a script that it runs.
        num_workers: the number of workers; if there are fewer Dask workers, some of these run
            several workers.
        num_ps: the number of parameter servers.
        client: a ``distributed.Client``; None: the current one.
        resources: the resources that each worker and the chief need of a Dask worker, for example
            ``{"GPU": 1}``. Default: none.
        placement_timeout: seconds to wait for Dask workers with the resources.
        options: the same as for Ray.

    Raises:
        MissingDependencyError: Dask's distributed is not installed.
        ValueError: there is no client.
        TimeoutError: the job took too long, or no Dask worker has the resources.
    """
    try:
        import distributed
        from distributed.protocol.pickle import dumps
    except ImportError as error:
        text = "Jobs on Dask need Dask's package distributed: pip install 'ndistribute[dask]'."
        raise MissingDependencyError(text) from error

    def host() -> str:
        """Return the host of the Dask worker in which this runs."""
        address = distributed.get_worker().address
        ip: str = distributed.comm.get_address_host(address)
        return "127.0.0.1" if address.startswith("inproc://") else ip

    @contextlib.contextmanager
    def place(types: list[str]) -> Iterator[list[Any]]:
        dask = distributed.get_client() if client is None else client
        needs = [{} if kind == "ps" else dict(resources or {}) for kind in types]
        futures = [
            dask.submit(PlacedTask, host, actor=True, pure=False, resources=need) for need in needs
        ]
        try:
            distributed.wait(futures, placement_timeout)
            yield dask.gather(futures)
        except distributed.TimeoutError as error:
            what = f"Dask did not place {len(needs)} tasks within {placement_timeout:g} s."
            how = f"Check that it has workers with the resources {dict(resources or {})}."
            raise TimeoutError(f"{what} {how}") from error
        finally:
            dask.cancel(futures)

    def call(actor: Any, method: str, *args: Any) -> Any:
        return getattr(actor, method)(*args).result()

    return run_job(fn_or_script, num_workers, num_ps, options, place, call, dumps)
