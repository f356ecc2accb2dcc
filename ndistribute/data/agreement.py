"""What the workers of a job tell each other about their input, where numbers alone do not say it.

One exchange when an epoch begins and, where only each worker knows when its own data ends, a small
one at every step. All of it happens on the consumer's thread, so that the collectives of all
workers come in the same order whatever is prepared ahead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute.data.element_specs import pack_spec, unpack_spec
from ndistribute.data.elements import Element
from ndistribute.data.places import WorkerGroup
from ndistribute.data.steps import COMPLETE_IT, Position
from ndistribute.errors import DistributeError

__all__ = ["Outcome", "Report", "agree", "exchange_notes", "share_template"]

# In the place of a shard's number, a row that says how its worker fares.
_WORKER = -1

_OVER, _STEP, _FAILED = range(3)


class Report(NamedTuple):
    """What a worker knows after it has tried to make its next step.

    Args:
        reached: the positions of the shards that the step touches; None where there is no step.
        needs_template: whether it could not say what an empty step looks like.
        failed: whether its input raised.
    """

    reached: Mapping[int, Position] | None
    needs_template: bool
    failed: bool = False


class Outcome(NamedTuple):
    """What all workers know then.

    Args:
        over: whether no worker has a step any more.
        needs_template: whether a worker needs to be told what a step looks like.
        reached: the positions of all shards that the joint step touches.
    """

    over: bool
    needs_template: bool
    reached: Mapping[int, Position]


def agree(workers: WorkerGroup, report: Report) -> Outcome:
    """Exchange the reports of all workers: one collective of 48 bytes for each and its shards.

    Raises:
        DistributeError: the input of another worker failed.
    """
    fares = _FAILED if report.failed else _OVER if report.reached is None else _STEP
    rows = [(_WORKER, fares, int(report.needs_template), workers.rank, 0)]
    rows += [(shard, *position) for shard, position in (report.reached or {}).items()]
    told = workers.all_gather(np.array(rows, np.int64), axis=0).tolist()
    by_worker = [row[1:4] for row in told if row[0] == _WORKER]
    failed = [rank for fared, _, rank in by_worker if fared == _FAILED and rank != workers.rank]
    if failed and not report.failed:
        raise DistributeError(
            f"the input of worker {failed[0]} failed, so this step can not be made: its own error "
            f"says why. Worker {workers.rank} has nothing to mend; iterate again on all workers."
        )
    over = not any(fared == _STEP for fared, *_ in by_worker)
    return Outcome(
        over,
        not over and any(needs for _, needs, _ in by_worker),
        {shard: Position(*position) for shard, *position in told if shard != _WORKER},
    )


def share_template(workers: WorkerGroup, template: Element | None) -> Element:
    """Return a batch of no rows, where this worker has none as the first one that has one.

    Raises:
        ValueError: no worker has one, as their elements are no batches; or it can not be told.
    """
    blob = b"" if template is None else pack_spec(template)
    known = next(filter(None, _all_gather_bytes(workers, blob)), None)
    if known is None:
        raise ValueError(f"a worker has run out of input that others still have. {COMPLETE_IT}")
    return unpack_spec(known) if template is None else template


def exchange_notes(workers: WorkerGroup, note: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the notes of all workers, plain values, in the order of the workers."""
    blob = json.dumps(note).encode()
    return [json.loads(told) for told in _all_gather_bytes(workers, blob)]


def _all_gather_bytes(workers: WorkerGroup, blob: bytes) -> Sequence[bytes]:
    length = np.array([len(blob)], np.int64).view(np.uint8)
    mine = np.concatenate([length, np.frombuffer(blob, np.uint8)])
    rest = workers.all_gather(mine, axis=0).tobytes()
    blobs = []
    while rest:
        stop = 8 + int(np.frombuffer(rest[:8], np.int64)[0])
        blobs.append(rest[8:stop])
        rest = rest[stop:]
    return blobs
