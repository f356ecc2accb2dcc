"""Dense layers that are divided among the replicas compute and learn what whole ones do."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, layers, losses
from ndistribute.variables.sharded import sharded_variable
from tests.kinds import SEVERAL, fixture_over, strategy

__all__ = ["strategy"]

replicated = fixture_over(SEVERAL, *(kind for kind in SEVERAL if kind.startswith("served")))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6))
Y = RNG.integers(0, 3, 50)


def network(wide=layers.Dense, narrow=layers.Dense, **options):
    """Return a compiled model in float64 whose middle layers may be divided."""
    nd.set_seed(1)
    kinds = [(layers.Dense, 5, "tanh"), (wide, 9, "relu"), (narrow, 7, "tanh")]
    model = Sequential([kind(units, activation=how, dtype="float64") for kind, units, how in kinds])
    model.add(layers.Dense(3, dtype="float64"))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(nd.optimizers.Adam(0.01, **options), loss, metrics=["accuracy"])
    model(X[:1])
    return model


@pytest.mark.parametrize("clipping", [{}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}], ids=str)
def test_divided_layers_train_as_whole_ones(replicated, clipping):
    whole = network(**clipping)
    expected = whole.fit(X, Y, batch_size=16, epochs=3, verbose=0).history
    predicted = whole.predict(X)
    with replicated.scope():
        model = network(layers.ColumnParallelDense, layers.RowParallelDense, **clipping)
        history = model.fit(X, Y, batch_size=16, epochs=3, verbose=0).history
        np.testing.assert_allclose(history["loss"], expected["loss"], atol=1e-12)
        for ours, theirs in zip(model.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)
        np.testing.assert_allclose(model.predict(X), predicted, atol=1e-12)


def test_each_replica_stores_a_shard_of_the_weights_and_of_their_slots(replicated):
    with replicated.scope():
        w = sharded_variable(np.arange(14.0).reshape(2, 7), axis=1)
        slot = w.create_slot("m")
    for one in (w, slot):
        assert max(part.shape[1] for part in one.values) < 7
    np.testing.assert_array_equal(w.numpy(), np.arange(14.0).reshape(2, 7))
    w.assign(-np.ones((2, 7)))
    np.testing.assert_array_equal(w.numpy(), -np.ones((2, 7)))


def test_rows_of_a_shard_are_updated_once():
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as both:
        table, optimizer = sharded_variable(np.zeros((4, 2)), axis=0), nd.optimizers.SGD(1.0)

        def step():
            with nd.GradientTape() as tape:
                loss = np.sum(table[[1, 1]])
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        both.run(step)
        np.testing.assert_array_equal(table.numpy()[:, 0], [0.0, -2.0, 0.0, -2.0])


def test_a_scaled_loss_leaves_shards_apart_and_an_overflow_in_one_skips_the_step_on_all():
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as both:
        w = sharded_variable(np.zeros(4), axis=0)
        optimizer = nd.optimizers.LossScale(nd.optimizers.SGD(1.0), initial_scale=2.0)

        def step(*gradients):
            rank = nd.get_replica_context().replica_id_in_sync_group
            optimizer.apply_gradients([(np.full(2, gradients[rank]), w)])
            return optimizer.scale

        assert both.local_results(both.run(step, args=(2.0, 4.0))) == (2.0, 2.0)
        assert both.local_results(both.run(step, args=(2.0, np.inf))) == (1.0, 1.0)
        np.testing.assert_array_equal(w.numpy(), [-1.0, -1.0, -2.0, -2.0])


def test_a_checkpoint_goes_to_another_number_of_replicas():
    with nd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as three:
        model = network(layers.ColumnParallelDense)
        model.fit(X, Y, batch_size=25, epochs=1, verbose=0)
        weights = model.get_weights()
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]):
        other = network(layers.ColumnParallelDense)
        other.set_weights(weights)
        for ours, theirs in zip(other.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert three.num_replicas_in_sync == 3


def test_mistakes_with_shards_say_what_to_do():
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as both:
        w = sharded_variable(np.ones(4), axis=0, name="w")
        sgd = nd.optimizers.SGD(0.1)
        with pytest.raises(RuntimeError, match="'w' inside run: assign the whole value outside"):
            both.run(lambda: w.assign(np.ones(2)))
        with pytest.raises(ValueError, match="apply its gradients inside run"):
            sgd.apply_gradients([(np.ones(4), w)])
        with pytest.raises(ValueError, match=r"'w' is sharded.*cannot be accumulated"):
            nd.optimizers.GradientAccumulation(sgd, 2).build([w])
        with pytest.raises(ValueError, match="cannot be cut along axis 0 into a shard"):
            sharded_variable(np.ones(1), axis=0)
        with pytest.raises(ValueError, match="put a Flatten before it"):
            layers.ColumnParallelDense(4)(np.ones((2, 3, 4), np.float32))
        with pytest.raises(ValueError, match="cannot be regularized"):
            layers.RowParallelDense(4, kernel_regularizer="l2")(np.ones((2, 3), np.float32))
        with pytest.raises(ValueError, match="along axis -1"):
            sharded_variable(np.ones((2, 2)), axis=-1)
        layer = layers.RowParallelDense(4)
        layer(np.ones((2, 6), np.float32))
        with pytest.raises(ValueError, match="the layer was built for 6 features"):
            both.run(lambda: layer(np.ones((2, 8), np.float32)))
    with nd.ParameterServerStrategy(), pytest.raises(ValueError, match="variable_partitioner"):
        sharded_variable(np.ones(4), axis=0)
