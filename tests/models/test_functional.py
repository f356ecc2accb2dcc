"""Functional models: what they compute and learn, how they are made, copied and saved."""

import functools
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ndistribute as nd
from ndistribute import tree
from ndistribute.models import (
    Input,
    Model,
    Sequential,
    activations,
    clone_model,
    layers,
    load,
    nn,
)
from tests.kinds import ALL_MEMORIES, COMPILED_2, fixture_over

strategy = fixture_over({**ALL_MEMORIES, **COMPILED_2})
RNG = np.random.default_rng(0)
F = "float64"
dense, conv = (functools.partial(kind, dtype=F) for kind in (layers.Dense, layers.Conv2D))
IMAGES = RNG.normal(size=(12, 6, 6, 2))
WORDS = RNG.integers(0, 7, (12, 3)), RNG.integers(0, 7, (12, 4))


class Residual(Model):
    """A convolution with a connection around it."""

    def __init__(self) -> None:
        super().__init__(dtype=F)
        self.first = conv(4, 3, padding="same")
        self.second = conv(4, 3, padding="same", activation="relu")
        self.head = dense(2)

    def call(self, x: Any) -> Any:
        """Return the logits."""
        x = self.first(x)
        return self.head(np.mean(np.maximum(x + self.second(x), 0), axis=(1, 2)))


def residual() -> Model:
    """Return the functional form of `Residual`."""
    x = Input((6, 6, 2), dtype=F)
    y = conv(4, 3, padding="same")(x)
    around = layers.add([y, conv(4, 3, padding="same", activation="relu")(y)], dtype=F)
    pooled = layers.GlobalAveragePool2D(dtype=F)(np.maximum(around, 0))
    return Model(inputs=x, outputs=dense(2, name="head")(pooled), name="residual")


class Towers(Model):
    """A shared embedding of two texts, which are compared."""

    def __init__(self) -> None:
        super().__init__(dtype=F)
        self.table = layers.Embedding(7, 3, dtype=F)
        self.head = dense(2)

    def call(self, texts: Any) -> Any:
        """Return the logits."""
        left, right = (np.mean(self.table(text), axis=1) for text in texts)
        return self.head(np.concatenate([left, right, left * right], axis=1))


def towers() -> Model:
    """Return the functional form of `Towers`, one half of which is a model of its own."""
    words = Input((None,), dtype="int64")
    tower = Model(words, np.mean(layers.Embedding(7, 3, dtype=F)(words), axis=1), dtype=F)
    texts = [Input((3,), dtype="int64", name="left"), Input((4,), dtype="int64", name="right")]
    left, right = map(tower, texts)
    joined = layers.Concatenate(dtype=F)([left, right, layers.multiply([left, right], dtype=F)])
    return Model(texts, dense(2)(joined), dtype=F)


MADE = {"residual": (residual, Residual, IMAGES), "towers": (towers, Towers, WORDS)}


def trained(make: Any, x: Any) -> Any:
    """Return the losses, the weights and the predictions of a training from fixed weights."""
    model = make()
    model.build_for(x)
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=weight.shape) for weight in model.get_weights()])
    loss = nd.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(nd.optimizers.Adam(0.05), loss)
    labels = np.arange(12) % 2
    history = model.fit(x, labels, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    score = model.evaluate(x, labels, verbose=0)
    return [history["loss"], score, model.predict(x), *model.get_weights()]


@functools.cache
def expected(kind: str) -> Any:
    """Return what the subclass learns on one replica."""
    return trained(*MADE[kind][1:])


@pytest.mark.parametrize("kind", MADE)
def test_a_functional_model_learns_what_a_subclass_learns_on_one_replica(strategy, kind):
    make, _, x = MADE[kind]
    with strategy.scope():
        values = trained(make, x)
    for value, wanted in zip(values, expected(kind), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)


UNARY = [np.tanh, np.negative, lambda x: x[:, ::-1], lambda x: 2 - x]
BINARY = [operator.add, np.multiply, lambda x, y: np.concatenate([x, y], axis=1)[:, 1:4]]
STEPS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)), max_size=8)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.booleans())
def test_any_graph_of_calls_computes_what_the_same_calls_compute_at_once(steps, several):
    values: Any = [Input((3,), dtype=F), Input((3,), dtype=F, name="second")]
    arrays: Any = [RNG.normal(size=(2, 3)), RNG.normal(size=(2, 3))]
    for kind, left, right in steps:
        made = [(list_[left % len(list_)], list_[right % len(list_)]) for list_ in (values, arrays)]
        functions: Any = [*UNARY, dense(3), *BINARY]
        count = 1 if kind <= len(UNARY) else 2
        results = [functions[kind](*pair[:count]) for pair in made]
        values, arrays = ([*a, b] for a, b in zip((values, arrays), results, strict=True))
    outputs = {"a": values[-1], "b": [values[len(values) // 2]]} if several else values[-1]
    model = Model(values[:2], outputs)
    result = model(arrays[:2])
    wanted = [arrays[-1], arrays[len(arrays) // 2]] if several else [arrays[-1]]
    for got, array in zip(tree.flatten(result), wanted, strict=True):
        np.testing.assert_array_equal(got, array)


def test_inputs_are_lists_or_dicts_by_name_and_outputs_any_nest():
    a, b = Input((2,), name="a"), Input((2,), dtype="int32", name="b")
    x, y = np.ones((3, 2)), np.full((3, 2), 2.0)
    model = Model([a, b], {"sum": a + b, "parts": (a * 2, np.split(b, 2, axis=1)[1])})
    assert (model.input_names, model.output_names) == (["a", "b"], ["sum", "parts"])
    assert model.input_shape == [(None, 2)] * 2
    for inputs in ([x, y], (x, y), {"b": y, "a": x, "unused": 0}):
        outputs = model(inputs)
        assert outputs["sum"].dtype == np.float64  # Of float32 and int32, as NumPy has it.
        assert outputs["parts"][1].dtype == np.int32
        np.testing.assert_array_equal(outputs["sum"], np.full((3, 2), 3.0))
    predicted = model.predict([x, y])
    assert predicted["parts"][0].shape == (3, 2)
    by_key = Model({"u": a, "v": b}, b - a)
    np.testing.assert_array_equal(by_key({"u": x, "v": y}), y - x)
    column = Input((1,))
    assert Model(column, column * 2)(np.ones(3)).shape == (3, 1)
    text = Input((1,), dtype="string")
    assert Model(text, text[:, 0])(np.array([["word"]])) == ["word"]


def test_parts_of_a_model_are_models():
    model = residual()
    features = Model(model.input, [layer.output for layer in model.layers])
    names = [layer.name for layer in model.layers]
    head = model.get_layer("head")
    assert head is model.get_layer(index=-1)
    assert names[-1] == "head"
    assert [part.shape[0] for part in features(IMAGES)] == [12] * len(names)
    np.testing.assert_array_equal(features(IMAGES)[-1], model(IMAGES))
    tail = Model(head.input, model.output)
    assert [type(layer).__name__ for layer in tail.layers] == ["InputLayer", "Dense"]
    body = Model(model.inputs, head.input)
    np.testing.assert_array_equal(tail(body(IMAGES)), model(IMAGES))


def test_layers_and_weights_come_in_the_order_of_keras():
    a, b = Input((2,), name="a"), Input((2,), name="b")
    late, first, second = dense(2, name="late"), dense(2, name="first"), dense(2, name="second")
    shortcut = late(b)  # Called first, but next to the output.
    model = Model([a, b], layers.Add(name="sum")([second(first(a)), shortcut]))
    assert [layer.name for layer in model.layers] == ["a", "first", "b", "second", "late", "sum"]
    paths = [variable.name for variable in model.weights]
    assert paths == [f"{n}/{v}" for n in ("first", "second", "late") for v in ("kernel", "bias")]
    assert model.count_params() == 18


def test_an_assignment_in_place_makes_another_array():
    x = y = Input((2,))
    y += 1
    y *= x
    np.testing.assert_array_equal(Model(x, [x, y])(np.full((1, 2), 3.0)), [[[3, 3]], [[12, 12]]])


def test_a_shared_layer_has_one_set_of_variables_and_variables_of_calls_are_trained():
    x, shared, factor = Input((2,)), layers.Dense(2), nd.Variable(np.float32(2.0))
    model = Model(x, shared(shared(x)) * factor)
    assert len(model.layers) == 2
    assert [v.shape for v in model.trainable_variables] == [(2, 2), (2,), ()]


def test_a_copy_has_variables_of_its_own_and_the_same_structure():
    model = towers()
    for copy in (clone_model(model), Model.from_config(model.get_config())):
        assert [v.name for v in copy.weights] == [v.name for v in model.weights]
        assert not set(map(id, copy.weights)) & set(map(id, model.weights))
        assert not np.array_equal(copy(list(WORDS)), model(list(WORDS)))
        copy.set_weights(model.get_weights())
        np.testing.assert_array_equal(copy(list(WORDS)), model(list(WORDS)))
    sequential = Sequential([Input((3,)), layers.Dense(2)])
    assert clone_model(sequential).count_params() == 8


@pytest.mark.parametrize("kind", MADE)
def test_an_exported_functional_model_is_loaded_without_its_code(kind, tmp_path):
    make, _, x = MADE[kind]
    model = make()
    model.layers[-1].trainable = False
    loaded = load(model.export(tmp_path / "model"))
    np.testing.assert_array_equal(loaded(x), model(x))
    assert loaded.summary() == model.summary()
    assert len(loaded.trainable_variables) == len(model.trainable_variables)
    path = nd.Checkpoint(model=model).save(tmp_path / "state")
    nd.Checkpoint(model=clone_model(model)).restore(path)


def test_calls_with_constants_slices_and_dtypes_are_exported(tmp_path):
    x = Input((3, 2))
    y = np.transpose(x, (0, 2, 1)) * np.array([1.0, 2.0, 3.0], np.float32)
    y = layers.Lambda(np.tanh)(y[..., ::2]).astype("float64") + activations.relu(y[..., 1:])
    model = Model(x, nn.softmax(y), name="net")
    loaded = load(model.export(tmp_path / "model"))
    array = RNG.normal(size=(4, 3, 2))
    assert loaded.output.dtype == model.output.dtype == np.float64
    np.testing.assert_array_equal(loaded(array), model(array))
    assert loaded.summary() == model.summary()


def test_a_sequential_knows_its_shapes_and_its_layers_have_outputs():
    model = Sequential([Input((4,), name="x"), layers.Dense(3), layers.Dropout(0.5)])
    assert [type(layer).__name__ for layer in model.layers] == ["Dense", "Dropout"]
    model.add(layers.Dense(2))
    assert (model.input_shape, model.output_shape) == ((None, 4), (None, 2))
    features = Model(model.inputs, model.layers[0].output)
    assert features(np.ones((5, 4))).shape == (5, 3)
    assert model.pop().units == 2
    assert model.output_shape == (None, 3)
    assert model(np.ones((5, 4))).shape == (5, 3)
    stacked = Sequential([features, layers.Dense(1)])
    assert stacked.output_shape == (None, 1)
    assert stacked.count_params() == 19


def test_a_call_with_training_keeps_it_and_does_not_change_statistics():
    layer = layers.BatchNormalization(dtype=F)
    x = Input((2,), dtype=F)
    model = Model(x, layer(x, training=True))
    assert not layer.moving_mean.numpy().any()
    assert (layer.moving_variance.numpy() == 1).all()
    np.testing.assert_allclose(model(RNG.normal(size=(64, 2))).mean(axis=0), 0, atol=1e-12)


def test_a_subclass_may_have_inputs_and_outputs():
    class Custom(Model):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.extra = layers.Dense(3)

    x = Input((2,))
    model = Custom(x, layers.Dense(1)(x), name="custom")
    assert model.predict(np.ones((3, 2))).shape == (3, 1)
    assert model.extra in model.walk()


X = Input((4,), name="x")
BY_LAYER = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "average": lambda a, b: (a + b) / 2,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "concatenate": lambda a, b: np.concatenate([a, b], axis=-1),
}


@pytest.mark.parametrize("name", BY_LAYER)
def test_layers_of_several_inputs_compute_what_numpy_computes(name):
    a, b = RNG.normal(size=(5, 3)), RNG.normal(size=(5, 3))
    merge = getattr(layers, name)
    np.testing.assert_array_equal(merge([a, b], dtype=F), BY_LAYER[name](a, b))
    if name != "concatenate":
        wide = RNG.normal(size=(5, 2, 3))
        np.testing.assert_array_equal(merge([a, wide], dtype=F), BY_LAYER[name](a[:, None], wide))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Model(X, layers.Dense(2)(Input((3,), name="y"))), r"needs the input 'y'.*\['x'\]"),
        (lambda: Model([X, X], X), "occurs twice"),
        (lambda: Model(X, np.ones(3)), "outputs must be symbolic arrays.* a ndarray is among"),
        (lambda: Model(X, None), "outputs must be symbolic"),
        (lambda: Model(X, X)([np.ones((1, 4))] * 2), r"called on 2 arrays, but has 1 input"),
        (lambda: Model(X, X)(np.ones((1, 5))), r"'x' has the shape \(None, 4\).*\(1, 5\)"),
        (lambda: Model(X, X)({"z": np.ones((1, 4))}), r"keys \['z'\], .*: add \['x'\]"),
        (
            lambda: Model({"a": X, "b": Input((2,))}, X)([np.ones((1, 4))]),
            r"a dict with the keys \['a', 'b'\]",
        ),
        (lambda: float(X), "is symbolic and has no values"),
        (lambda: X and 1, "if x: .*np.where"),
        (lambda: len(X), "read x.shape"),
        (lambda: list(X), "np.split"),
        (lambda: np.asarray(X), "write a Layer or a Lambda"),
        (lambda: operator.setitem(X, 0, 1), "compute a new one"),
        (lambda: np.add(X, 1, out=np.ones(4)), "add would write"),
        (lambda: np.squeeze(X[:, :1]), "name the axis"),
        (lambda: layers.Dense(2).output, "not called on a symbolic array"),
        (lambda: Sequential([layers.Dense(2)]).outputs, "begin a Sequential with Input"),
        (lambda: Sequential([layers.Dense(2), X]), "must be the first"),
        (lambda: Sequential().pop(), "it has no layers"),
        (lambda: Model(X, X).get_layer("y"), r"no layer 'y'; it has \['x'\]"),
        (lambda: Model(X, X).get_layer(), "a name or an index"),
        (lambda: layers.Dense(2)(Input(())), "a feature axis"),
        (lambda: layers.subtract([X, X, X]), "needs a list of 2 arrays.*got a list of 3"),
        (lambda: layers.add(np.ones((2, 3))), "needs a list of several arrays.*got ndarray"),
        (lambda: layers.Permute((0, 1)), "each of 1, 2"),
    ],
)
def test_mistakes_are_explained(call, says):
    with pytest.raises((TypeError, ValueError, AttributeError, IndexError), match=says):
        call()
