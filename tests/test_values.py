"""`PerReplica` and `Mirrored`: what they hold, and what they refuse."""

import operator
import re

import numpy as np
import pytest

import ndistribute as nd

BINARY = (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le gt ge".split()
)
UNARY = "neg pos abs invert".split()
IN_PLACE = "iadd isub imul itruediv ipow imatmul".split()
PAIR = [np.ones(2), np.ones(2)]


@pytest.fixture(params=[nd.PerReplica, nd.Mirrored])
def kind(request):
    return request.param


def test_components_are_a_tuple_in_replica_order(kind):
    held = kind([3, "b", None])
    assert held.values == (3, "b", None)
    assert isinstance(held, nd.DistributedValues)
    assert not (isinstance(held, nd.PerReplica) and isinstance(held, nd.Mirrored))
    with pytest.raises(ValueError, match="at least one"):
        kind([])


def test_arithmetic_is_refused_on_both_sides_even_of_a_single_value(kind):
    for values in ([1, 2], [1.0]):
        held = kind(values)
        for function in (getattr(operator, name) for name in BINARY):
            for arguments in ((held, 3), (3, held), (held, held)):
                with pytest.raises(TypeError, match=r"local_results.*reduce"):
                    function(*arguments)
        for name in (*UNARY, *IN_PLACE):
            with pytest.raises(TypeError, match=r"local_results.*reduce"):
                getattr(operator, name)(*([held] if name in UNARY else [held, 3]))


USES = """
np.ones(2) + x; x @ np.ones((2, 2)); np.exp(x); np.add.reduce(x); divmod(x, 2); divmod(2, x); x[0]
iter(x); len(x); bool(x); 1 in x; float(x); int(x); complex(x); np.asarray(x); np.mean(x)
operator.index(x)
"""


@pytest.mark.parametrize("use", re.split(r"; |\n", USES.strip()))
def test_use_as_an_array_or_number_is_refused_by_name(kind, use):
    with pytest.raises(TypeError, match=rf"on a {kind.__name__} of 2.*local_results.*reduce"):
        eval(use, {"np": np, "operator": operator, "x": kind(PAIR)})


def test_a_single_number_or_array_converts(kind):
    assert float(kind([np.float32(2.5)])) == 2.5
    assert isinstance(float(kind([1])), float)
    assert isinstance(int(kind([np.float64(2)])), int)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    converted = np.asarray(kind([array]))
    assert converted.dtype == np.float32
    assert np.array_equal(converted, array)
    assert np.asarray(kind([array.tolist()]), dtype=np.int8).dtype == np.int8


def test_a_format_specification_is_that_of_the_single_value(kind):
    for value in (2.5, np.float32(2.5), np.array(2.5)):
        held = kind([value])
        assert f"{held:.3f} {held:>6}" == "2.500    2.5"
        assert f"{held}" == str(held) == repr(held)
    with pytest.raises(TypeError, match=r"'\.3f'.*local_results.*reduce"):
        f"{kind([2.5, 2.5]):.3f}"


def test_values_are_told_apart_by_identity_and_show_each_component(kind):
    first = kind([1, 2])
    assert first != kind([1, 2])
    assert {first: "found"}[first] == "found"
    text = repr(kind([1.5, None]))
    assert text.startswith(kind.__name__)
    assert "0: 1.5" in text
    assert "1: None" in text
