"""What is saved under a name is read under that very name, and what callbacks write there."""

import csv
import os

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import callbacks, layers, metrics
from tests.kinds import one_process, strategy

__all__ = ["strategy"]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [0.5]], np.float32)


def compiled(**options):
    model = nd.Sequential([layers.Input((3,)), layers.Dense(1)])
    model.compile(nd.optimizers.Adam(0.1), "mse", **options)
    return model


@one_process("each worker has a temporary folder of its own")
def test_a_checkpoint_of_a_model_is_loaded_by_the_very_name_that_was_given(strategy, tmp_path):
    name = f"{tmp_path}/c.{{epoch:02d}}-{{val_loss:.2f}}.keras"
    with strategy.scope():
        model = compiled()
        save = callbacks.ModelCheckpoint(name)
        history = model.fit(X, Y, 8, epochs=2, verbose=0, validation_data=(X, Y), callbacks=[save])
        losses = history.history["val_loss"]
        first, last = (name.format(epoch=n + 1, val_loss=losses[n]) for n in range(2))
        assert sorted(os.listdir(tmp_path)) == sorted(map(os.path.basename, (first, last)))
        loaded = nd.models.load(last)
        assert int(loaded.optimizer.iterations) == 6
        assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(losses[1], rel=1e-5)
        loaded.load_weights(first)
        assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(losses[0], rel=1e-5)
        assert nd.models.load(first, compile=False).optimizer is None


def test_weights_are_read_by_the_very_name_and_take_the_place_of_the_last_ones(tmp_path):
    path, model = tmp_path / "best.weights.h5", compiled()
    model.save_weights(path)
    model.layers[0].bias.assign([3.0])
    model.save_weights(path)
    assert os.listdir(tmp_path) == [path.name]
    assert len(os.listdir(path)) == 1
    model.layers[0].bias.assign([4.0])
    model.load_weights(path)
    assert model.layers[0].bias.numpy() == [3.0]
    for save in (model.save_weights, model.save):
        with pytest.raises(FileExistsError, match=r"best.weights.h5 exists: .* overwrite=True"):
            save(path, overwrite=False)


def test_a_file_of_keras_is_told_apart_from_none(tmp_path):
    path = tmp_path / "x.weights.h5"
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*h5\.$"):
        compiled().load_weights(path)
    path.write_bytes(b"HDF")
    with pytest.raises(FileNotFoundError, match="is a file; ndistribute does not read"):
        compiled().load_weights(path)


def test_an_absent_file_is_named_with_the_folder_that_was_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        nd.models.load("nofile.keras")
    assert str(error.value) == f"there is no checkpoint {tmp_path / 'nofile.keras'}."


def test_a_model_is_saved_without_its_optimizer(tmp_path):
    model = compiled()
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model", include_optimizer=False)
    loaded = nd.models.load(tmp_path / "model")
    assert loaded.compiled is None
    assert np.array_equal(loaded.predict(X), model.predict(X))


def test_registered_objects_are_found_when_a_model_is_loaded(tmp_path):
    register = nd.models.register_keras_serializable

    @register("mine")
    def halved(x):
        return x / 2

    @register("mine", "Distance")
    class Error(metrics.MeanAbsoluteError):
        pass

    objects = nd.models.get_custom_objects()
    try:
        model = nd.Sequential([layers.Input((3,)), layers.Dense(1, halved)])
        model.compile("sgd", "mse", metrics=[Error("error")])
        model.save(tmp_path / "model")
        loaded = nd.models.load(tmp_path / "model")
        assert type(loaded.metrics[1]) is Error
        assert nd.models.model_from_json(model.to_json()).layers[0].activation is halved
    finally:
        objects.clear()
    with pytest.raises(ValueError, match="'mine>halved', which this program does not define"):
        nd.models.load(tmp_path / "model")
    with nd.models.custom_object_scope({"mine>halved": halved, "mine>Distance": Error}):
        nd.models.load(tmp_path / "model")
    assert not objects


class Falling(nd.optimizers.schedules.LearningRateSchedule):
    def __init__(self, first):
        super().__init__()
        vars(self)["first"] = first

    def __call__(self, step):
        return self.first / (step + 1)

    def get_config(self):
        return {"first": self.first}


def test_a_schedule_of_ones_own_is_saved_and_described(tmp_path):
    model = compiled()
    model.compile(nd.optimizers.SGD(Falling(0.5)), "mse")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model")
    loaded = nd.models.load(tmp_path / "model", {"Falling": Falling})
    assert loaded.optimizer.learning_rate(1) == 0.25
    described = nd.optimizers.serialize(model.optimizer)
    made = nd.optimizers.deserialize(described, {"Falling": Falling})
    assert made.learning_rate.first == 0.5
    decay = nd.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    optimizer = nd.optimizers.get(nd.optimizers.serialize(nd.optimizers.Adam(decay)))
    assert optimizer.learning_rate == decay


def test_fit_keeps_its_history_and_validates_after_the_epochs_that_are_given():
    model = compiled()
    lines = callbacks.ProgbarLogger()
    history = model.fit(
        X, Y, epochs=4, verbose=0, validation_data=(X, Y), validation_freq=[1, 4], callbacks=[lines]
    )
    assert model.history is history
    assert history.params == {"epochs": 4, "steps": 1, "verbose": 0}
    assert len(history.history["val_loss"]) == 2


def test_what_follows_a_validation_waits_for_the_epochs_that_have_one(tmp_path):
    log, ends = tmp_path / "log.csv", []
    followers = [
        callbacks.CSVLogger(log),
        callbacks.EarlyStopping(patience=1, min_delta=1e9),
        callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=1e9),
        callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras", save_best_only=True),
        callbacks.LambdaCallback(on_train_end=lambda logs: ends.append(sorted(logs))),
    ]
    options = {"validation_data": (X, Y), "validation_freq": 2, "callbacks": followers}
    history = compiled().fit(X, Y, epochs=8, verbose=0, **options)
    assert history.epoch == [0, 1, 2, 3]
    assert history.history["learning_rate"] == pytest.approx([0.1] * 4)
    assert len(history.history["val_loss"]) == 2
    assert ends == [["learning_rate", "loss", "val_loss"]]
    assert sorted(os.listdir(tmp_path)) == ["2.keras", "4.keras", "log.csv"]
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["val_loss"] == "NA" for row in rows] == [True, False, True, False]
    wrong = callbacks.EarlyStopping("val_lose")
    with pytest.raises(
        ValueError, match="monitors 'val_lose', but the logs have only loss, val_loss"
    ):
        compiled().fit(X, Y, verbose=0, validation_data=(X, Y), callbacks=wrong)


def test_gradients_are_applied_to_the_variables_that_the_optimizer_was_built_for():
    v, optimizer = nd.Variable([1.0, 2.0]), nd.optimizers.SGD(1.0)
    with pytest.raises(ValueError, match=r"pass the variables, or call build"):
        optimizer.apply([np.ones(2)])
    optimizer.build([v])
    optimizer.apply([np.ones(2)])
    assert v.numpy().tolist() == [0.0, 1.0]
