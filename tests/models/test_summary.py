"""The summary of a model names every layer and counts every variable."""

from __future__ import annotations

import re

import numpy as np

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
