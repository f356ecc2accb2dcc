"""`function`: a decorator that compiles a function of NumPy code by XLA, under any strategy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ndistribute.context import (
    ReplicaContext,
    current_trace,
    get_replica_context,
    get_strategy,
)
from ndistribute.jit.program import Compilation, Compiler, Devices
from ndistribute.jit.refusals import refuse_recording


class Function:
    """A function that XLA compiles for each shape of its arguments; see `function`."""

    def __init__(self, python_function: Callable[..., Any]) -> None:
        if not callable(python_function):
            raise TypeError(f"function needs a function, got {python_function!r}.")
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self._attribute = ""  # The name in a class.
        self._compilers: WeakKeyDictionary[Any, Compiler] = WeakKeyDictionary()  # By replica.

    @property
    def compilations(self) -> list[Compilation]:
        """The shapes of the arguments and the seconds of each compilation so far."""
        return [made for each in self._compilers.values() for made in each.compilations]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function, compiled."""
        if current_trace() is not None:
            return self.python_function(*args, **kwargs)  # It becomes a part of that program.
        refuse_recording(repr(self), "open the tape in the function")
        replica = _replica()
        compiler = self._compilers.get(replica)
        if compiler is None:
            made = Compiler(Devices(), lambda: [_replica()], contextlib.nullcontext)
            compiler = self._compilers.setdefault(replica, made)
        return compiler(self.python_function, args, kwargs)[0]

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return a method, which is compiled for each object."""
        if instance is None:
            return self
        method = Function(self.python_function.__get__(instance))
        vars(instance)[self._attribute] = method  # From now on it is found there.
        return method

    def __repr__(self) -> str:
        return f"<compiled {self.python_function!r}>"


def _replica() -> ReplicaContext:
    return get_replica_context() or get_strategy().replica_contexts[0]


def function(python_function: Callable[..., Any]) -> Any:
    """Return a function that computes the same, compiled by XLA for each shape of its arguments.

    With one replica it may be a whole step, with variables, tapes and an optimizer. With several,
    each replica calls it for itself, so it has no collectives: compile the loss and its gradients.
    Code that is not about arrays runs while the function is traced, and not in later calls.

    Args:
        python_function: computes with NumPy's functions. Arrays are its inputs; other arguments,
            such as Python numbers, are constants: other values compile it again, and so do others
            of what is around the function. An array around it, a global or of a closure, is a
            constant too, and a call raises if it has changed; read-only arrays are not looked at.

    Raises:
        TracingError: at a call, if the function does what only plain code can; it says where.
        MissingDependencyError: at a call, if JAX is not installed.

    >>> import numpy as np
    >>> import ndistribute as nd
    >>> @nd.function
    ... def distance(x, y):
    ...     return np.sqrt(np.sum((x - y) ** 2))
    >>> distance(np.array([3.0, 0.0]), np.array([0.0, 4.0]))  # doctest: +SKIP
    array(5.)
    """
    return Function(python_function)
