"""In-graph replication: one client trains towers on several workers by their mean gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ndistribute import errors
from ndistribute import graph as g
from tests.processes import Tasks, wait_until

STEPS, BATCH = 60, 128


def logits_of(images: Any) -> Any:
    """Return the logits of a tower; all towers share the variables."""
    random = np.random.default_rng(0)
    for name, rows, columns in (("hidden", 64, 32), ("output", 32, 10)):
        with g.variable_scope(name):
            start = random.normal(0.0, np.sqrt(2.0 / rows), (rows, columns))
            weights = g.get_variable("weights", None, np.float64, start)
            bias = g.get_variable("bias", None, np.float64, np.zeros(columns))
        images = images @ weights + bias if name == "hidden" else np.maximum(images, 0) @ weights
    return images + bias


def train(target: str, towers: list[str]) -> tuple[list[Any], float]:
    """Train towers on devices; return the variables and the accuracy."""
    from sklearn.datasets import load_digits  # Not for all who collect this file.

    data = load_digits()
    images, labels = data.data / 16, np.eye(10)[data.target]
    optimizer = g.AdagradOptimizer(0.2)
    variables = g.replica_device_setter(ps_tasks=2 if target else 0)
    with g.Graph().as_default(), g.variable_scope("model", reuse=g.AUTO_REUSE):
        x, y = g.placeholder(np.float64, [None, 64]), g.placeholder(np.float64, [None, 10])
        gradients = []
        parts = zip(np.split(x, len(towers)), np.split(y, len(towers)), strict=True)
        for tower, (own_x, own_y) in zip(towers, parts, strict=True):
            with g.device(variables), g.device(tower):
                logits = logits_of(own_x)
                losses = np.log(np.sum(np.exp(logits), axis=1)) - np.sum(logits * own_y, axis=1)
                gradients.append(optimizer.compute_gradients(np.mean(losses)))
        means = [
            (sum(gradient for gradient, _ in each) / len(towers), each[0][1])
            for each in zip(*gradients, strict=True)
        ]
        step = optimizer.apply_gradients(means)
        guesses = np.argmax(logits_of(x), axis=1)
        initialize = g.global_variables_initializer()
        with g.Session(target) as session:
            wait_until(lambda: reached(session, initialize))
            for k in range(STEPS):
                rows = np.arange(k * BATCH, (k + 1) * BATCH) % 1408
                session.run(step, {x: images[rows], y: labels[rows]})
            found = session.run(guesses, {x: images[1408:]})
            values = session.run(g.trainable_variables())
    return values, float(np.mean(found == data.target[1408:]))


def reached(session: g.Session, initialize: g.Operation) -> bool:
    try:
        session.run(initialize)
    except errors.UnavailableError:
        return False
    return True


def test_towers_on_two_workers_train_as_one_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    values, accuracy = train("", ["/job:localhost"])
    with Tasks(2, 2, chief=False) as tasks:
        monkeypatch.setenv("NDISTRIBUTE_SECRET", tasks.environ["NDISTRIBUTE_SECRET"])
        tasks.start_all()
        towers = [f"/job:worker/task:{k}" for k in range(2)]
        others, same = train(f"grpc://{tasks.cluster['worker'][0]}", towers)
    for one, other in zip(values, others, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-12)
    assert accuracy == same > 0.85


def test_variables_are_shared_in_scopes_that_reuse_them() -> None:
    with g.Graph().as_default(), g.variable_scope("a"):
        with g.variable_scope("b") as scope:
            w = g.get_variable("w", [2])
            with pytest.raises(ValueError, match="'a/b/w' exists already"):
                g.get_variable("w", [2])
            scope.reuse_variables()
            assert g.get_variable("w", [2]) is w
        with g.variable_scope(scope):
            assert g.get_variable("w") is w
            with pytest.raises(ValueError, match="'a/b/v' does not exist"):
                g.get_variable("v", [2])
        assert g.get_variable("v", [2]).name == "a/v:0"
        with g.Graph().as_default():
            assert g.get_variable("v", [2]).name == "v:0"


def test_new_variables_are_like_their_initializers() -> None:
    with g.Graph().as_default() as graph, g.Session() as session:
        counted = g.get_variable("counted", initializer=np.int64(3))
        number = g.get_variable("number", [2], np.int32, regularizer=lambda v: np.sum(v + 1))
        limited = g.get_variable("limited", [600])
        with pytest.raises(ValueError, match=r"'wrong' has shape \(2,\), not \(3,\)"):
            g.get_variable("wrong", [3], initializer=np.zeros(2))
        names = []
        for _ in range(2):
            with g.variable_scope(None, "layer", [limited]):
                names.append(g.get_variable("w", []).name)
        session.run(g.global_variables_initializer())
        assert (counted.dtype, session.run(number).tolist()) == (np.int64, [0, 0])
        assert session.run(graph.get_collection("regularization_losses")) == [2]
        assert 0.06 < np.abs(session.run(limited)).max() < np.sqrt(6 / 1200)
    assert names == ["layer/w:0", "layer_1/w:0"]
