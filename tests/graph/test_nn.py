"""Networks of graphs: convolutions and losses of models, trained over servers."""

from __future__ import annotations

import numpy as np

import ndistribute as nd
from ndistribute.graph import (
    AdagradOptimizer,
    Graph,
    Session,
    Variable,
    global_variables_initializer,
    gradients,
    placeholder,
)
from ndistribute.models import nn

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.standard_normal((6, 5, 5, 2)), np.array([0, 1, 2, 0, 1, 2])
KERNEL, WEIGHTS = RNG.standard_normal((3, 3, 2, 4)), RNG.standard_normal((16, 3))


def loss_of(images: object, kernel: object, weights: object) -> object:
    """Return the loss of a small network, for arrays, tracked arrays and tensors."""
    y = nn.max_pool2d(nn.relu(nn.conv2d(images, kernel, padding="same")), (2, 2))
    return np.mean(nn.softmax_cross_entropy(np.reshape(y, (6, 16)) @ weights, LABELS))


def test_networks_of_graphs_learn_as_those_of_arrays() -> None:
    with nd.GradientTape() as tape:
        sources = tape.watch([KERNEL, WEIGHTS])
        expected = loss_of(IMAGES, *sources)
    slopes = tape.gradient(expected, sources)
    server = nd.Server.create_local_server()
    with Graph().as_default(), Session(server.target) as session:
        x = placeholder(np.float64, [None, 5, 5, 2])
        weights = [Variable(one) for one in (KERNEL, WEIGHTS)]
        loss = loss_of(x, *weights)
        found = gradients(loss, weights)
        step = AdagradOptimizer(0.1).minimize(loss)
        session.run(global_variables_initializer())
        first, *computed = session.run([loss, *found], {x: IMAGES})
        assert first == float(expected)
        for ours, theirs in zip(computed, slopes, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)
        for _ in range(20):
            session.run(step, {x: IMAGES})
        assert session.run(loss, {x: IMAGES}) < 0.2 * first
    server.stop()
