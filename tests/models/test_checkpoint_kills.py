"""A process that is killed while it writes a checkpoint leaves the old state or the new one.

CHECKPOINT_KILLS says how many processes are killed, CHECKPOINT_SEED at which bytes.
"""

import os
import time
from pathlib import Path

import numpy as np

import ndistribute as nd
from ndistribute.models.checkpoint import Checkpoint
from ndistribute.models.checkpoint_manager import CheckpointManager
from tests.processes import Tasks

KILLS = int(os.environ.get("CHECKPOINT_KILLS", "10"))
SEED = int(os.environ.get("CHECKPOINT_SEED", "1"))
# Many, as a write of one tensor is counted only when it is complete.
SIZES = (*[12_500] * 40, 3)
BYTES = 8 * sum(SIZES) + 9_000  # Of a checkpoint, roughly.


def manager_in(directory: str | Path) -> tuple[list[nd.Variable], CheckpointManager]:
    variables = [nd.Variable(np.zeros(size)) for size in SIZES]
    optimizer = nd.optimizers.SGD(0.1, momentum=0.9)
    checkpoint = Checkpoint(optimizer=optimizer, variables=variables)
    optimizer.build(variables[-1:])
    return variables, CheckpointManager(checkpoint, directory, max_to_keep=2)


def write_for_ever() -> None:
    """Continue from the newest checkpoint, and write one after the other."""
    variables, manager = manager_in(os.environ["DIRECTORY"])
    manager.restore_or_initialize()
    step = manager.step or 0
    while True:
        step += 1
        for variable in variables:
            variable.assign(np.full(variable.shape, float(step)))
        manager.checkpoint._objects["optimizer"].iterations = step
        manager.save(step)


def written(pid: int) -> int:
    """Return how many bytes a process has written."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def kill_at(tasks: Tasks, byte: int) -> None:
    """Start the writer, and kill it when it has written so many bytes."""
    tasks.start("worker", 0)
    pid = tasks.pid("worker", 0)
    deadline = time.monotonic() + 50
    while written(pid) < byte:
        assert time.monotonic() < deadline, tasks.said()
    tasks.kill("worker", 0)


def test_what_loads_after_a_kill_is_the_old_or_the_new_state(tmp_path):
    script = tmp_path / "task.py"
    script.write_text(
        "from tests.models.test_checkpoint_kills import write_for_ever\nwrite_for_ever()\n"
    )
    directory = tmp_path / "saved"
    random = np.random.default_rng(SEED)
    variables, manager = manager_in(directory)
    manager.save(0)
    before = interrupted = 0
    with Tasks(1, 0, False, TASK_SCRIPT=str(script), DIRECTORY=str(directory)) as tasks:
        for byte in random.integers(1, 3 * BYTES, KILLS):
            kill_at(tasks, int(byte))
            interrupted += any(directory.glob("*.writing"))
            newest = manager.checkpoints[-1].name
            path = manager.restore_or_initialize()
            step = manager.step
            assert path is not None
            assert path.name == newest  # None of those with their final name is damaged.
            assert step is not None
            assert step >= before
            for variable in variables:
                assert set(variable.numpy().tolist()) == {float(step)}
            assert manager.checkpoint._objects["optimizer"].iterations == step
            before = step
    assert len(list(directory.glob("checkpoint.*"))) <= 4  # One is half written or half removed.
    manager.save(before + 1)
    assert len(list(directory.iterdir())) == 2
    assert interrupted
    assert not list(directory.glob("*.broken"))
    print(f"{KILLS} kills, {interrupted} during a write; {before} checkpoints were written")
