"""The examples train to the same result under every strategy, however they are started."""

import contextlib
import functools
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import QUICK, find_mpiexec, free_addresses

ROOT = Path(__file__).parents[1]
DIGITS, FIT, GAN, TEXT, SWAP, RESUME, PARALLEL = (
    f"examples/{name}.py"
    for name in "train_digits fit_digits gan text_classification swap_strategies resume "
    "model_parallel".split()
)
KERAS = "examples/keras3.py"
SERVERS = ["examples/parameter_server.py", "--epochs", "12"]
GRAPHS = ["examples/graph_trainer.py", "--steps", "200"]
CLASSIC = ["tests/compat/guides/classic_trainer.py", "--steps", "300"]
LAUNCHER = [sys.executable, "-m", "ndistribute", "run"]
ENVIRON = {**os.environ, **QUICK, "OPENBLAS_NUM_THREADS": "1"}
SECONDS = 110.0
# float32 sums in another order may move one of the 360 test images over the border.
NEAR = 1.5 / 360
OF_DIGITS = "loss ([0-9.]+), test accuracy ([0-9.]+)"
OF_ANY = "test accuracy ([0-9.]+)"


def arguments(script: str, strategy: str, replicas: int, *more: object) -> list[str]:
    return [script, "--strategy", strategy, "--replicas", str(replicas), *map(str, more)]


def numbers_in(output: str, pattern: str = OF_ANY) -> tuple[float, ...]:
    """Return what an example prints, once, however it is started."""
    (found,) = re.finditer(pattern, output)
    return tuple(map(float, found.groups()))


@functools.cache
def output_here(*command: str) -> str:
    """Run an example in this process, and return what it prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", list(command))
        patch.setattr("tqdm.tqdm.monitor_interval", 0)  # Else it keeps a thread.
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.chdir(ROOT)
        patch.setenv("PYTHONPATH", ENVIRON["PYTHONPATH"])  # Of processes that it starts.
        runpy.run_path(command[0], run_name="__main__")
    return out.getvalue()


def result_here(strategy: str, replicas: int) -> tuple[float, ...]:
    """Train the network of plain NumPy in this process; return its loss and accuracy."""
    said = output_here(*arguments(DIGITS, strategy, replicas, "--epochs", 6))
    return numbers_in(said, OF_DIGITS)


def test_a_network_divided_over_tasks_has_the_gradients_of_one_task():
    said = output_here("examples/graph_model_parallel.py", "--batch", "32", "--steps", "1")
    losses = re.findall("loss ([0-9.]+)", said)
    assert len(losses) == 4
    assert len(set(losses)) == 1
    away = [float(found) for found in re.findall("differ by (.*)", said)]
    assert len(away) == 3
    assert max(away) < 1e-12


def test_divided_layers_learn_what_whole_ones_learn():
    said = output_here(*arguments(PARALLEL, "mirrored", 2, "--epochs", 1))
    pattern = "test accuracy ([0-9.]+), ([0-9.]+) MB"
    (whole, all_bytes), (divided, shard_bytes) = (
        map(float, found.groups()) for found in re.finditer(pattern, said)
    )
    assert abs(whole - divided) < NEAR
    assert shard_bytes < 0.6 * all_bytes


def accuracy_here(script: str, strategy: str, replicas: int, *more: object) -> float:
    (found,) = numbers_in(output_here(*arguments(script, strategy, replicas, *more)))
    return found


def output_of(*commands: list[str], ends: int = 0) -> list[str]:
    """Run commands beside each other to their end, and return what each wrote."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with contextlib.ExitStack() as stack:
        started = []
        for command in commands:
            process = subprocess.Popen(command, cwd=ROOT, env=ENVIRON, **options)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        said = [process.communicate(timeout=SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [ends] * len(started), "\n".join(said)
    return said


def two_processes(mpi: bool) -> list[str]:
    """Return the start of a command that runs a script in two processes."""
    if not mpi:
        return [*LAUNCHER, "-n", "2"]
    pytest.importorskip("mpi4py")
    mpiexec = find_mpiexec()
    if mpiexec is None:
        pytest.skip("there is no mpiexec")
    return [mpiexec, "-n", "2", sys.executable]


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [("one_device", 1), ("mirrored", 3), ("central_storage", 2), ("parameter_server", 1)],
)
def test_digits_train_alike_under_every_strategy(strategy: str, replicas: int) -> None:
    plain = result_here("none", 1)
    assert plain[1] > 0.9
    assert result_here(strategy, replicas) == pytest.approx(plain, abs=NEAR)
    fitted = accuracy_here(FIT, "none", 1, "--epochs", 3)
    assert fitted > 0.93
    assert accuracy_here(FIT, strategy, replicas, "--epochs", 3) == pytest.approx(fitted, abs=NEAR)


def test_one_replica_strategies_refuse_more() -> None:
    with pytest.raises(SystemExit, match="one replica"):
        result_here("none", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "least"),
    [(SERVERS, 0.9), (GRAPHS, 0.9), (CLASSIC, 0.9), ([*CLASSIC, "--sync"], 0.95)],
    ids=["strategy", "graph", "names of TensorFlow 1", "synchronous"],
)
def test_four_command_lines_train_on_two_servers_and_two_workers(
    script: list[str], least: float
) -> None:
    cluster = free_addresses({"ps": 2, "worker": 2})
    hosts = [f"--{job}_hosts={','.join(addresses)}" for job, addresses in cluster.items()]
    said = output_of(
        *(
            [sys.executable, *script, *hosts, f"--job_name={job}", f"--task_index={index}"]
            for job in ("ps", "worker")
            for index in range(2)
        )
    )
    assert min(map(float, re.findall(OF_ANY, said[2] + said[3]))) > least


def test_the_launcher_starts_a_chief_that_sends_its_workers_functions() -> None:
    (said,) = output_of([*LAUNCHER, *"--workers 2 --ps 1 --chief".split(), *SERVERS])
    assert numbers_in(said) > (0.9,)


def test_a_convolutional_network_trains_on_emulated_devices_of_jax() -> None:
    said = output_here("examples/tpu_strategy.py", "--devices", "2", "--epochs", "3")
    assert len(re.findall("compiled for float32.32,64.*", said)) == 1
    assert numbers_in(said, "2 device.s.: test accuracy (.*)") > (0.85,)


def test_a_network_of_keras_trains_alike_under_every_strategy() -> None:
    pytest.importorskip("keras")
    plain = accuracy_here(KERAS, "none", 1, "--epochs", 3)
    assert plain > 0.9
    for strategy in ("mirrored", "central_storage", "parameter_server"):
        assert accuracy_here(KERAS, strategy, 2, "--epochs", 3) == pytest.approx(plain, abs=NEAR)
    command = [*two_processes(False), *arguments(KERAS, "multi_worker", 1, "--epochs", 3)]
    assert numbers_in(output_of(command)[0]) == pytest.approx((plain,), abs=NEAR)
    command = [*LAUNCHER, *"--workers 2 --ps 1 --chief".split()]
    (said,) = output_of([*command, *arguments(KERAS, "parameter_server", 1, "--epochs", 4)])
    assert numbers_in(said) > (0.85,)


def test_the_demo_reaches_its_accuracy() -> None:
    assert accuracy_here(FIT, "mirrored", 2) >= 0.98


@pytest.mark.parametrize("mpi", [False, True])
def test_fit_in_two_processes_gives_the_result_of_one(mpi: bool) -> None:
    command = arguments(FIT, "multi_worker", 1 if mpi else 2, "--epochs", 3)
    (said,) = output_of([*two_processes(mpi), *command])
    plain = accuracy_here(FIT, "none", 1, "--epochs", 3)
    assert numbers_in(said) == pytest.approx((plain,), abs=NEAR)


@pytest.mark.parametrize("chief", [[], ["--chief"]])
def test_fit_trains_on_parameter_servers_with_and_without_a_chief(chief: list[str]) -> None:
    command = [*LAUNCHER, *"--workers 2 --ps 1".split(), *chief]
    (said,) = output_of([*command, *arguments(FIT, "parameter_server", 1, "--epochs", 4)])
    assert numbers_in(said) > (0.9,)


def test_a_generator_learns_to_draw_digits() -> None:
    said = output_here(*arguments(GAN, "mirrored", 2, "--epochs", 15, "--picture="))
    assert len(re.findall(r"epoch \d+/15: discriminator loss [0-9.]+, generator loss", said)) > 5
    drawn, before, unseen = numbers_in(said, r"digit: ([\d.]+), before training ([\d.]+), .* (.*)")
    assert unseen < drawn < 0.8 * before


@pytest.mark.parametrize(("strategy", "replicas"), [("mirrored", 2), ("parameter_server", 1)])
def test_sparse_gradients_train_a_classifier_of_text(strategy: str, replicas: int) -> None:
    said = output_here(*arguments(TEXT, strategy, replicas, "--epochs", 3))
    assert numbers_in(said) > (0.95,)
    rows, words = numbers_in(said, r"batch: (\d+) of (\d+)")
    assert rows < words / 10


def test_a_table_compares_strategies_and_jobs_of_processes() -> None:
    chosen = ["none", "multi_worker"]
    command = [SWAP, "--strategy", *chosen, "--epochs", "2", "--picture="]
    lines = output_here(*command).replace(",", "").splitlines()
    found = {name: tuple(map(float, rest)) for name, *rest in map(str.split, lines[1:])}
    assert list(found) == chosen
    assert [replicas for replicas, *_ in found.values()] == [1, 2]
    assert found["multi_worker"][1:3] == pytest.approx(found["none"][1:3], abs=NEAR)


def test_a_killed_training_goes_on_with_another_number_of_replicas(tmp_path: Path) -> None:
    kept = "--epochs", 4, "--picture=", "--backup", tmp_path / "backup"
    command = [sys.executable, *arguments(RESUME, "mirrored", 2, *kept, "--kill_at", 53)]
    output_of(command, ends=-signal.SIGKILL)
    continued = output_here(*arguments(RESUME, "mirrored", 3, *kept))
    assert "3 replica(s): the training goes on after step 4 of epoch 3" in continued
    whole = output_here(*arguments(RESUME, "none", 1, *kept[:3]))
    curves = [re.findall(r"loss ([\d.]+) with (\d)", said) for said in (continued, whole)]
    assert [replicas for _, replicas in curves[0]] == ["2", "2", "3", "3"]
    losses = [[float(loss) for loss, _ in curve] for curve in curves]
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
    assert numbers_in(continued) > (0.95,)
