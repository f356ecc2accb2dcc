"""Results are written where nobody looks any more, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.collective.outputs import MOST_KEPT, SMALL_BYTES, Outputs

LARGE = SMALL_BYTES // 8


def address(array: Any) -> int:
    return int(array.ctypes.data)


def test_a_large_array_is_used_again_once_it_is_let_go() -> None:
    outputs = Outputs()
    like = [np.zeros(LARGE)]
    first = address(outputs.like(like)[0])
    assert address(outputs.like(like)[0]) == first


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array.reshape(2, -1)[1, 3:],
        lambda array: memoryview(array)[5:],
        lambda array: np.asarray(memoryview(array)),
        lambda array: [{"deep": array[::2].T}],
    ],
)
def test_an_array_that_somebody_holds_is_left_alone(hold: Any) -> None:
    outputs = Outputs()
    like = [np.zeros(LARGE)]
    array = outputs.like(like)[0]
    held, where = hold(array), address(array)
    del array
    others = [outputs.like(like)[0] for _ in range(3)]
    assert where not in map(address, others)
    assert held is not None


def test_arrays_of_one_call_are_different_ones() -> None:
    outputs = Outputs()
    made = outputs.like([np.zeros(LARGE)] * 3)
    assert len(set(map(address, made))) == 3


def test_only_so_many_shapes_are_kept() -> None:
    outputs = Outputs()
    for extra in range(3 * MOST_KEPT):
        outputs.like([np.zeros(LARGE + extra)])
    assert outputs._kept.cache_info().currsize <= MOST_KEPT


def test_results_of_earlier_steps_keep_their_values() -> None:
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        results = []
        for k in range(6):

            def step(k: int = k) -> Any:
                context = nd.get_replica_context()
                assert context is not None
                return context.all_reduce("sum", np.full(LARGE, float(k)))

            results.append(strategy.run(step))
        for k, result in enumerate(results):
            for value in strategy.local_results(result):
                assert (value == 2.0 * k).all()
