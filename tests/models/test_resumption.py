"""A training that is interrupted, at any step, continues on other replicas or workers.

The losses and weights are those of a training without an interruption, and each example is used
once an epoch.
"""

import collections
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, callbacks, layers
from tests.contract_rows import central, mirrored, served
from tests.kinds import join
from tests.processes import Ranks

EXAMPLES, BATCH, EPOCHS = 14, 4, 2  # The last batch of an epoch has two examples.
STEPS = EPOCHS * -(-EXAMPLES // BATCH)
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3))
Y = np.arange(EXAMPLES)[:, None] / EXAMPLES


class Interrupt(callbacks.Callback):
    """Raises after a number of steps; None: never."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        """Raise."""
        if self.model.position.steps_made == self.steps:
            raise KeyboardInterrupt


def fit(
    strategy: Any, directory: Any = None, until: int | None = None, seed: int = 1
) -> tuple[list[float], list[Any], list[int]]:
    """Train; return the losses of the epochs that ended, the weights, and the examples in use."""
    seen: list[int] = []

    def examples(y_true: Any, y_pred: Any) -> Any:
        seen.extend(np.rint(y_true[:, 0] * EXAMPLES).astype(int).tolist())
        return np.zeros(len(y_true))

    nd.set_seed(seed)
    with strategy.scope():
        model = Sequential([layers.Dense(1, dtype="float64", kernel_initializer="ones")])
        model.compile(nd.optimizers.Adam(0.01), "mse", metrics=[examples])
        backup = [] if directory is None else [callbacks.BackupAndRestore(directory, save_freq=1)]
        history = callbacks.History()
        used = [history, *backup, Interrupt(until)]
        try:
            model.fit(X, Y, BATCH, EPOCHS, 0, callbacks=used)
        except KeyboardInterrupt:
            assert model.position.steps_made == until
        return history.history.get("loss", []), model.get_weights(), seen


@functools.cache
def uninterrupted() -> tuple[Any, ...]:
    return fit(nd.get_strategy())


def check(first: tuple[Any, ...], then: tuple[Any, ...]) -> None:
    """Compare a training in two parts with one that was not interrupted."""
    losses, weights, seen = uninterrupted()
    np.testing.assert_allclose([*first[0], *then[0]], losses, rtol=0, atol=1e-12)
    for found, wanted in zip(then[1], weights, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    assert collections.Counter([*first[2], *then[2]]) == collections.Counter(seen)
    assert set(collections.Counter(seen).values()) == {EPOCHS}


PAIRS = {
    "1 to 3": (lambda: mirrored(1), lambda: mirrored(3)),
    "2 to servers": (lambda: central(2), lambda: served(3)),
    "servers to 2": (lambda: served(3), lambda: mirrored(2)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_training_interrupted_at_any_step_continues_on_other_replicas(pair, tmp_path):
    for step in range(1, STEPS + 1):
        folder = tmp_path / str(step)
        with PAIRS[pair][0]() as before:
            first = fit(before, folder, step)
        with PAIRS[pair][1]() as after:
            check(first, fit(after, folder, seed=2))
        assert not list(folder.iterdir())


def parts_of(strategy: Any, directory: Any, interrupted: bool, seed: int) -> list[Any]:
    """Make the first parts of trainings that are interrupted at any step, or the others."""
    return [
        fit(strategy, f"{directory}/{step}", step if interrupted else None, seed)
        for step in range(1, STEPS + 1)
    ]


def on_worker(rank: int, size: int, directory: str, interrupted: bool) -> list[Any]:
    with join("auto", (1,) * size) as strategy:
        return parts_of(strategy, directory, interrupted, 1 if interrupted else 2)


@pytest.mark.parametrize("interrupted", [True, False], ids=["2 workers to 3 replicas", "reversed"])
def test_a_training_interrupted_at_any_step_continues_on_other_workers(interrupted, tmp_path):
    def here() -> list[Any]:
        with mirrored(3) as strategy:
            return parts_of(strategy, tmp_path, not interrupted, 3 if interrupted else 1)

    firsts = [] if interrupted else here()
    with Ranks(2) as ranks:
        parts = ranks.results(on_worker, str(tmp_path), interrupted)
    together = [(one[0], one[1], [*one[2], *other[2]]) for one, other in zip(*parts, strict=True)]
    firsts, thens = (together, here()) if interrupted else (firsts, together)
    for first, then in zip(firsts, thens, strict=True):
        check(first, then)
    assert not [path for path in Path(tmp_path).rglob("*") if path.is_file()]
