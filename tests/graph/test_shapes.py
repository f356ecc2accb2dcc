"""What is known of tensors before a run is what the run then gives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute import graph as g
from ndistribute.models import nn

# Functions of tensors (rows, columns) that keep two axes.
STEPS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "broadcast": lambda x: x * np.arange(3.0)[:, None, None],
    "columns": lambda x: np.stack([np.mean(x, -1), np.max(x, -1)], -1),
    "concatenate": lambda x: np.concatenate([x, x], -1),
    "counted": lambda x: np.reshape(x, (np.shape(x)[0], -1)),
    "flat": lambda x: np.reshape(x, (-1,)),
    "mask": lambda x: x[x > 5],
    "matmul": lambda x: np.tanh(x) @ np.tanh(np.swapaxes(x, -1, -2)),
    "nonzero": lambda x: np.argwhere(np.greater(x, 5)),
    "one row": lambda x: x[:1],
    "product": lambda x: x @ np.ones((4, 2), np.float32),
    "rows": lambda x: x[1:],
    "softmax": lambda x: nn.softmax(x, -1),
    "rows to 2": lambda x: x[:2],
    "split": lambda x: np.split(x, 2, -1)[1],
    "squeeze": np.squeeze,
    "sum": lambda x: np.sum(x, axis=-1, keepdims=True),
    "transpose": lambda x: x.T,
    "unique": np.unique,
    "whole": lambda x: np.greater(x, 2).astype(np.int16),
}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), max_size=5),
    st.sampled_from([(None, 4), (4, None), (None, None), (2, 4)]),
    st.integers(1, 9),
)
def test_runs_give_the_shapes_and_dtypes_that_were_known(names, declared, length):
    shape = tuple(length if n is None else n for n in declared)
    fed: Any = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with g.Graph().as_default(), g.Session() as session:
        tensor: Any = g.placeholder(np.float32, declared)
        x, value = tensor, fed
        for name in names:
            if not value.size:  # Of which NumPy warns.
                break
            try:
                value = STEPS[name](value)
            except (ValueError, IndexError):  # Not for values of this shape.
                break
            tensor = STEPS[name](tensor)
        found = np.asarray(session.run(tensor, {x: fed}))
        assert found.shape == value.shape
        if tensor.shape is not None:
            assert len(tensor.shape) == found.ndim
            assert all(n in (None, m) for n, m in zip(tensor.shape, found.shape, strict=True))
        assert tensor.dtype in (None, found.dtype)


def test_lengths_are_known_as_far_as_the_program_says_them():
    with g.Graph().as_default():
        x = g.placeholder(np.float32, (None, 784))
        images = np.reshape(x, (-1, 28, 28, 1))
        convolved = nn.conv2d(images, np.ones((5, 5, 1, 8), np.float32), padding="same")
        y = nn.max_pool2d(convolved, (2, 2), (2, 2))
        assert y.shape == (None, 14, 14, 8)
        assert y.shape[1:].num_elements() == 1568
        assert np.reshape(y, (np.shape(y)[0], -1)).shape == (None, 1568)
        assert g.gradients(np.sum(y), x)[0].shape == (None, 784)
        assert g.identity(y).shape == x.stop_gradient().shape[:1] + y.shape[1:]
        assert g.random_normal(np.shape(x)).shape == (None, 784)
        assert [len(row.shape) for row in np.ones((3, 1)) * x[:1]] == [1, 1, 1]


def test_what_only_a_run_can_tell_stays_unknown():
    with g.Graph().as_default():
        x = g.placeholder(np.float32, (None, 4))
        assert g.placeholder(np.float32).shape is None
        assert x[np.less(x, -1)].shape == np.flatnonzero(x).shape == (None,)
        assert np.argwhere(np.less(x, -1)).shape == (None, 2)
        assert np.unique(x).shape is None
        assert g.py_function(np.sum, [x]).shape is None
        assert (g.py_function(np.sum, [x]) + x).dtype is None
        size = g.placeholder(np.int64, ())
        assert x[size : size + 2].shape == x[size * 4 : size * 4 + 4].shape == (None, 4)
        assert x[:, size:].shape == (None, None)
        assert np.squeeze(g.placeholder(np.float32, (None, 1))).shape is None
        assert np.delete(x, size, axis=1).shape is None
        assert np.reshape(x, (size, -1)).shape is None
        assert np.broadcast_to(x[0], (size, 4)).shape == (None, 4)
        assert g.random_normal(np.stack([size, 3])).shape is None


def test_branches_and_loops_have_what_all_their_values_have():
    with g.Graph().as_default():
        x = g.placeholder(np.float32, (None, 4))
        some = np.sum(x) > 0
        assert g.cond(some, lambda: x + 1, lambda: x).shape == (None, 4)
        assert g.cond(some, lambda: x[:2], lambda: np.ones((3, 4))).shape == (None, 4)
        assert g.cond(some, lambda: x, lambda: np.ones(4)).shape is None
        grown = g.while_loop(
            lambda i, _: np.less(i, 3),
            lambda i, y: (i + 1, np.concatenate([y, y])),
            [np.int64(0), np.ones((1, 4))],
        )
        assert [one.shape for one in grown] == [None, None]
        kept = g.while_loop(
            lambda i, _: np.less(i, 3), lambda i, y: (i + 1, 2 * y), [np.int64(0), x]
        )
        assert [one.shape for one in kept] == [(), (None, 4)]


def test_large_values_take_no_memory():
    with g.Graph().as_default():
        table = g.Variable(g.random_normal([10**9, 64]) * 0.1, name="table")
        ids = g.placeholder(np.int32, (None, 2))
        assert table.shape == (10**9, 64)
        assert table[ids].shape == (None, 2, 64)
        assert np.clip(table, 0, 1).astype(np.float64).shape == (10**9, 64)
        assert np.matmul(table, np.ones((64, 1))).shape is None  # Too large to be tried.


def test_a_fed_value_must_have_the_shape_of_what_it_stands_for(session):
    x = g.placeholder(np.float32, (None, 4))
    doubled = 2 * x
    assert session.run(doubled + 1, {doubled: np.ones((1, 4))}).shape == (1, 4)
    with pytest.raises(ValueError, match=r"shape \(4,\), expected \(None, 4\)"):
        session.run(doubled + 1, {doubled: np.ones(4)})
