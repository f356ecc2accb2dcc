"""`fit`, `evaluate` and `predict` in a job whose workers are killed, and join, at any step."""

import contextlib
import csv
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import tensor_files
from tests.jobs import elastic_fit
from tests.processes import ROOT, Tasks, free_addresses, tf_config, wait_until

SCRIPT = str(ROOT / "tests" / "jobs" / "elastic_fit.py")


class Job:
    """Three elastic workers, of which some end."""

    def __init__(self, results: Path, **plan: Any) -> None:
        self._results, self._plan = results, plan
        self.tasks = Tasks(workers=3, servers=0, chief=False)

    def start(self, index: int, **more: Any) -> None:
        """Start a worker."""
        output = self._results / f"result-{index}"
        plan = json.dumps({"output": str(output), **self._plan, **more}, separators=(",", ":"))
        self.tasks.start("worker", index, TASK_SCRIPT=SCRIPT, TASK_ARGUMENTS=plan)

    def start_again(self, index: int, waits: Path) -> None:
        """Start a worker that has ended, once the chief waits for it."""
        wait_until(waits.exists)
        self.tasks.code("worker", index)
        self.start(index)

    def result(self, index: int) -> dict[str, Any]:
        """Return what a worker has come to, which must have ended well."""
        assert self.tasks.code("worker", index) == 0, self.tasks.said()
        return json.loads((self._results / f"result-{index}").read_text())


@pytest.fixture
def job(tmp_path):
    with contextlib.ExitStack() as held:

        def begin(**plan: Any) -> Job:
            job = Job(tmp_path, **plan)
            held.enter_context(job.tasks)
            return job

        yield begin


@functools.cache
def undisturbed(kind: str, epochs: int = 3, steps: int | None = None) -> dict[str, Any]:
    """Return what one worker comes to that nothing happens to."""
    return elastic_fit.run(kind, epochs=epochs, steps=steps)


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that a training came to the same, with each example counted once."""
    for name in ("epochs", "steps"):
        assert result[name] == expected[name]
    for name in ("logs", "weights", "scores", "outputs"):
        if name in expected:
            nd.tree.map_leaves(_assert_close, result[name], expected[name])


def _assert_close(mine: Any, theirs: Any) -> None:
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("fit", {0: ["train", 8]}),
        ("fit", {2: ["test", 3], 1: ["train", 11]}),
        ("fit", {0: ["epoch", 2], 1: ["epoch", 2]}),
        ("fit", {0: ["predict", 3]}),
        ("fit", {1: ["test", 11]}),  # In `evaluate`, after the validations of three epochs.
        ("gan", {0: ["update", 5]}),
        ("gan", {1: ["update", 6], 2: ["update", 11]}),
        ("sums", {0: ["train", 3], 2: ["train", 8]}),
        ("scale", {1: ["train", 4]}),
        ("scaled-sums", {1: ["train", 3]}),
    ],
)
def test_who_remains_comes_to_what_an_undisturbed_training_comes_to(job, kind, ends):
    begun = job(kind=kind)
    for index in range(3):
        begun.start(index, ends=ends.get(index))
    remaining = [begun.result(index) for index in range(3) if index not in ends]
    for result in remaining:
        assert_same(result, undisturbed(kind))
    assert sum(result["chief"] for result in remaining) == 1


def test_epochs_that_go_on_in_the_dataset_do_so_after_a_loss(job):
    begun = job(kind="fit", steps=4, epochs=4)
    for index in range(3):
        begun.start(index, ends={0: ["train", 7], 1: ["test", 5]}.get(index))
    assert_same(begun.result(2), undisturbed("fit", 4, 4))


@pytest.mark.parametrize("kind", ["fit", "gan", "sums", "scaled-sums"])
def test_a_newcomer_goes_on_at_the_step_of_the_others_with_their_state(job, tmp_path, kind):
    begun = job(kind=kind, waits=[f"{tmp_path}/waits", ["train", 14]])
    for index in range(3):
        begun.start(index, ends=["train", 8] if index == 1 else None)
    begun.start_again(1, tmp_path / "waits")
    expected = undisturbed(kind)
    for result in map(begun.result, range(3)):
        assert_same(result, expected)
        assert result["best"] == pytest.approx(expected["best"])
    assert begun.result(1)["begun"] == [2]  # Earlier epochs are not repeated.
    assert begun.result(0)["begun"] == [0, 1, 2]


@pytest.mark.parametrize("comes", [[["train", 18], ["test", 10]], [["predict", 4]]])
def test_a_worker_that_comes_after_fit_joins_in_the_next_loop(job, tmp_path, comes):
    begun = job(kind="fit", waits=[f"{tmp_path}/waits", *comes])
    for index in range(3):
        begun.start(index, ends=["train", 8] if index == 0 else None)
    begun.start_again(0, tmp_path / "waits")
    late, expected = begun.result(0), undisturbed("fit")
    assert late["begun"] == []
    assert late["weights"] == begun.result(1)["weights"]
    assert_same(begun.result(1), expected)
    assert_same(late, {**expected, "steps": late["steps"]})


@pytest.mark.parametrize("ends", [["train", 8], ["write", 2], ["write", 3], ["epoch", 2]])
def test_a_new_chief_continues_the_files_of_a_lost_one(job, tmp_path, ends):
    begun = job(kind="fit", folder=str(tmp_path))
    for index in range(3):
        begun.start(index, ends=ends if index == 0 else None)
    results = [begun.result(1), begun.result(2)]
    for result in results:
        assert_same(result, undisturbed("fit"))
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2]
    losses = [float(row["loss"]) for row in rows]
    np.testing.assert_allclose(losses, undisturbed("fit")["logs"]["loss"], atol=1e-5)
    assert not any((tmp_path / "backup").iterdir())  # The training has ended.
    saved = tensor_files.paths(tmp_path, "model")
    assert len(saved) in (3, 4)  # A save that runs again may find that of the lost chief.
    model = elastic_fit.made("fit")
    nd.Checkpoint(model=model).restore(saved[-1])
    for mine, theirs in zip(model.get_weights(), results[0]["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs)
    said = begun.tasks.said("worker:1")
    assert "Epoch 3/3" in said


def test_a_backup_covers_the_loss_of_all(job, tmp_path):
    begun = job(kind="fit", folder=str(tmp_path))
    for index in range(3):
        begun.start(index, ends=["train", 11])
    for index in range(3):
        assert begun.tasks.code("worker", index) == -9
    for index in range(3):
        begun.start(index)
    expected = undisturbed("fit")
    for result in map(begun.result, range(3)):
        np.testing.assert_allclose(result["outputs"], expected["outputs"], atol=1e-5)
        assert (result["epochs"], result["steps"]) == ([1, 2], expected["steps"])


def test_the_rate_is_in_proportion_to_the_workers_whose_batches_are_kept(job):
    begun = job(kind="rate")
    for index in range(3):
        begun.start(index, ends=["train", 4] if index == 1 else None)
    for result in (begun.result(0), begun.result(2)):
        assert result["rate"] == pytest.approx(0.02)
        # Batches became smaller, so that there are more of them.
        assert result["steps"] > undisturbed("fit")["steps"]
        assert np.isfinite(result["logs"]["loss"]).all()


def test_what_cannot_go_on_with_other_workers_is_refused_at_the_start(monkeypatch):
    config = tf_config(free_addresses({"worker": 1}), "worker", 0)
    monkeypatch.setenv("TF_CONFIG", config)
    x, y = elastic_fit.data()
    with nd.MultiWorkerMirroredStrategy(elastic=nd.Elastic()) as strategy:
        model = elastic_fit.made("gan")
        with pytest.raises(ValueError, match="list_iterator, which cannot go back"):
            model.fit(iter([(x, y)]), verbose=0)
        assert strategy.is_chief
