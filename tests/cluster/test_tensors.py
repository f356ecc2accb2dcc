"""Tensors come out as they went in, and nothing that is not one comes out at all."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import hypothesis.extra.numpy as arrays_of
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.cluster.wire.tensors import (
    DTYPES,
    PART_BYTES,
    MalformedError,
    decode,
    encode,
    pack,
    parts,
    unpack,
)

KNOWN = [name for name in DTYPES if name != "bfloat16"]
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)
ARRAYS = st.sampled_from(KNOWN).flatmap(lambda name: arrays_of.arrays(name, SHAPES))


def same(one, other):
    """Say whether two arrays are the same to the bit."""
    shapes = one.shape == other.shape and one.dtype == other.dtype
    return shapes and one.tobytes() == other.tobytes()


@given(ARRAYS)
def test_a_tensor_comes_back_as_it_was(array):
    assert same(decode(b"".join(encode(array)), array.nbytes), array)


@given(ARRAYS)
def test_a_tensor_that_lies_otherwise_in_memory_comes_back_as_it_was(array):
    for other in (array.T, array[..., ::2] if array.ndim else array):
        assert same(decode(b"".join(encode(other)), array.nbytes), other)


def test_a_tensor_of_the_other_byte_order_comes_back_in_this_machines():
    array = np.arange(5, dtype=np.dtype("i4").newbyteorder())
    back = decode(b"".join(encode(array)), 100)
    assert back.dtype.isnative
    assert back.tolist() == array.tolist()


def test_bfloat16_travels_where_numpy_knows_it():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    assert same(decode(b"".join(encode(array)), 100), array)


def test_no_data_is_copied_on_the_way():
    array = np.arange(1000.0)
    data = encode(array)[1]
    message = bytearray(b"".join(encode(array)))
    back = decode(message, 10_000)
    message[-8:] = struct.pack("<d", -1.0)
    assert np.shares_memory(np.frombuffer(data), array)
    assert back[-1] == -1.0
    assert not back.flags.writeable


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.array(["2020"], "M8")])
def test_a_dtype_that_is_not_on_the_list_is_not_sent(array):
    with pytest.raises(ValueError, match="can not be sent"):
        encode(array)


@given(ARRAYS, st.data())
def test_a_tensor_that_is_cut_short_is_refused(array, data):
    whole = b"".join(encode(array))
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(MalformedError):
        decode(whole[:length], 1 << 20)


@given(st.lists(ARRAYS, max_size=4), st.binary(max_size=40))
def test_a_message_comes_back_as_it_was(tensors, head):
    back_head, back = unpack(b"".join(pack(head, tensors)), 1 << 20)
    assert back_head.rstrip(b" ") == head.rstrip(b" ")
    assert all(map(same, back, tensors))
    assert len(back) == len(tensors)


@given(st.lists(ARRAYS, max_size=3), st.data())
def test_a_message_that_is_cut_short_or_longer_is_refused(tensors, data):
    whole = b"".join(pack(b"{}", tensors))
    length = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:length], whole + b"x", whole + bytes(8)):
        with pytest.raises(MalformedError):
            unpack(wrong, 1 << 20)


@given(st.lists(ARRAYS, min_size=1, max_size=3), st.data())
def test_damaged_bytes_are_refused_or_give_other_arrays_but_nothing_else(tensors, data):
    whole = bytearray(b"".join(pack(b"{}", tensors)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedError):
        unpack(bytes(whole), 1 << 20)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(junk):
    with pytest.raises(MalformedError):
        unpack(junk, 1000)
    with pytest.raises(MalformedError):
        decode(junk, 1000)


HUGE = 1 << 50


@pytest.mark.parametrize(
    ("code", "nbytes", "shape"),
    [
        (11, HUGE * 8, (HUGE,)),
        (11, 8, (HUGE,)),
        (11, 0, (0, HUGE, HUGE, HUGE, HUGE)),
        (11, 0, (2**63, 0)),
        (11, 8, (2**64 - 1, 2**64 - 1)),
        (200, 8, (1,)),
    ],
)
def test_what_a_header_claims_is_refused_before_memory_is_taken(code, nbytes, shape):
    header = struct.pack("<4sBB2xQ", b"NDT1", code, len(shape), nbytes)
    claim = header + struct.pack(f"<{len(shape)}Q", *shape) + bytes(8)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            decode(claim[: len(claim) - 8 + nbytes] if nbytes < 9 else claim, 1 << 62)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_tensor_above_the_limit_is_refused():
    message = b"".join(encode(np.zeros(100)))
    with pytest.raises(MalformedError, match="limit is 799"):
        decode(message, 799)
    with pytest.raises(MalformedError, match="limit is 799"):
        unpack(b"".join(pack(b"", [np.zeros(100)])), 799)


@given(st.integers(0, 1 << 40))
def test_parts_cover_a_message_and_are_of_about_one_length(nbytes):
    cut = parts(nbytes) if nbytes < (1 << 32) else parts(nbytes >> 10)
    nbytes = nbytes if nbytes < (1 << 32) else nbytes >> 10
    ends = [0, *(part.stop for part in cut)]
    assert [part.start for part in cut] == ends[:-1]
    assert ends[-1] == nbytes
    lengths = [part.stop - part.start for part in cut]
    assert all(0 < length <= PART_BYTES for length in lengths)
    assert len(cut) < 2 or min(lengths) >= PART_BYTES // 2 - 64 * len(cut)
