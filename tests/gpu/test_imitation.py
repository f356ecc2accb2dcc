"""Claims about CuPy that the package builds on, which the imitation and real GPUs must both keep.

And claims about the imitation alone: that it notices what a GPU would silently get wrong.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tests.gpu.imitation.clock import RaceError, current_world
from tests.gpu.placing import need


def test_an_array_of_the_gpu_mixes_with_none_of_the_host(cupy: Any) -> None:
    x, host = cupy.ones((2, 2)), np.ones((2, 2))
    for mixed in (
        lambda: x + host,
        lambda: host * x,
        lambda: np.add(x, host),
        lambda: np.matmul(x, host),
        lambda: np.concatenate([x, host]),
        lambda: x.__iadd__(host),
        lambda: x * np.asarray(2.0),
        lambda: np.asarray(x),
    ):
        with pytest.raises(TypeError):
            mixed()
    with pytest.raises(ValueError, match="non-scalar"):
        x[...] = host
    with pytest.raises((TypeError, IndexError)):
        host[cupy.zeros(1, int)]
    x[cupy.arange(2)] = host * 3  # An index by numbers takes host arrays, and carries them over.
    x[np.array([0])] = 2
    np.testing.assert_array_equal(x.get(), [[2, 2], [3, 3]])


def test_numbers_mix_with_arrays_and_keep_their_dtype(cupy: Any) -> None:
    x = cupy.ones(3, np.float32)
    for mixed in (x * 2, 2.5 + x, x / np.float32(2), -(x**2), np.maximum(x, 0), np.float32(1) - x):
        assert type(mixed) is cupy.ndarray
        assert mixed.dtype == np.float32
    assert (x > 0.5).dtype == bool


def test_what_has_no_axes_is_an_array_all_the_same(cupy: Any) -> None:
    x = cupy.arange(6.0).reshape(2, 3)
    for number in (x[1, 2], x.sum(), np.sum(x), x.max(), np.exp(x[0, 0]), x[0, 0] + 1, x.sum()[()]):
        assert type(number) is cupy.ndarray
        assert number.shape == ()
    assert float(x.sum()) == 15.0
    assert x[1, 2].item() == 5.0
    assert bool(x[0, 1] == 1)


def test_numpy_s_functions_lead_to_cupy_s(cupy: Any) -> None:
    x = cupy.arange(6.0).reshape(2, 3)
    for result in (
        np.sum(x, axis=0, keepdims=True),
        np.where(np.greater(x, 1), x, 0),
        np.concatenate([x, x], 1),
        np.zeros_like(x, dtype=np.float32, shape=(4,)),
        np.moveaxis(x, 0, 1),
        np.take_along_axis(x, np.argsort(x, axis=1, kind="stable"), 1),
        np.add.reduce(x),
        np.einsum("ij,kj->ik", x, x, optimize=True),
    ):
        assert type(result) is cupy.ndarray
    for missing in (lambda: np.maximum.reduce(x), lambda: np.reshape(x, shape=(3, 2))):
        with pytest.raises((NotImplementedError, TypeError)):
            missing()


def test_views_share_memory_and_hold_the_array_that_owns_it(cupy: Any) -> None:
    x = cupy.zeros(6)
    alone = sys.getrefcount(x)
    view = x.view().reshape(2, 3)[1:].T
    assert view.base is x
    assert sys.getrefcount(x) == alone + 1
    view[...] = 4
    np.testing.assert_array_equal(x.get(), [0, 0, 0, 4, 4, 4])
    assert x.base is None
    assert (x + 1).base is None


def test_some_dtypes_have_no_atomic_addition(cupy: Any) -> None:
    """In CuPy 13; newer ones add 64-bit integers too, so the package uses none for these."""
    x = cupy.zeros(3)
    cupy.add.at(x, cupy.array([1, 1]), cupy.array([2.0, 3.0]))
    np.testing.assert_array_equal(x.get(), [0, 5, 0])
    with pytest.raises(TypeError):
        cupy.subtract.at(x, cupy.array([1]), cupy.array([2.0]))


def test_arrays_are_made_on_the_current_device(cupy: Any) -> None:
    need(cupy, 2)
    with cupy.cuda.Device(1):
        there = cupy.ones(3)
        with cupy.cuda.Device(0):
            assert cupy.zeros(1).device.id == 0
        assert cupy.cuda.runtime.getDevice() == 1
        cupy.cuda.get_current_stream().synchronize()
    assert there.device.id == there.view().device.id == 1
    assert there.copy().device.id == 0  # The copy is here.
    np.testing.assert_array_equal(there.get(), np.ones(3))


def test_a_stream_belongs_to_a_device(cupy: Any) -> None:
    need(cupy, 2)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert cupy.cuda.get_current_stream().ptr == stream.ptr
        with cupy.cuda.Device(1):
            assert cupy.cuda.get_current_stream().ptr != stream.ptr
    with cupy.cuda.Device(1), pytest.raises(RuntimeError, match="device"), stream:
        pass


@pytest.fixture
def imitated(kind: str, cupy: Any) -> Any:
    """CuPy, imitated; the test is not for the real one."""
    if kind == "real":
        pytest.skip("a GPU does not say so")
    return cupy


def test_another_device_s_array_is_refused(imitated: Any) -> None:
    with imitated.cuda.Device(1):
        there = imitated.ones(3)
    touches: list[Any] = [
        lambda: there + 1,
        lambda: imitated.ones(3) + there,
        lambda: there.fill(0),
    ]
    for touch in touches:
        with pytest.raises(ValueError, match="current device"):
            touch()


def test_unordered_streams_are_found(imitated: Any) -> None:
    one, two = (imitated.cuda.Stream(non_blocking=True) for _ in range(2))
    with one:
        x = imitated.ones(10)
    with two:
        with pytest.raises(RaceError, match="read"):
            x + 1
        with pytest.raises(RaceError, match="write"):
            x[...] = 2
        one.synchronize()
        total = x + 1
        x[...] = 2
    with one, pytest.raises(RaceError, match="write"):
        x[3] = 1
    with one:
        one.wait_event(two.record())
        x[3] = float(total[0])


def test_halves_of_an_array_may_be_written_at_once(imitated: Any) -> None:
    x = imitated.zeros(10)
    imitated.cuda.Device(0).synchronize()
    for half in (x[:5], x[5:]):
        with imitated.cuda.Stream(non_blocking=True):
            half[...] = 1
    imitated.cuda.Device(0).synchronize()
    assert float(x.sum()) == 10.0


def test_pinned_memory_that_is_given_back_early_is_noticed(imitated: Any) -> None:
    for wait in (False, True):
        staged = np.frombuffer(imitated.cuda.alloc_pinned_memory(24), float)
        imitated.empty(3).set(staged)
        if wait:
            imitated.cuda.get_current_stream().synchronize()
        del staged
        faults = current_world().faults
        assert len(faults) == (0 if wait else 1)
        faults.clear()


def test_fresh_memory_is_not_clean(imitated: Any) -> None:
    assert not np.any(imitated.empty(3).get() == 0)
    with pytest.raises(AssertionError, match="twice"):
        imitated.zeros(3)[imitated.array([1, 1])] = imitated.ones(2)
