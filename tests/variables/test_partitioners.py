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
    number_of_shards,
)
from ndistribute.variables.sharding import Shards

SHAPES = st.lists(st.integers(0, 70), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from([np.dtype(name) for name in ("int8", "float16", "float32", "complex128")])
SIZES = st.integers(1, 5000)
FLOAT32 = np.dtype(np.float32)


def shard_bytes(partitioner, shape, dtype):
    """Return the size of each shard of a variable."""
    shards = Shards(shape, number_of_shards(partitioner, shape, dtype))
    return [prod(shards.shape_of(k)) * dtype.itemsize for k in range(shards.count)]


@given(SHAPES, DTYPES, SIZES, st.integers(1, 9))
def test_no_shard_is_below_the_least_size(shape, dtype, least, most):
    sizes = shard_bytes(MinSizePartitioner(least, most), shape, dtype)
    assert len(sizes) <= most
    assert len(sizes) == 1 or min(sizes) >= least


@given(SHAPES.filter(prod), DTYPES, SIZES)
def test_one_more_shard_would_be_below_the_least_size(shape, dtype, least):
    count = len(shard_bytes(MinSizePartitioner(least, 100), shape, dtype))
    if count < shape[0]:
        shards = Shards(shape, count + 1)
        assert prod(shards.shape_of(count)) * dtype.itemsize < least


@given(SHAPES, DTYPES, SIZES)
def test_no_shard_is_above_the_greatest_size(shape, dtype, most):
    sizes = shard_bytes(MaxSizePartitioner(most), shape, dtype)
    row = prod(shape[1:]) * dtype.itemsize
    assert max(sizes) <= max(most, row)
    if len(sizes) > 1:
        fewer = Shards(shape, len(sizes) - 1)
        assert prod(fewer.shape_of(0)) * dtype.itemsize > most


@given(SHAPES, DTYPES, SIZES, st.integers(1, 4))
def test_there_are_no_more_shards_than_allowed(shape, dtype, most, shards):
    assert len(shard_bytes(MaxSizePartitioner(most, shards), shape, dtype)) <= shards


@given(SHAPES, st.integers(1, 9))
def test_a_fixed_number_of_shards(shape, shards):
    expected = min(shards, shape[0]) if prod(shape) else 1
    assert number_of_shards(FixedShardsPartitioner(shards), shape, FLOAT32) == expected


@pytest.mark.parametrize(
    "partitioner",
    [FixedShardsPartitioner(3), MinSizePartitioner(1, 3), MaxSizePartitioner(1)],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0)])
def test_what_has_no_axis_or_no_element_is_left_whole(partitioner, shape):
    assert number_of_shards(partitioner, shape, FLOAT32) == 1
    assert len(partitioner(shape, FLOAT32)) == len(shape)


def test_the_least_size_allows_one_shard_unless_more_are_asked_for():
    assert MinSizePartitioner()((1 << 20, 4), "float32") == [1, 1]
    assert MinSizePartitioner(max_shards=3)((1 << 20, 4), "float32") == [3, 1]


def test_any_function_is_a_partitioner():
    assert number_of_shards(lambda shape, dtype: (np.int64(4), 1), (8, 2), FLOAT32) == 4
    assert number_of_shards(None, (8, 2), FLOAT32) == 1


@pytest.mark.parametrize("answer", [None, 2, [2], [2, 1, 1], [0, 1], [-1, 1], [2.0, 1], "21"])
def test_a_partitioner_that_returns_no_number_for_each_axis_is_refused(answer):
    with pytest.raises(ValueError, match="for each axis"):
        number_of_shards(lambda shape, dtype: answer, (8, 2), FLOAT32)


@pytest.mark.parametrize("answer", [[1, 2], [2, 2], [9, 1]])
def test_only_the_first_axis_is_cut(answer):
    with pytest.raises(ValueError, match="only the first axis"):
        number_of_shards(lambda shape, dtype: answer, (8, 2), FLOAT32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedShardsPartitioner(0),
        lambda: MinSizePartitioner(0),
        lambda: MinSizePartitioner(1, max_shards=0),
        lambda: MaxSizePartitioner(0),
        lambda: MaxSizePartitioner(1, max_shards=-1),
    ],
)
def test_numbers_below_one_are_refused(make):
    with pytest.raises(ValueError, match="must be 1 or more"):
        make()
