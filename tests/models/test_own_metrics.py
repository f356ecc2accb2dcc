"""Metrics that users write with variables of their own, as for Keras, under every strategy."""

from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import layers, losses, metrics
from tests.kinds import strategy
from tests.processes import Ranks

__all__ = ["strategy"]

RNG = np.random.default_rng(0)
X, WEIGHTS = RNG.normal(size=(25, 3)), RNG.uniform(size=25)
Y = X @ np.array([[1.0], [-2.0], [0.5]]) > 0


class Positives(metrics.Metric):
    """Counts by classes in a vector, and a weighted share, of an inner metric too."""

    def __init__(self, name: str = "positives", threshold: float = 0.1, **options: Any) -> None:
        super().__init__(name=name, **options)
        self.threshold = threshold
        self.counts = self.add_weight(name="counts", shape=(2,), initializer="zeros")
        self.sums = [self.add_weight("right", dtype="float64"), self.add_variable((), name="all")]
        self.mean = metrics.Mean()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        above, positive = y_pred[:, 0] > self.threshold, y_true[:, 0] > 0
        weight = np.ones(len(above)) if sample_weight is None else sample_weight
        self.counts.assign_add(np.stack([above.sum(), positive.sum()]).astype(self.dtype))
        self.sums[0].assign_add(np.sum((above == positive) * weight))
        self.sums[1].assign_add(np.sum(weight).astype(self.dtype))
        self.mean.update_state(y_pred[:, 0])

    def result(self) -> Any:
        right, everything = self.sums
        return {
            "share": right / everything,
            "mean": self.mean.result(),
            "counts": self.counts.read_value(),
        }

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "threshold": self.threshold}


class Largest(metrics.Mean):
    """A subclass of a metric here, with another result; its older name for `reset_state`."""

    resets = 0

    def update_state(self, y_true: Any, y_pred: Any) -> None:
        super().update_state(np.max(np.abs(y_pred - y_true), axis=-1))

    def result(self) -> float:
        return 2 * super().result()

    def reset_states(self) -> None:
        self.resets += 1
        self.state.assign(np.zeros(2))


def fitted() -> Any:
    nd.set_seed(2)
    model = nd.Sequential([layers.Dense(1, dtype="float64")])
    own = Largest("largest")
    model.compile("sgd", "mse", metrics=[own], weighted_metrics=[Positives()])
    data = X, Y.astype(float)
    history = model.fit(
        *data, 8, epochs=2, sample_weight=WEIGHTS, validation_data=data, shuffle=False, verbose=0
    )
    assert own.resets >= 4
    return model, history.history


def expected(model: Any) -> dict[str, Any]:
    predicted = model.predict(X)
    return {
        "largest": 2 * np.mean(np.abs(predicted - Y)),
        "share": np.mean((predicted > 0.1) == Y),
        "mean": np.mean(predicted),
        "counts": [np.sum(predicted > 0.1), np.sum(Y)],
    }


def test_a_metric_with_variables_of_its_own_counts_all_examples_of_all_replicas(strategy):
    _, alone = fitted()
    with strategy.scope():
        model, history = fitted()
    for name, wanted in expected(model).items():
        assert np.allclose(history[f"val_{name}"][-1], wanted, rtol=1e-5), name
        assert np.allclose(history[name], alone[name], rtol=1e-5), name


def test_a_metric_of_ones_own_is_part_of_a_model_that_is_saved(strategy, tmp_path):
    with strategy.scope():
        model, _ = fitted()
        model.save(tmp_path / "model.keras")
        objects = {"Positives": Positives, "Largest": Largest}
        loaded = nd.models.load(tmp_path / "model.keras", objects)
        counted, again = (each.metrics[-1] for each in (model, loaded))
        assert again.threshold == counted.threshold
        assert np.array_equal(again.counts, counted.counts)
        assert again.result()["share"] == counted.result()["share"]


def test_a_metric_of_ones_own_counts_in_a_step_that_a_model_defines(strategy):
    class Counting(nd.Sequential):
        def __init__(self) -> None:
            super().__init__([layers.Dense(1, dtype="float64")])
            self.seen = Positives()

        def test_step(self, data: Any) -> Any:
            self.seen.update_state(data[1], self(data[0], training=False))
            return {"seen": self.seen.result()}

    with strategy.scope():
        model = Counting()
        model.compile("sgd", "mse")
        logs = model.evaluate(X, Y.astype(float), 8, verbose=0, return_dict=True)
        assert logs["counts"].tolist() == [np.sum(model.predict(X) > 0.1), np.sum(Y)]


def test_a_metric_of_ones_own_counts_the_examples_of_all_processes():
    _, alone = fitted()
    with Ranks(2) as ranks:
        for history, local in ranks.results(in_processes):
            for name in ("largest", "share", "counts", "val_counts"):
                assert np.allclose(history[name], alone[name], rtol=1e-5), name
            assert local["counts"].tolist() != alone["val_counts"][-1].tolist()


def in_processes(rank: int, size: int) -> Any:
    with nd.MultiWorkerMirroredStrategy():
        model, history = fitted()
        return history, model.metrics[-1].local_result()


def test_states_are_forgotten():
    metric = Positives()
    metric.update_state(Y, X)
    assert metric.counts.numpy().tolist() == [np.sum(X[:, 0] > 0.1), np.sum(Y)]
    assert len(metric.variables) == 4
    metric.reset_state()
    assert not np.any(metric.counts)


@pytest.mark.parametrize(("module", "name"), [(losses, "huber"), (metrics, "mae")])
def test_losses_and_metrics_are_objects_of_what_describes_them(module, name):
    made = module.get(name)
    again = module.deserialize(nd.models.serialize(made))
    assert type(again) is type(made)
    with pytest.raises(ValueError, match="unknown"):
        module.deserialize({"class_name": "Nothing", "config": {}})
