"""Folders of checkpoints that several processes write, and folders that hold what is no file."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import tensor_files
from ndistribute.graph.graph import Graph
from ndistribute.graph.saver import Saver
from ndistribute.graph.session import Session
from ndistribute.graph.variables import Variable
from tests.processes import Ranks

Save = Callable[[float, int], Any]


def savers(directory: str) -> Iterator[tuple[str, Save]]:
    """Yield each way to save a value in a step, which returns what its path then has."""
    variables = [nd.Variable(np.zeros(500)) for _ in range(4)]
    checkpoint = nd.Checkpoint(v=variables)
    model = nd.Sequential([nd.layers.Dense(9, input_shape=(50,))])

    def with_variables(save: Callable[[int], Any]) -> Save:
        def run(value: float, step: int) -> Any:
            for variable in variables:
                variable.assign(np.full(500, value))
            return tensor_files.read(save(step)).tensors.values()

        return run

    def with_model(value: float, save: Callable[[], Any]) -> Any:
        model.set_weights([np.full(w.shape, value, np.float32) for w in model.get_weights()])
        return tensor_files.read(save()).tensors.values()

    manager = nd.CheckpointManager(checkpoint, directory, max_to_keep=100)
    yield "manager", with_variables(manager.save)
    yield "checkpoint", with_variables(lambda _: checkpoint.save(f"{directory}/run"))
    path = f"{directory}/weights"
    yield "save_weights", lambda value, _: with_model(value, lambda: model.save_weights(path))
    path = f"{directory}/model"
    yield "export", lambda value, _: with_model(value, lambda: model.export(path))
    with Graph().as_default(), Session() as session:
        held = [Variable(np.zeros(500), name=f"v{k}") for k in range(4)]
        saver = Saver(max_to_keep=100)

        def save_graph(value: float, step: int) -> Any:
            for variable in held:
                variable.load(np.full(500, value), session)
            # Two savers that write the same step replace each other's files.
            saved = Path(saver.save(session, f"{directory}/graph", int(value)))
            return tensor_files.newest(saved.parent, saved.name).tensors.values()

        yield "graph", save_graph


def save_again_and_again(rank: int, size: int, directory: str, count: int) -> list[str]:
    """Save values of this process in each way, and return what a returned path did not have."""
    wrong = []
    for name, save in savers(directory):
        for step in range(count):
            value = 1000.0 * rank + step
            if not all((tensor == value).all() for tensor in save(value, step)):
                wrong.append(f"{name}, step {step}")
    return wrong


def test_each_path_has_what_was_saved_while_other_processes_save_there_too(tmp_path):
    module = importlib.import_module("tests.models.test_checkpoint_folders")
    count = int(os.environ.get("CHECKPOINT_RACES", "8"))
    with Ranks(3) as ranks:
        assert ranks.results(module.save_again_and_again, str(tmp_path), count) == [[], [], []]
    names = [path.name for path in tmp_path.iterdir()]
    assert all(name.rpartition(".")[2].isdigit() for name in names), names  # Nothing is left.
    assert len([name for name in names if name.startswith("checkpoint.")]) == min(3 * count, 100)


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
    module = importlib.import_module("tests.models.test_checkpoint_folders")
    with Ranks(3) as ranks:
        *_, found = ranks.results(module.read_while_others_save, str(tmp_path), 20)
    assert found <= {1.0, 2.0}
    assert len(list(tmp_path.iterdir())) == 1


def restored_by_saver(path: Path) -> None:
    """Restore the variables of a graph."""
    with Graph().as_default(), Session() as session:
        Variable(np.zeros(3), name="v")
        Saver().restore(session, path)


READERS: dict[str, Callable[[Path], Any]] = {
    "load": nd.models.load,
    "restore": lambda path: nd.Checkpoint(v=nd.Variable(np.zeros(3))).restore(path),
    "manager": lambda path: nd.CheckpointManager(
        nd.Checkpoint(v=nd.Variable(np.zeros(3))), path.parent
    ).restore_or_initialize(),
    "saver": restored_by_saver,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["tensors.safetensors", "data.json", "SHA256SUMS"])
def test_no_reader_waits_for_a_pipe_or_reads_a_device_or_a_hole(reader, name, tmp_path):
    for kind in ("pipe", "device", "hole"):
        path = nd.Checkpoint(v=nd.Variable(np.zeros(3))).save(tmp_path / kind / "checkpoint")
        file = path / name
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "device":
            file.symlink_to("/dev/zero")
        else:
            file.touch()
            os.truncate(file, 40 << 30)
        with pytest.raises(nd.CheckpointCorruptError, match=str(file)):
            READERS[reader](path.with_suffix(""))
