"""Checkpoints of several workers, of which only the chief sees the disk."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import ndistribute as nd
from ndistribute.models.checkpoint import Checkpoint, CheckpointManager
from tests.processes import Ranks


def save_and_restore(rank: int, size: int, directory: str) -> tuple[float, bool, str]:
    """Save asynchronously, restore, and fail to save, where only the chief sees the disk."""
    own = directory if rank == 0 else f"{directory}/{rank}-sees-nothing"
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]):
        v = nd.Variable(3.0)
        manager = CheckpointManager(Checkpoint(v=v), own, asynchronous=True)
        manager.save(1)
        v.assign(5.0)
        found = manager.restore_or_initialize()
        if rank == 0:
            (Path(directory) / "file").write_text("")
        lost = CheckpointManager(Checkpoint(v=v), f"{own}/file", asynchronous=True)
        lost.save(2)
        try:
            lost.wait()
        except OSError as error:
            return float(v.numpy()), found is not None, type(error).__name__
    return float(v.numpy()), found is not None, ""


def test_an_asynchronous_save_of_two_workers_needs_the_chiefs_disk_alone(tmp_path):
    # Under the name by which the ranks find it.
    module = importlib.import_module("tests.models.test_checkpoint_workers")
    with Ranks(2) as ranks:
        first, second = ranks.results(module.save_and_restore, str(tmp_path / "saved"))
    assert first[:2] == second[:2] == (3.0, True)
    assert first[2]
    assert second[2]  # Both learn that it could not be written.
    assert not (tmp_path / "saved" / "1-sees-nothing").exists()


def test_a_value_per_replica_without_an_aggregation_is_refused_by_name(tmp_path):
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        v = nd.Variable(0.0, synchronization="on_read", name="counts")
        with pytest.raises(ValueError, match=r"'counts'.*aggregation"):
            Checkpoint(v=v).save(tmp_path / "run")
    assert not list(tmp_path.iterdir())
