"""Checkpoints of several workers, of which only the chief sees the disk."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import tensor_files
from ndistribute.models.checkpoint import Checkpoint, CheckpointManager
from tests.digits_training import serve
from tests.kinds import DEADLINE
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


def save_on_the_chief_alone(rank: int, size: int, folder: str, others: str) -> None:
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        strategy.run(step := lambda: nd.get_replica_context().all_reduce("sum", 1.0))
        model = nd.Sequential([nd.layers.Dense(1)])
        model(np.ones((1, 2), np.float32))
        if strategy.is_chief:
            model.save_weights(f"{folder}/weights")
        elif others == "go on":
            strategy.run(step)


@pytest.mark.parametrize("others", ["go on", "end"])
def test_saving_on_the_chief_alone_names_the_call_and_what_to_do(tmp_path, others):
    module = importlib.import_module("tests.models.test_checkpoint_workers")
    with Ranks(2) as ranks:
        chief, other = ranks.run(module.save_on_the_chief_alone, str(tmp_path), others)
    assert chief.error == ("WorkerLostError" if others == "end" else "CollectiveMismatchError")
    advice = "Every worker must call Sequential.save_weights(); the chief alone reads and writes"
    assert advice in chief.text
    if others == "go on":
        assert other.error == "CollectiveMismatchError"
        assert "worker 0 called all_gather" in other.text
        assert " for Sequential.save_weights()" in other.text
    assert not list(tmp_path.iterdir())


def save_at_any_time(rank: int, size: int, directory: str) -> list[str]:
    """Save and restore without waiting for the other worker."""
    with nd.ParameterServerStrategy(devices=["cpu:0"], timeout_seconds=DEADLINE):
        variables = [nd.Variable(np.full(50, 7.0), name=f"v{k}") for k in range(5)]
        checkpoint = Checkpoint(v=variables)
        manager = CheckpointManager(checkpoint, directory, 1, asynchronous=rank == 2)
        for _ in range(20):
            manager.save()
            assert manager.restore_or_initialize() is not None
        return [checkpoint.save(f"{directory}/same").name for _ in range(10)]


def test_workers_that_do_not_wait_for_each_other_save_in_turn(tmp_path):
    module = importlib.import_module("tests.models.test_checkpoint_workers")
    with Ranks(3, jobs=["ps", "worker", "worker"]) as ranks:
        ranks.run(serve, ranks=[0])[0].result()
        outcomes = ranks.run(module.save_at_any_time, str(tmp_path), ranks=[1, 2])
        names = sorted(name for outcome in outcomes for name in outcome.result())
    assert names == [f"same.{number:06d}" for number in range(1, 21)]
    for folder in tmp_path.glob("*.0*"):
        assert (tensor_files.read(folder).tensors["v/0"] == 7).all()
    assert all(path.suffix[1:].isdigit() for path in tmp_path.iterdir())  # No lock is left.
    assert [path.name for path in tmp_path.glob("checkpoint.0*")] == ["checkpoint.000040"]


def test_a_value_per_replica_without_an_aggregation_is_refused_by_name(tmp_path):
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        v = nd.Variable(0.0, synchronization="on_read", name="counts")
        with pytest.raises(ValueError, match=r"'counts'.*aggregation"):
            Checkpoint(v=v).save(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def fit_otherwise_on_one(rank: int, size: int, what: str) -> str:
    """Call `fit` on two workers whose programs differ in one thing, and then alike."""
    x, y = np.ones((8, 3), np.float32), np.zeros(8, int)
    differs = rank == 1
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        with strategy.scope():
            activation = "relu" if differs and what == "layer 1" else "tanh"
            model = nd.Sequential([nd.layers.Dense(4, activation), nd.layers.Dense(2)])
            model.compile("sgd", "sparse_categorical_crossentropy")
        if differs and what == "rate":
            model.optimizer.learning_rate = 0.5
        options = {"epochs": 2 if differs and what == "epochs" else 1}
        options["class_weight"] = {0: 2.0} if differs and what == "class_weight" else None
        with pytest.raises(ValueError, match=rf"fit: the {what} is .* on worker 0 and") as caught:
            model.fit(x, y, verbose=0, **options)
        return str(caught.value)


@pytest.mark.parametrize("what", ["layer 1", "rate", "epochs", "class_weight"])
def test_workers_that_would_train_in_different_ways_are_told(what):
    module = importlib.import_module("tests.models.test_checkpoint_workers")
    with Ranks(2) as ranks:
        first, second = ranks.results(module.fit_otherwise_on_one, what)
    assert first == second
    assert "on worker 1" in first
