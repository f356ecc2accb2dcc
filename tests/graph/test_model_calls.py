"""Layers and losses of models on tensors of graphs, beside the same on arrays."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import estimator as est
from ndistribute import graph as g
from ndistribute.compat import tf1 as tf

L = nd.layers
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(3, 6, 6, 2)).astype(np.float32)
ROWS, STEPS = IMAGES[:, 0, 0], IMAGES[:, :, 0]


class Scaled(L.Layer):
    """Scales its inputs, and calls a layer."""

    def build(self, input_shape):
        self.scale = self.add_weight("scale", (input_shape[-1],), "ones")
        self.inner = L.Dense(2)

    def call(self, inputs):
        return self.inner(inputs * self.scale)


def functional():
    x = nd.models.Input((2,))
    return nd.Model(x, L.Dense(2)(x) * 2 + 1)


LAYERS = {
    "dense": (lambda: L.Dense(3, activation="relu"), ROWS),
    "convolution": (lambda: L.Conv2D(3, 2, strides=2, padding="same", activation="tanh"), IMAGES),
    "dilated": (lambda: L.Conv2D(4, 2, dilation_rate=2, groups=2), IMAGES),
    "pooling": (lambda: L.MaxPool2D(2), IMAGES),
    "mean": (L.GlobalAveragePool2D, IMAGES),
    "flat": (L.Flatten, IMAGES),
    "normalized": (L.LayerNormalization, ROWS),
    "batch": (L.BatchNormalization, ROWS),
    "sequence": (lambda: L.LSTM(3), STEPS),
    "table": (lambda: L.Embedding(4, 3), np.array([[0, 3], [1, 1]])),
    "dropout": (lambda: L.Dropout(0.5), ROWS),
    "user's": (Scaled, ROWS),
    "model": (lambda: nd.Sequential([L.Dense(4, input_shape=(2,)), L.Dense(2)]), ROWS),
    "functional": (functional, ROWS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_of_tensors_what_it_computes_of_arrays(session, name):
    make, values = LAYERS[name]
    layer = make()
    x = g.placeholder(values.dtype, [None, *values.shape[1:]])
    outputs = layer(x)
    again = layer(x)
    weights = g.trainable_variables()
    sources = weights if values.dtype.kind == "i" else [*weights, x]
    gradients = g.gradients(np.sum(np.square(outputs)), sources)
    session.run(g.global_variables_initializer())
    of_graph = session.run([outputs, again, gradients], {x: values})
    same = make()
    same(values)
    same.set_weights(session.run(g.global_variables()))
    with nd.GradientTape(watch_accessed_variables=True) as tape:
        watched = values if values.dtype.kind == "i" else tape.watch(values)
        expected = same(watched)
        total = np.sum(np.square(expected))
    np.testing.assert_array_equal(of_graph[0], of_graph[1])
    np.testing.assert_allclose(of_graph[0], nd.stop_gradient(expected), rtol=1e-6)
    over = same.trainable_variables if sources is weights else [*same.trainable_variables, watched]
    for pair in zip(of_graph[2], tape.gradient(total, over), strict=True):
        rows = [each.to_dense() if isinstance(each, nd.IndexedSlices) else each for each in pair]
        np.testing.assert_allclose(*rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_built", [False, True])
def test_weights_start_as_their_layer_says_and_penalties_are_refused(session, is_built):
    options = {"input_shape": (2,)} if is_built else {}
    layer = L.Dense(2, kernel_initializer="ones", kernel_regularizer="l2", **options)
    x = g.placeholder(np.float32, [None, 2])
    outputs = nd.Sequential([layer])(x) if is_built else layer(x)
    session.run(g.global_variables_initializer())
    found = session.run(outputs, {x: ROWS})
    np.testing.assert_allclose(found, np.sum(ROWS, 1, keepdims=True).repeat(2, 1), rtol=1e-5)
    with pytest.raises(TypeError, match="no values before it is run"):
        assert layer.losses


class Cubes(nd.losses.Loss):
    """The mean of cubes."""

    def call(self, y_true, y_pred):
        return np.mean((y_pred - y_true) ** 3, axis=-1)


LOSSES = {
    "squares": (nd.losses.MeanSquaredError(), ROWS, 2 * ROWS),
    "sum": (nd.losses.MeanAbsoluteError("sum"), ROWS, 2 * ROWS),
    "classes": (
        nd.losses.SparseCategoricalCrossentropy(from_logits=True),
        np.array([0, 1, 1]),
        ROWS,
    ),
    "each": (nd.losses.Huber(reduction="none"), ROWS, 3 * ROWS),
    "user's": (Cubes(), ROWS, 2 * ROWS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_reduced_as_it_says(session, name):
    loss, labels, predictions = LOSSES[name]
    weights = np.array([1.0, 2.0, 0.0], np.float32)
    y, p = (g.placeholder(of.dtype, of.shape) for of in (labels, predictions))
    fetches = [loss(y, p), loss(labels, p, weights)]
    plain, weighted = session.run(fetches, {y: labels, p: predictions})
    np.testing.assert_allclose(plain, loss(labels, predictions), rtol=1e-6)
    np.testing.assert_allclose(weighted, loss(labels, predictions, weights), rtol=1e-6)


def model_fn(features, labels, mode):
    model = nd.Sequential([L.Dense(8, activation="tanh", input_shape=(2,)), L.Dense(1)])
    outputs = model(features, training=mode == est.ModeKeys.TRAIN)
    loss = nd.losses.MeanSquaredError()(labels, outputs)
    step = g.get_or_create_global_step()
    train_op = g.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
    return est.EstimatorSpec(mode, {"y": outputs}, loss, train_op)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_a_model_trains_in_an_estimator_under_a_strategy(tmp_path, devices):
    x = np.random.default_rng(1).normal(size=(32, 2)).astype(np.float32)
    y = x[:, :1] - x[:, 1:]
    with nd.MirroredStrategy(devices) as strategy:
        under = dict.fromkeys(["train_distribute", "eval_distribute"], strategy)
        config = est.RunConfig(tf_random_seed=1, **under)
        model = est.Estimator(model_fn, tmp_path, config)

        def data():
            return nd.Dataset.from_tensor_slices((x, y)).batch(8)

        before = model.train(data, steps=1).evaluate(data)["loss"]
        model.train(lambda: data().repeat(), steps=60)
        assert model.evaluate(data)["loss"] < before / 10
    names = ["dense/bias", "dense/kernel", "dense_1/bias", "dense_1/kernel", "global_step"]
    assert model.get_variable_names() == names


def test_a_server_computes_layers_and_losses():
    with nd.Server.create_local_server() as server, g.Graph().as_default():
        outputs = L.Dense(1)(g.constant(ROWS))
        loss = nd.losses.MeanSquaredError()(np.ones((3, 1), np.float32), outputs)
        step = g.GradientDescentOptimizer(0.1).minimize(loss)
        with g.Session(server.target) as session:
            session.run(g.global_variables_initializer())
            values = [session.run([loss, step])[0] for _ in range(5)]
    assert values == sorted(values, reverse=True)


def test_weights_follow_the_seed_of_the_graph():
    def weights():
        with g.Graph().as_default() as graph, g.Session() as session:
            graph.seed = 3
            L.Dense(2)(g.placeholder(np.float32, [None, 2]))
            session.run(g.global_variables_initializer())
            return session.run(g.global_variables()[0])

    first = weights()
    np.testing.assert_array_equal(first, weights())
    assert np.ptp(first) > 0


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_all_initial_weights_follow_the_seed_of_an_estimator(tmp_path, devices):
    def weights(name, seed):
        with nd.MirroredStrategy(devices) as strategy:
            config = est.RunConfig(tf_random_seed=seed, train_distribute=strategy)
            model = est.Estimator(model_fn, tmp_path / name, config)
            data = nd.Dataset.from_tensor_slices((ROWS[:, :2], ROWS[:, :1])).batch(4)
            model.train(lambda: data, steps=1)
        return [model.get_variable_value(f"{layer}/kernel") for layer in ("dense", "dense_1")]

    first, again, other = weights("first", 1), weights("again", 1), weights("other", 2)
    for one_run, same, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(one_run, same)
        assert not np.allclose(one_run, different)


@pytest.mark.parametrize(
    "make", [nd.models.initializers.HeNormal, nd.models.initializers.Orthogonal]
)
def test_any_initializer_follows_the_seed_of_the_graph(make):
    def weights():
        with g.Graph().as_default() as graph, g.Session() as session:
            graph.seed = 3
            outputs = g.placeholder(np.float32, [None, 2])
            for _ in range(2):
                outputs = L.Dense(2, kernel_initializer=make(), use_bias=False)(outputs)
            session.run(g.global_variables_initializer())
            return session.run(g.global_variables())

    first, second = weights()
    assert not np.allclose(first, second)
    np.testing.assert_array_equal([first, second], weights())


def test_layers_are_named_in_each_graph_and_shared_in_one():
    for _ in range(2):
        with tf.Graph().as_default():
            x = tf.placeholder(tf.float32, [None, 2])
            first, named = tf.keras.layers.Dense(2), tf.keras.layers.Dense(2, name="top")
            named(first(first(x)))
            tf.layers.dense(x, 2)
            names = [variable.op.name for variable in tf.trainable_variables()]
            layers = ["dense", "top", "dense_1"]
            assert names == [f"{k}/{part}" for k in layers for part in ("kernel", "bias")]


def test_layers_of_graphs_keep_the_dtype_and_the_dilation(session):
    x = g.constant(IMAGES.astype(np.float64))
    made = [tf.layers.flatten(x), tf.layers.max_pooling2d(x, 2, 2), tf.layers.dense(x, 2)]
    assert [each.dtype for each in made] == [np.float64] * 3
    dilated = tf.layers.conv2d(x, 3, 2, dilation_rate=2)
    session.run(g.global_variables_initializer())
    kernel = session.run(g.get_default_graph().get_tensor_by_name("conv2d/kernel:0"))
    same = L.Conv2D(3, 2, dilation_rate=2, use_bias=False, dtype="float64")
    same(IMAGES.astype(np.float64))
    same.set_weights([kernel])
    np.testing.assert_allclose(session.run(dilated), same(IMAGES.astype(np.float64)), rtol=1e-12)


class Listed(L.Layer):
    def build(self, input_shape):
        self.scales = [nd.Variable(np.ones(2, np.float32))]

    def call(self, inputs):
        return inputs * self.scales[0]


def elsewhere():
    layer = L.Dense(2)
    with g.Graph().as_default():
        layer(g.placeholder(np.float32, [None, 2]))
    return layer


REFUSED = {
    "dropout": (lambda: L.Dropout(0.5), {"training": True}, "use tf.compat.v1.layers in training"),
    "batch": (L.BatchNormalization, {"training": True}, "layers in training"),
    "listed": (Listed, {}, "keep each variable in an attribute of its own"),
    "another graph": (elsewhere, {}, "a new layer in each graph"),
    "several": (lambda: L.TimeDistributed(L.Dense(2)), {}, "cannot be called on a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_run_is_said(session, name):
    make, options, message = REFUSED[name]
    shape = [None, 3, 2] if name == "several" else [None, 2]
    with pytest.raises(ValueError, match=message):
        make()(g.placeholder(np.float32, shape), **options)
