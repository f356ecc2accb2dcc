"""The programs of TensorFlow's guides of distributed training run after one import is changed.

They are files as users have them, with small synthetic data; each runs in processes of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.processes import Tasks

GUIDES = Path(__file__).parent / "guides"


def said_by(name: str, folder: Path, workers: int = 1, **environ: str) -> list[str]:
    """Run a guide as each worker of a cluster in a folder, and return what each has written."""
    script = str(starter(name, folder))
    with Tasks(workers=workers, servers=0, chief=False) as tasks:
        tasks.start_all("worker", TASK_SCRIPT=script, **environ)
        codes = [tasks.code("worker", index) for index in range(workers)]
        said = [tasks.said(f"worker:{index}") for index in range(workers)]
    assert codes == [0] * workers, "\n".join(said)
    return said


def starter(name: str, folder: Path) -> Path:
    """Return a script that runs a guide in a folder."""
    start = "import os, runpy\nos.chdir({!r})\nrunpy.run_path({!r}, run_name='__main__')\n"
    script = folder / "start.py"
    script.write_text(start.format(str(folder), str(GUIDES / name)))
    return script


def test_the_keras_guide_runs(tmp_path: Path) -> None:
    (said,) = said_by("keras_fit.py", tmp_path, TF_CONFIG="")
    assert "Learning rate for epoch 1 is 0.00999999" in said
    assert "Learning rate for epoch 4 is 0.00100000" in said
    assert "Model 'sequential'" in said


def test_the_guide_of_custom_loops_runs(tmp_path: Path) -> None:
    (said,) = said_by("custom_loop.py", tmp_path, TF_CONFIG="")
    assert "Accuracy after restoring without strategy: " in said
    assert said.count("(16, 8, 8, 1)") == 2


def test_the_guide_of_several_workers_runs(tmp_path: Path) -> None:
    first, second = said_by("multi_worker.py", tmp_path, workers=2)
    for said in (first, second):
        assert "workers 2 replicas 2" in said
        assert "ended 3" in said
    told = [re.findall(r"Epoch: .*", each) for each in (first, second)]
    assert len(told[0]) == 3
    assert told[0] == told[1]
    progress = re.compile(r"Epoch \d/3 - (\d+\.\d s|\d+ ms) - loss: ")
    assert progress.search(first)  # The chief alone shows the progress.
    assert " - loss: " not in second


def test_a_guide_of_workers_continues_from_its_checkpoint(tmp_path: Path) -> None:
    said_by("multi_worker.py", tmp_path)
    (said,) = said_by("multi_worker.py", tmp_path)
    assert "Epoch: " not in said
    assert "ended 3" in said


def test_the_guide_of_parameter_servers_runs(tmp_path: Path) -> None:
    script = str(starter("parameter_servers.py", tmp_path))
    with Tasks(workers=2, servers=1) as tasks:
        for job in ("ps", "worker", "chief"):
            tasks.start_all(job, TASK_SCRIPT=script)
        code = tasks.code("chief", 0)
        said = tasks.said()
    assert code == 0, said
    assert "Finished epoch 3, accuracy is 1.0" in said
    assert "Final loss is 0." in said
