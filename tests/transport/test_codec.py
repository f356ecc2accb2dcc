"""What is encoded comes back the same; what is not, is a `MalformedError` and never worse."""

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from ndistribute.dtypes import PORTABLE
from ndistribute.transport.codec import Array, Decoder, MalformedError, Record, encode


class Leaf(Record, frozen=True):
    name: str
    value: Array | None
    notes: dict[str, int | float | str] = {}  # noqa: RUF012 (msgspec copies it)


class Branch(Record, frozen=True):
    leaves: tuple[Leaf, ...]
    blob: bytes
    flag: bool = False


KINDS: Decoder[Leaf | Branch] = Decoder(Leaf | Branch)

some_arrays = st.sampled_from(sorted(PORTABLE - {"bfloat16"})).flatmap(
    lambda name: arrays_of.arrays(name, arrays_of.array_shapes(min_dims=0, min_side=0, max_side=4))
)
some_notes = st.integers(-(2**63), 2**63 - 1) | st.floats()
some_leaves = st.builds(
    Leaf,
    st.text(max_size=5),
    st.none() | some_arrays,
    st.dictionaries(st.text(max_size=3), some_notes, max_size=3),
)
some_records = some_leaves | st.builds(
    Branch, st.lists(some_leaves, max_size=3).map(tuple), st.binary(max_size=9), st.booleans()
)


def plain(value: object) -> object:
    """Return a value in a form in which equal ones compare as equal, also with NaN in them."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, Record):
        return type(value), [plain(getattr(value, name)) for name in value.__struct_fields__]
    return list(map(plain, value)) if isinstance(value, tuple) else repr(value)


def decoded(control: bytes, buffers: list[bytes]) -> Record | None:
    """Return the record, or None if it was refused in the one way that is allowed."""
    try:
        return KINDS.decode(control, buffers)
    except MalformedError:
        return None


@given(some_records)
def test_a_record_comes_back_the_same(record):
    control, buffers = encode(record)
    assert plain(KINDS.decode(control, [bytes(buffer) for buffer in buffers])) == plain(record)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.arange(4, dtype=">f8"),
        np.asfortranarray(np.ones((2, 3))),
        np.float32(3)[...],
        np.arange(4.0),
        "bfloat16",
    ],
)
def test_arrays_arrive_whole_in_this_machines_order_without_a_needless_copy(array):
    if isinstance(array, str):
        array = np.arange(3, dtype=pytest.importorskip("ml_dtypes").bfloat16)
    control, buffers = encode(Leaf("x", array))
    value = KINDS.decode(control, buffers).value
    np.testing.assert_array_equal(value, array)
    assert (value.dtype, value.shape) == (array.dtype.newbyteorder("="), array.shape)
    plain_order = array.flags.c_contiguous and array.dtype.isnative
    assert np.shares_memory(value, array) == plain_order


@pytest.mark.parametrize(
    "array", [np.array([None]), np.array(["text"]), np.array(0, "M8[s]"), np.zeros((1,) * 33)]
)
def test_what_does_not_travel_is_an_error_of_the_sender(array):
    with pytest.raises(ValueError, match=r"cannot be sent|dimensions"):
        encode(Leaf("x", array))


@settings(max_examples=200)
@given(some_records, st.data())
def test_mutated_bytes_are_malformed_and_nothing_else(record, data):
    control, buffers = encode(record)
    control, buffers = bytearray(control), [bytes(buffer) for buffer in buffers]
    for _ in range(data.draw(st.integers(1, 3))):
        control[data.draw(st.integers(0, len(control) - 1))] = data.draw(st.integers(0, 255))
    decoded(bytes(control), buffers)
    decoded(bytes(control[: data.draw(st.integers(0, len(control)))]), buffers)
    decoded(data.draw(st.binary(max_size=200)), buffers)


@given(some_records.filter(lambda record: len(encode(record)[1]) > 0), st.data())
def test_buffers_that_do_not_fit_are_malformed(record, data):
    control, buffers = encode(record)
    spoilt = [bytes(buffer) for buffer in buffers]
    which = data.draw(st.integers(0, len(spoilt) - 1))
    assert decoded(control, spoilt[:-1]) is None
    spoilt[which] += b"\0"
    assert decoded(control, spoilt) is None
    spoilt[which] = spoilt[which][:-2]
    assert decoded(control, spoilt) is None or not buffers[which]


@pytest.mark.parametrize(
    "node",
    [
        [0, "object", [4]],
        [0, "O", [4]],
        [0, "V4", [1]],
        [0, "float32", [-1]],
        [0, "float32", [-1, -1]],
        [0, "float32", [1.0]],
        [0, "float32", [True]],
        [0, "float32", [2**63 - 1] * 20 + [0.5]],
        [0, "float32", [2**62, 0, 2**62]],
        [-1, "float32", [1]],
        [1, "float32", [1]],
        [0, ["float32"], [1]],
        [0, "float32", [1] * 33],
        [0, "float32", {"1": 1}],
        [0, "float32", [2**62] * 200_000],
    ],
    ids=lambda node: repr(node)[:40],
)
def test_descriptions_that_would_mislead_numpy_are_refused(node):
    assert decoded(msgspec.msgpack.encode(["Leaf", "x", node]), [b"1234"]) is None


def test_another_kind_or_number_of_fields_is_malformed_and_announced_lengths_take_no_memory():
    for record in (["Other", 1], ["Leaf"], ["Leaf", "x", None, {}, "more"], {"type": "Leaf"}, []):
        assert decoded(msgspec.msgpack.encode(record), []) is None
    for control in (
        b"\xdd\xff\xff\xff\xff",  # An array of 2^32 - 1 elements, none of which came.
        b"\x93\xa6Branch\xdd\xff\xff\xff\xff",
        b"\x93\xa6Branch\x90\xc6\xff\xff\xff\xff",
        b"\x94\xa4Leaf\xa1x\xc0\xdf\xff\xff\xff\xff",
        b"\x93\xa4Leaf\xa1x" + b"\x91" * 100_000,
    ):
        tracemalloc.start()
        try:
            assert decoded(control, []) is None
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()
