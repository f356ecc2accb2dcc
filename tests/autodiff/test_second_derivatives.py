"""Gradients of gradients: by nested tapes they are right, or refused by name."""

from functools import partial

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.autodiff import GradientTape, Tracked, custom_gradient, untrack
from tests.autodiff.standin import StandInVariable, agree, change_of, dense
from tests.autodiff.test_collectives import all_gather, all_reduce, on_replicas
from tests.autodiff.test_expressions import X


def attention(**options):
    def build():
        layer = nd.layers.MultiHeadAttention(2, 3, dtype="float64")
        return layer, lambda x: layer(x, x, **options)

    return build


def merging(name):
    def build():
        layer = getattr(nd.layers, name)(dtype="float64")
        return layer, lambda x: layer([x, np.sin(x)])

    return build


def layer_of(name, *args, training=None, **options):
    def build():
        layer = getattr(nd.layers, name)(*args, dtype="float64", **options)
        return layer, layer if training is None else partial(layer, training=training)

    return build


def around(name, inner, *args):
    def build():
        layer = getattr(nd.layers, inner)(*args, dtype="float64")
        return (layer := getattr(nd.layers, name)(layer, dtype="float64")), layer

    return build


def state_of(name):
    def build():
        layer = getattr(nd.layers, name)(2, return_state=True, dtype="float64")
        return layer, lambda x: layer(x)[-1]

    return build


ACTIVATIONS = "elu gelu leaky_relu log_softmax relu sigmoid silu softmax softplus tanh".split()
MERGING = "Add Average Concatenate Maximum Minimum Multiply Subtract".split()
SMALL = (2, 3, 3, 2)
ROWS, SEQUENCES, IMAGES, NUMBERS = (3, 4), (2, 3, 4), (2, 5, 5, 4), np.array([[1, 2], [1, 0]])
LAYERS = {
    **{name: (layer_of(name), ROWS) for name in ("ELU", "LeakyReLU", "Softmax")},
    **{name: (layer_of(name), SEQUENCES) for name in ("LayerNormalization", "Masking")},
    **{f"Dense {name}": (layer_of("Dense", 5, activation=name), ROWS) for name in ACTIVATIONS},
    **{f"Activation {name}": (layer_of("Activation", name), ROWS) for name in ACTIVATIONS},
    "Dense of sequences": (layer_of("Dense", 5, use_bias=False), SEQUENCES),
    "Conv2D": (layer_of("Conv2D", 3, 3, activation="tanh"), IMAGES),
    "Conv2D with groups": (
        layer_of("Conv2D", 4, 3, strides=2, padding="same", groups=2, activation="relu"),
        IMAGES,
    ),
    "Conv2D dilated": (layer_of("Conv2D", 4, 2, dilation_rate=2, activation="sigmoid"), IMAGES),
    "MaxPool2D": (layer_of("MaxPool2D", 3, strides=2, padding="same"), IMAGES),
    "AveragePool2D": (layer_of("AveragePool2D", 3, strides=2, padding="same"), IMAGES),
    "GlobalAveragePool2D": (layer_of("GlobalAveragePool2D"), IMAGES),
    "MaxPool1D": (layer_of("MaxPool1D", 2, strides=1), SEQUENCES),
    "AveragePool1D": (layer_of("AveragePool1D"), SEQUENCES),
    "GlobalAveragePool1D": (layer_of("GlobalAveragePool1D"), SEQUENCES),
    "GlobalMaxPool1D": (layer_of("GlobalMaxPool1D"), SEQUENCES),
    "GlobalMaxPool2D": (layer_of("GlobalMaxPool2D"), IMAGES),
    "Conv1D": (layer_of("Conv1D", 3, 2, padding="causal"), SEQUENCES),
    "Conv2DTranspose": (layer_of("Conv2DTranspose", 2, 3, strides=2, padding="same"), SMALL),
    "DepthwiseConv2D": (layer_of("DepthwiseConv2D", 2, depth_multiplier=2), SMALL),
    "ZeroPadding2D": (layer_of("ZeroPadding2D"), SMALL),
    "Cropping2D": (layer_of("Cropping2D", ((1, 0), (0, 1))), SMALL),
    "UpSampling2D": (layer_of("UpSampling2D", (2, 3)), SMALL),
    "Rescaling": (layer_of("Rescaling", 2.0, 1.0), ROWS),
    "CenterCrop": (layer_of("CenterCrop", 2, 1), SMALL),
    "RandomCrop": (layer_of("RandomCrop", 2, 1, training=False), SMALL),
    "RandomFlip": (layer_of("RandomFlip", training=False), SMALL),
    "RandomRotation": (layer_of("RandomRotation", (0.1, 0.1)), SMALL),
    "RandomTranslation": (layer_of("RandomTranslation", (0.1, 0.1), (0.2, 0.2)), SMALL),
    "RandomZoom": (layer_of("RandomZoom", (0.1, 0.1), fill_mode="constant"), SMALL),
    "RandomContrast": (layer_of("RandomContrast", (0.5, -0.5), (-9, 9)), SMALL),
    "Resizing": (layer_of("Resizing", 2, 5), SMALL),
    "SeparableConv2D": (layer_of("SeparableConv2D", 3, 2, activation="tanh"), SMALL),
    "SpatialDropout1D": (layer_of("SpatialDropout1D", 0.5), SEQUENCES),
    "SpatialDropout2D": (layer_of("SpatialDropout2D", 0.5), SMALL),
    "ReLU": (layer_of("ReLU", 1.0, 0.1, 0.2), ROWS),
    "GroupNormalization": (layer_of("GroupNormalization", 2), IMAGES),
    "RNN of cells": (around("RNN", "GRUCell", 2), SEQUENCES),
    "Normalization": (layer_of("Normalization", mean=1.0, variance=4.0), ROWS),
    "GaussianNoise": (layer_of("GaussianNoise", 0.1), ROWS),
    "PReLU": (layer_of("PReLU", alpha_initializer="ones"), ROWS),
    "BatchNormalization": (layer_of("BatchNormalization", training=True), ROWS),
    "BatchNormalization of use": (layer_of("BatchNormalization", training=False), IMAGES),
    "MultiHeadAttention": (attention(), SEQUENCES),
    "MultiHeadAttention causal": (attention(use_causal_mask=True), SEQUENCES),
    "SimpleRNN": (layer_of("SimpleRNN", 2), SEQUENCES),
    "LSTM": (layer_of("LSTM", 2, return_sequences=True), SEQUENCES),
    "LSTM of another activation": (layer_of("LSTM", 2, activation="softplus"), SEQUENCES),
    "LSTM by its state": (state_of("LSTM"), SEQUENCES),
    "GRU": (layer_of("GRU", 2), SEQUENCES),
    "Embedding": (layer_of("Embedding", 5, 3), NUMBERS),
    "Flatten": (layer_of("Flatten"), IMAGES),
    "Reshape": (layer_of("Reshape", (2, 2)), ROWS),
    "Permute": (layer_of("Permute", (2, 1)), SEQUENCES),
    "RepeatVector": (layer_of("RepeatVector", 2), ROWS),
    "Lambda": (layer_of("Lambda", np.exp), ROWS),
    **{f"{name} of two": (merging(name), ROWS) for name in MERGING},
    "Bidirectional": (around("Bidirectional", "GRU", 2), SEQUENCES),
    "TimeDistributed": (around("TimeDistributed", "Dense", 2), SEQUENCES),
    "Dropout": (layer_of("Dropout", 0.5), ROWS),
    "ColumnParallelDense": (layer_of("ColumnParallelDense", 4), ROWS),
    "RowParallelDense": (layer_of("RowParallelDense", 4), ROWS),
}


def test_the_table_has_all_layers():
    names = {name for name in dir(nd.layers) if name[0].isupper()}
    names -= {"Input", "InputLayer", "Layer"}
    names -= {"CategoryEncoding", "Discretization", "Hashing", "IntegerLookup", "StringLookup"}
    names -= {"TextVectorization"}  # Of numbers without gradients.
    names -= {"GRUCell", "LSTMCell", "SimpleRNNCell"}  # In recurrent layers.
    assert names <= {case.split()[0] for case in LAYERS}


@pytest.mark.parametrize("case", LAYERS)
def test_each_layer_is_differentiated_twice(case):
    build, given = LAYERS[case]
    rng = np.random.default_rng(3)
    x = given if isinstance(given, np.ndarray) else rng.normal(size=given)
    layer, call = build()
    weights = rng.uniform(0.5, 1.5, call(x).shape)
    variables = list(layer.trainable_variables)

    def slopes(tape, x):
        with tape:
            sources = variables if x.dtype.kind == "i" else [*variables, tape.watch(x)]
            loss = np.sum(np.square(call((sources + [x])[len(variables)])) * weights)
        return tape.gradient(loss, sources), sources

    ways = [rng.normal(size=one.shape) for one in slopes(GradientTape(), x)[1]]

    def along():
        gradients, _ = slopes(GradientTape(), x)
        return sum(np.sum(dense(g) * way) for g, way in zip(gradients, ways, strict=True))

    with GradientTape() as outer:
        leaf = x if x.dtype.kind == "i" else outer.watch(x)
        gradients, sources = slopes(GradientTape(), leaf)
        total = sum(np.sum(g * way) for g, way in zip(gradients, ways, strict=True))
    seconds = [dense(one) for one in outer.gradient(total, sources, "zero")]
    assert along() == pytest.approx(float(untrack(total)), rel=1e-9)
    for source, second in zip(sources, seconds, strict=True):
        if isinstance(source, Tracked):
            some = x.reshape(-1)[:12]  # A view, so that the input changes with it.
            expected = change_of(along, some)
        else:
            value = np.array(source)
            expected = change_of(lambda v=source, a=value: (v.assign(a), along())[1], value)
            source.assign(value)
            some = value
        agree(second.reshape(-1)[: some.size], expected.reshape(-1), 1e-4)


KERNEL = np.array([[0.5, -1.0, 0.3], [0.2, 0.4, -0.6]])
HEAD = np.array([[1.0], [-0.5], [2.0]])
BATCH = np.array([[0.3, -0.2], [1.0, 0.5], [-0.7, 0.9]])


@pytest.mark.parametrize("what", ["random numbers", "a variable"])
def test_a_derivative_that_returns_another_result_when_it_runs_again_is_refused(what):
    """Its gradient was that of the second run: 300 for 3, and that of another dropout."""
    factor, rng = nd.Variable(1.0), np.random.default_rng(0)

    @custom_gradient
    def scaled(x):
        scale = factor.numpy() if what == "a variable" else rng.normal(size=x.shape)
        return scale * x**3, lambda g: [g * 3 * scale * x**2]

    with GradientTape() as outer:
        x = outer.watch(np.ones(5))
        with GradientTape() as inner:
            y = scaled(x)
        factor.assign(100.0)
        slope = inner.gradient(y, x)
    np.testing.assert_allclose(slope, 3 * y)
    with pytest.raises(TypeError, match="scaled are not available: it ran again, and returned"):
        outer.gradient(slope, x)


def penalty_of(kernel, head, x):
    """Return the gradients of a critic's loss with the penalty of its gradient."""
    with GradientTape() as outer:
        with GradientTape() as inner:
            x = inner.watch(x)
            y = np.tanh(x @ kernel) @ head
        slope = inner.gradient(y, x)
        norm = np.sqrt(np.sum(np.square(slope), axis=1))
        loss = np.mean(y) + 10 * np.mean((norm - 1) ** 2)
    return outer.gradient(loss, [kernel, head])


def test_the_penalty_of_a_gradient_by_a_formula():
    """Of ``y = tanh(x k) h`` the gradient is ``s = k ((1 - t^2) h)``, differentiated by hand."""
    found = penalty_of(StandInVariable(KERNEL), StandInVariable(HEAD), BATCH)
    t = np.tanh(BATCH @ KERNEL)
    inner = (1 - t**2) * HEAD[:, 0]
    slope = inner @ KERNEL.T
    norm = np.sqrt((slope**2).sum(1, keepdims=True))
    up = 20 / len(BATCH) * (norm - 1) / norm * slope  # The gradient of the loss by the slope.
    of_inner = up @ KERNEL
    of_head = t.mean(0) + (of_inner * (1 - t**2)).sum(0)
    of_t = HEAD[:, 0] / len(BATCH) - 2 * t * HEAD[:, 0] * of_inner
    of_kernel = up.T @ inner + BATCH.T @ (of_t * (1 - t**2))
    np.testing.assert_allclose(found[0], of_kernel, rtol=1e-12)
    np.testing.assert_allclose(found[1][:, 0], of_head, rtol=1e-12)


def test_the_residual_of_a_differential_equation():
    """Of ``u = a sin(w t)``, the residual ``u'' + u`` is ``(1 - w^2) u``."""
    t = np.linspace(0.1, 2.0, 7)
    a, w = StandInVariable(np.float64(1.3)), StandInVariable(np.float64(0.7))
    with GradientTape() as outer:
        with GradientTape() as second:
            times = second.watch(t)
            with GradientTape() as inner:
                u = a * np.sin(w * times)
            speed = inner.gradient(u, times)
        residual = second.gradient(speed, times) + u
        loss = np.mean(residual**2)
    found = outer.gradient(loss, [a, w])
    sine, cosine, factor = np.sin(0.7 * t), np.cos(0.7 * t), 1 - 0.7**2
    left = factor * 1.3 * sine
    by_w = -2 * 0.7 * 1.3 * sine + factor * 1.3 * t * cosine
    np.testing.assert_allclose(untrack(residual), left, rtol=1e-12)
    np.testing.assert_allclose(found[0], np.mean(2 * left * factor * sine), rtol=1e-9)
    np.testing.assert_allclose(found[1], np.mean(2 * left * by_w), rtol=1e-9)


def test_a_penalty_on_each_of_two_replicas():
    strategy = nd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = nd.Sequential([nd.layers.Dense(4, "tanh"), nd.layers.Dense(1)])
        model(np.zeros((1, 2), np.float32))

    def step():
        return penalty(BATCH[nd.get_replica_context().replica_id_in_sync_group :][:2])

    def penalty(part):
        with GradientTape() as outer:
            with GradientTape() as inner:
                x = inner.watch(np.float32(part))
                y = model(x)
            slope = inner.gradient(y, x)
            loss = np.mean(np.square(slope)) + np.mean(y)
        return outer.gradient(loss, model.trainable_variables)

    each = zip(*map(strategy.local_results, strategy.run(step)), strict=True)
    strategy.close()
    for replica, gradients in enumerate(each):
        alone = penalty(BATCH[replica:][:2])
        assert all(map(np.array_equal, gradients, alone))


@pytest.mark.parametrize("op", ["sum", "mean", "max", "gather", "prod"])
def test_of_collectives_but_for_the_product_which_is_refused_by_name(op):
    values = np.array([[2.0, -3.0], [1.0, 4.0]])

    def step(communicator):
        with GradientTape() as outer:
            x = outer.watch(values[communicator.rank])
            with GradientTape() as inner:
                if op == "gather":
                    total = all_gather(communicator, x**3, 0)
                else:
                    total = all_reduce(communicator, op, x**3)
                y = np.sum(total**2)
            slope = inner.gradient(y, x)
        if op == "prod":
            with pytest.raises(TypeError, match=r"second derivatives of .*all_reduce"):
                outer.gradient(slope, x)
            return None
        return untrack(slope), outer.gradient(slope, x)

    if op == "prod":
        on_replicas(2, step)
        return

    def whole(x):
        """Return the sum of the targets of all replicas."""
        cubes = x**3
        total = {"sum": cubes.sum(0), "mean": cubes.mean(0), "max": cubes.max(0)}
        return 2 * np.sum(total.get(op, cubes) ** 2)

    def slopes(x):
        with GradientTape() as tape:
            y = whole(x := tape.watch(x))
        return tape.gradient(y, x)

    x, expected = values.copy(), slopes(values)
    # A replica's slopes depend on the values of all, and the sum of all slopes is differentiated.
    seconds = change_of(lambda: slopes(x).sum(), x)
    for rank, (slope, second) in enumerate(on_replicas(2, step)):
        np.testing.assert_allclose(slope, expected[rank], rtol=1e-9)
        agree(second, seconds[rank])


def test_at_points_where_a_formula_divides_by_zero():
    def bend(function, x):
        with GradientTape() as outer:
            x = outer.watch(np.array(x))
            with GradientTape() as inner:
                y = function(x)
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    assert bend(np.sinc, 0.0) == pytest.approx(-(np.pi**2) / 3)
    assert bend(nd.layers.Activation("relu", dtype="float64"), 0.0) is None
    assert bend(np.linalg.norm, [3.0, 0.0]).tolist() == pytest.approx([0, 1 / 3])
    with pytest.raises(TypeError, match=r"np\.prod .* factor of 0"):
        bend(np.prod, [2.0, 0.0])


def test_a_derivative_of_ones_own_is_computed_again_or_refused_by_name():
    @custom_gradient
    def cube(x):
        return x**3, lambda g: [3 * x**2 * g]

    @custom_gradient
    def written(x):
        y = np.asarray(x).copy()
        y *= 2
        return y, lambda g: [g * y]

    def second(function):
        with GradientTape() as outer:
            x = outer.watch(2.0)
            with GradientTape() as inner:
                y = function(x) * x
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    assert second(cube) == 12 * 2**2
    with pytest.raises(TypeError, match=r"second derivatives of .*written are not available"):
        second(written)


def test_a_rule_that_fails_leaves_no_part_of_a_gradient():
    """The first rule succeeds with tracked arrays, the second does not; both are made again."""

    @custom_gradient
    def product(x, y):
        return x * y, [lambda g: g * 2.0, lambda g: g * np.asarray(y)]

    with GradientTape() as outer:
        x = outer.watch(np.array([3.0, 4.0]))
        with GradientTape() as inner:
            y = np.sum(product(x, x) + x * 5)
        slope = inner.gradient(y, x)
    assert untrack(slope).tolist() == [2 + 3 + 5, 2 + 4 + 5]
    with pytest.raises(TypeError, match=r"product are not available: np\.asarray"):
        outer.gradient(slope, x)


def test_rows_of_a_variable():
    table = StandInVariable(np.array([1.0, 2.0, 3.0]))
    with GradientTape() as outer:
        with GradientTape() as inner:
            y = np.sum(table[np.array([2, 0, 2])] ** 3)
        slope = inner.gradient(y, table)
        loss = np.sum(slope**2)
    assert isinstance(slope, Tracked)
    # The slope is 3 x^2, times 1, 0 and 2.
    assert dense(outer.gradient(loss, table)).tolist() == [36, 0, 4 * 36 * 27]


def test_a_tape_does_not_record_its_own_gradient_silently():
    with GradientTape(persistent=True) as tape:
        x = tape.watch(2.0)
        y = x**3
        slope = tape.gradient(y, x)
        with tape.stop_recording():
            plain = tape.gradient(y, x)
        loss = y + slope**2
    assert plain == slope.value == 12
    assert not isinstance(plain, Tracked)
    assert tape.gradient(y, x) == 12
    with pytest.raises(TypeError, match="Nest two tapes"):
        tape.gradient(loss, x)


def test_what_only_one_tape_recorded_is_refused():
    with GradientTape() as early:
        x = early.watch(2.0)
        y = x**2
        with GradientTape() as late:
            late.watch(x)
            z = y * 3
            slope = early.gradient(z, x)
        with pytest.raises(TypeError, match="Nest two tapes"):
            late.gradient(slope, x)


def test_a_tape_alone_keeps_no_calls():
    with GradientTape() as tape:
        x = tape.watch(X)
        np.sum(np.exp(x) @ x.T + x[0].reshape(-1)[:3])
        assert not tape._graph.again
        with GradientTape():
            np.exp(x)
        assert len(tape._graph.again) == 1
    assert not tape._graph.again


def test_the_gradient_of_a_variable_by_itself_is_one():
    v, unwatched = StandInVariable(np.ones(2)), StandInVariable(np.ones(2), trainable=False)
    with GradientTape() as tape:
        pass
    assert tape.gradient([v, unwatched], [v, unwatched])[0].tolist() == [1, 1]
    with GradientTape(persistent=True) as tape:
        y = v * 2
    assert tape.gradient(v, v).tolist() == [1, 1]
    assert tape.gradient(unwatched, unwatched) is None
    assert tape.gradient([y, v], v).tolist() == [3, 3]


@pytest.mark.parametrize("persistent", [True, False])
def test_jacobian(persistent):
    table, unused = StandInVariable(np.array([[1.0, 2.0], [3.0, 4.0]])), StandInVariable(1.0)
    with GradientTape(persistent) as tape:
        x = tape.watch(np.array([2.0, 3.0, 5.0]))
        y = np.stack([x[:2] * x[1:], x[:2] ** 2]) @ table[np.array([0])].reshape(2, 1)
    found = tape.jacobian(y, {"x": x, "table": table, "unused": unused})
    assert found["x"].tolist() == [[[3, 2 + 2 * 5, 2 * 3]], [[4, 2 * 6, 0]]]
    assert found["table"].tolist() == [[[[6, 15], [0, 0]]], [[[4, 9], [0, 0]]]]
    assert found["unused"] is None
    if not persistent:
        with pytest.raises(RuntimeError, match="only once"):
            tape.jacobian(y, x)
        return
    assert tape.jacobian(y, unused, "zero").tolist() == [[0], [0]]
    assert tape.jacobian(y[:0], x).shape == (0, 1, 3)


def test_batch_jacobian():
    rng = np.random.default_rng(1)
    points, kernel = rng.normal(size=(4, 3)), rng.normal(size=(3, 2, 2))
    with GradientTape(persistent=True) as tape:
        x = tape.watch(points)
        y = np.einsum("bi,ijk->bjk", np.sin(x), kernel)
    found = tape.batch_jacobian(y, x)
    np.testing.assert_allclose(found, np.einsum("bi,ijk->bjki", np.cos(points), kernel))
    whole = tape.jacobian(y, x)
    np.testing.assert_allclose(whole[np.arange(4), :, :, np.arange(4)], found)
    with pytest.raises(ValueError, match="same first axis"):
        tape.batch_jacobian(y, x[:2])


def test_a_hessian_and_its_products():
    point, way = np.array([1.0, 2.0, 3.0]), np.array([1.0, -1.0, 2.0])
    with GradientTape(persistent=True) as outer:
        x = outer.watch(point)
        with GradientTape() as inner:
            y = np.sum(x**3) + x[0] * x[1]
        slope = inner.gradient(y, x)
    hessian = outer.jacobian(slope, x)
    assert hessian.tolist() == [[6, 1, 0], [1, 12, 0], [0, 0, 18]]
    product = outer.gradient(slope, x, output_gradients=way)
    assert product.tolist() == (hessian @ way).tolist()
