"""What processes say of a call tells apart whatever they do differently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ndistribute.collective.backend import Call
from ndistribute.collective.header import compare, encode
from ndistribute.errors import CollectiveMismatchError

FLOATS = np.dtype([("x", np.float32), ("y", np.float32)])


def header_of(dtype: Any, shape: tuple[int, ...] = (2,)) -> bytes:
    return encode(Call(1, "all_gather", "axis=0", ((np.dtype(dtype), shape),)), 1)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (FLOATS, [("x", np.float32), ("y", np.int32)]),
        (FLOATS, [("y", np.float32), ("x", np.float32)]),
        (">f4", "<f4"),
        (np.float32, np.int32),
    ],
)
def test_dtypes_of_one_size_are_told_apart(mine: Any, theirs: Any) -> None:
    compare(header_of(mine), header_of(mine), 0, 1)
    with pytest.raises(CollectiveMismatchError, match="worker 1 called all_gather"):
        compare(header_of(mine), header_of(theirs), 0, 1)
