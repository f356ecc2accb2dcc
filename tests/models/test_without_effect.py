"""What users of Keras define that nothing here calls is refused by name; `build` works."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import callbacks, layers, losses, metrics, optimizers

X, Y = np.ones((6, 4), np.float32), np.ones((6, 2), np.float32)


@pytest.mark.parametrize(
    ("base", "name", "instead"),
    [
        (nd.Model, "make_train_function", "define train_step"),
        (nd.Model, "losses", "define penalties"),
        (layers.Layer, "trainable_variables", "set trainable"),
        (layers.Layer, "save_own_variables", "variables"),
        (losses.Loss, "__call__", "define call"),
        (metrics.Metric, "value_of", "define result"),
        (optimizers.SGD, "update_step", "define update of a Rule"),
        (optimizers.Optimizer, "_resource_apply_dense", "define update of a Rule"),
        (callbacks.Callback, "on_epoch_finish", "define on_epoch"),
    ],
)
def test_a_class_that_defines_what_nothing_calls_is_refused(base, name, instead):
    with pytest.raises(TypeError, match=f"Own: nothing calls {name}: .*{instead}"):
        type("Own", (base,), {name: lambda self, *args: None})
    mixed = type("Mixed", (), {name: lambda self, *args: None})
    with pytest.raises(TypeError, match=f"Own: nothing calls {name}"):
        type("Own", (mixed, base), {})


@pytest.mark.parametrize("jit_compile", [False, True])
def test_penalties_of_outputs_and_of_weights_are_part_of_the_loss(jit_compile):
    class Penalized(layers.Layer):
        def __init__(self):
            super().__init__()
            self.activity_regularizer = nd.models.regularizers.L2(0.5)

        def build(self, input_shape):
            self.scale = self.add_weight("scale", (), "ones", regularizer="l1")

        def call(self, inputs):
            return inputs * self.scale

    model = nd.Sequential([Penalized(), layers.Dense(2, activity_regularizer="l2")])
    model.compile("sgd", losses.MeanSquaredError(), jit_compile=jit_compile)
    predicted = model.predict(X)
    expected = np.mean((predicted - Y) ** 2) + 0.5 * 4 + 0.01 + 0.01 * np.sum(predicted[0] ** 2)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="layers have no kernel_constraint"):
        layers.Dense(2, kernel_constraint=abs)
    with pytest.raises(TypeError, match="no argument 'recurrent_initialiser': use recurrent_init"):
        layers.GRU(2, recurrent_initialiser="ones")
    with pytest.raises(TypeError, match=r"no argument 'seed': call nd\.set_seed"):
        layers.Dropout(0.5, seed=1)


def test_a_penalty_of_outputs_does_not_depend_on_replicas():
    def trained(strategy):
        with strategy.scope():
            dense = layers.Dense(2, activity_regularizer="l2", kernel_initializer="ones")
            model = nd.Sequential([dense])
            model.compile(optimizers.SGD(0.1), "mse")
        history = model.fit(np.arange(12.0).reshape(3, 4), Y[:3], 3, 2, verbose=0).history
        return [*model.get_weights(), history["loss"]]

    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as both:
        pairs = zip(trained(both), trained(nd.get_strategy()), strict=True)
    for ours, expected in pairs:
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_a_model_may_choose_what_it_trains():
    class Head(nd.Model):
        def __init__(self):
            super().__init__()
            self.body, self.head = layers.Dense(3), layers.Dense(2)

        def call(self, x):
            return self.head(self.body(x))

        @property
        def trainable_variables(self):
            return self.head.trainable_variables

    model = Head()
    model.build_for(X)
    model.compile("sgd", "mse")
    kept = model.body.kernel.numpy()
    model.fit(X, Y, verbose=0)
    assert np.array_equal(model.body.kernel.numpy(), kept)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_fit_takes_no_loss_of_another_reduction(reduction):
    model = nd.Sequential([layers.Dense(2)])
    with pytest.raises(ValueError, match=f"reduction='{reduction}'.* divides the sum"):
        model.compile("sgd", losses.MeanSquaredError(reduction=reduction))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("method", ["fit", "predict"])
def test_a_layer_to_train_that_each_call_creates_is_refused(replicas, method):
    class Creating(nd.Model):
        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(3)

        def call(self, x):
            return layers.Dense(2)(self.inner(x))

    with nd.MirroredStrategy([f"cpu:{k}" for k in range(replicas)]) as strategy, strategy.scope():
        model = Creating()
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=r"Dense layer was created inside call.* in __init__"):
            getattr(model, method)(*(X, Y)[: 2 if method == "fit" else 1])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_call_may_create_layers_without_variables(replicas):
    class Flat(nd.Model):
        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(2)

        def call(self, x):
            return self.inner(layers.Dropout(0.1)(layers.Flatten()(x)))

    with nd.MirroredStrategy([f"cpu:{k}" for k in range(replicas)]) as strategy, strategy.scope():
        model = Flat()
        model.compile("sgd", "mse")
        before = model(X)
        model.fit(X, Y, verbose=0)
        assert not np.array_equal(model(X), before)
        assert len(model.variables) == 2


def test_the_first_call_may_create_a_layer_that_the_model_keeps():
    class Late(nd.Model):
        inner = None

        def call(self, x):
            if self.inner is None:
                self.inner = layers.Dense(2)
            return self.inner(x)

    model = Late()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert len(model.trainable_variables) == 2


def test_build_makes_the_variables_of_all_layers():
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nd.Sequential([layers.Dense(3), layers.Dense(2)])
        model.build((None, 4))
        shapes = [variable.shape for variable in model.variables]
        assert shapes == [(4, 3), (3,), (3, 2), (2,)]
        model.build([None, 4])
        kernel = model.layers[0].kernel
        model(X)
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
        assert model.layers[0].kernel is kernel
    with pytest.raises(ValueError, match=r"built for examples of the shapes \[\(4,\)\]"):
        model.build((None, 5))
    with pytest.raises(ValueError, match="each length but the first"):
        nd.Sequential([layers.Dense(3)]).build((None, None))


def test_build_of_several_inputs_takes_a_nest_of_shapes():
    class Joined(nd.Model):
        def __init__(self):
            super().__init__()
            self.output = layers.Dense(2)

        def call(self, parts):
            return self.output(np.concatenate([parts["a"], parts["b"][0]], axis=-1))

    model = Joined()
    model.build({"a": (None, 3), "b": [(None, 2)]})
    assert model.output.kernel.shape == (5, 2)


def test_an_own_build_of_a_model_runs_once_and_may_call_that_of_its_base():
    class Own(nd.Model):
        def build(self, input_shape):
            self.scale = self.add_weight("scale", input_shape[-1:], "ones")
            self.output = layers.Dense(2)
            super().build(input_shape)

        def call(self, x):
            return self.output(x * self.scale)

    early, late = Own(), Own()
    early.build((None, 4))
    late(X)
    assert [*early.named_variables()] == [*late.named_variables()]
    assert [*early.named_variables()] == ["scale", "output/kernel", "output/bias"]
