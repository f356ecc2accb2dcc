"""Whether names of two meanings make arrays or operations of graphs.

Some names, such as `Variable`, mean an array in TensorFlow 2 and an operation of a graph in
TensorFlow 1. They make operations inside ``with tf.Graph().as_default()``. In a graph program they
make operations everywhere: with `compat.tf1`, and with `compat.tf` after
``tf.compat.v1.disable_eager_execution()``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ndistribute import graph
from ndistribute.graph.graph import Symbolic, in_default_of_a_block

_here = threading.local()


class Program:
    """Decides whether names with two meanings make operations; a module's namespaces share it."""

    def __init__(self, has_graphs: bool) -> None:
        self._has_graphs = has_graphs

    def use(self, has_graphs: bool) -> None:
        """Let these names make operations everywhere, or only in `Graph.as_default`."""
        self._has_graphs = has_graphs

    def uses_graphs(self) -> bool:
        """Return True if these names make operations now."""
        in_graph = self._has_graphs or in_default_of_a_block()
        return in_graph and not getattr(_here, "is_eager", False)


@contextlib.contextmanager
def init_scope() -> Iterator[None]:
    """Return a context manager in which names of two meanings make arrays in this thread."""
    before = getattr(_here, "is_eager", False)
    _here.is_eager = True
    try:
        yield
    finally:
        _here.is_eager = before


def either(meanings: tuple[Callable[..., Any], Callable[..., Any]], program: Program) -> Any:
    """Return a function that calls one of two, depending on whether operations are made now."""
    in_graphs, otherwise = meanings

    def call(*args: Any, **kwargs: Any) -> Any:
        return (in_graphs if program.uses_graphs() else otherwise)(*args, **kwargs)

    return call


def of_program(function: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """Return a function that passes the program to another one."""

    @functools.wraps(function, ["__doc__"])
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(program, *args, **kwargs)

    return call


def in_graphs_only(function: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """Return a function that raises `RuntimeError` for arrays where names make no operations.

    For a class, `__call__` and `apply` of its objects raise the error.
    """
    if isinstance(function, type):
        call_it = in_graphs_only(vars(function.__mro__[1])["__call__"], program)
        return type(function.__name__, (function,), {"__call__": call_it, "apply": call_it})

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if not program.uses_graphs() and not any(isinstance(value, Symbolic) for value in values):
            where = "inside Graph().as_default(), or after disable_eager_execution()"
            what = f"{function.__qualname__} makes an operation of a graph"
            raise RuntimeError(f"{what}: call it {where}.")
        return function(*args, **kwargs)

    return call


def of_tensors(function: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """Return a function that gets tensors instead of arrays where operations are made."""

    @functools.wraps(function)
    def call(*args: Any, name: str | None = None, **kwargs: Any) -> Any:
        if program.uses_graphs():
            args = tuple(map(_as_operation, args))
            kwargs = {key: _as_operation(kwargs[key]) for key in kwargs}
        return function(*args, **kwargs)

    return call


def use_graphs(program: Program) -> None:
    """Let names of two meanings make operations of graphs from now on."""
    program.use(has_graphs=True)


def use_arrays(program: Program) -> None:
    """Let names of two meanings make arrays again."""
    program.use(has_graphs=False)


def executing_eagerly(program: Program) -> bool:
    """Return True if names of two meanings make arrays."""
    return not program.uses_graphs()


def _as_operation(value: Any) -> Any:
    return graph.as_tensor(value) if isinstance(value, list | np.ndarray) else value


class StandIn(type):
    """The type of a class that stands for others: their instances count as its instances."""

    def __instancecheck__(cls, value: Any) -> bool:
        return super().__instancecheck__(value) or isinstance(value, vars(cls).get("native", ()))

    def __subclasscheck__(cls, kind: type) -> bool:
        return super().__subclasscheck__(kind) or issubclass(kind, vars(cls).get("native", ()))
