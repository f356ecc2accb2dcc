"""What the workers of a job tell each other about their input, where numbers alone do not say it.

One exchange when an epoch begins and, where only each worker knows when its own data ends, a small
one at every step. All of it happens on the consumer's thread, so that the collectives of all
workers come in the same order whatever is prepared ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ndistribute.collective.objects import ProcessGroup, all_gather_object
from ndistribute.data.elements import Element
from ndistribute.data.steps import COMPLETE_IT, Position
from ndistribute.errors import DistributeError

__all__ = ["Outcome", "Report", "agree", "share_template"]

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


def agree(workers: ProcessGroup, report: Report) -> Outcome:
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
