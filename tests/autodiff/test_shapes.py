"""Derivatives of functions that move elements about."""

from __future__ import annotations

import numpy as np
import pytest

from tests.autodiff.standin import check_gradients

ONE = {
    "reshape": lambda x: np.reshape(x, (4, 6)),
    "reshape_method": lambda x: x.reshape(-1, 3) * x.reshape((8, 3)),
    "reshape_by_column": lambda x: np.reshape(x, (6, 4), order="F") + x.reshape(6, 4, order="F"),
    "ravel": lambda x: np.ravel(x) + x.ravel() + x.flatten() + np.ravel(x, order="F"),
    "transpose": np.transpose,
    "transpose_axes": lambda x: np.transpose(x, (1, 2, 0)) * x.transpose(1, 2, 0),
    "transpose_axes_from_the_end": lambda x: x.transpose((-1, 0, -2)),
    "T": lambda x: x.T + x.transpose(),
    "swapaxes": lambda x: np.swapaxes(x, 0, -1) + x.swapaxes(0, 2),
    "moveaxis": lambda x: np.moveaxis(x, 0, -1),
    "moveaxes": lambda x: np.moveaxis(x, (0, 1), (2, 0)),
    "rollaxis": lambda x: np.rollaxis(x, 2),
    "expand_dims": lambda x: np.expand_dims(x, (0, 2)),
    "squeeze": lambda x: np.squeeze(x[:1]) + x[:1].squeeze(0),
    "broadcast_to": lambda x: np.broadcast_to(x[:, :1], (5, 2, 3, 4)),
    "broadcast_arrays": lambda x: np.broadcast_arrays(x, x[:, :1])[1],
    "atleast_1d": np.atleast_1d,
    "atleast_2d": lambda x: np.atleast_2d(x[0, 0]),
    "atleast_3d": lambda x: np.atleast_3d(x[0]),
    "flip": np.flip,
    "flip_axis": lambda x: np.flip(x, 1) + np.flip(x, (0, 2)) + np.flipud(x) + np.fliplr(x),
    "rot90": lambda x: np.rot90(x, 1, (1, 2)),
    "roll": lambda x: np.roll(x, 3) + np.roll(x, -1, 1) + np.roll(x, (1, 2), (0, 2)),
    "repeat": lambda x: np.repeat(x, 3),
    "repeat_axis": lambda x: np.repeat(x, 2, axis=1) + x.repeat(2, axis=-2),
    "tile": lambda x: np.tile(x, 2),
    "tile_axes": lambda x: np.tile(x, (2, 1, 3)),
    "tile_more_axes": lambda x: np.tile(x, (2, 1, 1, 2)),
    "tile_a_vector": lambda x: np.tile(x[0, 0], (3, 2)),
    "pad": lambda x: np.pad(x, 1),
    "pad_axes": lambda x: np.pad(x, ((0, 1), (2, 0), (1, 1))),
    "pad_both": lambda x: np.pad(x, (1, 2), mode="constant", constant_values=3.0),
    "tril": lambda x: np.tril(x) + np.triu(x, 1) + np.tril(x, k=-1),
    "diagonal": lambda x: np.diagonal(x, 1, 1, 2) * x.diagonal(1, axis1=1, axis2=2),
    "diagonal_below": lambda x: np.diagonal(x, -1, 0, 2),
    "diag_of_a_vector": lambda x: np.diag(x[0, 0], 1),
    "diag_of_a_matrix": lambda x: np.diag(x[0], 1) * np.diag(x[0], -1)[0],
    "trace": lambda x: np.trace(x, 1, 1, 2) + x.trace(offset=1, axis1=1, axis2=2),
    "split": lambda x: np.concatenate(np.split(x * x, 3, axis=1)[1:], axis=1),
    "split_at": lambda x: np.split(x * x, [1, 3], axis=-1)[1],
    "array_split": lambda x: np.array_split(x, 3, axis=2)[0] * 2,
    "hsplit": lambda x: np.hsplit(x, 3)[1] * np.hsplit(x, 3)[2],
    "vsplit": lambda x: np.vsplit(x, 2)[1] * np.vsplit(x, 2)[0],
    "dsplit": lambda x: np.dsplit(x, 2)[1],
    "iteration": lambda x: sum(row * k for k, row in enumerate(x)),
    "unpacking": lambda x: np.multiply(*x),
}
SEVERAL = {
    "concatenate": lambda x, y: np.concatenate([x, y]),
    "concatenate_axis": lambda x, y: np.concatenate((x, y, x), axis=-1),
    "concatenate_flat": lambda x, y: np.concatenate([x, y], axis=None),
    "concatenate_plain": lambda x, y: np.concatenate([np.ones((1, 3)), x, np.zeros((1, 3)), y]),
    "stack": lambda x, y: np.stack([x, y]) + np.stack((y, x), axis=0),
    "stack_axis": lambda x, y: np.stack([x, y, x], axis=-1),
    "vstack": lambda x, y: np.vstack([x, y, y[0]]),
    "hstack": lambda x, y: np.hstack([x, y]),
    "hstack_vectors": lambda x, y: np.hstack([x[0], y[1], 2.0]),
    "dstack": lambda x, y: np.dstack([x, y]),
    "column_stack": lambda x, y: np.column_stack([x[:, 0], y]),
    "append": lambda x, y: np.append(x, y) * 2,
    "append_axis": lambda x, y: np.append(x, y, axis=1),
    "a_list_of_numbers": lambda x, y: np.stack([x.sum(), y[0, 0], 3.0]),
}


@pytest.mark.parametrize("name", ONE)
def test_one(name):
    check_gradients(ONE[name], np.random.default_rng(0).normal(size=(2, 3, 4)))


@pytest.mark.parametrize("name", SEVERAL)
def test_several(name):
    check_gradients(SEVERAL[name], *np.random.default_rng(0).normal(size=(2, 2, 3)))


def test_empty_and_numbers():
    check_gradients(lambda x: np.reshape(x, (3, 0)), np.zeros((0, 3)))
    check_gradients(lambda x: np.concatenate([x, x]), np.zeros((0, 3)))
    check_gradients(lambda x: np.reshape(x, (1, 1)), np.float64(3))
    check_gradients(lambda x: np.broadcast_to(x, (0, 3)), np.float64(3))
    check_gradients(lambda x: np.stack([x, x]), np.float64(3))
