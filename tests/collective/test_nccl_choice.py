"""When replicas of several processes meet through NCCL, and what is said when they can not."""

from __future__ import annotations

import pytest

from tests.collective import nccl_calls
from tests.processes import Outcome, Ranks


def trained(environ: dict[str, str], implementation: str) -> list[Outcome]:
    with Ranks(2, environ=environ) as made:
        return made.run(nccl_calls.trained, implementation)


@pytest.mark.parametrize(
    ("implementation", "backend"),
    [("nccl", "NcclBackend"), ("auto", "NcclBackend"), ("ring", "HierarchicalBackend")],
)
def test_gpus_of_their_own_meet_through_nccl_unless_asked_otherwise(
    implementation: str, backend: str
) -> None:
    outcomes = trained({"NCCL_GROUND": "cupy"}, implementation)
    assert [outcome.result()["backend"] for outcome in outcomes] == [backend] * 2


def test_a_gpu_that_two_workers_share_meets_in_host_memory() -> None:
    outcomes = trained({"NCCL_GROUND": "cupy", "DEVICES": "gpu:0"}, "auto")
    assert [outcome.result()["backend"] for outcome in outcomes] == ["HierarchicalBackend"] * 2


@pytest.mark.parametrize(
    ("devices", "reason"),
    [("gpu:0", "workers 0 and 1 share the GPU"), ("cpu:0", "worker 0 has a replica on a CPU")],
)
def test_who_asks_for_nccl_in_vain_is_told_why(devices: str, reason: str) -> None:
    for outcome in trained({"NCCL_GROUND": "cupy", "DEVICES": devices}, "nccl"):
        assert outcome.error == "ValueError"
        assert reason in outcome.text
