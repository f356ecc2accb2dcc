"""The summary of a model names every layer and counts every variable."""

from __future__ import annotations

import re

import numpy as np

import ndistribute as nd
from ndistribute.models import Model, Sequential, layers


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
    model = Sequential([layers.Input((256,)), inner])
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
