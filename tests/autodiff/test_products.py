"""Derivatives of matrix products, in all the shapes that NumPy multiplies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.autodiff.standin import check_gradients, gradients_of

MATMUL = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((6, 1, 2, 3), (5, 3, 4)),
    ((0, 3), (3, 4)),
    ((2, 0), (0, 4)),
    ((5, 0, 3), (3, 2)),
]
DOT = [((), (3,)), ((2, 3), ()), ((), ()), *MATMUL[:7], ((2, 3), (5, 3, 4)), ((6, 2, 3), (5, 3, 4))]
EINSUM = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("ij,jk", (2, 3), (3, 4)),
    ("bij,bjk->bik", (5, 2, 3), (5, 3, 4)),
    ("bqhd,bkhd->bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
    ("i,j->ij", (2,), (3,)),
    ("ij,ij->", (2, 3), (2, 3)),
    ("ij,k->ij", (2, 3), (4,)),
    ("...ij,jk->...ik", (5, 2, 3), (3, 4)),
]


@pytest.mark.parametrize("shapes", MATMUL, ids=str)
def test_matmul(shapes):
    x, y = _arrays(shapes)
    check_gradients(np.matmul, x, y)
    check_gradients(lambda x, y: x @ y, x, y)


@pytest.mark.parametrize("shapes", DOT, ids=str)
def test_dot(shapes):
    x, y = _arrays(shapes)
    check_gradients(np.dot, x, y)
    check_gradients(lambda y: np.dot(x, y), y)
    check_gradients(lambda x: x.dot(y) if np.ndim(x) else np.dot(x, y), x)


@pytest.mark.parametrize(("subscripts", "first", "second"), EINSUM)
def test_einsum(subscripts, first, second):
    check_gradients(lambda x, y: np.einsum(subscripts, x, y), *_arrays((first, second)))


@pytest.mark.parametrize("subscripts", ["ij->ji", "ij->i", "ii->i", "ii", "ij->"])
def test_einsum_of_one(subscripts):
    check_gradients(lambda x: np.einsum(subscripts, x), *_arrays([(3, 3)]))


def test_einsum_of_three():
    shapes = [(2, 3), (3, 4), (4, 5)]
    check_gradients(lambda x, y, z: np.einsum("ij,jk,kl->il", x, y, z), *_arrays(shapes))


@pytest.mark.parametrize("axes", [0, 1, 2, ([1, 0], [0, 1]), (1, 0), ([-1], [-2])], ids=str)
def test_tensordot(axes):
    x, y = _arrays([(3, 3), (3, 3)])
    check_gradients(lambda x, y: np.tensordot(x, y, axes), x, y)


@pytest.mark.parametrize("name", ["outer", "inner", "vdot", "kron"])
def test_products_of_vectors(name):
    check_gradients(getattr(np, name), *_arrays([(3,), (3,)]))


def test_products_of_matrices():
    x, y = _arrays([(2, 3), (4, 3)])
    check_gradients(np.inner, x, y)
    check_gradients(np.outer, x, y)
    check_gradients(np.kron, x, y)


def test_a_broadcast_gradient_meets_blas():
    """The gradient of a sum of views has stride 0 when the user hands it in."""
    x = np.ones((4, 3))
    seed = np.broadcast_to(2.0, (4, 2))
    _, (w,) = gradients_of(lambda w: x @ w, np.ones((3, 2)), output_gradients=seed)
    assert w.tolist() == [[8, 8]] * 3


def test_float32_times_float64_comes_back_in_the_sources_dtype():
    x, y = np.ones((2, 3), np.float32), np.ones((3, 2))
    value, gradients = gradients_of(np.matmul, x, y)
    assert value.dtype == np.float64
    assert [gradient.dtype for gradient in gradients] == [np.float32, np.float64]


def _arrays(shapes):
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape) for shape in shapes]
