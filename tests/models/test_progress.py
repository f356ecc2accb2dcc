"""What `fit` shows, a bar in a terminal and lines elsewhere; what the summary of a model names."""

import contextlib
import io
import re
import sys

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Model, Sequential, layers
from ndistribute.models.callbacks import callback
from ndistribute.models.metrics import Metric

X, Y = np.ones((12, 3), np.float32), np.ones((12, 1), np.float32)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_by_fit(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, **options: object) -> str:
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("COLUMNS", "80")
    model = Sequential([layers.Dense(1, kernel_initializer="zeros")])
    model.compile("sgd", "mse", metrics=["mean_absolute_error"])
    model.fit(X, Y, batch_size=4, epochs=2, **options)
    return stderr.getvalue()


def test_a_terminal_shows_a_bar_that_becomes_a_line_with_all_metrics(monkeypatch):
    pytest.importorskip("tqdm")
    said = shown_by_fit(monkeypatch, Terminal(), validation_data=(X, Y))
    first, wrapped, second, *_ = said.split("\n")
    assert "Epoch 1/2 - 0/3 |          | 00:00<?" in first
    assert re.search(r"Epoch 1/2 - 3/3 \|##########\| \d+(\.\d s| ms) - ", first.split("\r")[-1])
    assert wrapped.startswith("    - val_loss: ")
    assert "Epoch 2/2 - 3/3 |##########| " in second.split("\r")[-1]
    assert all(len(drawn) <= 80 for line in said.split("\n") for drawn in line.split("\r"))


def test_a_dataset_of_unknown_length_has_a_counter(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stderr", Terminal())
    data = nd.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(4)
    model = Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(data)
    assert re.search(r"Epoch 1/1 - 3 steps \d+(\.\d s| ms) - loss: ", sys.stderr.getvalue())


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_other_output_gets_a_line_an_epoch(monkeypatch, verbose):
    first, second, end = shown_by_fit(monkeypatch, io.StringIO(), verbose=verbose).split("\n")
    assert re.match(r"Epoch 1/2 - \d+(\.\d s| ms) - loss: ", first)
    assert " - mean_absolute_error: " in second
    assert not end


def test_lines_end_between_metrics_in_the_terminal_of_a_launcher(monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_COLUMNS", "70")
    said = shown_by_fit(monkeypatch, io.StringIO(), validation_data=(X, Y))
    first, wrapped, second, _, _ = said.split("\n")
    assert first.startswith("Epoch 1/2 - ")
    assert wrapped.startswith("    - val_loss: ")
    assert " - val_mean_absolute_error: " in wrapped
    assert second.startswith("Epoch 2/2 - ")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (100, "Epoch 1/2 - 5/16 |###1      | 00:00<? - loss: 5.1134e-05 - {maximum}: 0.2500"),
        (70, "Epoch 1/2 - 5/16 |##1    | 00:00<? - loss: 5.1134e-05"),
        (50, "Epoch 1/2 - 5/16 |6 | 00:00<? - loss: 5.1134e-05"),
        (40, "Epoch 1/2 - 5/16 |3| 00:00<?"),
        (20, "Epoch 1/2"),
        (5, "Epoch"),
    ],
)
def test_a_running_bar_shows_whole_metrics_only(columns, shown):
    pytest.importorskip("tqdm")
    logs = {"loss": 5.1134e-05, "{maximum}": 0.25, "metric_with_a_longer_name": 1.0}
    form = callback._format("{elapsed}<{remaining}", 16, columns, logs)
    with contextlib.closing(callback._bar("Epoch 1/2", 16, 5)) as bar:
        parts = {**bar.format_dict, "bar_format": form, "ncols": columns, "ascii": True}
        assert bar.format_meter(**parts) == shown


def test_a_width_that_is_no_number_is_an_error_before_training(monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_COLUMNS", "wide")
    with pytest.raises(ValueError, match="NDISTRIBUTE_COLUMNS must be a number of columns, got 'w"):
        shown_by_fit(monkeypatch, io.StringIO())


def test_no_bar_reads_metrics_at_no_step(monkeypatch):
    monkeypatch.setattr(Metric, "local_result", lambda self: pytest.fail("read"))
    assert shown_by_fit(monkeypatch, Terminal(), verbose=0) == ""
    shown_by_fit(monkeypatch, io.StringIO())


@pytest.mark.parametrize(("verbose", "said"), [(0, ""), (1, "Predicted 3 batches.\n")])
def test_predict_shows_a_line_when_asked(monkeypatch, verbose, said):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    Sequential([layers.Dense(1)]).predict(X, batch_size=4, verbose=verbose)
    assert sys.stderr.getvalue() == said


class Nested(Model):
    """Has layers in a list and in a model that it uses twice, and a variable of its own."""

    def __init__(self):
        super().__init__(name="nested")
        self.inner = Sequential([layers.Dense(4), layers.Dense(4)])
        self.blocks = [self.inner, layers.Dense(4)]
        self.last = layers.Dense(2, trainable=False)

    def build(self, input_shape):
        self.factor = self.add_weight("factor", (3,))

    def call(self, x):
        for block in self.blocks:
            x = block(x * self.factor[0])
        return self.last(self.inner(x))


def test_rows_add_up_to_all_parameters():
    model = Nested()
    model(np.zeros((1, 4), np.float32))
    *rows, rule, total = model.summary().splitlines()[3:]
    counts = [int(row.split()[-1]) for row in rows]
    assert counts == [40, 20, 10, 3]
    assert "  2 x (4, 4), 2 x (4,)  " in rows[0]
    assert set(rule) == {"-"}
    assert total == f"Parameters: {sum(counts)}, to train: {sum(counts) - 10}"


def test_layers_that_are_not_built_say_so():
    text = Sequential([layers.Dense(4), layers.Flatten()]).summary()
    assert len(re.findall(r"not built +\?", text)) == 2
    assert text.endswith("created when the model is first called.")


def test_many_shapes_are_wrapped_so_that_a_table_fits_a_terminal():
    widths = [64, 16, 128, 8, 32, 4]
    inner = Sequential([layers.Dense(width) for width in widths], name="inner")
    model = Sequential([inner])
    model.build((None, 256))
    _, header, rule, *rows, last_rule, _ = model.summary().splitlines()
    assert len(header) == len(rule) == len(last_rule) <= 80
    assert [len(row) for row in rows if "inner" in row] == [len(rule)]
    shapes = " ".join(row.split("(Sequential)")[-1].strip() for row in rows if "Input" not in row)
    for variable in inner.variables:
        assert str(variable.shape) in shapes


def test_names_of_layers_start_anew_in_each_strategy_and_paths_depend_on_the_model_alone():
    def names():
        with nd.OneDeviceStrategy("cpu:0").scope():
            model = Sequential([layers.Dense(2, input_shape=(2,)), layers.Dense(2)])
        return model.summary(), list(model.named_variables())

    first = names()
    Sequential([layers.Dense(2, input_shape=(2,))])
    assert names() == first
    assert "dense_1 (Dense)" in first[0]
    assert first[1] == [f"layers/{k}/{name}" for k in range(2) for name in ("kernel", "bias")]
