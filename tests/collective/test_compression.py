"""The codes for 16-bit wires: rounding, special values, and that a second pass changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.collective.compression import compress, compressed_dtype, decompress

FLOAT32 = np.dtype(np.float32)
NAMES = ["float16", "bfloat16"]


def through(name: str, values: np.ndarray) -> np.ndarray:
    dtype = compressed_dtype(name, FLOAT32)
    assert dtype is not None
    assert dtype.itemsize == 2
    wire = compress(values, np.empty(values.size, dtype))
    return decompress(wire, np.empty(values.size, np.float32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bfloat16_rounds_as_ml_dtypes_does(bits: list[int]) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(through("bfloat16", values), expected)


@pytest.mark.parametrize("name", NAMES)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_a_second_pass_changes_nothing(name: str, values: list[float]) -> None:
    once = through(name, np.array(values, np.float32))
    np.testing.assert_array_equal(through(name, once), once)


@pytest.mark.parametrize(("name", "step"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
@given(value=st.floats(2.0**-10, 60000, width=32))
def test_values_move_by_half_a_step_at_most(name: str, step: float, value: float) -> None:
    (back,) = through(name, np.array([value], np.float32))
    assert abs(float(back) - value) <= step * value


@pytest.mark.parametrize("name", NAMES)
def test_special_values_stay(name: str) -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    assert np.isnan(through(name, bits.view(np.float32))).all()
    special = np.array([0.0, -0.0, np.inf, -np.inf], np.float32)
    back = through(name, special)
    assert back.tobytes() == special.tobytes()


def test_float16_ends_at_infinity_without_a_warning() -> None:
    assert through("float16", np.array([1e6], np.float32)).tolist() == [np.inf]


@pytest.mark.parametrize("dtype", ["float64", "int32", "complex64"])
def test_other_dtypes_are_not_compressed(dtype: str) -> None:
    assert compressed_dtype("float16", np.dtype(dtype)) is None
