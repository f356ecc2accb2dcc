"""The example of PyTorch trains to the same result under every strategy, however it is started."""

import pytest

from tests.test_examples import (
    LAUNCHER,
    NEAR,
    OF_DIGITS,
    arguments,
    numbers_in,
    output_here,
    output_of,
)

pytest.importorskip("torch")

SCRIPT, EPOCHS = "examples/torch_workers.py", ("--epochs", 3)


def result_here(strategy, replicas):
    return numbers_in(output_here(*arguments(SCRIPT, strategy, replicas, *EPOCHS)), OF_DIGITS)


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [("one_device", 1), ("mirrored", 3), ("central_storage", 2), ("parameter_server", 2)],
)
def test_it_trains_alike_under_every_strategy(strategy, replicas):
    plain = result_here("none", 1)
    assert plain[1] > 0.9
    assert result_here(strategy, replicas) == pytest.approx(plain, abs=NEAR)


def test_workers_train_as_one_process_does():
    command = arguments(SCRIPT, "multi_worker", 1, *EPOCHS)
    (said,) = output_of([*LAUNCHER, "-n", "2", *command])
    assert numbers_in(said, OF_DIGITS) == pytest.approx(result_here("none", 1), abs=NEAR)


def test_workers_of_a_server_learn():
    command = arguments(SCRIPT, "parameter_server", 1, *EPOCHS)
    (said,) = output_of([*LAUNCHER, *"--workers 2 --ps 1".split(), *command])
    assert numbers_in(said) > (0.85,)
