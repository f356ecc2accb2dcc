"""A compiled step reads what is around it as it is at each call, and compiles only for changes."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from tests.contract_rows import tpus
from tests.kinds import closing

pytest.importorskip("jax")

X = np.array([[1.0, 2.0]])
RATE = 1.0
CONFIG = {"rate": 1.0, "of": [1.0]}


def set_rate(value: float) -> None:
    globals()["RATE"] = value


def called(x: Any) -> Any:
    return x * RATE


def calls_another(x: Any) -> Any:
    return called(x) + CONFIG["of"][0]


def calls_inside(x: Any) -> Any:
    def inner(y: Any) -> Any:
        return y * RATE

    return inner(x)


def reads_a_dict(x: Any) -> Any:
    return x * CONFIG["rate"]


class Slotted:
    __slots__ = ("rate",)


class Settings:
    rate = 1.0


def scaled_by(settings: Any, x: Any) -> Any:
    return x * settings.rate


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Trainer:
    def __init__(self) -> None:
        self.model = nd.Sequential([nd.layers.Dense(1), nd.layers.Dense(1)])
        self.model.build_for(X)
        self.model.set_weights([np.ones(w.shape) for w in self.model.get_weights()])
        self.optimizer = nd.optimizers.SGD(0.125)
        self.doubled, self.losses, self.made = False, [], 0
        self.inner: Any = types.SimpleNamespace(rate=1.0)

    @property
    def factor(self) -> float:
        return 2.0 if self.doubled else 1.0

    def loss(self, x: Any) -> Any:
        return np.sum(self.model(x) ** 2) * self.factor * self.inner.rate

    def step(self, x: Any) -> Any:
        with nd.GradientTape() as tape:
            loss = self.loss(x)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    __call__ = loss


def of_globals(function: Callable[..., Any]) -> Any:
    set_rate(1.0)
    CONFIG.update(rate=1.0, of=[1.0])

    def change() -> None:
        set_rate(3.0)
        CONFIG.update(rate=3.0)

    return function, change


def of_item() -> Any:
    CONFIG.update(rate=1.0, of=[1.0])
    set_rate(1.0)
    return calls_another, lambda: CONFIG["of"].__setitem__(0, 5.0)


def of_settings(settings: Any, owner: Any = None) -> Any:
    settings.rate = 1.0
    return lambda x: scaled_by(settings, x), lambda: setattr(owner or settings, "rate", 2.0)


def of_class() -> Any:
    Settings.rate = 1.0
    settings = Settings()
    return lambda x: x * settings.rate, lambda: setattr(Settings, "rate", 2.0)


def of_trainer(change: Callable[[Trainer], None], step: Callable[..., Any] | None = None) -> Any:
    trainer = Trainer()
    chosen = trainer.step if step is None else step(trainer)
    return chosen, lambda: change(trainer)


def test_what_no_code_of_a_step_reads_does_not_compile_it_again() -> None:
    class Loop(Trainer):
        epoch = 0

        def step(self, x: Any) -> Any:
            return Loop.halved(super().loss(x))

        @staticmethod
        def halved(x: Any) -> Any:
            return x / 2

        def fit(self) -> int:
            self.epoch += 1
            self.last = nd.function(self.step)(X)
            return len(compiled.compilations)

    loop = Loop()
    compiled = nd.function(loop.step)
    for _ in range(3):
        loop.fit()
        compiled(X)
    assert len(compiled.compilations) == 1


def double(trainer: Trainer) -> None:
    trainer.doubled = True


CASES: dict[str, Callable[[], Any]] = {
    "a global of a called function": lambda: of_globals(called),
    "a global of an inner function": lambda: of_globals(calls_inside),
    "a dict": lambda: of_globals(reads_a_dict),
    "a list in a dict": of_item,
    "an object that is passed on": lambda: of_settings(types.SimpleNamespace()),
    "slots": lambda: of_settings(Slotted()),
    "a class": of_class,
    "a flag in a method that is called": lambda: of_trainer(double),
    "an object that is called": lambda: of_trainer(double, lambda trainer: trainer),
    "a partial": lambda: of_trainer(double, lambda t: functools.partial(t.loss)),
    "a decorator": lambda: of_trainer(double, lambda t: wrapped(t.step)),
    "an attribute of an attribute": lambda: of_trainer(lambda t: setattr(t.inner, "rate", 2.0)),
    "another object": lambda: of_trainer(
        lambda t: setattr(t, "inner", types.SimpleNamespace(rate=2.0))
    ),
    "another optimizer": lambda: of_trainer(
        lambda t: setattr(t, "optimizer", nd.optimizers.SGD(0.5))
    ),
    "another model": lambda: of_trainer(lambda t: setattr(t, "model", t.model.layers[0])),
    "a layer that is frozen": lambda: of_trainer(
        lambda t: setattr(t.model.layers[0], "trainable", False)
    ),
    "a layer that is added": lambda: of_trainer(
        lambda t: t.model.layers.append(nd.layers.Activation(np.tanh)), lambda t: t.model
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_what_its_surroundings_are_at_the_call(case: str) -> None:
    def results(compiled: Callable[..., Any]) -> list[Any]:
        step, change = CASES[case]()
        step = compiled(step)
        first = [step(X), step(X)]
        change()
        return [*first, step(X), step(X)]

    made: list[Any] = []

    def compiled(step: Any) -> Any:
        made.append(nd.function(step))
        return made[0]

    expected = results(lambda step: step)
    assert not np.array_equal(expected[1], expected[2])
    np.testing.assert_allclose(results(compiled), expected, rtol=1e-6)
    assert len(made[0].compilations) == 2


def test_objects_that_are_passed_are_looked_at() -> None:
    def step(model: Any, settings: Any, x: Any) -> Any:
        return np.sum(model(x)) * settings.rate + 100 * len(model.trainable_variables)

    with closing(tpus(1)) as strategy:
        with strategy.scope():
            trainer = Trainer()
        arguments = trainer.model, trainer.inner, X
        assert strategy.run(step, args=arguments).values[0] == 405
        trainer.model.layers[0].trainable, trainer.inner.rate = False, 2.0
        assert strategy.run(step, args=arguments).values[0] == 210


def test_what_a_step_changes_itself_does_not_compile_it_again() -> None:
    trainer = Trainer()

    def step(x: Any) -> Any:
        trainer.made += 1
        trainer.last = x * 2
        trainer.losses.append(x)
        return trainer.last

    compiled = nd.function(step)
    for k in range(4):
        trainer.rows = k  # Nothing reads it.
        compiled(X)
    assert len(compiled.compilations) == 1
    compiled(X[0])
    compiled(X)
    assert len(compiled.compilations) == 2


@dataclasses.dataclass
class Factor:
    value: float = 1.0


class Scaled(nd.Model):
    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.dense, self.factor = nd.layers.Dense(1), factor

    def call(self, x: Any) -> Any:
        return self.scaled(self.dense(x))

    def scaled(self, y: Any) -> Any:
        return y * self.factor.value


def test_a_model_reads_the_settings_of_its_code_at_each_training() -> None:
    factor = Factor()

    def squared(y: Any, predicted: Any) -> Any:
        return (y - predicted) ** 2 * factor.value

    def trained(strategy: Any) -> list[Any]:
        factor.value = 1.0
        with strategy.scope():
            model = Scaled(factor)
            model.compile(nd.optimizers.SGD(0.01), squared)
        model.build_for(X)
        model.set_weights([np.ones(w.shape) for w in model.get_weights()])
        results = []
        for factor.value in (1.0, 2.0):
            history = model.fit(X, X[:, :1], epochs=2, verbose=0)
            results += [*history.history["loss"], model.predict(X).item()]
        return results

    with closing(tpus(1)) as strategy:
        np.testing.assert_allclose(trained(strategy), trained(nd.get_strategy()), rtol=1e-6)
        assert len(strategy.compilations) <= 5


class Stepping(nd.Sequential):
    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "rate": np.ones(()) * RATE}


def test_a_step_that_a_model_defines_reads_what_is_around_it_at_each_training() -> None:
    with closing(tpus(1)) as strategy, strategy.scope():
        model = Stepping([nd.layers.Dense(1)])
        model.compile("sgd", "mse")
        for rate in (1.0, 2.0, 2.0):
            set_rate(rate)
            history = model.fit(X, X[:, :1], verbose=0).history
            assert history["rate"] == [rate]
        assert len(strategy.compilations) == 3  # One makes the variables.
