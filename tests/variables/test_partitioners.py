"""Partitioners: how many shards a variable of some shape has."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Shards,
    number_of_shards,
)

SHAPES = st.lists(st.integers(0, 70), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from([np.dtype(name) for name in ("int8", "float32", "complex128")])
SIZES = st.integers(1, 5000)
FLOAT32 = np.dtype(np.float32)


def shard_bytes(partitioner, shape, dtype):
    """Return the size of each shard of a variable."""
    shards = Shards(shape, number_of_shards(partitioner, shape, dtype))
    return [prod(shards.shape_of(k)) * dtype.itemsize for k in range(shards.count)]


@given(SHAPES, DTYPES, SIZES, st.integers(1, 100))
def test_no_shard_is_below_the_least_size_but_one_more_would_be(shape, dtype, least, most):
    sizes = shard_bytes(MinSizePartitioner(least, most), shape, dtype)
    count = len(sizes)
    assert count <= most
    assert count == 1 or min(sizes) >= least
    if prod(shape) and count < min(most, shape[0]):
        assert prod(Shards(shape, count + 1).shape_of(count)) * dtype.itemsize < least


@given(SHAPES, DTYPES, SIZES, st.none() | st.integers(1, 4))
def test_no_shard_is_above_the_greatest_size_but_of_one_less_would_be(shape, dtype, most, shards):
    sizes = shard_bytes(MaxSizePartitioner(most, shards), shape, dtype)
    count = len(sizes)
    assert count <= (shards or count)
    if shards is None:
        assert max(sizes) <= max(most, prod(shape[1:]) * dtype.itemsize)
    if count > 1:
        assert prod(Shards(shape, count - 1).shape_of(0)) * dtype.itemsize > most


@given(SHAPES, st.integers(1, 9))
def test_a_fixed_number_of_shards(shape, shards):
    expected = min(shards, shape[0]) if prod(shape) else 1
    assert number_of_shards(FixedShardsPartitioner(shards), shape, FLOAT32) == expected


def test_what_has_no_axis_or_no_element_is_left_whole():
    for partitioner in (FixedShardsPartitioner(3), MinSizePartitioner(1, 3), MaxSizePartitioner(1)):
        for shape in ((), (0,), (0, 4), (4, 0)):
            assert number_of_shards(partitioner, shape, FLOAT32) == 1
            assert len(partitioner(shape, FLOAT32)) == len(shape)


def test_any_function_is_a_partitioner():
    assert number_of_shards(lambda shape, dtype: (np.int64(4), 1), (8, 2), FLOAT32) == 4
    assert number_of_shards(None, (8, 2), FLOAT32) == 1
    assert MinSizePartitioner()((1 << 20, 4), "float32") == [1, 1]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        *((answer, "for each axis") for answer in (None, 2, [2], [2, 1, 1], [0, 1], [2.0, 1])),
        *((answer, "only the first axis") for answer in ([1, 2], [2, 2], [9, 1])),
    ],
)
def test_a_partitioner_that_splits_otherwise_is_refused(answer, says):
    with pytest.raises(ValueError, match=says):
        number_of_shards(lambda shape, dtype: answer, (8, 2), FLOAT32)


def test_numbers_below_one_are_refused():
    for make, numbers in (
        (FixedShardsPartitioner, (0,)),
        (MinSizePartitioner, (1, 0)),
        (MaxSizePartitioner, (0,)),
        (MaxSizePartitioner, (1, -1)),
    ):
        with pytest.raises(ValueError, match="must be 1 or more"):
            make(*numbers)
