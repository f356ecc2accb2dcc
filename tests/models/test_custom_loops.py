"""What loops of users' own need: shares of losses, metrics of tracked values, late restoring."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, callbacks, layers, losses, metrics
from tests.kinds import mine, strategy

__all__ = ["strategy"]

rng = np.random.default_rng(3)
X = rng.normal(size=(12, 3)).astype(np.float32)


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


def test_the_average_loss_counts_examples_and_not_their_time_steps(strategy):
    size, steps = strategy.num_replicas_in_sync, np.ones((2, 5))
    means = strategy.run(lambda: losses.compute_average_loss(steps))
    assert strategy.reduce("sum", means) == pytest.approx(5.0)
    halves = strategy.run(lambda: losses.compute_average_loss(steps, [0.0, 1.0], 2 * size))
    assert strategy.reduce("sum", halves) == pytest.approx(2.5)


def test_an_average_loss_of_what_is_no_loss_of_examples_is_refused():
    with pytest.raises(ValueError, match="pass the loss of each example"):
        losses.compute_average_loss(np.array(1.0), global_batch_size=2)
    with pytest.raises(ValueError, match="0 or more"):
        losses.compute_average_loss(np.ones(2), global_batch_size=-1)
    with pytest.raises(TypeError, match="float"):
        losses.compute_average_loss(np.ones(2), global_batch_size=2.5)
    with pytest.raises(ValueError, match="one weight for each example"):
        losses.compute_average_loss(np.ones((2, 2)), np.ones(3))
    assert losses.compute_average_loss(np.zeros(0), global_batch_size=0) == 0
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]), pytest.raises(RuntimeError, match="in strategy"):
        losses.compute_average_loss(np.ones(2))


ONE_HOT = np.eye(3, dtype=np.float32)
UNNORMALIZED = np.array([[2, 1, 1], [0, 5, 1], [0.1, 0.2, 0.3]], np.float32)


@pytest.mark.parametrize(
    ("kind", "labels", "expected", "gradient"),
    [
        (
            losses.CategoricalCrossentropy,
            ONE_HOT,
            0.52287197,
            [[-3 / 36, 3 / 36, 3 / 36], [1 / 18, -1 / 90, 1 / 18], [5 / 9, 5 / 9, -5 / 9]],
        ),
        (
            losses.SparseCategoricalCrossentropy,
            np.arange(3),
            0.8283022,
            [[0, 0, 0], [0, 0, 0], [5 / 9, 5 / 9, -5 / 9]],
        ),
    ],
    ids=["one-hot", "integers"],
)
def test_crossentropies_of_unnormalized_outputs_are_those_of_keras(
    kind, labels, expected, gradient
):
    """The expected values are those of Keras 3.15, whose two losses clip at different places."""
    outputs = nd.Variable(UNNORMALIZED)
    with nd.GradientTape() as tape:
        loss = kind()(labels, outputs)
    np.testing.assert_allclose(float(loss), expected, rtol=1e-5)
    np.testing.assert_allclose(tape.gradient(loss, outputs), gradient, rtol=1e-4, atol=1e-7)


def worst(labels, predicted):
    """Return one number for a batch."""
    return np.max(np.abs(labels - predicted))


@pytest.mark.parametrize(
    ("metric", "labels"),
    [
        (metrics.SparseCategoricalAccuracy, np.eye(3)),
        (metrics.SparseTopKCategoricalAccuracy, np.eye(3)),
        (metrics.CategoricalAccuracy, np.arange(3)),
        (metrics.BinaryAccuracy, np.arange(3)),
        (metrics.Precision, np.ones((3, 1))),
        (metrics.MeanSquaredError, np.ones((3, 1))),
    ],
)
def test_a_metric_refuses_labels_of_another_shape(metric, labels):
    with pytest.raises(ValueError, match="the labels must have the shape"):
        metric().update_state(labels, np.eye(3))


@pytest.mark.parametrize("kind", [losses.MeanSquaredError, metrics.MeanSquaredError])
def test_labels_may_have_a_last_axis_of_one_that_predictions_have_not(kind):
    assert float(kind()(np.array([[1.0], [2.0]]), np.zeros(2))) == 2.5


def test_one_number_for_a_batch_counts_for_each_of_its_examples():
    metric = metrics.get(worst, losses.MeanSquaredError())
    metric.update_state(np.array([[1.0], [4.0], [0.0]]), np.zeros((3, 1)))
    metric.update_state(np.array([[8.0]]), np.zeros((1, 1)))
    assert metric.result() == (3 * 4 + 8) / 4
    with pytest.raises(ValueError, match=r"'worst' returned an array of shape \(\) for 2 examples"):
        metric.update_state(np.ones((2, 1)), np.ones((2, 1)), np.ones(2))


def test_values_without_a_last_axis_are_examples_of_their_own():
    labels, scores, weights = np.zeros(3), np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.0, 1.0])
    metric = metrics.MeanSquaredError()
    metric.update_state(labels[:2], scores[:2])
    metric.update_state(labels[2:], scores[2:])
    assert metric.result() == pytest.approx(14 / 3)
    assert losses.MeanSquaredError()(labels, scores, weights) == pytest.approx(9 / 3)


def test_a_loss_of_one_number_is_a_mean_and_takes_no_weights():
    class Squares(losses.Loss):
        def call(self, y_true, y_pred):
            return np.mean(np.square(y_true - y_pred))

    zeros, twos = np.zeros((4, 1)), np.full((4, 1), 2.0)
    assert Squares()(zeros, twos) == 4
    assert Squares().weighted(zeros, twos).tolist() == [4, 4, 4, 4]
    with pytest.raises(ValueError, match="cannot weigh"):
        Squares()(zeros, twos, np.ones(4))


def test_the_accuracy_of_a_binary_crossentropy_of_logits_compares_with_the_logit_of_a_half():
    logits, labels = np.array([[0.2], [-1.0], [3.0]]), np.array([[1], [0], [1]])
    for from_logits, expected in ((True, 1.0), (False, 2 / 3)):
        metric = metrics.get("accuracy", losses.BinaryCrossentropy(from_logits=from_logits))
        metric.update_state(labels, logits)
        assert metric.result() == pytest.approx(expected)
    of_keras = metrics.BinaryAccuracy()
    of_keras.update_state(labels, logits)
    assert of_keras.result() == pytest.approx(2 / 3)


LABELS, SCORES = np.array([1, 0, 1, 1]), np.array([0.9, 0.8, 0.2, 0.6])
CLASSES = np.stack([1 - SCORES, SCORES], axis=1)
ERRORS = LABELS - SCORES
KINDS = [
    (metrics.SparseCategoricalAccuracy(), LABELS, CLASSES, 0.5),
    (metrics.SparseTopKCategoricalAccuracy(1), LABELS, CLASSES, 0.5),
    (metrics.SparseTopKCategoricalAccuracy(2), LABELS, CLASSES, 1.0),
    (metrics.CategoricalAccuracy(), np.eye(2)[LABELS], CLASSES, 0.5),
    (metrics.BinaryAccuracy(), LABELS, SCORES, 0.5),
    (metrics.Precision(), LABELS, SCORES, 2 / 3),
    (metrics.Recall(), LABELS, SCORES, 2 / 3),
    (metrics.MeanSquaredError(), LABELS, SCORES, np.mean(ERRORS**2)),
    (metrics.RootMeanSquaredError(), LABELS, SCORES, np.sqrt(np.mean(ERRORS**2))),
    (metrics.MeanAbsoluteError(), LABELS, SCORES, np.mean(np.abs(ERRORS))),
]


@pytest.mark.parametrize(("metric", "labels", "scores", "expected"), KINDS, ids=str)
def test_metrics_count_plain_and_tracked_predictions(metric, labels, scores, expected):
    with nd.GradientTape() as tape:
        predicted = tape.watch(scores) * 1.0
        metric.update_state(labels, predicted)
        loss = np.sum(predicted)
    inside = metric.result()
    for given in (predicted, scores):
        metric.reset_state()
        assert metric.result() == 0
        metric.update_state(labels, given)
        assert metric.result() == inside == pytest.approx(expected)
    assert tape.gradient(loss, predicted) is not None


def test_means_and_sums_count_weights_and_tracked_values():
    mean, total = metrics.Mean(), metrics.Sum()
    mean.update_state([1.0, 3.0], sample_weight=[3.0, 1.0])
    assert mean.result() == 1.5
    mean.reset_states()
    with nd.GradientTape() as tape:
        loss = np.mean(tape.watch(np.array([1.0, 3.0])) * 2)
        mean.update_state(loss)
        total.update_state(loss)
    mean(loss)
    assert mean.result() == total.result() == 4.0


def test_a_manager_counts_the_steps_that_it_is_not_told(tmp_path):
    manager = nd.CheckpointManager(nd.Checkpoint(v=nd.Variable(1.0)), tmp_path)
    manager.save()
    manager.save()
    assert manager.step == 2
    manager.save(10)
    manager.save()
    assert manager.step == 11


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
