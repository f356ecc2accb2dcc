"""Nests of plain values are encoded and decoded; files of earlier versions are read."""

from __future__ import annotations

import enum
import json

import numpy as np
import pytest

from ndistribute.models import Sequential, contents, layers
from ndistribute.models.export import Architecture
from ndistribute.plain import Encoder

VALUE = {
    "plain": [None, True, 3, 2.5, "text", -float("inf")],
    "nests": ((), [], {}, {"$tuple": 1}, {1: (2,), None: 3.0, (4, "a"): {}}),
    "others": (slice(1, None), 1 - 2j, ..., np.dtype("float16")),
}
# What earlier versions wrote.
STATE = {"best": {"$float": "inf"}, "a": {"$tensor": "p/a"}, "p": {"$tuple": [1, [2]]}, "$x": None}
EMPTY = {"$empty": [[2, 0], "int8"]}
MODEL = """{"layer": "Sequential", "name": "m", "config": {"layers": [
    {"layer": "Dense", "name": "d", "config": {"units": 2, "dtype": {"dtype": "float64"},
        "activation": {"function": "relu"},
        "kernel_regularizer": {"object": "L2", "fields": {"l2": 0.01}}}},
    {"layer": "Reshape", "name": "r", "config": {"target_shape": {"tuple": [1, 2]}}},
    {"shared": 2}]}}"""
INPUT = """{"dict": {"x": {"empty": [0, 4], "dtype": "float32"}}}"""


def test_what_is_decoded_from_json_is_what_was_encoded():
    node = json.loads(json.dumps(Encoder().encode(VALUE), allow_nan=False))
    assert repr(Encoder().decode(node)) == repr(VALUE)


def test_a_value_of_a_derived_class_is_one_of_its_base():
    class Names(list):
        pass

    class Word(str, enum.Enum):  # noqa: UP042, a StrEnum has the text of its value
        SUM = "sum"

    names = Names([np.float32(1.5), np.str_("a"), np.int8(2), Word.SUM])
    assert Encoder().encode(names) == [1.5, "a", 2, "sum"]
    assert type(Encoder().encode(Word.SUM)) is str


def test_what_is_not_plain_is_named_with_its_path():
    with pytest.raises(TypeError, match=r"^\['x'\]\[1\]\[0\] is \{3\}: not plain"):
        Encoder().encode({"x": [1, ({3},)]})


def test_states_of_earlier_versions_are_read():
    tensors = {"p/a": np.ones(3)}
    value = contents.States(tensors).decode(STATE)
    assert value["a"] is tensors["p/a"]
    assert value == {"best": float("inf"), "a": value["a"], "p": (1, [2]), "$x": None}
    empty = contents.States({}).decode(EMPTY)
    assert (empty.shape, empty.dtype) == ((2, 0), np.int8)


def test_states_are_written_as_earlier_versions_read_them():
    tensors = {}
    value = {"best": float("inf"), "a": np.ones(3), "p": (1, [2])}
    node = contents.States(tensors).encode(value, "p")
    assert json.loads(json.dumps(node)) == {name: STATE[name] for name in value}
    assert contents.States(tensors).encode(np.zeros((2, 0), np.int8)) == {
        "$empty": [(2, 0), "int8"]
    }


def test_models_of_earlier_versions_are_read_and_written_alike():
    model = Architecture().decode(json.loads(MODEL))
    assert isinstance(model, Sequential)
    dense, *reshapes = model.layers
    assert (model.name, dense.name, dense.units, dense.dtype) == ("m", "d", 2, np.float64)
    assert reshapes[0] is reshapes[1]
    assert isinstance(reshapes[0], layers.Reshape)
    node = Architecture().encode(model)
    assert [each.get("shared") for each in node["config"]["layers"]] == [None, None, 2]
    assert node["config"]["layers"][1]["config"]["target_shape"] == {"tuple": [1, 2]}
    assert Architecture().encode(float("inf")) == {"float": "inf"}
    spec = Architecture().decode(json.loads(INPUT))
    assert (spec["x"].shape, spec["x"].dtype) == ((0, 4), np.float32)
    again = Architecture().decode(json.loads(json.dumps(Architecture().encode(spec))))
    assert (again["x"].shape, again["x"].dtype) == ((0, 4), np.float32)


def test_a_file_makes_objects_of_models_alone():
    node = {"made": "rmtree", "group": "compat.tf.io.gfile", "config": {"dict": {}}}
    with pytest.raises(
        ValueError,
        match=r"a file needs 'compat\.tf\.io\.gfile', which this program does not define",
    ):
        Architecture("a file").decode(node)
