"""Workers tell each other values in records, and nothing is unpickled."""

import collections
import dataclasses
import json
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ndistribute as nd
from ndistribute.collective.objects import (
    PackedObject,
    all_gather_object,
    pack,
    unpack,
)
from ndistribute.data.agreement import share_template
from ndistribute.transport.codec import MalformedError, encode
from tests.data.workers import on_workers

ml_dtypes = pytest.importorskip("ml_dtypes")

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Sample:
    image: np.ndarray
    label: dict[str, np.ndarray]
    rows: int = dataclasses.field(init=False, default=0)


class Ran:
    """A pickle of it marks that code of the sender was run."""

    marks: list[str] = []  # noqa: RUF012

    def __reduce__(self):
        return self.marks.append, ("ran",)


def column(dtype, *shape):
    return np.zeros((5, *shape), dtype)


@pytest.mark.parametrize(
    "value",
    [
        column("f4", 2, 3),
        (column("i1"), [column("c16", 1), column("?")], ()),
        {"b": column("U5"), "$tuple": {1: column("M8[s]"), None: column(">f8", 2)}},
        Point(column("S3"), Sample(column("f4")[:0], {"x": column("i2", 0)})),
        column([("a", "i4"), ("b", "f8", (2,))]),
        column("O")[:0],
        [None, True, 3, -(2**200), 2.5, "text", [], {}],
        np.float32(1.5),
        np.array(["a", "bcd"]),
        column(ml_dtypes.bfloat16, 2),
    ],
)
def test_a_decoded_value_equals_the_encoded_one(value):
    told = unpack(pack(value))
    assert repr(told) == repr(value)


def test_indexed_slices_are_encoded_and_decoded():
    told = unpack(pack(nd.IndexedSlices(np.ones((2, 3)), np.array([4, 1]), (5, 3))))
    assert isinstance(told, nd.IndexedSlices)
    assert told.indices.tolist() == [4, 1]
    assert told.to_dense().sum() == 6


def test_a_value_that_others_cannot_create_is_an_error_on_the_sender():
    @dataclasses.dataclass
    class Local:
        x: np.ndarray

    with pytest.raises(ValueError, match="define it at the top of a module"):
        pack(Local(column("i4")))
    for value in (column("O"), object(), {1, 2}):
        with pytest.raises(TypeError, match=r"^\[0\]\['x'\]: .*cannot travel"):
            pack([{"x": value}])


def test_values_of_all_workers_come_in_their_order_in_one_collective():
    def work(workers):
        told = all_gather_object(workers, {"rank": workers.rank, "rows": np.ones(workers.rank)})
        return [(one["rank"], len(one["rows"])) for one in told], workers.calls_made

    assert on_workers(3, work) == [([(0, 0), (1, 1), (2, 2)], 1)] * 3


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [(ValueError("not so"), ValueError, "not so"), (object(), TypeError, "cannot travel")],
)
def test_a_value_that_one_worker_cannot_encode_is_an_error_on_all(value, kind, text):
    def work(workers):
        return all_gather_object(workers, value if workers.rank == 1 else 0)

    for error in on_workers(3, work):
        assert type(error) is kind
        assert text in str(error)
        assert str(error).startswith("worker 1: ")


def node(text: str, *arrays: bytes) -> bytes:
    return encode(PackedObject(text, arrays))[0]


def array(data: bytes, dtype: str, *shape: int) -> bytes:
    return node(f'{{"$array": [0, {dtype}, {[*shape]}]}}', data)


def forged(kind: str, *keys: str) -> bytes:
    return node(json.dumps({"$class": [kind, keys, [1.0] * len(keys)]}))


@pytest.mark.parametrize(
    "blob",
    [
        pickle.dumps(np.zeros((0, 2))),
        pickle.dumps((Ran(),)),
        b"cposix\nsystem\n(S'true'\ntR.",
        forged("os:system", "command"),
        forged("subprocess:Popen", "args"),
        forged("builtins:eval", "source"),
        forged("tests.collective.test_objects:Sample", "image"),
        forged("tests.collective.test_objects:Ran", "marks"),
        forged("tests.collective.test_objects:Ran"),
        forged("never.imported.module:Point", "x", "y"),
        forged("tests.collective.test_objects:Point", "x", "y")[:-1],
        node('{"$dict": [["x", "y"], [1]]}'),
        node('{"$dict": [[[]], [1]]}'),
        node('{"$class": [1, [], []]}'),
        node('{"$class": ["collections:Counter", [], []]}'),
        node('{"$tuple": 1}'),
        node('{"$float": "one"}'),
        node('{"$array": [0, "<f4", [0]]}'),
        node("__import__('os')"),
        node("[" * 5000),
        array(b"", '"float33"', 0),
        array(b"", '"f4', 0),
        array(b"", "[" * 5000, 0),
        array(b"", '"<f4"', -1),
        array(b"", '"<f4"', 2),
        array(b"1234", '"<f4"', 2),
        array(b"12345678", '"|O"', 1),
        array(b"", '"<f4"', *(1,) * 40),
        array(b"", '"<f4"', 0, 2**62, 2**62),
        array(b"1234", '"<f4"', 2**70),
        b"",
    ],
)
def test_what_is_no_spec_is_refused_and_nothing_of_it_is_run(blob):
    modules = set(sys.modules)
    with pytest.raises(MalformedError):
        unpack(blob)
    assert not Ran.marks
    assert not [name for name in set(sys.modules) - modules if name.startswith("never")]


@given(st.binary(max_size=200), st.integers(0, 100), st.integers(0, 255))
def test_altered_bytes_are_refused_or_make_plain_values(noise, position, value):
    told = bytearray(pack((column("f4", 2), {"x": Point(column("U3"), 5)})))
    told[position % len(told)] = value
    for blob in (bytes(told), noise):
        try:
            made = unpack(blob)
        except (ValueError, TypeError):  # An error that was told is one of these.
            continue
        for leaf in nd.tree.flatten(made):
            assert isinstance(leaf, np.ndarray | np.generic | str | int | float | None)


def test_a_pickle_in_the_place_of_a_template_is_refused():
    class Forging:
        """Workers, one of which sends a pickle."""

        def all_gather(self, mine, axis):
            blob = np.frombuffer(pickle.dumps(Ran()), np.uint8)
            sizes, own = mine
            return np.append(sizes, blob.size), np.concatenate([own, blob])

    with pytest.raises(MalformedError):
        share_template(Forging(), None)
    assert not Ran.marks


def test_workers_without_input_take_part_with_what_they_were_told():
    def work(workers):
        return share_template(workers, {"x": column("f4", 2)[:0]} if workers.rank == 1 else None)

    for outcome in on_workers(3, work):
        assert outcome["x"].shape == (0, 2)
