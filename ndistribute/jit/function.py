"""`function`: a decorator that compiles NumPy code with XLA, under any strategy."""

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
    """A function that XLA compiles once for each shape of its arguments; see `function`."""

    def __init__(self, python_function: Callable[..., Any]) -> None:
        if not callable(python_function):
            raise TypeError(f"function needs a function, got {python_function!r}.")
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self._attribute = ""  # The name of the attribute if it is a method.
        # The compilers, by replica.
        self._compilers: WeakKeyDictionary[Any, Compiler] = WeakKeyDictionary()

    @property
    def compilations(self) -> list[Compilation]:
        """The compilations so far: the shapes of the arguments, and the seconds each took."""
        return [made for each in self._compilers.values() for made in each.compilations]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the compiled function."""
        if current_trace() is not None:
            # The function becomes a part of that program.
            return self.python_function(*args, **kwargs)
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
        """Return the method of an object; it is compiled for each object."""
        if instance is None:
            return self
        method = Function(self.python_function.__get__(instance))
        vars(instance)[self._attribute] = method  # From now on, Python finds it there.
        return method

    def __repr__(self) -> str:
        return f"<compiled {self.python_function!r}>"


def _replica() -> ReplicaContext:
    return get_replica_context() or get_strategy().replica_contexts[0]


def function(python_function: Callable[..., Any]) -> Any:
    """Return a function that computes the same, compiled by XLA for each shape of its arguments.

    With one replica, the function may be a whole step, with variables, tapes and an optimizer. With
    several replicas, each calls it separately, so it must not contain collectives: compile the loss
    and its gradients. Code that does not compute with arrays runs only while the function is
    traced, and not in later calls.

    Args:
        python_function: a function that computes with NumPy's functions. Arrays are its inputs.
            Other arguments, such as Python numbers, are constants: another value compiles the
            function again. So does a change of the globals, closure variables and attributes that
            it reads. A global or closure variable that is an array is a constant too, and a call
            raises an error if it has changed; read-only arrays are not checked.

    Raises:
        TracingError: at a call, if the function does something that only plain code can do; the
            message names the line.
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
