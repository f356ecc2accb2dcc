"""Training on GPUs computes what training on one CPU computes, to the last digits of a float64."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.devices import to_host
from tests.gpu.placing import components, here, hosts, on, replica

EXAMPLES, BATCH, FEATURES, WORDS, WIDTH, CLASSES = 11, 8, 5, 11, 4, 3

OPTIMIZERS = {
    "nesterov": lambda: nd.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: nd.optimizers.Adam(0.01, clipvalue=10.0),
    "global_clipnorm": lambda: nd.optimizers.Adagrad(0.1, global_clipnorm=0.05),
}


class Model:
    """An embedding, whose gradient is sparse, beside dense layers."""

    def __init__(self):
        rng = np.random.default_rng(7)
        self.table = nd.Variable(rng.normal(size=(WORDS, WIDTH)))
        self.dense = nd.Variable(rng.normal(size=(FEATURES, WIDTH)))
        self.output = nd.Variable(rng.normal(size=(WIDTH, CLASSES)))
        self.bias = nd.Variable(np.zeros(CLASSES))
        self.variables = [self.table, self.dense, self.output, self.bias]

    def loss(self, features, words, labels):
        hidden = np.tanh(features @ self.dense + np.sum(self.table[words], axis=1))
        logits = np.maximum(hidden @ self.output, 0) + self.bias
        likelihood = logits[np.arange(len(labels)), labels]
        return np.sum(np.log(np.sum(np.exp(logits), axis=1)) - likelihood) / BATCH


def batches(strategy):
    rng = np.random.default_rng(5)
    data = (
        rng.normal(size=(EXAMPLES, FEATURES)),
        rng.integers(0, WORDS, size=(EXAMPLES, 3)),
        rng.integers(0, CLASSES, size=EXAMPLES),
    )
    return strategy.distribute_dataset(nd.Dataset.from_tensor_slices(data).batch(BATCH))


def train(strategy, optimizer):
    """Return the losses of all steps and the variables and slots after the last."""
    with strategy.scope():
        model = Model()

    def step(batch):
        with nd.GradientTape() as tape:
            loss = model.loss(*batch)
        gradients = tape.gradient(loss, model.variables)
        assert isinstance(gradients[0], nd.IndexedSlices)
        assert all(on(gradient, replica().device) for gradient in gradients[1:])
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        return replica().all_reduce("sum", loss)

    losses = []
    for batch in batches(strategy):
        seen = hosts(strategy.local_results(strategy.run(step, args=(batch,))))
        assert all(value == seen[0] for value in seen), "replicas hold different bits"
        losses.append(seen[0])
    owned = [*model.variables, *optimizer.variables]
    for variable in owned:
        copies = hosts(variable.values)
        for copy in copies:
            # A CPU and a GPU do not add rows in the same order.
            tolerance = 1e-12 if any(device.kind == "cpu" for device in strategy.devices) else 0
            np.testing.assert_allclose(copy, copies[0], tolerance, tolerance)
    return np.array(losses), [variable.numpy() for variable in owned]


@functools.cache
def trained_on_a_cpu(name):
    return train(nd.get_strategy(), OPTIMIZERS[name]())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_gpus_equal_steps_on_a_cpu(strategy, name):
    expected_losses, expected = trained_on_a_cpu(name)
    losses, values = train(strategy, OPTIMIZERS[name]())
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12, atol=1e-12)
    for value, wanted in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_applied_across_replicas_reach_every_copy(strategy):
    """Outside `run` the gradients are final; they may lie on any device."""
    rng = np.random.default_rng(1)
    dense, rows = rng.normal(size=(WORDS, 2)), rng.normal(size=(4, 2))
    where = np.array([3, 0, 3, 9])
    results = []
    for current in (nd.get_strategy(), strategy):
        with current.scope():
            first, second = nd.Variable(dense), nd.Variable(dense)
        place = components(current, lambda _: rows).values[-1]
        slices = nd.IndexedSlices(place, where, (WORDS, 2))
        optimizer = OPTIMIZERS["adam"]()
        for _ in range(2):
            whole = components(current, lambda _: dense).values[-1]
            optimizer.apply_gradients([(whole, first), (slices, second)])
        results.append([*hosts(first.values), *hosts(second.values), *map(to_host, [place])])
        copies = len(first.values)
        for copy in results[-1][:copies]:
            np.testing.assert_allclose(copy, results[0][0], rtol=1e-12)
        for copy in results[-1][copies:-1]:
            np.testing.assert_allclose(copy, results[0][1], rtol=1e-12)
        np.testing.assert_array_equal(results[-1][-1], rows)


def test_gradients_of_the_host_train_too(strategy):
    """Somebody may write derivatives by hand, or take them from another library."""
    with strategy.scope():
        variable = nd.Variable(np.zeros(6))
    optimizer = nd.optimizers.SGD(1.0)
    strategy.run(lambda: optimizer.apply_gradients([(np.arange(6.0), variable)]))
    np.testing.assert_array_equal(variable.numpy(), -np.arange(6.0) * strategy.num_replicas_in_sync)


def test_gradients_that_are_summed_already_are_applied_once(strategy):
    with strategy.scope():
        variable = nd.Variable(np.zeros(6))
    optimizer = nd.optimizers.SGD(1.0)

    def step():
        total = replica().all_reduce("sum", here(np.ones(6)))
        optimizer.apply_gradients([(total, variable)], skip_gradients_aggregation=True)

    strategy.run(step)
    for copy in hosts(variable.values):
        np.testing.assert_array_equal(copy, np.full(6, -float(strategy.num_replicas_in_sync)))


def test_gradients_flow_through_collectives(strategy):
    size = strategy.num_replicas_in_sync

    def step():
        x = here(np.arange(1.0, 4.0) + replica().replica_id_in_sync_group)
        with nd.GradientTape(persistent=True) as tape:
            x = tape.watch(x)
            total = replica().all_reduce("sum", x * x)
            most = replica().all_reduce("max", x)
            product = replica().all_reduce("prod", x)
            joined = replica().all_gather(x, 0)
            loss = np.sum(total) + np.sum(joined * joined)
        return tape.gradient(loss, x), tape.gradient(most, x), tape.gradient(product, x)

    table = np.arange(1.0, 4.0) + np.arange(size)[:, None]
    for index, own in enumerate(strategy.local_results(strategy.run(step))):
        sums, extremes, products = hosts(own)
        np.testing.assert_allclose(sums, 4 * size * table[index], rtol=1e-12)
        np.testing.assert_allclose(extremes, size * (table[index] == table.max(0)), rtol=1e-12)
        np.testing.assert_allclose(products, size * table.prod(0) / table[index], rtol=1e-12)
