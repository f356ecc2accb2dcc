"""The begin of an epoch: what its shards are, and what their shuffles drew.

Workers that share one pipeline must shuffle alike, though nobody called `set_seed`: where they can
meet, all take over what the first of them drew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ndistribute.collective.objects import all_gather_object
from ndistribute.data.pipeline import Node, Pass, seeds_of
from ndistribute.data.places import Place
from ndistribute.data.policies import Sharding, number_of_files
from ndistribute.data.progress import Progress
from ndistribute.data.steps import Position

__all__ = ["begin"]

# What a note says of a pipeline that all workers share, and how an error calls it.
_SHARED = {
    "sharding": "auto_shard_policy",
    "files": "number of files",
    "cardinality": "number of batches",
    "shuffles": "number of shuffles",
}


def begin(node: Node, place: Place, sharding: Sharding) -> tuple[Pass, Progress]:
    """Begin the next epoch of a pipeline, on all workers together where they can meet.

    Raises:
        ValueError: the workers have pipelines that differ, and mean to share one.
    """
    current = Pass.begin(node)
    draws = [current.draws[seeds] for seeds in seeds_of(node)]
    files = number_of_files(node)
    shards = 1 if sharding is Sharding.DATA else place.num_workers
    drawn = [draws] * place.num_workers
    if place.workers is not None:
        note = {
            "sharding": sharding.value,
            "files": files,
            "cardinality": node.cardinality,
            "shuffles": len(draws),
            "draws": draws,
        }
        notes = all_gather_object(place.workers, note)
        drawn = [told["draws"] for told in notes]
        if sharding in (Sharding.DATA, Sharding.FILE):
            _check_alike(notes)
            drawn = drawn[:1] * place.num_workers
        if drawn[place.worker_index] != draws:
            current = Pass.resume(node, drawn[0])
    return current, Progress(sharding, files, drawn[:shards], [Position()] * shards)


def _check_alike(notes: Sequence[Mapping[str, Any]]) -> None:
    for key, name in _SHARED.items():
        for worker, note in enumerate(notes):
            if note[key] != notes[0][key]:
                raise ValueError(
                    f"distribute_dataset: the {name} is {notes[0][key]} on worker 0 and "
                    f"{note[key]} on worker {worker}. Build the same dataset on every worker; to "
                    "give each its own, use distribute_datasets_from_function or "
                    "AutoShardPolicy.OFF."
                )
