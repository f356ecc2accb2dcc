"""How several workers divide one pipeline: which of the four ways, and whether it can be done.

What decides is in the pipeline alone, so all workers decide alike.
"""

from __future__ import annotations

import enum

from ndistribute.data.options import AutoShardPolicy
from ndistribute.data.pipeline import Node, upstream

__all__ = ["Sharding", "choose_sharding", "number_of_files"]


class Sharding(enum.Enum):
    """Say what the shards of an epoch are.

    ``DATA``: one shard, of whose every batch each worker takes its slices. ``FILE``: every n-th
    file. ``OFF``: the whole pipeline, once for each worker. ``FUNCTION``: what the dataset function
    of each worker made.
    """

    DATA = "data"
    FILE = "file"
    OFF = "off"
    FUNCTION = "function"


def choose_sharding(
    node: Node, policy: AutoShardPolicy, num_workers: int, can_agree: bool
) -> Sharding:
    """Return how the workers divide a pipeline.

    Args:
        node: its last step.
        policy: what the user asked for.
        num_workers: workers of the job.
        can_agree: whether the workers can tell each other when their files end.

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


def number_of_files(node: Node) -> int:
    """Return how many files a pipeline reads."""
    return sum(len(step.files or ()) for step in upstream(node))


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
