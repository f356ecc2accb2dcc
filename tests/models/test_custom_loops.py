"""What loops of users' own need: shares of losses, metrics of tracked values, late restoring."""

from __future__ import annotations

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, callbacks, latest_checkpoint, layers, losses, metrics
from tests.kinds import mine, one_process, strategy

__all__ = ["strategy"]

rng = np.random.default_rng(3)
X = rng.normal(size=(12, 3)).astype(np.float32)
Y = rng.integers(0, 2, 12)


def test_shares_of_the_mean_loss_add_up_to_it(strategy):
    size = strategy.num_replicas_in_sync
    rows = [np.arange(1.0, 2.0 + i) for i in range(size)]  # Uneven, as a last batch is.
    every = np.concatenate(rows)
    given = nd.PerReplica(mine(strategy, rows))

    def share(own):
        mean = losses.compute_average_loss(own)
        weighted = losses.compute_average_loss(own, 2 * np.ones_like(own), 10)
        return mean, weighted, losses.scale_regularization_loss(np.array([1.0, 2.0]))

    mean, weighted, penalty = strategy.reduce("sum", strategy.run(share, args=(given,)))
    np.testing.assert_allclose(mean, every.mean())
    np.testing.assert_allclose(weighted, 2 * every.sum() / 10)
    np.testing.assert_allclose(penalty, 3.0)


LABELS = np.array([1, 0, 1])
SCORES = np.array([[0.2, 0.8], [0.7, 0.3], [0.6, 0.4]])
KINDS = [
    (metrics.SparseCategoricalAccuracy, LABELS, SCORES),
    (metrics.SparseTopKCategoricalAccuracy, LABELS, SCORES),
    (metrics.CategoricalAccuracy, np.eye(2)[LABELS], SCORES),
    (metrics.BinaryAccuracy, LABELS, SCORES[:, 1]),
    (metrics.Precision, LABELS, SCORES[:, 1]),
    (metrics.Recall, LABELS, SCORES[:, 1]),
    (metrics.MeanSquaredError, LABELS, SCORES[:, 1]),
    (metrics.RootMeanSquaredError, LABELS, SCORES[:, 1]),
    (metrics.MeanAbsoluteError, LABELS, SCORES[:, 1]),
]


@pytest.mark.parametrize(("kind", "labels", "scores"), KINDS, ids=lambda one: str(one)[:40])
def test_metrics_count_tracked_predictions_in_and_after_the_tape(kind, labels, scores):
    plain, inside, after = kind(), kind(), kind()
    plain.update_state(labels, scores)
    with nd.GradientTape() as tape:
        predicted = tape.watch(scores) * 1.0
        inside.update_state(labels, predicted)
        loss = np.sum(predicted)
    after.update_state(labels, predicted)
    assert inside.result() == after.result() == plain.result()
    assert tape.gradient(loss, predicted) is not None


def test_means_and_sums_count_tracked_values():
    with nd.GradientTape() as tape:
        loss = np.mean(tape.watch(np.array([1.0, 3.0])) * 2)
        mean, total = metrics.Mean(), metrics.Sum()
        mean.update_state(loss)
        total.update_state(loss)
    mean(loss)
    assert mean.result() == total.result() == 4.0
    mean.reset_states()
    assert mean.result() == 0.0


@one_process("the chief writes what all workers read")
def test_a_model_that_is_not_built_is_restored(strategy, tmp_path):
    def made():
        with strategy.scope():
            model = Sequential([layers.Dense(4, activation="relu"), layers.Dense(2)])
            return model, nd.optimizers.Adam(0.1)

    model, optimizer = made()
    model.compile(optimizer, losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(X, Y, verbose=0, callbacks=None)
    nd.Checkpoint(model=model).save(tmp_path / "run")
    restored, _ = made()
    assert restored.metrics == []
    restored.compile("adam", model.loss)
    nd.Checkpoint(model=restored).restore(latest_checkpoint(tmp_path))
    for one, other in zip(model.get_weights(), restored.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert restored.optimizer.iterations == 1


def test_the_latest_checkpoint_of_any_name_is_found(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None
    checkpoint = nd.Checkpoint(v=nd.Variable(1.0))
    for name in ("ckpt_2", "ckpt_10", "ckpt_1"):
        path = checkpoint.save(tmp_path / name)
    assert latest_checkpoint(tmp_path) == path


def test_a_manager_counts_the_steps_that_it_is_not_told(tmp_path):
    manager = nd.CheckpointManager(nd.Checkpoint(v=nd.Variable(1.0)), tmp_path)
    manager.save()
    manager.save()
    assert manager.step == 2
    manager.save(10)
    manager.save()
    assert manager.step == 11


def test_an_exported_regularizer_is_loaded(tmp_path):
    model = Sequential([layers.Dense(2, kernel_regularizer="l2", input_shape=(3,))])
    loaded = nd.models.load(model.export(tmp_path / "model"))
    assert float(loaded.losses[0]) == float(model.losses[0]) > 0


@pytest.mark.parametrize("schedule", [lambda epoch: 0.5**epoch, lambda epoch, rate: rate / 2])
def test_a_schedule_takes_the_epoch_alone_or_the_rate_too(schedule):
    model = Sequential([layers.Dense(2)])
    model.compile(nd.optimizers.SGD(2.0), "mse")
    model.fit(X, X[:, :2], 12, 2, 0, callbacks=[callbacks.LearningRateScheduler(schedule)])
    assert model.optimizer.learning_rate == 0.5


def test_iterators_have_the_methods_of_tensorflow(strategy):
    size = strategy.num_replicas_in_sync
    data = strategy.distribute_dataset(nd.Dataset.range(2 * size).batch(size))
    iterator = iter(data)
    first = iterator.get_next()
    assert [one.shape for one in strategy.local_results(first)] == [(1,)] * len(strategy.devices)
    second = iterator.get_next_as_optional()
    assert second.has_value()
    assert strategy.local_results(second.get_value())
    end = iterator.get_next_as_optional()
    assert not end.has_value()
    with pytest.raises(ValueError, match="has ended: call has_value"):
        end.get_value()
