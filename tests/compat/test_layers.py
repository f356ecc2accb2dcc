"""Layers of graphs compute what layers of models compute, with variables of TensorFlow's names."""

from typing import Any

import numpy as np
import pytest

from ndistribute import graph, layers
from ndistribute.compat import tf1 as tf

pytestmark = pytest.mark.usefixtures("empty_graph")
rng = np.random.default_rng(0)


def run(fetches: Any, feeds: Any = None) -> Any:
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run(fetches, feeds)


def test_layers_make_variables_of_their_names() -> None:
    x = tf.placeholder(tf.float32, [None, 8, 8, 3])
    y = tf.layers.conv2d(x, 4, 3, padding="same", activation=tf.nn.relu)
    y = tf.layers.max_pooling2d(inputs=y, pool_size=[2, 2], strides=2)
    y = tf.layers.conv2d(y, 5, [3, 3], use_bias=False)
    y = tf.layers.dense(tf.layers.flatten(y), 6)
    y = tf.layers.dense(y, units=2, name="output")
    assert y.shape == (None, 2)
    assert {one.name: one.shape.as_list() for one in tf.trainable_variables()} == {
        "conv2d/kernel:0": [3, 3, 3, 4],
        "conv2d/bias:0": [4],
        "conv2d_1/kernel:0": [3, 3, 4, 5],
        "dense/kernel:0": [20, 6],
        "dense/bias:0": [6],
        "output/kernel:0": [6, 2],
        "output/bias:0": [2],
    }
    assert run(y, {x: np.ones((7, 8, 8, 3))}).shape == (7, 2)


def test_a_layer_computes_what_a_layer_of_a_model_does() -> None:
    images = rng.normal(size=(2, 9, 9, 3))
    x = tf.placeholder(tf.float64, [None, 9, 9, 3])
    convolved = tf.layers.conv2d(x, 4, 3, strides=2, padding="SAME", activation=tf.nn.relu)
    ends = [
        tf.layers.max_pooling2d(convolved, 2, 2),
        tf.layers.average_pooling2d(convolved, 2, 2, padding="same"),
        tf.layers.dense(convolved, 3, tf.nn.sigmoid),
    ]
    found, weights = run([[convolved, *ends], tf.global_variables()], {x: images})
    conv, dense = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"), layers.Dense(3)
    expected = [
        conv(images),
        layers.MaxPool2D(2, 2)(found[0]),
        layers.AveragePool2D(2, 2, padding="same")(found[0]),
        dense(found[0]),
    ]
    for layer, own in ((conv, weights[:2]), (dense, weights[2:])):
        for variable, value in zip(layer.variables, own, strict=True):
            variable.assign(value)
    expected[0] = conv(images)
    expected[3] = 1 / (1 + np.exp(-dense(found[0])))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=1e-6)


def test_weights_are_used_again_if_the_program_says_so() -> None:
    x = tf.placeholder(tf.float32, [None, 3])
    first = tf.layers.dense(x, 2, name="shared")
    with pytest.raises(ValueError, match=r"shared/kernel.*exists already"):
        tf.layers.dense(x, 2, name="shared")
    second = tf.layers.dense(x, 2, name="shared", reuse=True)
    np.testing.assert_array_equal(*run([first, second], {x: rng.normal(size=(4, 3))}))
    assert len(tf.trainable_variables()) == 2


def test_losses_of_weights_are_part_of_the_total_loss() -> None:
    x = tf.placeholder(tf.float32, [None, 3])
    y = tf.layers.dense(x, 2, kernel_regularizer=tf.contrib.layers.l2_regularizer(0.1))
    loss = tf.losses.sigmoid_cross_entropy(np.ones((1, 2), np.float32), y)
    total = tf.losses.get_total_loss()
    kernel = tf.trainable_variables()[0]
    found = run([loss, total, tf.losses.get_regularization_loss(), kernel], {x: [[0, 0, 0]]})
    assert found[0] == pytest.approx(np.log(2))
    assert found[2] == pytest.approx(0.1 * np.sum(found[3] ** 2) / 2)
    assert found[1] == pytest.approx(found[0] + found[2])


def test_moving_averages_follow_the_batches_of_training() -> None:
    x = tf.placeholder(tf.float64, [None, 2])
    training = tf.placeholder(tf.bool, [])
    y = tf.layers.batch_normalization(x, momentum=0.5, epsilon=0.0, training=training)
    loss = tf.reduce_sum(tf.square(y - 1))
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        # The slots of the optimizer begin without the batch on which the updates depend.
        train = tf.train.AdamOptimizer(0.0).minimize(loss)
    gamma, beta, *moving = tf.global_variables()[:4]
    assert tf.trainable_variables() == [gamma, beta]
    batch = rng.normal(2.0, 3.0, (50, 2))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train, {x: batch, training: True})
        mean, variance = session.run(moving)
        np.testing.assert_allclose(mean, batch.mean(0) / 2)
        np.testing.assert_allclose(variance, (1 + batch.var(0)) / 2)
        in_training = session.run(y, {x: batch, training: True})
        np.testing.assert_allclose(in_training, (batch - batch.mean(0)) / batch.std(0))
        session.run(train, {x: batch, training: False})
        np.testing.assert_array_equal(session.run(moving[0]), mean)  # As it was.
        later = session.run(y, {x: batch, training: False})
        np.testing.assert_allclose(later, (batch - mean) / np.sqrt(variance))


@pytest.mark.parametrize("training", [True, False])
def test_a_part_is_dropped_in_training_alone(training: bool) -> None:
    x = tf.placeholder(tf.float32, [None, 100])
    flag = tf.placeholder(tf.bool, [])
    said = tf.layers.dropout(x, 0.25, seed=1, training=training)
    fed = tf.layers.dropout(x, 0.25, seed=1, training=flag)
    assert said.shape == fed.shape == (None, 100)
    for values in run([said, fed], {x: np.ones((100, 100)), flag: training}):
        assert values.mean() == pytest.approx(1.0, abs=0.03)
        assert (values == 0).mean() == pytest.approx(0.25 * training, abs=0.02)


def test_lengths_of_which_weights_depend_must_be_known() -> None:
    x = tf.placeholder(tf.float32, [None, None])
    with pytest.raises(ValueError, match=r"'placeholder:0'.*set_shape"):
        tf.layers.dense(x, 2)
    assert tf.layers.flatten(tf.placeholder(tf.float32, [None, None, 2])).shape == (None, None)
    with pytest.raises(ValueError, match="channels_last"):
        tf.layers.max_pooling2d(tf.zeros([1, 2, 4, 4]), 2, 2, data_format="channels_first")
    with pytest.raises(ValueError, match="the last one"):
        tf.layers.batch_normalization(tf.zeros([1, 2, 4, 4]), axis=1)
    assert graph.get_default_graph().get_collection(tf.GraphKeys.GLOBAL_VARIABLES) == []


def test_layers_are_numbered_by_variable_scopes_and_shared_when_these_are_entered_again() -> None:
    def net(x: Any) -> Any:
        return tf.layers.dense(tf.layers.dense(x, 3), 3)

    x = tf.placeholder(tf.float32, [None, 3])
    with tf.name_scope("a"):
        tf.layers.dense(x, 2)
    with tf.name_scope("b"):
        tf.layers.dense(x, 2)
    with tf.variable_scope("net") as scope:
        first = net(x)
    with tf.variable_scope(scope, reuse=True):
        second = net(x)
    with tf.variable_scope("other", reuse=True), tf.variable_scope(scope):
        assert tf.get_variable("new", [1]).name == "net/new:0"  # The scope that is entered counts.
    names = [one.op.name for one in tf.trainable_variables() if one.name.endswith("kernel:0")]
    assert names == ["dense/kernel", "dense_1/kernel", "net/dense/kernel", "net/dense_1/kernel"]
    assert [one.name for one in tf.trainable_variables("net/dense/")] == [
        "net/dense/kernel:0",
        "net/dense/bias:0",
    ]
    np.testing.assert_array_equal(*run([first, second], {x: rng.normal(size=(4, 3))}))


def test_options_of_batch_normalization_count() -> None:
    x = tf.placeholder(tf.float32, [None, 2])
    y = tf.layers.batch_normalization(
        x,
        beta_initializer=tf.constant_initializer(2.0),
        gamma_initializer=tf.zeros_initializer(),
        gamma_regularizer=tf.contrib.layers.l2_regularizer(1.0),
        fused=True,
    )
    np.testing.assert_array_equal(run(y, {x: [[1, 5]]}), [[2, 2]])
    assert run(tf.losses.get_regularization_loss()) == 0.0
    with pytest.raises(TypeError, match="renorm"):
        tf.layers.batch_normalization(x, renorm=True)
