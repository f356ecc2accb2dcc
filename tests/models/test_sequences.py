"""Recurrent layers against a loop in plain NumPy, and masks from the first layer to the metrics."""

import functools

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import layers, losses, metrics
from ndistribute.compat import tf
from ndistribute.models import load
from ndistribute.models.masks import attach_mask, mask_of

RNG = np.random.default_rng(2)
X = RNG.normal(size=(3, 5, 4))
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 1]], bool)
TOKENS = np.array([[1, 2, 3, 0], [4, 0, 0, 0], [5, 1, 0, 2]])
KINDS = {"SimpleRNN": layers.SimpleRNN, "LSTM": layers.LSTM, "GRU": layers.GRU}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def step(kind, x, states, kernel, recurrent, bias):
    """Return the new states of one example."""
    h, n = states[0], len(recurrent)
    if kind == "SimpleRNN":
        return [np.tanh(x @ kernel + h @ recurrent + bias)]
    if kind == "LSTM":
        i, f, g, o = np.split(x @ kernel + h @ recurrent + bias, 4)
        c = sigmoid(f) * states[1] + sigmoid(i) * np.tanh(g)
        return [sigmoid(o) * np.tanh(c), c]
    of_x, of_h = x @ kernel + bias[0], h @ recurrent + bias[1]
    u, r = np.split(sigmoid(of_x[: 2 * n] + of_h[: 2 * n]), 2)
    return [u * h + (1 - u) * np.tanh(of_x[2 * n :] + r * of_h[2 * n :])]


def walked(kind, x, mask, weights, initial):
    """Return the outputs of all steps and the last states, example by example."""
    outputs, last = [], []
    for rows, counts, *first in zip(x, mask, *initial, strict=True):
        outputs.append([])
        states = first
        for row, is_counted in zip(rows, counts, strict=True):
            states = step(kind, row, states, *weights) if is_counted else states
            outputs[-1].append(states[0])
        last.append(states)
    return np.array(outputs), [np.array(state) for state in zip(*last, strict=True)]


def made(kind, **options):
    layer = KINDS[kind](2, return_sequences=True, return_state=True, dtype="float64", **options)
    layer(X)
    layer.set_weights([RNG.normal(size=weight.shape) for weight in layer.get_weights()])
    return layer


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_layer_computes_what_a_loop_does(kind, is_masked):
    layer = made(kind)
    initial = [RNG.normal(size=(3, 2)) for _ in range(layer.cell.step.states)]
    mask = MASK if is_masked else np.ones_like(MASK)
    expected, last = walked(kind, X, mask, layer.get_weights(), initial)
    y, *states = layer(X, initial_state=initial, mask=MASK if is_masked else None)
    np.testing.assert_allclose(y, expected, atol=1e-12)
    for ours, theirs in zip(states, last, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"activation": "softplus"}, {"go_backwards": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_of_a_recurrent_layer_are_those_of_small_changes(kind, options):
    layer = made(kind, **options)
    initial = [RNG.normal(size=(3, 2)) for _ in range(layer.cell.step.states)]
    arrays = [X.copy(), *layer.get_weights(), *initial]
    ways = [RNG.normal(size=array.shape) for array in arrays]

    def loss(arrays):
        layer.set_weights(arrays[1:4])
        with nd.GradientTape() as tape:
            x, *states = (tape.watch(array) for array in (arrays[0], *arrays[4:]))
            results = layer(x, initial_state=states, mask=MASK)
            total = sum(np.sum(np.sin(result + k)) for k, result in enumerate(results))
        return float(nd.stop_gradient(total)), tape, total, [x, *layer.variables, *states]

    _, tape, total, sources = loss(arrays)
    gradients = tape.gradient(total, sources)
    slope = sum(np.sum(g * way) for g, way in zip(gradients, ways, strict=True))
    ends = [[a + s * way for a, way in zip(arrays, ways, strict=True)] for s in (1e-6, -1e-6)]
    assert (loss(ends[0])[0] - loss(ends[1])[0]) / 2e-6 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("merge", ["concat", "sum", "ave", "mul", None])
def test_a_bidirectional_layer_joins_both_directions_at_the_same_steps(merge):
    inner = layers.LSTM(2, return_sequences=True, dtype="float64")
    layer = layers.Bidirectional(inner, merge_mode=merge, dtype="float64")
    y = layer(X)
    both = inner(X), layer.backward_layer(X)[:, ::-1]
    expected = {
        "concat": np.concatenate(both, axis=-1),
        "sum": both[0] + both[1],
        "ave": (both[0] + both[1]) / 2,
        "mul": both[0] * both[1],
        None: both,
    }
    np.testing.assert_allclose(y, expected[merge], atol=1e-12)


def tagger(**options):
    return nd.Sequential(
        [
            layers.Embedding(6, 3, mask_zero=True, **options),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True, **options)),
            layers.TimeDistributed(layers.Dense(5, activation="tanh", **options)),
            layers.Dense(3, **options),
        ]
    )


def test_padding_has_no_effect_on_outputs_losses_and_metrics():
    model = tagger(dtype="float64")
    labels = RNG.integers(0, 3, TOKENS.shape)
    longer = [np.pad(array, ((0, 0), (0, 3))) for array in (TOKENS, labels)]
    np.testing.assert_array_equal(mask_of(model(TOKENS)), TOKENS != 0)
    np.testing.assert_allclose(model(longer[0])[:, :4], model(TOKENS), atol=1e-12)
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=[metrics.SparseCategoricalAccuracy()])
    results = [model.evaluate(*data, verbose=0) for data in ((TOKENS, labels), longer)]
    np.testing.assert_allclose(*results, rtol=1e-6)
    logits, real = model(TOKENS)[TOKENS != 0], labels[TOKENS != 0]
    expected = loss(real, logits), np.mean(logits.argmax(axis=-1) == real)
    np.testing.assert_allclose(results[0], expected, rtol=1e-6)


def test_masked_training_does_not_depend_on_replicas():
    def trained(strategy):
        with strategy.scope():
            nd.set_seed(1)
            model = tagger(dtype="float64")
            model.compile(nd.optimizers.SGD(0.5), losses.MeanSquaredError(), metrics=["mae"])
        history = model.fit(TOKENS, np.ones((3, 4, 3)), 3, 3, verbose=0).history
        return [*model.get_weights(), history["loss"], history["mae"]]

    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as both:
        found = trained(both)
    for ours, expected in zip(found, trained(nd.get_strategy()), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-12)


def test_masks_reach_attention_and_means_and_end_where_a_layer_has_none():
    x = layers.Embedding(6, 4, mask_zero=True)(TOKENS)
    changed = x + 9 * (TOKENS == 0)[:, :, None].astype(x.dtype)
    attention = layers.MultiHeadAttention(1, 4)
    kept = attention(x, x)
    attach_mask(changed, mask_of(x))
    np.testing.assert_allclose(attention(x, changed), kept, atol=1e-6)
    mean = layers.GlobalAveragePool1D()(x)
    np.testing.assert_allclose(mean[0], x[0, :3].mean(axis=0), atol=1e-6)
    masked = layers.Masking(0.0)(np.array([[[0.0, 0.0], [0.0, 1.0]]]))
    assert mask_of(masked).tolist() == [[False, True]]
    with pytest.warns(UserWarning, match="a mask, which Flatten does not pass on"):
        assert mask_of(layers.Flatten()(x)) is None


def test_a_mask_stays_with_the_elements_of_an_array():
    """A cast to the dtype of a model in a model, or to the kind of the input, left it behind."""
    x = layers.Embedding(6, 3, mask_zero=True)(TOKENS)
    inside = layers.Input((None, 3), dtype="float64")
    functional = nd.Model(inside, layers.GRU(2, return_sequences=True, dtype="float64")(inside))
    wide = nd.Sequential([layers.GRU(2, return_sequences=True, dtype="float64")])
    tensor = tf.keras.layers.Embedding(6, 3, mask_zero=True)(tf.constant(TOKENS))
    for y in (functional(x), wide(x), layers.LSTM(2, return_sequences=True)(tensor)):
        np.testing.assert_array_equal(mask_of(y), TOKENS != 0)


def test_layers_of_several_inputs_and_outputs_have_masks():
    x, y = (layers.Embedding(6, 3, mask_zero=True)(tokens) for tokens in (TOKENS, TOKENS[:, ::-1]))
    counts, reverse, plain = TOKENS != 0, TOKENS[:, ::-1] != 0, np.ones((3, 2, 3), np.float32)
    np.testing.assert_array_equal(mask_of(layers.add([x, y])), counts | reverse)
    assert mask_of(layers.add([x, np.ones_like(x)])) is None
    joined = mask_of(layers.concatenate([x, plain], axis=1))
    np.testing.assert_array_equal(joined, np.pad(counts, ((0, 0), (0, 2)), constant_values=True))
    np.testing.assert_array_equal(mask_of(layers.concatenate([x, y])), counts | reverse)
    both = layers.Bidirectional(layers.LSTM(2, return_sequences=True), merge_mode=None)(x)
    np.testing.assert_array_equal(mask_of(both), [counts, counts])
    of_words = layers.TimeDistributed(layers.Embedding(6, 3, mask_zero=True))(TOKENS[:, :, None])
    sentences = layers.TimeDistributed(layers.LSTM(2))(of_words)
    np.testing.assert_array_equal(mask_of(sentences), counts)


def test_what_a_mask_leaves_out_has_no_part_in_statistics():
    layer = layers.BatchNormalization(momentum=0.0, epsilon=0.0, dtype="float64")
    y = layer(X, mask=MASK, training=True)
    np.testing.assert_allclose(layer.moving_mean, X[MASK].mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(layer.moving_variance, X[MASK].var(axis=0), atol=1e-12)
    np.testing.assert_allclose(y[MASK].std(axis=0), 1, atol=1e-12)
    with pytest.raises(ValueError, match="does not fit"):
        layer(X, mask=MASK[:, :2], training=True)


class Leaky(layers.Layer):
    """A cell of a user, with states of two shapes in a list."""

    def __init__(self, units):
        super().__init__(dtype="float64")
        self.units, self.state_size = units, [units, (2, 2)]

    def build(self, input_shape):
        self.kernel = self.add_weight("kernel", (input_shape[-1], self.units))

    def call(self, inputs, states):
        h = 0.5 * states[0] + inputs @ self.kernel
        return h + 1, (h, states[1] + 1)

    def get_config(self):
        return {"units": self.units}


def test_a_cell_of_a_user_is_called_for_each_step_that_counts():
    layer = layers.RNN(Leaky(2), return_sequences=True, return_state=True, dtype="float64")
    y, h, count = layer(X, mask=MASK)
    kernel, state, last = layer.get_weights()[0], np.zeros((3, 2)), np.zeros((3, 2))
    for t in range(5):
        counts = MASK[:, t, None]
        state = np.where(counts, 0.5 * state + X[:, t] @ kernel, state)
        last = np.where(counts, state + 1, last)
        np.testing.assert_allclose(y[:, t], last, atol=1e-12)
    np.testing.assert_allclose(h, state, atol=1e-12)
    np.testing.assert_array_equal(count, np.broadcast_to(MASK.sum(1)[:, None, None], (3, 2, 2)))
    both = layers.Bidirectional(layers.RNN(Leaky(2)))
    assert both(X).shape == (3, 4)
    assert len(both.variables) == 2
    assert layers.RNN(Leaky(2)).cell is not both.backward_layer.cell is not both.forward_layer.cell


def test_a_cell_does_the_steps_of_its_layer_in_a_loop_of_a_user():
    cell = layers.LSTMCell(3, dtype="float64")
    h, c = np.zeros((2, 3, 3))
    for t in range(5):
        h, (_, c) = cell(X[:, t], [h, c])
    np.testing.assert_allclose(h, layers.RNN(cell, dtype="float64")(X), atol=1e-12)


def test_states_pass_between_layers_of_a_functional_model():
    x, y = layers.Input((5, 4), dtype="float64"), layers.Input((3, 4), dtype="float64")
    encoder = layers.LSTM(2, return_state=True, dtype="float64")
    decoder = layers.LSTM(2, return_sequences=True, dtype="float64")
    _, *states = encoder(x)
    model = nd.Model([x, y], decoder(y, initial_state=states))
    expected = decoder(X[:, :3], initial_state=encoder(X)[1:])
    np.testing.assert_array_equal(model([X, X[:, :3]]), expected)


def test_a_layer_of_the_user_makes_and_takes_masks():
    class Short(layers.Layer):
        def compute_mask(self, inputs, mask=None):
            return np.abs(inputs[..., 0]) < 1

        def call(self, inputs):
            return inputs * 2

    class Counting(layers.Layer):
        def call(self, inputs, mask=None):
            return mask.sum(axis=1)

        def compute_mask(self, inputs, mask=None):
            return None

    counted = nd.Sequential([Short(), Counting()])(X)
    assert counted.tolist() == (np.abs(X[..., 0].astype(np.float32)) < 1).sum(axis=1).tolist()


def twice(layer, *arrays):
    return [layer(array) for array in arrays]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: layers.LSTM(2, stateful=True)(X), "stateful=True is not supported"),
        (lambda: layers.GRU(2, recurrent_dropout=0.5)(X), "recurrent_dropout=0.5.*use dropout"),
        (lambda: layers.LSTM(2)(X[0]), "needs three axes"),
        (lambda: layers.LSTMCell(2)(X, []), "needs the axes .batch of one time step"),
        (lambda: layers.GRU(2, reset_after=False), "reset_after=False is not supported"),
        (lambda: layers.GRU(2, unit_forget_bias=False), "unit_forget_bias is for LSTM"),
        (lambda: layers.RNN(layers.Dense(2)), "a cell needs a state_size"),
        (lambda: layers.RNN([layers.GRUCell(2)]), "Put an RNN around each of"),
        (lambda: twice(layers.LSTM(2), X, X[..., :2]), "built for 4 features"),
        (lambda: twice(layers.LayerNormalization(), X[..., :1], X), "built for 1 features"),
        (lambda: layers.LSTM(2)(X[:, :0]), "has no time step"),
        (lambda: layers.LSTM(2)(X, initial_state=X[:, 0]), "2 of shape"),
        (lambda: layers.Bidirectional(layers.GRU(2), "max"), "merge_mode must be one of"),
        (lambda: layers.TimeDistributed(layers.Dense(2))(X[0]), "needs the axes"),
        (lambda: layers.Conv1D(2, 3)(X[0]), "needs the axes .batch, steps"),
        (lambda: layers.ZeroPadding2D((1, 2, 3)), "padding must be an integer"),
        (lambda: layers.StringLookup(vocabulary=["a", "a"]), "vocabulary has 'a' twice"),
        (lambda: layers.StringLookup(num_oov_indices=0, vocabulary=["a"])(["b"]), "'b' is not in"),
        (lambda: metrics.AUC(curve="LIFT"), "curve must be 'ROC' or 'PR'"),
        (lambda: nd.optimizers.SGD(weight_decay=-1.0), "weight_decay must be 0 or more"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_dropout_drops_the_same_features_in_all_steps():
    layer = layers.SimpleRNN(4, activation=None, dropout=0.5, recurrent_initializer="zeros")
    layer.return_sequences = True
    x = np.ones((1, 3, 4), np.float32)
    y = layer(x, training=True)
    np.testing.assert_array_equal(y[:, 0], y[:, 2])
    assert np.abs(layer(x) - y).max() > 0


def test_random_changes_of_images_are_made_but_in_predictions():
    images = RNG.uniform(size=(40, 4, 5, 2)).astype(np.float32)
    model = nd.Sequential([layers.RandomFlip("horizontal"), layers.RandomCrop(3, 4)])
    np.testing.assert_array_equal(model.predict(images, verbose=0), images[:, :3, :4])
    flipped = layers.RandomFlip("horizontal")(images)
    is_flipped = [np.array_equal(a, b[:, ::-1]) for a, b in zip(flipped, images, strict=True)]
    assert 0 < sum(is_flipped) < 40
    windows = np.lib.stride_tricks.sliding_window_view(images[0, ..., 0], (3, 4))
    corners = {
        tuple(np.argwhere((windows == crop[0, ..., 0]).all(axis=(2, 3)))[0].tolist())
        for crop in (layers.RandomCrop(3, 4)(images) for _ in range(60))
    }
    assert corners == {(y, x) for y in range(2) for x in range(2)}


@pytest.mark.parametrize(
    "make",
    [
        layers.RandomFlip,
        functools.partial(layers.RandomCrop, 2, 2),
        functools.partial(layers.RandomZoom, 0.5),
        functools.partial(layers.RandomContrast, 0.5),
    ],
)
def test_layers_of_one_seed_change_images_alike(make):
    images = RNG.uniform(size=(2, 40, 4, 5, 2)).astype(np.float32)
    first, second, other = (make(seed=seed) for seed in (3, 3, 4))
    changed = [[layer(batch) for batch in images] for layer in (first, second, other)]
    np.testing.assert_array_equal(changed[0], changed[1])
    assert not np.array_equal(changed[0], changed[2])
    again = make(seed=3)
    assert not np.array_equal(again(images[0]), again(images[0]))
    if make is layers.RandomFlip:
        model = nd.Sequential([again])
        model.compile("sgd", nd.losses.MeanSquaredError(), jit_compile=True)
        with pytest.raises(ValueError, match="leave out seed"):
            model.fit(images[0], images[0], verbose=0)


def test_models_of_sequences_and_words_are_exported(tmp_path):
    numbers = layers.Normalization()
    numbers.adapt(X)
    model = nd.Sequential([numbers, layers.Bidirectional(layers.GRU(3)), layers.PReLU()])
    y = model(X)
    np.testing.assert_allclose(load(model.export(tmp_path / "model"))(X), y, rtol=1e-6)
    words = layers.StringLookup(output_mode="multi_hot")
    words.adapt(np.array([["b", "a"], ["b", "c"]]))
    assert words.get_vocabulary() == ["[UNK]", "b", "c", "a"]
    again = layers.StringLookup(**words.get_config())
    assert again([["a", "z"]]).tolist() == words([["a", "z"]]).tolist() == [[1, 0, 0, 1]]
