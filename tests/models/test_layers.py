"""Layers under every strategy, divided among the replicas too: results, variables and refusals."""

import itertools

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.devices import is_device_array
from ndistribute.dtypes import dtype_named
from ndistribute.models import Sequential, layers, losses, regularizers
from ndistribute.variables.mirrored import sharded_variable
from tests.kinds import (
    ALL_MEMORIES,
    SEVERAL,
    SEVERAL_MEMORIES,
    fixture_over,
    here,
    one_process,
    parts,
    replica_ids,
)

strategy, several = fixture_over(ALL_MEMORIES), fixture_over(SEVERAL_MEMORIES)
F = np.float64


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape)


def pieces(strategy, array):
    """Divide rows among the replicas unevenly: the last one gets none."""
    size = strategy.num_replicas_in_sync
    if size == 1:
        return parts(strategy, [array])
    cuts = [0, *np.linspace(1, len(array), size - 1).astype(int), len(array)]
    return parts(strategy, [array[a:b] for a, b in itertools.pairwise(cuts)])


def trained(strategy, make, x, steps=2):
    """Return a layer's variables after steps on ``mean(y**2) / 2 + mean(y)``, by path."""
    with strategy.scope():
        layer, optimizer = make(), nd.optimizers.SGD(0.5)

        def build():
            layer(here(x[:1]))

        def step(rows):
            rows = here(rows)
            with nd.GradientTape() as tape:
                y = layer(rows, training=True)
                loss = np.sum(y * y / 2 + y) / len(x)
            assert is_device_array(y.value) == is_device_array(rows)
            variables = layer.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        nd.set_seed(1)
        strategy.run(build)
        for _ in range(steps):
            strategy.run(step, args=(pieces(strategy, x),))
        return {name: one.numpy() for name, one in layer.named_variables().items()}


class Attending(layers.Layer):
    def __init__(self):
        super().__init__(dtype=F)
        self.table = layers.Embedding(6, 4, dtype=F)
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.0, dtype=F)
        self.norm = layers.LayerNormalization(dtype=F)

    def call(self, tokens):
        x = self.table(tokens)
        return self.norm(x + self.attention(x, x, use_causal_mask=True))


def chain(*members):
    return nd.models.Sequential(members)


MADE = {
    "convolution": (
        lambda: chain(
            layers.Conv2D(4, 3, padding="same", activation="relu", dtype=F),
            layers.MaxPool2D(),
            layers.Conv2D(2, (1, 2), strides=(2, 1), groups=2, activation="gelu", dtype=F),
            layers.AveragePool2D(2, strides=1),
            layers.GlobalAveragePool2D(),
            layers.Dense(3, activation="tanh", dtype=F),
        ),
        normal(5, 6, 6, 2),
    ),
    "batch normalisation": (
        lambda: chain(
            layers.Conv2D(4, 3, dtype=F),
            layers.BatchNormalization(synchronized=True, dtype=F),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dense(2, kernel_initializer="he_normal", dtype=F),
            layers.BatchNormalization(synchronized=True, dtype=F),
        ),
        normal(5, 4, 4, 1),
    ),
    "sizes": (
        lambda: chain(
            layers.ZeroPadding2D(1),
            layers.DepthwiseConv2D(3, depth_multiplier=2, dtype=F),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(3, 3, strides=2, padding="same", dtype=F),
            layers.PReLU(shared_axes=[1, 2], dtype=F),
            layers.Cropping2D(((1, 0), (0, 2))),
            layers.UpSampling2D(2),
            layers.GlobalMaxPool2D(),
        ),
        normal(5, 4, 4, 2),
    ),
    "recurrent": (
        lambda: chain(
            layers.Embedding(6, 4, mask_zero=True, dtype=F),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True, dtype=F), dtype=F),
            layers.GRU(3, return_sequences=True, dtype=F),
            layers.SimpleRNN(3, dtype=F),
        ),
        np.random.default_rng(0).integers(0, 6, (5, 4)),
    ),
    "other images": (
        lambda: chain(
            layers.Resizing(5, 3, dtype=F),
            layers.RandomRotation((0.2, 0.2), dtype=F),
            layers.SeparableConv2D(4, 2, depth_multiplier=2, dtype=F),
            layers.GroupNormalization(2, dtype=F),
            layers.ReLU(2.0, 0.1, 0.2, dtype=F),
            layers.SpatialDropout2D(0.0),
            layers.Softmax(dtype=F),
        ),
        normal(5, 4, 4, 2),
    ),
    "attention": (Attending, np.random.default_rng(0).integers(0, 6, (5, 3))),
}


@pytest.mark.parametrize("kind", MADE)
def test_training_does_not_depend_on_replicas_with_uneven_and_empty_pieces(strategy, kind):
    make, x = MADE[kind]
    expected = trained(nd.get_strategy(), make, x)
    found = trained(strategy, make, x)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_synchronized_statistics_are_those_of_all_examples(several):
    x = 3 + normal(7, 4)
    with several.scope():
        layer = layers.BatchNormalization(momentum=0.75, synchronized=True, dtype=F)

        def normalize(rows):
            return layer(here(rows), training=True)

        found = several.gather(several.run(normalize, args=(pieces(several, x),)), axis=0)
        moved = layer.moving_mean.numpy(), layer.moving_variance.numpy()
    expected = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-3)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moved[0], x.mean(axis=0) / 4, rtol=1e-12)
    np.testing.assert_allclose(moved[1], 0.75 + x.var(axis=0) / 4, rtol=1e-12)


@one_process("reads the components of all replicas")
def test_moving_averages_are_each_replicas_own_and_saved_as_their_mean():
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        layer = layers.BatchNormalization(momentum=0.5, dtype=F)
        rows = nd.PerReplica((np.full((2, 1), 2.0), np.full((4, 1), 6.0)))
        strategy.run(lambda x: layer(x, training=True), args=(rows,))
        own = [float(value[0]) for value in layer.moving_mean.values]
        assert own == [1, 3]
        assert layer.get_weights()[2].tolist() == [2]
        empty = nd.PerReplica((np.zeros((0, 1)), np.full((4, 1), 6.0)))
        strategy.run(lambda x: layer(x, training=True), args=(empty,))
        assert [float(value[0]) for value in layer.moving_mean.values] == [1, 4.5]


def test_a_frozen_batch_normalization_uses_its_moving_averages():
    layer = layers.BatchNormalization(dtype=F)
    x = normal(4, 3)
    layer(x)
    layer.trainable = False
    np.testing.assert_allclose(layer(x, training=True), x / np.sqrt(1 + 1e-3), rtol=1e-12)
    assert not layer.moving_mean.numpy().any()
    assert layer.trainable_variables == []


def test_the_input_may_be_passed_by_name():
    query, value = layers.Input((5, 8)), layers.Input((7, 8))
    attention = layers.MultiHeadAttention(2, 3)
    model = nd.Model([query, value], attention(key=value, value=value, query=query))
    x, y = normal(2, 5, 8), normal(2, 7, 8)
    np.testing.assert_array_equal(attention(value=y, query=x), model([x, y]))


def test_normalizations_without_center_and_scale_have_no_variables():
    for kind, count in ((layers.BatchNormalization, 2), (layers.LayerNormalization, 0)):
        layer = kind(center=False, scale=False, dtype=F)
        y = layer(normal(8, 2), training=True)
        assert len(layer.variables) == count
        assert y.shape == (8, 2)


def test_a_float32_layer_computes_in_float32():
    image = np.zeros((2, 4, 4, 3))
    for layer, given in (
        (layers.Dense(2), image),
        (layers.Conv2D(2, 3), image),
        (layers.BatchNormalization(), image),
        (layers.LayerNormalization(), image),
        (layers.Conv2D(2, 3), (image + 200).astype(np.uint8)),
        (layers.Dense(2), np.arange(6).reshape(2, 3)),
    ):
        assert layer(given, training=True).dtype == np.float32, layer


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_layers_compute_in_16_bits_and_train_float32(name):
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    wanted = dtype_named(name)
    x = np.random.default_rng(0).standard_normal((4, 6, 6, 4)).astype(np.float32)
    rows = x.reshape(4, 36, 4)
    for make, given in (
        (lambda dtype: layers.Dense(3, "relu", dtype=dtype), (x,)),
        (lambda dtype: layers.Conv2D(3, 3, groups=1, activation="tanh", dtype=dtype), (x,)),
        (lambda dtype: layers.MaxPool2D(dtype=dtype), (x,)),
        (lambda dtype: layers.AveragePool2D(dtype=dtype), (x,)),
        (lambda dtype: layers.GlobalAveragePool2D(dtype=dtype), (x,)),
        (lambda dtype: layers.BatchNormalization(dtype=dtype), (x,)),
        (lambda dtype: layers.LayerNormalization(dtype=dtype), (x,)),
        (lambda dtype: layers.MultiHeadAttention(2, 3, dtype=dtype), (rows, rows)),
    ):
        plain, mixed = make("float32"), make(f"mixed_{name}")
        expected = plain(*given, training=True)
        mixed(*given)
        mixed.set_weights(plain.get_weights())
        with nd.GradientTape() as tape:
            y = mixed(*given, training=True)
        assert y.dtype == wanted, mixed
        found = nd.stop_gradient(y).astype(np.float32)
        np.testing.assert_allclose(found, expected, atol=0.06)
        if mixed.trainable_variables:
            gradients = tape.gradient(y, mixed.trainable_variables)
            assert {one.dtype.name for one in gradients} == {"float32"}


def test_dropout_is_different_on_each_replica_and_off_without_training(strategy):
    x = np.ones((100, 200), np.float32)
    with strategy.scope():
        layer = layers.Dropout(0.25)
        found = strategy.local_results(strategy.run(lambda: layer(here(x), training=True)))
        whole = strategy.local_results(strategy.run(lambda: layer(here(x))))
        assert all((one == 1).all() for one in whole)
        attention = layers.MultiHeadAttention(1, 4, dropout=0.5)
        x = np.ones((1, 3, 4), np.float32)
        attended = strategy.run(lambda: attention(here(x), here(x), training=True))
        assert all(np.isfinite(one).all() for one in strategy.local_results(attended))
    for one in found:
        assert set(np.unique(one).tolist()) == {0.0, np.float32(1 / 0.75).item()}
        assert abs((one == 0).mean() - 0.25) < 0.02
    assert len({one.tobytes() for one in found}) == len(replica_ids(strategy))


def test_the_gradient_of_dropout_is_zero_where_it_dropped():
    layer = layers.Dropout(0.5, dtype="float16")
    with nd.GradientTape() as tape:
        x = tape.watch(np.ones((30, 30), np.float16))
        y = layer(x, training=True)
    assert y.dtype == np.float16
    np.testing.assert_array_equal(tape.gradient(y, x), y.numpy())


def test_an_embedding_has_sparse_gradients_of_the_rows_in_use(strategy):
    tokens = np.array([[1, 3], [3, 4999]])
    with strategy.scope():
        layer = layers.Embedding(5000, 8)
        strategy.run(lambda: layer(here(tokens)))

        def step():
            with nd.GradientTape() as tape:
                y = layer(here(tokens.astype(np.float32)))
            gradient = tape.gradient(y, layer.embeddings)
            assert isinstance(gradient, nd.IndexedSlices)
            assert y.shape == (2, 2, 8)
            return gradient.to_dense()[[1, 3, 4999], 0]

        for one in strategy.local_results(strategy.run(step)):
            assert one.tolist() == [1, 2, 1]


@pytest.mark.parametrize("tokens", [[0, 10], [-1, 0]])
def test_indices_outside_an_embedding_are_refused(tokens):
    with pytest.raises(ValueError, match=r"indices must be in \[0, 10\)"):
        layers.Embedding(10, 2)(np.array(tokens))


def test_attention_is_causal_and_masked():
    layer = layers.MultiHeadAttention(2, 4, value_dim=3, output_shape=5, dtype=F)
    query, value = normal(2, 4, 6), normal(2, 4, 3)
    y = layer(query, value, use_causal_mask=True)
    assert y.shape == (2, 4, 5)
    changed = value.copy()
    changed[:, 2:] += 1
    again = layer(query, changed, use_causal_mask=True)
    np.testing.assert_array_equal(again[:, :2], y[:, :2])
    assert (again[:, 2:] != y[:, 2:]).all()
    mask = np.tril(np.ones((4, 4), bool))
    for one in (mask, mask[None], np.broadcast_to(mask, (2, 2, 4, 4)), mask.astype(int)):
        np.testing.assert_allclose(layer(query, value, attention_mask=one), y, rtol=1e-12)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 4\).*\(4, 4\)"):
        layer(query, value, attention_mask=mask[:3])


def test_attention_has_separate_keys_and_drops_in_training():
    layer = layers.MultiHeadAttention(1, 4, dropout=0.5)
    query, value, key = (normal(2, n, 6).astype(np.float32) for n in (3, 5, 5))
    y = layer(query, value, key + 1)
    assert [v.name.rpartition("/")[2] for v in layer.variables] == ["kernel", "bias"] * 4
    assert np.abs(layer(query, value, key + 1) - y).max() == 0
    assert np.abs(layer(query, value, key + 1, training=True) - y).max() > 0


def test_an_activation_of_the_user_is_not_taken_for_one_of_the_same_name():
    def relu(x):
        return x * 3

    layer = layers.Dense(1, activation=relu, kernel_initializer="ones", dtype=F)
    assert layer(np.array([[-1.0]])).tolist() == [[-3]]


def test_shapes_are_changed_without_the_batch():
    x = normal(0, 2, 6)
    assert layers.Reshape((3, -1))(x).shape == (0, 3, 4)
    assert layers.Flatten()(x).shape == (0, 12)
    assert layers.Flatten()(np.zeros(3)).shape == (3, 1)


def test_regularizers_by_name_are_in_the_losses():
    layer = layers.Conv2D(2, 1, kernel_regularizer="l2", bias_regularizer=regularizers.L1(1.0))
    layer(np.ones((1, 2, 2, 1), np.float32))
    layer.set_weights([np.full((1, 1, 1, 2), 2.0), np.array([-1.0, 3.0])])
    np.testing.assert_allclose([float(one) for one in layer.losses], [0.08, 4])
    with pytest.raises(ValueError, match="unknown regularizer 'l3': use one of l1, l2"):
        layers.Dense(1, kernel_regularizer="l3")


IMAGE = np.zeros((1, 4, 4, 3), np.float32)


@pytest.mark.parametrize(
    ("make", "x", "match"),
    [
        (lambda: layers.Conv2D(0, 3), IMAGE, "filters must be an integer, 1 or more, got 0"),
        (lambda: layers.Conv2D(3, 3, groups=2), IMAGE, "not a multiple of groups=2"),
        (lambda: layers.Conv2D(4, 3, groups=2), IMAGE, "3 channels are not a multiple of groups=2"),
        (lambda: layers.Conv2D(4, (3, 3, 3)), IMAGE, "kernel_size must be an integer or two"),
        (lambda: layers.Conv2D(4, 3, padding="full"), IMAGE, r"\['valid', 'same'\], got 'full'"),
        (lambda: layers.Conv2D(4, 5), IMAGE, "does not fit into images of 4 x 4"),
        (lambda: layers.Conv2D(4, 3), IMAGE[0], "needs the axes .images, height"),
        (layers.MaxPool2D, IMAGE[..., 0], "needs the axes .images, height"),
        (lambda: layers.Dropout(1.0), IMAGE, r"rate must be in \[0, 1\), got 1.0"),
        (lambda: layers.BatchNormalization(axis=1), IMAGE, "features on the last one"),
        (lambda: layers.BatchNormalization(momentum=2.0), IMAGE, r"momentum must be in \[0, 1\]"),
        (lambda: layers.Dense(2), np.zeros(3), "needs a batch axis and a feature axis"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(make, x, match):
    with pytest.raises(ValueError, match=match):
        make()(x)


def test_another_number_of_channels_is_refused():
    for layer in (layers.Conv2D(2, 3), layers.Dense(2)):
        layer(IMAGE)
        with pytest.raises(ValueError, match="the layer was built for 3"):
            layer(np.zeros((1, 4, 4, 2), np.float32))


def test_a_layer_is_made_again_from_its_configuration():
    """Those of rotations and separable convolutions had arguments by position in one, 'args'."""
    for layer in (
        layers.RandomRotation(0.1, "wrap"),
        layers.SeparableConv2D(2, 3, 1, "same"),
        layers.LSTM(2, "relu", return_sequences=True, kernel_regularizer="l2"),
        layers.Conv2D(4, (2, 3), activation="relu", name="c"),
        layers.MaxPool2D(3, strides=2),
        layers.BatchNormalization(synchronized=True),
        layers.MultiHeadAttention(2, 4, dropout=0.1),
    ):
        assert type(layer)(**layer.get_config()).get_config() == layer.get_config()


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
        with pytest.raises(
            RuntimeError, match="'w' is not possible inside run: assign the whole value outside"
        ):
            both.run(lambda: w.assign(np.ones(2)))
        with pytest.raises(ValueError, match="apply its gradients inside run"):
            sgd.apply_gradients([(np.ones(4), w)])
        with pytest.raises(ValueError, match=r"'w' is sharded.*cannot accumulate"):
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
