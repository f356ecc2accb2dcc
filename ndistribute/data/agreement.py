"""What the workers of a job settle among them about their input.

How they divide a pipeline follows from the pipeline alone. When an epoch begins they compare what
they have, and take over the seeds of the first of them: workers that share one pipeline must
shuffle alike, though nobody called `set_seed`. Where only each worker knows when its own data ends,
they agree at every step. All of it happens on the consumer's thread, so that the collectives of all
workers come in the same order whatever is prepared ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.collective.objects import ProcessGroup, all_gather_object
from ndistribute.data.elements import Element
from ndistribute.data.options import AutoShardPolicy, Sharding, Topology
from ndistribute.data.pipeline import Epoch, Node, upstream
from ndistribute.data.steps import COMPLETE_IT, Position, Progress
from ndistribute.errors import DistributeError

# In the place of a shard's number, a row that says how its worker fares.
_WORKER = -1

# How a worker fares: it has a step; it has none; nor did it ever; its input raised.
STEP, OVER, EMPTY, FAILED = range(4)

_SEPARATELY = (
    "Build the same dataset on every worker; to give each its own, use "
    "distribute_datasets_from_function or AutoShardPolicy.OFF."
)

_SAME_BATCHES = (
    "Under AutoShardPolicy.DATA each worker takes its part of every batch, so all must get "
    "the same batches in the same order: seed the loader alike on all workers, or let each "
    "have its own data with AutoShardPolicy.OFF or distribute_datasets_from_function. If only the "
    "values differ, as with augmentation at random, give Dataset.from_generator(lambda: "
    "iter(loader)), of which no values are compared."
)

# The point of the input at which workers compare first batches and ends, and a failure before it.
_COMPARISON = "the first batch or the end of an epoch"
_FAILED = "failed"


def choose_sharding(
    node: Node, policy: AutoShardPolicy, num_workers: int, can_agree: bool
) -> Sharding:
    """Return how the workers divide a pipeline; by files only if they `can_agree` when those end.

    Raises:
        ValueError: sharding by file was asked for and can not be done.
    """
    if policy is AutoShardPolicy.OFF:
        return Sharding.OFF
    if policy is AutoShardPolicy.DATA or num_workers == 1:
        return Sharding.DATA
    hindrance = _hindrance(node, num_workers, can_agree)
    if policy is AutoShardPolicy.FILE and hindrance is not None:
        raise ValueError(f"AutoShardPolicy.FILE {hindrance}")
    return Sharding.FILE if hindrance is None else Sharding.DATA


def _hindrance(node: Node, num_workers: int, can_agree: bool) -> str | None:
    """Say why a pipeline can not be divided by files, and what to do instead; None if it can."""
    steps = upstream(node)
    fewest = min((len(step.files) for step in steps if step.files is not None), default=0)
    if not fewest:
        return (
            "needs a dataset of files, and this one reads none. Make it with Dataset.from_files, "
            "use DATA, or distribute_datasets_from_function and give each worker its own files."
        )
    if any(step.files is None and not step.inputs for step in steps):
        return (
            "needs a dataset of files alone, and this one reads other sources too, of which every "
            "worker would use all. Use DATA."
        )
    if fewest < num_workers:
        return (
            f"deals whole files to workers, and there are {fewest} file(s) for {num_workers} "
            f"workers. Write the data to at least {num_workers} files, or use DATA."
        )
    if any(step.positional for step in steps):
        return (
            "deals whole files to workers, but take, skip, shard and zip count elements over all "
            "files. Move them into the reader, or use DATA."
        )
    if not can_agree:
        return (
            "needs the workers to tell each other when their files end: pass their communicator "
            "as workers, or use DATA."
        )
    return None


def begin(node: Node, topology: Topology, sharding: Sharding) -> tuple[Epoch, Progress]:
    """Begin the next epoch of a pipeline, on all workers together where they can meet.

    Raises:
        ValueError: the workers have pipelines that differ, and mean to share one.
    """
    epoch = Epoch.begin(node)
    seeds = list(epoch.seeds.values())
    steps = upstream(node)
    files = sum(len(step.files or ()) for step in steps)
    shards = 1 if sharding is Sharding.DATA else topology.num_workers
    of_workers = [seeds] * topology.num_workers
    if topology.workers is not None:
        lengths = [step.spec.cardinality for step in steps if not step.inputs]
        note = {
            "auto_shard_policy": sharding.value,
            "number of files": files,
            "number of batches": node.spec.cardinality,
            "length of its sources": lengths[0] if len(lengths) == 1 else lengths,
            "batch size": node.spec.batch_size,
            "number of shuffles": len(seeds),
        }
        told = _tell(topology.workers, "the begin of an epoch", {**note, "seeds": seeds})
        of_workers = [theirs.pop("seeds") for theirs in told]
        if sharding in (Sharding.DATA, Sharding.FILE):
            _check_alike(told, _SEPARATELY)
            of_workers = of_workers[:1] * topology.num_workers
        if of_workers[topology.worker_index] != seeds:
            epoch = Epoch.resume(node, of_workers[0])
    return epoch, Progress(sharding, files, of_workers[:shards], [Position()] * shards)


def compare(workers: ProcessGroup, note: dict[str, Any]) -> None:
    """Check that all workers under DATA begin with the same batch, and end after as many rows.

    Raises:
        DistributeError: the input of another worker failed.
        ValueError: the workers get different batches.
    """
    told = _tell(workers, _COMPARISON, note)
    failed = [rank for rank, theirs in enumerate(told) if _FAILED in theirs]
    if failed:
        raise _failed_on(failed[0], workers)
    _check_alike(told, _SAME_BATCHES)


def tell_failure(workers: ProcessGroup) -> None:
    """Let the others know, where they `compare`, that the input of this worker failed."""
    all_gather_object(workers, {"at": _COMPARISON, _FAILED: True})


def _tell(workers: ProcessGroup, at: str, note: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what all workers say of themselves, all at the same point of their input."""
    told = all_gather_object(workers, {"at": at, **note})
    for worker, theirs in enumerate(told):
        if theirs["at"] != at:
            raise DistributeError(
                f"worker {workers.rank} is at {at} of its input, and worker {worker} at "
                f"{theirs['at']}: after an error in the input of one worker, or a break, all "
                "workers must leave the iteration before they iterate again."
            )
    return told


def _failed_on(worker: int, workers: ProcessGroup) -> DistributeError:
    return DistributeError(
        f"the input of worker {worker} failed, so this step can not be made: its own error "
        f"says why. Worker {workers.rank} has nothing to mend; iterate again on all workers."
    )


def _check_alike(notes: Sequence[dict[str, Any]], remedy: str) -> None:
    """Raise a ValueError with a remedy if what workers say of themselves differs."""
    for key, first in notes[0].items():
        for worker, note in enumerate(notes):
            other = note.get(key, "missing")
            if other != first:
                raise ValueError(
                    f"distribute_dataset: the {key} is {first} on worker 0 and {other} on worker "
                    f"{worker}. {remedy}"
                )


def agree(
    workers: ProcessGroup, fares: int, reached: Mapping[int, Position]
) -> tuple[set[int], Mapping[int, Position]]:
    """Tell all workers how this one fares and which positions its step reaches.

    One collective of 40 bytes for each worker and its shards.

    Returns:
        How the workers fare, and the positions that all of them reach.

    Raises:
        DistributeError: the input of another worker failed.
    """
    rows = [(_WORKER, fares, workers.rank, 0, 0)]
    rows += [(shard, *position) for shard, position in reached.items()]
    told = workers.all_gather(np.array(rows, np.int64), axis=0).tolist()
    by_worker = [row[1:3] for row in told if row[0] == _WORKER]
    failed = [rank for fared, rank in by_worker if fared == FAILED]
    if failed and fares != FAILED:
        raise _failed_on(failed[0], workers)
    joint = {shard: Position(*position) for shard, *position in told if shard != _WORKER}
    return {fared for fared, _ in by_worker}, joint


def share_template(workers: ProcessGroup, template: Element | None) -> Element:
    """Return a batch of no rows, where this worker has none as the first one that has one.

    Raises:
        ValueError: no worker has one, as their elements are no batches; or it can not be told.
    """
    told = all_gather_object(workers, template)
    known = next((other for other in told if other is not None), None)
    if known is None:
        raise ValueError(f"a worker has run out of input that others still have. {COMPLETE_IT}")
    return known if template is None else template
