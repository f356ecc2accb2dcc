"""Folders of checkpoints that several processes write, and folders that hold what is no file."""

import contextlib
import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import tensor_files
from ndistribute.graph.graph import Graph
from ndistribute.graph.saver import Saver, latest_checkpoint
from ndistribute.graph.session import Session
from ndistribute.graph.variables import GraphVariable
from tests.processes import Ranks


@contextlib.contextmanager
def graph_saver(value: float, **options: Any) -> Iterator[Callable[..., str]]:
    """Give the method `save` of a saver of one variable, without its first argument."""
    with Graph().as_default(), Session() as session:
        GraphVariable(np.full(3, value), name="v").load(np.full(3, value), session)
        yield functools.partial(Saver(**options).save, session)


def savers(directory: str) -> tuple[Callable[[float], None], dict[str, Callable[..., Path]]]:
    """Return what sets a value, and each way to save it in a step, which returns its folder."""
    variables = [nd.Variable(np.zeros(500)) for _ in range(4)]
    checkpoint = nd.Checkpoint(v=variables)
    manager = nd.CheckpointManager(checkpoint, directory, max_to_keep=100)
    model = nd.Sequential([nd.layers.Dense(9, input_shape=(50,))])

    def fill(value: float) -> None:
        for variable in variables:
            variable.assign(np.full(500, value))
        model.set_weights([np.full(w.shape, value, np.float32) for w in model.get_weights()])

    def by_graph(step: int, value: float) -> Path:
        with graph_saver(value, max_to_keep=100) as save:
            # Two savers that write the same step replace each other's files.
            saved = Path(save(f"{directory}/graph", int(value)))
        return tensor_files.newest(saved.parent, saved.name).path

    return fill, {
        "manager": lambda step, value: manager.save(step),
        "checkpoint": lambda step, value: checkpoint.save(f"{directory}/run"),
        "save_weights": lambda step, value: model.save_weights(f"{directory}/weights"),
        "export": lambda step, value: model.export(f"{directory}/model"),
        "graph": by_graph,
    }


def save_again_and_again(rank: int, size: int, directory: str, count: int) -> list[str]:
    """Save values of this process in each way, and return what a returned path did not have."""
    wrong = []
    fill, ways = savers(directory)
    for name, save in ways.items():
        for step in range(count):
            value = 1000.0 * rank + step
            fill(value)
            tensors = tensor_files.read(save(step, value)).tensors.values()
            if not all((tensor == value).all() for tensor in tensors):
                wrong.append(f"{name}, step {step}")
    return wrong


def test_each_path_has_what_was_saved_while_other_processes_save_there_too(tmp_path):
    count = int(os.environ.get("CHECKPOINT_RACES", "8"))
    with Ranks(3) as ranks:
        assert ranks.results(save_again_and_again, str(tmp_path), count) == [[], [], []]
    names = [path.name for path in tmp_path.iterdir()]
    assert all(name.rpartition(".")[2].isdigit() for name in names), names  # Nothing is left.
    assert len([name for name in names if name.startswith("checkpoint.")]) == min(3 * count, 100)


def by_kinds(path: Path) -> dict[str, Callable[[], Any]]:
    """Return for each kind a function that saves to a path, and keeps one of its own if it can."""
    checkpoint = nd.Checkpoint(v=nd.Variable(np.zeros(3)))
    manager = nd.CheckpointManager(checkpoint, path.parent, max_to_keep=1)
    model = nd.Sequential([nd.layers.Dense(1, input_shape=(2,))])

    def by_saver() -> Any:
        with graph_saver(1.0, max_to_keep=1) as save:
            return save(path)

    return {
        "checkpoint": lambda: checkpoint.save(path),
        "manager": manager.save,
        "training": manager.extended(more=nd.Variable(1.0)).save,
        "weights": lambda: model.save_weights(path),
        "export": lambda: model.export(path, max_to_keep=1),
        "saver": by_saver,
        "server": lambda: tensor_files.write(path.parent, path.name, {}, keep=1),
    }


def test_no_kind_of_writer_deletes_what_another_kind_wrote(tmp_path):
    kinds = by_kinds(tmp_path / "x")
    for first, second in itertools.permutations(kinds, 2):
        folder = tmp_path / first / second
        writers = by_kinds(folder / "checkpoint")
        writers[first]()
        (earlier,) = folder.iterdir()
        for _ in range(2):
            writers[second]()
        kept = 2 if second in ("checkpoint", "weights") else 1
        assert earlier.exists(), (first, second)
        assert len(list(folder.iterdir())) == 1 + kept, (first, second)
    manager = nd.CheckpointManager(nd.Checkpoint(), tmp_path / "export" / "manager")
    manager.delete()
    assert [path.name for path in manager.checkpoints] == ["checkpoint.000001"]


def test_a_saver_leaves_what_others_write_and_wrote_to_the_path_of_a_step(tmp_path):
    earlier = nd.Checkpoint(v=nd.Variable(np.zeros(3))).save(tmp_path / "run-5")
    with tensor_files.exclusive(tmp_path, "run-7"), graph_saver(1.0, max_to_keep=1) as save:
        written = tmp_path / "run-7.000001.12-ab.writing"
        written.mkdir()
        (tmp_path / "run-9.writing.lock").touch()  # A process was killed before it wrote.
        for step in (5, 6):
            save(tmp_path / "run", step)
        assert written.exists()
    assert earlier.exists()
    with graph_saver(1.0, max_to_keep=1) as save:
        shutil.rmtree(save(tmp_path / "run", 7) + ".000001")
        nd.Checkpoint().save(tmp_path / "run-7")  # It takes the number.
        save(tmp_path / "run", 8)
    names = [f"run-{step}.000001" for step in (5, 6, 7, 8)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_saver_that_goes_on_counts_no_checkpoints_of_other_kinds(tmp_path):
    for step in (1, 2):
        nd.Checkpoint(v=nd.Variable(np.zeros(3))).save(tmp_path / f"run-{step}")
    with Graph().as_default(), Session() as session:
        GraphVariable(np.zeros(3), name="v")
        saver = Saver(max_to_keep=1)
        assert saver.restore_latest(session, tmp_path) == str(tmp_path / "run-2")
        for step in (3, 4):
            saver.save(session, tmp_path / "run", step)
    names = ["run-1.000001", "run-2.000001", "run-4.000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_there(tmp_path, monkeypatch):
    """It was told to be damaged."""
    checkpoint = nd.Checkpoint(v=nd.Variable(np.zeros(3)))
    path, read = checkpoint.save(tmp_path / "run"), tensor_files.read

    def late(folder: Path) -> Any:
        tensor_files.delete(folder)
        return read(folder)

    monkeypatch.setattr(tensor_files, "read", late)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*run\.000001"):
        checkpoint.restore(path)


def test_a_checkpoint_that_replaces_one_while_they_are_listed_is_the_latest(tmp_path, monkeypatch):
    """None was the latest, as in an empty folder."""
    with graph_saver(1.0, max_to_keep=1) as save:
        save(tmp_path / "run", 1)
        iterdir, late = Path.iterdir, [2]

        def replaced_later(path: Path) -> Any:
            found = list(iterdir(path))
            if late:
                save(tmp_path / "run", late.pop())
            return iter(found)

        monkeypatch.setattr(Path, "iterdir", replaced_later)
        assert latest_checkpoint(tmp_path) == str(tmp_path / "run-2")


def test_a_saver_reads_the_next_one_if_the_newest_is_deleted_meanwhile(tmp_path, monkeypatch):
    with graph_saver(2.0) as save:
        paths = [save(tmp_path / "run", step) for step in (1, 2)]
    read = tensor_files.read

    def late(folder: Path) -> Any:
        if folder.name == "run-2.000001":
            tensor_files.delete(folder)
        return read(folder)

    monkeypatch.setattr(tensor_files, "read", late)
    with Graph().as_default(), Session() as session:
        GraphVariable(np.zeros(3), name="v")
        assert Saver().restore_latest(session, tmp_path) == paths[0]
        GraphVariable(np.zeros(3), name="more")
        with pytest.raises(nd.errors.NotFoundError, match="lacks more"):
            Saver().restore_latest(session, tmp_path)


def read_while_others_save(rank: int, size: int, directory: str, count: int) -> set[float]:
    """Replace a checkpoint again and again, or on the last rank read it; return what was read."""
    v = nd.Variable(np.zeros(10_000))
    checkpoint = nd.Checkpoint(v=v)
    manager = nd.CheckpointManager(checkpoint, directory, max_to_keep=1)
    found = set()
    for step in range(count):
        if rank < size - 1:
            v.assign(np.full(10_000, float(rank + 1)))
            manager.save(step)
        else:
            manager.restore_or_initialize()
            found |= set(v.numpy().tolist())
            checkpoint.restore(f"{directory}/checkpoint")
            found |= set(v.numpy().tolist())
    return found


def test_a_reader_sees_a_whole_checkpoint_while_others_replace_it(tmp_path):
    nd.CheckpointManager(nd.Checkpoint(v=nd.Variable(np.ones(10_000))), tmp_path).save(0)
    with Ranks(3) as ranks:
        *_, found = ranks.results(read_while_others_save, str(tmp_path), 20)
    assert found <= {1.0, 2.0}
    assert len(list(tmp_path.iterdir())) == 1
