"""Gradients of the collectives, which are computed by further collectives.

Each call becomes one entry of the graph, even if its nest has several arrays. So the backward pass
makes the same calls in the same order on every replica. A replica sends zeros as the gradient of an
unused result. A replica whose target does not depend on the call at all makes no backward call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.tracked import operand
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.context import current_trace
from ndistribute.devices import Array

Arrays = list[Array]
Backward = Callable[[Arrays], Arrays]
Maker = Callable[[Arrays, Arrays], Backward]  # From the inputs and the results.


def all_reduce(graph: Any, communicator: Any, op: Any, value: Any, options: Any) -> Any:
    """Return a nest reduced over the replicas; leaves are tracked like those of the argument."""
    op = ReduceOp.parse(op)

    def backward_of(inputs: Arrays, results: Arrays) -> Backward:
        if op in (ReduceOp.SUM, ReduceOp.MEAN):
            return lambda gradients: list(all_reduce(graph, communicator, op, gradients, options))
        is_product = op is ReduceOp.PROD

        def backward(gradients: Arrays) -> Arrays:
            # A replica does not need the other arrays, only how many of them have a zero or the
            # extreme.
            both = zip(inputs, results, strict=True)
            marks = [np.equal(x, 0 if is_product else y) for x, y in both]
            as_gradients = [mark.astype(g.dtype) for mark, g in zip(marks, gradients, strict=True)]
            sent = [*gradients, *as_gradients]
            summed = all_reduce(graph, communicator, ReduceOp.SUM, sent, options)
            totals, counts = summed[: len(marks)], summed[len(marks) :]
            rows = zip(totals, counts, marks, strict=True)
            if not is_product:
                # Equal extremes share the gradient. With a NaN, no element is equal to the result.
                return [total * mark / np.maximum(count, 1) for total, count, mark in rows]
            pairs = zip(marks, inputs, strict=True)
            factors = [np.where(zero, np.ones_like(x), x) for zero, x in pairs]
            products = communicator.all_reduce(ReduceOp.PROD, factors, options)
            others = [product / x for product, x in zip(products, factors, strict=True)]
            each = zip(rows, others, strict=True)
            return [total * other * np.equal(count, zero) for (total, count, zero), other in each]

        return backward

    return _recorded(
        graph, value, lambda raw: communicator.all_reduce(op, raw, options), backward_of, op
    )


def all_gather(graph: Any, communicator: Any, value: Any, axis: int, options: Any) -> Any:
    """Return a nest concatenated over the replicas; leaves are tracked like the argument's."""

    def backward_of(inputs: Arrays, results: Arrays) -> Backward:
        lengths = [array.shape[axis] for array in inputs]

        def backward(gradients: Arrays) -> Arrays:
            # Each replica has a gradient for all parts; this one needs the sum for its own part.
            if current_trace() is not None:  # This holds if all parts are equally long.
                totals = all_reduce(graph, communicator, ReduceOp.SUM, gradients, options)
                firsts = [communicator.rank * length for length in lengths]
                return [
                    np.take(total, first + np.arange(length), axis=axis)
                    for total, first, length in zip(totals, firsts, lengths, strict=True)
                ]
            table = communicator.all_gather(np.array([lengths]), 0, options)
            starts = table[: communicator.rank].sum(axis=0).tolist()
            totals = all_reduce(graph, communicator, ReduceOp.SUM, gradients, options)
            return [
                total[(slice(None),) * (axis % total.ndim) + (slice(start, start + length),)]
                for total, start, length in zip(totals, starts, lengths, strict=True)
            ]

        return backward

    return _recorded(
        graph, value, lambda raw: communicator.all_gather(raw, axis, options), backward_of
    )


def _recorded(
    graph: Any, value: Any, call: Callable[[Any], Any], backward_of: Maker, op: Any = ReduceOp.SUM
) -> Any:
    """Run a collective on raw arrays, and record its tracked leaves as one operation."""
    pairs = [operand(leaf, graph) for leaf in tree.flatten(value)]
    results = call(tree.unflatten(value, [raw for raw, _ in pairs]))
    tracked = [k for k, (_, place) in enumerate(pairs) if place is not None]
    if not tracked:
        return results
    leaves = tree.flatten(results)
    inputs, outputs = [pairs[k][0] for k in tracked], [leaves[k] for k in tracked]
    both = zip(inputs, outputs, strict=True)
    zeros = [partial(np.zeros_like, x, shape=np.shape(y), dtype=y.dtype) for x, y in both]
    backward = backward_of(inputs, outputs)

    def joint(gradients: Sequence[Array | None]) -> Arrays:
        pairs = zip(gradients, zeros, strict=True)
        return backward([make() if g is None else g for g, make in pairs])

    def again() -> Backward:
        if op is ReduceOp.PROD:  # All other operations are linear almost everywhere.
            raise NotImplementedError("it computes a product")
        return joint

    graph.again[len(graph.entries)] = all_reduce, again
    parents = tuple(place for _, place in pairs if place is not None)
    for k, output in zip(tracked, graph.record_many(outputs, parents, joint), strict=True):
        leaves[k] = output
    return tree.unflatten(value, leaves)
