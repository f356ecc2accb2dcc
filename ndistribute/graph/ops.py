"""`Op`: the kernel of an operation type, and all facts about the type, in one place.

`kernel` registers a kernel with its facts. The facts of functions come from the table of functions
and from the derivative rules, which tapes use too. Other files know only a few types by name:
gradients, groups, and the ends of cuts between tasks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ndistribute.autodiff.rules import COMPOSED
from ndistribute.numpy_functions import CONSTANT, Function, Results, function_named, results_of

if TYPE_CHECKING:
    from ndistribute.graph.definition import OperationDef
    from ndistribute.graph.step import Node, Step

Kernel = Callable[["Step", "Node", Sequence[Any]], Any]
"""Returns the value of an operation's output, or a list if it has another number of outputs."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """The kernel of the operations of a type, and the facts that hold for all of them."""

    kernel: Kernel | None = None
    """Computes the results from the step, the node and its inputs; None: `function` does."""
    function: Function | None = None
    """Computes the results from the arguments of the definition's call."""
    smooth: bool = True
    """Whether the results depend smoothly on the inputs, so that gradients go through it."""
    pure: bool = True
    """Whether the results depend on the inputs alone, and are the same in each step."""
    reads: bool = False
    """Whether it leaves the variable that its attributes name as it is."""
    keeps_rows: bool = False
    """Whether it gives rows of an array for rows, and not a whole array."""
    waits: bool = False
    """Whether it may wait for others, so that it runs on a thread of its own."""
    bound: bool = False
    """Whether only the thread of the step can run it, which is that of its replica."""
    shape: Callable[[OperationDef, Sequence[Any]], list[Any]] | None = None
    """Returns what is known of the results, from the definition and what is known of the inputs."""
    results: Results = Results.OTHER
    """How the results of a function depend on its arguments."""


KERNELS: dict[str, Op] = {}
"""The facts of operations that have a kernel, by their type."""


def kernel(*types: str, **facts: Any) -> Callable[[Kernel], Kernel]:
    """Return a decorator that makes a function the kernel of operation types.

    Args:
        types: the types, which share the facts.
        facts: the facts, by their names in `Op`.
    """

    def add(function: Kernel) -> Kernel:
        for name in types:
            KERNELS[name] = Op(kernel=function, **facts)
        return function

    return add


@functools.cache
def op_named(kind: str) -> Op:
    """Return the facts of an operation type.

    Raises:
        KeyError: neither a kernel nor a function has this name.

    >>> op_named("numpy.argmax").smooth
    False
    """
    if kind in KERNELS:
        return KERNELS[kind]
    function = function_named(kind)
    results = results_of(function)
    constant = results is Results.OF_SHAPES or (function in CONSTANT and function not in COMPOSED)
    return Op(function=function, smooth=not constant, results=results)
