"""A real job of two workers is traced, and the report finds the one that is made late."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ndistribute import timeline, trace_report
from tests.processes import Ranks

STEPS, LATE = 20, 0.02


def train(rank: int, size: int, late: int) -> float:
    import ndistribute as nd

    with nd.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            variable = nd.Variable(np.zeros(50_000, np.float32))
            optimizer = nd.optimizers.SGD(0.1)

        def step() -> Any:
            if rank == late:
                time.sleep(LATE)  # What a slower worker would compute.
            optimizer.apply_gradients([(np.ones(50_000, np.float32), variable)])
            return nd.get_replica_context().all_reduce("sum", np.float32(1))

        for _ in range(STEPS):
            total = strategy.run(step)
        return float(total)


def written(rank: int, size: int) -> bool:
    timeline.flush()
    return timeline.enabled()


@pytest.mark.parametrize("late", [0, 1])
def test_the_late_worker_of_a_real_job_is_found(tmp_path: Path, late: int):
    with Ranks(2, "python", {"NDISTRIBUTE_TRACE": str(tmp_path)}) as ranks:
        assert [outcome.result() for outcome in ranks.run(train, late)] == [2.0, 2.0]
        assert [outcome.result() for outcome in ranks.run(written)] == [True, True]
    traces = trace_report.read(tmp_path)
    names = {event.name for trace in traces for event in trace.events}
    assert {"compute", "pack", "wait", "reduce", "update"} <= names
    said = trace_report.report(tmp_path)
    assert f"Rank {late} is late" in said, said
    lost = trace_report.lateness(traces)[late]
    assert lost.steps >= STEPS
    assert lost.cost / lost.steps / 1e6 > 0.5 * LATE
    merged = json.loads(trace_report.merge(tmp_path).read_text())
    assert merged["otherData"]["clock_offsets_us"] == {"0": 0.0, "1": 0.0}
