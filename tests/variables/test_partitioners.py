"""How many shards a variable has, which rows are where, and what an index needs, against NumPy."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ndistribute.indexed_slices import IndexedSlices
from ndistribute.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Shards,
    joined,
    number_of_shards,
    select_rows,
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


@st.composite
def sharded(draw):
    """Draw an array, how it is cut, and some of its rows."""
    rows = draw(st.integers(1, 40))
    array = np.arange(rows * 2.0).reshape(rows, 2)
    shards = Shards(array.shape, draw(st.integers(1, rows)))
    dtype = draw(st.sampled_from([np.int64, np.uint64]))
    return array, shards, np.array(draw(st.lists(st.integers(0, rows - 1), max_size=12)), dtype)


@st.composite
def indexed(draw):
    """Draw an array and an index of every kind that begins with its rows."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    array = np.arange(np.prod(shape)).reshape(shape)
    numbers = st.lists(st.integers(-shape[0], shape[0] - 1), min_size=1, max_size=6)
    dimensions = draw(st.integers(1, len(shape)))
    kinds = [
        arrays.basic_indices(shape, allow_newaxis=True),
        numbers,
        numbers.map(lambda found: np.array(found, np.int32).reshape(-1, 1)),
        numbers.map(lambda found: (found, Ellipsis)),
        numbers.map(lambda found: (np.array(found), None)),
        arrays.arrays(bool, shape[:dimensions]),
    ]
    if len(shape) > 1:
        kinds += [st.tuples(numbers, st.integers(-shape[1], shape[1] - 1))]
        kinds += [st.tuples(numbers, st.just([0])), st.tuples(st.integers(0, 0), st.just([0, 0]))]
        kinds.append(st.tuples(arrays.arrays(bool, shape[:1]), st.just(slice(0, 1))))
    if len(shape) == 3:
        kinds.append(st.tuples(numbers, st.just(slice(None)), st.just([0])))
    return array, draw(st.one_of(kinds))


@given(sharded())
def test_every_row_is_in_one_shard_and_lengths_are_balanced(drawn):
    array, shards, _ = drawn
    parts = shards.cut(array)
    lengths = [len(part) for part in parts]
    assert [part.shape for part in parts] == [shards.shape_of(k) for k in range(shards.count)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1
    assert np.array_equal(joined(parts), array)


@given(sharded())
def test_rows_are_found_in_their_shards(drawn):
    array, shards, rows = drawn
    parts = shards.cut(array)
    found = np.full((len(rows), 2), np.nan)
    for part, (positions, indices) in zip(parts, shards.locate(rows), strict=True):
        assert indices.dtype == np.int64
        found[positions] = part[indices]
    assert np.array_equal(found, array[rows])


@given(sharded())
def test_gradient_rows_are_cut_like_their_sum(drawn):
    array, shards, rows = drawn
    gradient = IndexedSlices(np.arange(2.0 * len(rows)).reshape(-1, 2), rows, array.shape)
    whole = shards.cut(gradient.to_dense())
    for part, expected in zip(shards.cut(gradient), whole, strict=True):
        assert np.array_equal(part.to_dense(), expected)


@given(indexed())
def test_an_index_of_the_rows_it_needs_gives_what_it_gives_of_all(drawn):
    array, index = drawn
    rows, rest = select_rows(index, array.shape)
    part = array if rows is None else array[rows]
    expected, got = array[index], part[rest]
    assert np.array_equal(got, expected)
    assert np.shape(got) == np.shape(expected)
    assert rows is None or np.array_equal(rows, np.unique(rows))


def test_no_more_rows_are_needed_than_an_index_names():
    for index, rows in (
        (-1, [8]),
        ([5, 2, 5], [2, 5]),
        (slice(7, 2, -2), [3, 5, 7]),
        (slice(20, None), []),
        (np.arange(18).reshape(9, 2) % 9 == 5, [2, 7]),
        (slice(None, None, -1), None),
        ((), None),
        (None, None),
    ):
        found, _ = select_rows(index, (9, 2))
        assert (None if found is None else found.tolist()) == rows
