"""Functions that NumPy got after 1.26, the oldest version that is supported."""

from __future__ import annotations

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape
from tests.autodiff.standin import check_gradients

if not hasattr(np, "matvec"):
    pytest.skip("this NumPy is older than 2.2", allow_module_level=True)

FUNCTIONS = {
    "astype": lambda x: np.astype(x, np.float64) * 2,
    "mT": lambda x: x.mT,
    "matrix_transpose": lambda x: np.matrix_transpose(x) + np.linalg.matrix_transpose(x),
    "unstack": lambda x: np.unstack(x, axis=1)[0],
    "concat": lambda x: np.concat([x, x]),
    "permute_dims": lambda x: np.permute_dims(x, (1, 0)),
    "cumulative_sum": lambda x: np.cumulative_sum(x, axis=1),
    "correction": lambda x: np.var(x, 1, correction=1) + np.std(x, 1, correction=1),
    "clip": lambda x: np.clip(x, min=0.9, max=1.3) + x.clip(min=0.9, max=1.3),
    "vecdot": lambda x: np.vecdot(x, x + 1) + np.linalg.vecdot(x, x * x),
    "matvec": lambda x: np.matvec(x, x[:, 0]) * np.vecmat(x[0], x),
    "linalg": lambda x: np.linalg.matmul(x, x) + np.linalg.outer(x[0], x[1]),
    "tensordot": lambda x: np.linalg.tensordot(x, x, axes=1),
    "svdvals": np.linalg.svdvals,
    "norms": lambda x: np.linalg.matrix_norm(x) + np.linalg.vector_norm(x, axis=1, ord=1),
    "norm_of_all": np.linalg.vector_norm,
    "pow": lambda x: np.pow(x, 2) + np.acos(x / 3) + np.atan2(x, 2.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    check_gradients(FUNCTIONS[name], np.random.default_rng(0).uniform(0.5, 2, (3, 3)), rtol=1e-5)


def test_the_device_of_the_array():
    with GradientTape() as tape:
        assert tape.watch(np.ones(2)).device == "cpu"
