"""The classic trainer as real processes: two servers of variables, and workers that die.

FAULTS_KILLS says how many tasks are killed in each training.
"""

import contextlib
import io
import os
import re
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ndistribute import errors
from ndistribute import graph as g
from tests.processes import Tasks, wait_until

SCRIPT = Path(__file__).parents[2] / "examples" / "graph_trainer.py"
KILLS = int(os.environ.get("FAULTS_KILLS", "3"))
VICTIMS = [("worker", 1), ("ps", 0), ("worker", 0), ("ps", 1)]
SECONDS = 100.0


class Trainer(Tasks):
    """The processes of a training."""

    def __init__(self, workers: int, *flags: object) -> None:
        super().__init__(workers, 2, chief=False, TASK_SCRIPT=str(SCRIPT))
        hosts = [f"--{job}_hosts={','.join(all_)}" for job, all_ in self.cluster.items()]
        self._flags = [*hosts, *map(str, flags)]

    def start(self, job: str, index: int, **environ: str) -> None:
        task = [f"--job_name={job}", f"--task_index={index}"]
        super().start(job, index, TASK_ARGUMENTS=" ".join([*self._flags, *task]), **environ)

    def results(self) -> list[tuple[int, int, float]]:
        """Wait for the end; return the runs, the last step and the accuracy of each worker."""
        for job in ("worker", "ps"):
            for index in range(len(self.cluster[job])):
                assert self.code(job, index, SECONDS) == 0, self.said()
        pattern = r"(\d+) runs, step (\d+), test accuracy ([\d.]+)"
        found = re.findall(pattern, self.said())
        return [(int(runs), int(step), float(accuracy)) for runs, step, accuracy in found]


@pytest.fixture(scope="module")
def accuracy_of_one() -> float:
    """Return the accuracy that one process reaches."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [str(SCRIPT), "--steps", "200"])
        patch.syspath_prepend(str(SCRIPT.parent))
        with g.Graph().as_default():
            runpy.run_path(str(SCRIPT), run_name="__main__")
    return float(out.getvalue().rpartition(" ")[2])


@contextlib.contextmanager
def watching(tasks: Tasks) -> Iterator[g.Tensor]:
    """Return a context manager in which the step of a training can be read."""
    with g.Graph().as_default(), g.device("/job:ps/task:0"):
        yield g.get_or_create_global_step()


def step_of(tasks: Tasks, step: g.Tensor) -> int:
    """Return the step of a training; -1 while it has none."""
    with g.Session(f"grpc://{tasks.cluster['ps'][0]}") as session:
        try:
            return int(session.run(step))
        except (errors.FailedPreconditionError, errors.UnavailableError, errors.AbortedError):
            return -1


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [0, 2], ids=["asynchronous", "synchronous"])
def test_a_training_goes_on_after_each_of_its_processes_was_killed(
    replicas, tmp_path, monkeypatch, accuracy_of_one
):
    last = 100 + 100 * KILLS
    flags = ["--steps", last, "--checkpoint_dir", tmp_path]
    flags += ["--replicas_to_aggregate", replicas] if replicas else []
    seconds = []
    with Trainer(2, *flags) as tasks, watching(tasks) as step:
        monkeypatch.setenv("NDISTRIBUTE_SECRET", tasks.environ["NDISTRIBUTE_SECRET"])
        tasks.start_all()
        for kill in range(KILLS):
            wait_until(lambda at=20 + 60 * kill: step_of(tasks, step) >= at)
            victim = VICTIMS[kill % len(VICTIMS)]
            reached = step_of(tasks, step)
            tasks.kill(*victim)
            start = time.monotonic()
            tasks.start(*victim)
            wait_until(lambda reached=reached: step_of(tasks, step) >= reached + 5)
            seconds.append((*victim, reached, round(time.monotonic() - start, 2)))
        found = tasks.results()
    if "FAULTS_KILLS" in os.environ:
        sys.stdout.write(f"until the step was passed again: {seconds}\n")
    # Workers that do not wait for each other may be in a step when another one reaches the last.
    assert all(last <= ended <= last + (0 if replicas else 4) for _, ended, _ in found), found
    assert min(accuracy for _, _, accuracy in found) > accuracy_of_one - 0.02
