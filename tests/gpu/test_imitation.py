"""What of CuPy the package builds on; the imitation and real GPUs must both keep it."""

import sys

import numpy as np
import pytest

from tests.gpu.imitation.world import RaceError
from tests.gpu.placing import need


def test_an_array_of_the_gpu_mixes_with_none_of_the_host(cupy):
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


def test_what_has_no_axes_is_an_array_all_the_same(cupy):
    x = cupy.arange(6.0).reshape(2, 3)
    for number in (x[1, 2], x.sum(), np.sum(x), x.max(), np.exp(x[0, 0]), x[0, 0] + 1, x.sum()[()]):
        assert type(number) is cupy.ndarray
        assert number.shape == ()
    assert float(x.sum()) == 15.0
    assert x[1, 2].item() == 5.0
    assert bool(x[0, 1] == 1)


def test_views_share_memory_and_hold_the_array_that_owns_it(cupy):
    x = cupy.zeros(6)
    alone = sys.getrefcount(x)
    view = x.view().reshape(2, 3)[1:].T
    assert view.base is x
    assert sys.getrefcount(x) == alone + 1
    view[...] = 4
    np.testing.assert_array_equal(x.get(), [0, 0, 0, 4, 4, 4])
    assert x.base is None
    assert (x + 1).base is None


def test_arrays_are_made_on_the_current_device(cupy):
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


def test_a_stream_belongs_to_a_device(cupy):
    need(cupy, 2)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert cupy.cuda.get_current_stream().ptr == stream.ptr
        with cupy.cuda.Device(1):
            assert cupy.cuda.get_current_stream().ptr != stream.ptr
    with cupy.cuda.Device(1), pytest.raises(RuntimeError, match="device"), stream:
        pass


def test_the_imitation_finds_unordered_streams_and_arrays_of_other_devices(kind, cupy):
    """All other tests count on it."""
    if kind == "real":
        pytest.skip("a GPU does not say so")
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with one:
        x = cupy.ones(10)
    with two:
        with pytest.raises(RaceError, match="read"):
            x + 1
        with pytest.raises(RaceError, match="write"):
            x[...] = 2
        one.synchronize()
        x[...] = x + 1
    with cupy.cuda.Device(1), pytest.raises(ValueError, match="current device"):
        x + 1
