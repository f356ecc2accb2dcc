"""Gradients of the collectives; computing them involves collectives.

A call becomes one entry of the graph, however many arrays its nest has, so that the backward pass
makes the same calls on every replica, in the same order. A replica sends zeros as the gradient of
an unused result. If its target does not depend on the call at all, it makes no backward call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.dispatch import operand
from ndistribute.autodiff.rules.reductions import exclusive_product
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.context import CommunicatorLike
from ndistribute.device import Array

__all__ = ["all_gather", "all_reduce"]

Arrays = list[Array]
Reduce = Callable[[ReduceOp, Arrays], Arrays]
Backward = Callable[[Arrays], Arrays]


def all_reduce(
    graph: Any, communicator: CommunicatorLike, op: Any, value: Any, options: Any
) -> Any:
    """Return a nest reduced over the replicas; leaves are tracked like those of the argument."""
    op = ReduceOp.parse(op)

    def reduce(op: ReduceOp, arrays: Arrays) -> Arrays:
        return list(communicator.all_reduce(op, arrays, options))

    def backward_of(inputs: Arrays, results: Arrays) -> Backward:
        if op is ReduceOp.SUM or op is ReduceOp.MEAN:
            return lambda gradients: reduce(op, gradients)
        if op is ReduceOp.PROD:
            return lambda gradients: _product_gradients(inputs, gradients, reduce)
        return lambda gradients: _extreme_gradients(inputs, results, gradients, reduce)

    return _recorded(
        graph, value, lambda raw: communicator.all_reduce(op, raw, options), backward_of
    )


def all_gather(
    graph: Any, communicator: CommunicatorLike, value: Any, axis: int, options: Any
) -> Any:
    """Return a nest concatenated over the replicas; leaves are tracked like the argument's."""

    def backward_of(inputs: Arrays, results: Arrays) -> Backward:
        lengths = [array.shape[axis] for array in inputs]

        def backward(gradients: Arrays) -> Arrays:
            # Each replica has a gradient for all parts; this one needs the sum for its own part.
            table = communicator.all_gather(np.array([lengths]), 0, options)
            starts = table[: communicator.rank].sum(axis=0).tolist()
            totals = communicator.all_reduce(ReduceOp.SUM, gradients, options)
            return [
                total[(slice(None),) * (axis % total.ndim) + (slice(start, start + length),)]
                for total, start, length in zip(totals, starts, lengths, strict=True)
            ]

        return backward

    return _recorded(
        graph, value, lambda raw: communicator.all_gather(raw, axis, options), backward_of
    )


def _recorded(
    graph: Any,
    value: Any,
    call: Callable[[Any], Any],
    backward_of: Callable[[Arrays, Arrays], Backward],
) -> Any:
    """Run a collective on raw arrays, and record its tracked leaves as one operation."""
    pairs = [operand(leaf, graph) for leaf in tree.flatten(value)]
    results = call(tree.unflatten(value, [raw for raw, _ in pairs]))
    tracked = [k for k, (_, place) in enumerate(pairs) if place is not None]
    if not tracked:
        return results
    leaves = tree.flatten(results)
    inputs, outputs = [pairs[k][0] for k in tracked], [leaves[k] for k in tracked]
    like = [(np.shape(output), output.dtype) for output in outputs]
    backward = backward_of(inputs, outputs)

    def joint(gradients: Sequence[Array | None]) -> Arrays:
        return backward(
            [
                np.zeros_like(array, shape=shape, dtype=dtype) if g is None else g
                for g, (shape, dtype), array in zip(gradients, like, inputs, strict=True)
            ]
        )

    parents = tuple(place for _, place in pairs if place is not None)
    for k, one in zip(tracked, graph.record_many(outputs, parents, joint), strict=True):
        leaves[k] = one
    return tree.unflatten(value, leaves)


def _extreme_gradients(
    inputs: Arrays, results: Arrays, gradients: Arrays, reduce: Reduce
) -> Arrays:
    """Return the gradients of MIN or MAX: replicas with the extreme value share the gradient."""
    holds = [
        np.equal(array, result).astype(g.dtype)
        for array, result, g in zip(inputs, results, gradients, strict=True)
    ]
    summed = reduce(ReduceOp.SUM, [*gradients, *holds])
    totals, counts = summed[: len(holds)], summed[len(holds) :]
    return [total * hold / count for total, hold, count in zip(totals, holds, counts, strict=True)]


def _product_gradients(inputs: Arrays, gradients: Arrays, reduce: Reduce) -> Arrays:
    """Return the gradients of PROD: the gradient times the product of the other values."""
    zeros = [np.equal(array, 0) for array in inputs]
    factors = [
        np.where(zero, np.ones_like(array), array)
        for zero, array in zip(zeros, inputs, strict=True)
    ]
    flags = [zero.astype(g.dtype) for zero, g in zip(zeros, gradients, strict=True)]
    summed = reduce(ReduceOp.SUM, [*gradients, *flags])
    products = reduce(ReduceOp.PROD, factors)
    return [
        total * exclusive_product(product, factor, count, zero)
        for total, product, factor, count, zero in zip(
            summed[: len(zeros)], products, factors, summed[len(zeros) :], zeros, strict=True
        )
    ]
