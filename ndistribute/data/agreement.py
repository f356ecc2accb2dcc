"""The agreement of a job's workers on their input.

The pipeline alone determines how the workers divide it. At the start of an epoch they compare
their pipelines and use the seeds of worker 0, because workers that share a pipeline need the same
shuffles, also without `set_seed`. If only each worker knows when its own data ends, they also agree
at every step. The consumer's thread makes all these collectives, so their order is the same on all
workers and does not depend on prefetching.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.collective.objects import ProcessGroup, all_gather_object
from ndistribute.data.elements import Element
from ndistribute.data.options import AutoShardPolicy, Sharding, Topology
from ndistribute.data.pipeline import Epoch, Node, facts, number_of_files, upstream
from ndistribute.data.steps import COMPLETE_IT, PipelineStep, Position, Progress
from ndistribute.devices import Device, copy_to
from ndistribute.errors import DistributeError, WorkerLostError
from ndistribute.mistakes import count_of
from ndistribute.values import PerReplica

# Instead of a shard's number: marks the row with the status of a worker.
_WORKER = -1

# The statuses of a worker: it has a step; it has no step left; it never had one; its input failed.
_STEP, _OVER, _EMPTY, _RAISED = range(4)

_SEPARATELY = (
    "Build the same dataset on every worker, from equal arrays in the same order, and seed what "
    "shuffles them. To give each worker its own data, use distribute_datasets_from_function or "
    "AutoShardPolicy.OFF."
)

_SAME_BATCHES = (
    "Under AutoShardPolicy.DATA each worker takes its part of every batch, so all must get "
    "the same batches in the same order: seed all loaders equally, or give each worker "
    "its own data with AutoShardPolicy.OFF or distribute_datasets_from_function. If only the "
    "values differ, as with augmentation at random, pass Dataset.from_generator(lambda: "
    "iter(loader)), whose values are not compared."
)

# The point of the input at which workers compare batches, and the key of a failure before it.
_COMPARISON = "the first batch or the end of an epoch"
_FAILED = "failed"


def choose_sharding(
    node: Node, policy: AutoShardPolicy, num_workers: int, can_agree: bool, anew: bool = False
) -> Sharding:
    """Return how the workers divide a pipeline; by files only if they `can_agree` on their end.

    If other workers divide it again (`anew`), `FILE` is possible with fewer files than workers:
    some workers then get no file.
    """
    if policy is AutoShardPolicy.OFF:
        return Sharding.OFF
    if policy is AutoShardPolicy.DATA or num_workers == 1:
        return Sharding.DATA
    fewest = 1 if anew and policy is AutoShardPolicy.FILE else num_workers
    hindrance = _hindrance(node, fewest, can_agree)
    if policy is AutoShardPolicy.FILE and hindrance is not None:
        raise ValueError(f"AutoShardPolicy.FILE {hindrance}")
    return Sharding.FILE if hindrance is None else Sharding.DATA


def _hindrance(node: Node, num_workers: int, can_agree: bool) -> str | None:
    """Return why a pipeline cannot be divided by files, and a remedy; None if it can be."""
    steps = upstream(node)
    fewest = min((len(step.files) for step in steps if step.files is not None), default=0)
    if not fewest:
        return (
            "needs a dataset of files, but this one reads none. Make it with Dataset.from_files, "
            "use DATA, or distribute_datasets_from_function and give each worker its own files."
        )
    if any(step.files is None and not step.inputs for step in steps):
        return (
            "needs a dataset of files only, but this one also reads other sources, which every "
            "worker would read in full. Use DATA."
        )
    if fewest < num_workers:
        return (
            f"assigns whole files to workers, but there are {num_workers} workers and only "
            f"{count_of(fewest, 'file')}. Write the data to at least {num_workers} files, or use "
            "DATA."
        )
    if any(step.positional for step in steps):
        return (
            "assigns whole files to workers, but take, take_while, skip, shard, zip, enumerate, "
            "scan and choices among datasets count elements over all files. Move them into the "
            "reader, or use DATA."
        )
    if not can_agree:
        return (
            "requires that the workers agree on the end of their files: pass their communicator "
            "as workers, or use DATA."
        )
    return None


def begin(node: Node, topology: Topology, sharding: Sharding, least: int) -> tuple[Epoch, Progress]:
    """Return the next epoch of a pipeline and its progress; collective with a process group.

    The seeds of its shuffles are those of epoch `least` or of a later epoch.
    """
    epoch = Epoch.begin(node, least)
    seeds = list(epoch.seeds.values())
    shards = 1 if sharding is Sharding.DATA else topology.num_workers
    of_workers = [seeds] * topology.num_workers
    if topology.workers is not None:
        alike = sharding in (Sharding.DATA, Sharding.FILE)
        note = {"auto_shard_policy": sharding.value} | (facts(node) if alike else {})
        try:
            notes = _notes_of_all(
                topology.workers, "the start of an epoch", {**note, "seeds": seeds}
            )
        except WorkerLostError:  # The remaining workers begin this epoch again, in the same order.
            epoch.give_back()
            raise
        of_workers = [theirs.pop("seeds") for theirs in notes]
        if alike:
            _check_alike("distribute_dataset", notes, _SEPARATELY)
            of_workers = of_workers[:1] * topology.num_workers
        if of_workers[topology.worker_index] != seeds:
            epoch = Epoch.resume(node, of_workers[0])
    files = 0 if sharding is Sharding.FUNCTION else number_of_files(node)
    positions = [Position()] * shards
    return epoch, Progress(sharding, files, topology.replica_counts, of_workers[:shards], positions)


def compared(steps: Iterator[PipelineStep], workers: ProcessGroup) -> Iterator[PipelineStep]:
    """Yield steps; with DATA, first check that all workers have the same first batch.

    At the end the workers compare the number of rows. A worker whose input fails before its first
    row tells the others, so that they do not wait for it.
    """
    rows = 0
    while True:
        try:
            step = next(steps, None)
        except Exception:
            if not rows:
                all_gather_object(workers, {"at": _COMPARISON, _FAILED: True})
            raise
        note = {"number of rows of the epoch": rows} if step is None else step.first
        if note is not None:
            notes = _notes_of_all(workers, _COMPARISON, note)
            failed = [rank for rank, theirs in enumerate(notes) if _FAILED in theirs]
            if failed:
                raise _failed_on(failed[0], workers)
            _check_alike("distribute_dataset", notes, _SAME_BATCHES)
        if step is None:
            return
        rows += step.rows
        yield step


def joint(
    steps: Iterator[PipelineStep], workers: ProcessGroup, devices: Sequence[Device]
) -> Iterator[PipelineStep]:
    """Yield steps until all workers have finished: after this worker's last step, empty steps.

    Before each step the workers agree whether any of them has a step left. A worker whose input
    failed takes part too, so that the others do not wait for it.
    """
    template: Element | None = None  # A batch without rows, on the host.
    while True:
        step, failure = None, None
        try:
            step = next(steps, None)
        except Exception as error:
            failure = error
        # The step is made again; only other workers have rows in it.
        if step is not None and step.value is None:
            step = None
        if step is not None and template is None:
            template = _without_rows(step.value)
        none_left = _EMPTY if template is None else _OVER
        status = _RAISED if failure is not None else none_left if step is None else _STEP
        statuses, reached = _agree(workers, status, {} if step is None else step.reached)
        if failure is not None:
            raise failure
        if _STEP not in statuses:
            return
        if _EMPTY in statuses:
            template = share_template(workers, template)
        if step is None:
            value = tree.map_leaves(
                lambda leaf: PerReplica([copy_to(leaf, device) for device in devices]), template
            )
        yield PipelineStep(value, reached) if step is None else step._replace(reached=reached)


def _notes_of_all(workers: ProcessGroup, at: str, note: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the notes of all workers, after checking that they are at the same point."""
    notes = all_gather_object(workers, {"at": at, **note})
    for worker, theirs in enumerate(notes):
        place = theirs.get("at") if isinstance(theirs, dict) else "another call"
        if place != at:
            raise DistributeError(
                f"worker {workers.rank} is at {at} of its input, but worker {worker} is at "
                f"{place}. After an error in the input of one worker, or a break, all workers must "
                "end the iteration before they iterate again."
            )
    return notes


def _failed_on(worker: int, workers: ProcessGroup) -> DistributeError:
    return DistributeError(
        f"the input of worker {worker} failed, so this step has no data: see the error on that "
        f"worker. Worker {workers.rank} has no error; iterate again on all workers."
    )


def check_alike(workers: ProcessGroup, method: str, note: dict[str, Any], remedy: str) -> None:
    """Raise a ValueError with a remedy if what the workers passed to a method differs."""
    _check_alike(method, _notes_of_all(workers, f"the start of {method}", note), remedy)


def _check_alike(method: str, notes: Sequence[dict[str, Any]], remedy: str) -> None:
    """Raise a ValueError with a remedy if the notes of the workers differ."""
    for key, first in notes[0].items():
        for worker, note in enumerate(notes):
            other = note.get(key, "missing")
            if other != first:
                raise ValueError(
                    f"{method}: the {key} is {first} on worker 0 and {other} on worker "
                    f"{worker}. {remedy}"
                )


def _agree(
    workers: ProcessGroup, status: int, reached: Mapping[int, Position]
) -> tuple[set[int], Mapping[int, Position]]:
    """Return the statuses of all workers, and the positions of all shards after their steps.

    This is one collective of 40 bytes for each worker and for each shard of its step.
    """
    rows = [(_WORKER, status, workers.rank, 0, 0)]
    rows += [(shard, *position) for shard, position in reached.items()]
    all_rows = workers.all_gather(np.array(rows, np.int64), axis=0).tolist()
    statuses = {rank: status for shard, status, rank, *_ in all_rows if shard == _WORKER}
    failed = [rank for rank, theirs in statuses.items() if theirs == _RAISED]
    if failed and status != _RAISED:
        raise _failed_on(failed[0], workers)
    joint = {shard: Position(*position) for shard, *position in all_rows if shard != _WORKER}
    return set(statuses.values()), joint


def share_template(workers: ProcessGroup, template: Element | None) -> Element:
    """Return a batch without rows; a worker without one gets that of the first worker with one."""
    templates = all_gather_object(workers, template)
    known = next((other for other in templates if other is not None), None)
    if known is None:
        raise ValueError(f"a worker has no input left, but others have. {COMPLETE_IT}")
    return known if template is None else template


def _without_rows(step: Any) -> Element | None:
    """Return a batch without rows, on the host, like those of a step; None for scalar leaves."""
    leaves = [leaf.values[0] for leaf in tree.flatten(step)]
    if not all(leaf.ndim for leaf in leaves):
        return None
    return tree.unflatten(step, [np.empty((0, *leaf.shape[1:]), leaf.dtype) for leaf in leaves])
