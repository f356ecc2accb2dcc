"""Gradients as operations: the derivative of each operation, on its device.

An operation whose gradient is needed is recorded when it runs, and the gradient operation walks the
record back. So `ndistribute.autodiff` provides the rules, and shapes may be unknown.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.graph.graph import Graph, Operation, Tensor, as_tensor, get_default_graph
from ndistribute.graph.ops import op_named
from ndistribute.graph.variables import GraphVariable
from ndistribute.mistakes import accepting

Upstream = dict[Tensor, list[Tensor]]
"""By tensor, the gradients with respect to it, whose sum counts."""
HINTS = ("aggregation_method", "colocate_gradients_with_ops", "gate_gradients")
"""Keywords of TensorFlow's functions that change no result."""


@accepting(*HINTS)
def gradients(ys: Any, xs: Any, grad_ys: Any = None, name: str = "gradients") -> list[Any]:
    """Return the gradients of the sum of tensors with respect to others.

    Args:
        ys: a tensor or a list of tensors.
        xs: a tensor or variable, or a list of them.
        grad_ys: the gradients of another value with respect to `ys`; None: ones.
        name: the name scope of the operations.

    Returns:
        A tensor for each of `xs`, or None if no y depends on it. If only rows of a variable were
        read, the value of the tensor is an `IndexedSlices`. Apply `gradients` to the result for
        second derivatives.

    Raises:
        ValueError: in the body of a `cond` or `while_loop`, a y depends on one of `xs` through the
            graph around the body.

    >>> from ndistribute.graph.session import Session
    >>> x = as_tensor(np.array([1.0, 2.0]))
    >>> slope = gradients(np.sum(x * x), x)
    >>> Session().run([slope, gradients(slope, x)])
    [[array([2., 4.])], [array([2., 2.])]]
    """
    targets = [as_tensor(y) for y in _listed(ys)]
    sources = _listed(xs)
    graph = targets[0].graph if targets else get_default_graph()
    with graph.as_default(), graph.control_dependencies(None), graph.name_scope(name):
        reads = _reads(graph)
        ends = [_ends(source, graph, reads, targets) for source in sources]
        reached = {tensor for tensors in ends for tensor in tensors}
        between = _between(graph, targets, reached)
        upstream: Upstream = {}
        seeds = [None] * len(targets) if grad_ys is None else _listed(grad_ys)
        for y, seed in zip(targets, seeds, strict=True):
            with graph.colocate_with(y):
                first: Any = np.ones_like(y) if seed is None else as_tensor(seed)
            upstream.setdefault(y, []).append(first)
        for op in reversed(between):  # All users of its results come first.
            _propagate(op, between, upstream, reached)
        return [
            _sum([part for tensor in tensors for part in upstream.get(tensor, [])])
            for tensors in ends
        ]


def global_norm(t_list: Sequence[Any]) -> Any:
    """Return the norm of all tensors together; rows of the same index are not added up first.

    Args:
        t_list: tensors, rows of tensors, and None, which does not count.
    """
    squares = [_added("sum_of_squares", part) for part in t_list if part is not None]
    return np.sqrt(sum(squares))


def clip_by_global_norm(
    t_list: Sequence[Any], clip_norm: Any, use_norm: Any = None, name: str | None = None
) -> tuple[list[Any], Any]:
    """Return tensors scaled to a norm of at most `clip_norm`, and their norm before.

    Args:
        t_list: see `global_norm`.
        clip_norm: the largest norm of the results.
        use_norm: the norm of the tensors, if you have computed it already.
        name: ignored.
    """
    norm = global_norm(t_list) if use_norm is None else use_norm
    factor = clip_norm / np.maximum(norm, clip_norm)
    # If a gradient is infinite, all are NaN, as in TensorFlow: zeros would hide it.
    scale: Any = np.where(np.isfinite(norm), factor, np.nan)
    scaled = [None if part is None else _added("scaled", part, scale) for part in t_list]
    return scaled, norm


def _added(kernel: str, gradient: Any, *more: Any) -> Tensor:
    """Return the result of a kernel, which takes rows as well as arrays."""
    tensor = as_tensor(gradient)
    known = (tensor,) if more else None
    return tensor.graph.add(kernel, [tensor, *more], known=known).outputs[0]


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _reads(graph: Graph) -> dict[str, list[Tensor]]:
    """Return the values of variables in a graph and those around it, by the variables' names."""
    reads: dict[str, list[Tensor]] = {}
    level: Graph | None = graph
    while level is not None:
        for op in level.get_operations():
            name = op.definition.attributes.get("variable")
            if name is not None and op_named(op.type).reads and op_named(op.type).smooth:
                reads.setdefault(name, []).extend(op.outputs)
        level = level.outer
    return reads


def _ends(
    source: Any, graph: Graph, reads: Mapping[str, list[Tensor]], targets: Sequence[Tensor]
) -> list[Tensor]:
    """Return the tensors of a graph that stand for a source: all reads of a variable.

    Raises:
        ValueError: a target depends on the source by other tensors of a graph around this one.
    """
    is_variable = isinstance(source, GraphVariable)
    ends = reads.get(source.op.name, []) if is_variable else [as_tensor(source)]
    around = [tensor for tensor in ends if tensor.graph is not graph]
    here = [tensor for tensor in ends if tensor.graph is graph]
    here += [graph.captured[tensor] for tensor in around if tensor in graph.captured]
    needed = _behind([y.op for y in targets], {tensor.op for tensor in here}) if around else ()
    for tensor in around:
        if tensor.op in needed:
            raise ValueError(
                f"gradients: the target depends on {tensor.name!r}, which was computed outside of "
                "this cond or while_loop, and derivatives inside do not reach outside. Compute the "
                "whole target inside, or call gradients outside."
            )
    return here


def _between(graph: Graph, targets: Sequence[Tensor], ends: set[Tensor]) -> dict[Operation, None]:
    """Return the operations on paths from the ends to the targets, in the order of the graph."""
    behind = _behind([target.op for target in targets])
    between: dict[Operation, None] = {}
    for op in graph.get_operations():
        if op in behind and any(x in ends or x.op in between for x in _arguments(op)):
            between[op] = None
    return between


def _behind(operations: Iterable[Operation], ends: Container[Operation] = ()) -> set[Operation]:
    """Return operations, and those on which their values depend smoothly, up to some ends."""
    behind: set[Operation] = set()
    stack = list(operations)
    while stack:
        op = stack.pop()
        if op not in behind and op not in ends and op_named(op.type).smooth:
            behind.add(op)
            stack += [tensor.op for tensor in _arguments(op)]
    return behind


def _arguments(op: Operation) -> list[Tensor]:
    """Return what an operation computes from: a gradient, also from that of its operation."""
    if op.type != "gradient":
        around = op.graph.arguments
        return [around[op]] if op in around else op.inputs
    of = op.graph.get_operation_by_name(op.definition.attributes["of"])
    return [*op.inputs, *_arguments(of)]


def _propagate(
    op: Operation, between: Container[Operation], upstream: Upstream, ends: set[Tensor]
) -> None:
    """Add the gradient operation of an operation, and its results to those of its inputs."""
    seeds = [_sum(upstream.get(tensor, [])) for tensor in op.outputs]
    if all(seed is None for seed in seeds):
        return
    arguments = _arguments(op)
    wanted = [k for k, x in enumerate(arguments) if x in ends or x.op in between]
    if op.type == "identity":
        upstream.setdefault(op.inputs[0], []).append(seeds[0])
        return
    there = [seed is not None for seed in seeds]
    node = op.graph.add(
        "gradient",
        [seed for seed in seeds if seed is not None],
        name=f"{op.name}_gradient",
        outputs=len(wanted),
        attributes={"of": op.name, "inputs": wanted, "upstream": there},
        device=op.device,
    )
    for k, gradient in zip(wanted, node.outputs, strict=True):
        gradient.known = (arguments[k],)
        upstream.setdefault(arguments[k], []).append(gradient)


def _sum(parts: list[Tensor]) -> Any:
    """Return the sum of gradients, on the device of the first; None if there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    first = parts[0]
    op = first.graph.add("add_gradients", parts, device=first.device, known=(first,))
    return op.outputs[0]
