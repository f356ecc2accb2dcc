"""What `fit` shows: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import Sequential, layers
from ndistribute.models.metrics import Metric

X, Y = np.ones((12, 3), np.float32), np.ones((12, 1), np.float32)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_by_fit(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, **options: object) -> str:
    monkeypatch.setattr("sys.stderr", stderr)
    model = Sequential([layers.Dense(1, kernel_initializer="zeros")])
    model.compile("sgd", "mse", metrics=["mean_absolute_error"])
    model.fit(X, Y, batch_size=4, epochs=2, **options)
    return stderr.getvalue()


def test_a_terminal_shows_a_bar_that_becomes_a_line_with_all_metrics(monkeypatch):
    pytest.importorskip("tqdm")
    said = shown_by_fit(monkeypatch, Terminal(), validation_data=(X, Y))
    first, wrapped, second, *_ = said.split("\n")
    assert "Epoch 1/2 - 0/3 |          | 00:00<?" in first
    assert "Epoch 1/2 - 3/3 |##########| 0." in first.split("\r")[-1]
    assert wrapped.startswith("    - val_loss: ")
    assert "Epoch 2/2 - 3/3 |##########| 0." in second.split("\r")[-1]
    assert all(len(drawn) <= 80 for line in said.split("\n") for drawn in line.split("\r"))


def test_a_dataset_of_unknown_length_has_a_counter(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stderr", Terminal())
    data = nd.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(4)
    model = Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(data)
    assert "Epoch 1/1 - 3 steps 0." in sys.stderr.getvalue()


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_other_output_gets_a_line_an_epoch(monkeypatch, verbose):
    first, second, end = shown_by_fit(monkeypatch, io.StringIO(), verbose=verbose).split("\n")
    assert first.startswith("Epoch 1/2 - 0.")
    assert "s - loss: " in first
    assert " - mean_absolute_error: " in second
    assert not end


def test_no_bar_reads_metrics_at_no_step(monkeypatch):
    monkeypatch.setattr(Metric, "local_result", lambda self: pytest.fail("read"))
    assert shown_by_fit(monkeypatch, Terminal(), verbose=0) == ""
    shown_by_fit(monkeypatch, io.StringIO())


@pytest.mark.parametrize(("verbose", "said"), [(0, ""), (1, "Predicted 3 batches.\n")])
def test_predict_shows_a_line_when_asked(monkeypatch, verbose, said):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    Sequential([layers.Dense(1)]).predict(X, batch_size=4, verbose=verbose)
    assert sys.stderr.getvalue() == said
