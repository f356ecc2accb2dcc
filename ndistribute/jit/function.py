"""`function`: a decorator that compiles a function of NumPy code by XLA, under any strategy."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import user_line
from ndistribute.context import current_frame, current_trace, get_replica_context, get_strategy
from ndistribute.devices import Array
from ndistribute.errors import TracingError
from ndistribute.jit.identity import Identities
from ndistribute.jit.program import MOST_PROGRAMS, Compilation, CompiledStep, Devices


class Function:
    """A function that XLA compiles for each shape of its arguments; see `function`."""

    def __init__(self, python_function: Callable[..., Any]) -> None:
        if not callable(python_function):
            raise TypeError(f"function needs a function, got {python_function!r}.")
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self._attribute = ""  # The name in a class.
        self._identities = Identities()
        self._steps: OrderedDict[Any, CompiledStep] = OrderedDict()

    @property
    def compilations(self) -> list[Compilation]:
        """The shapes of the arguments and the seconds of each compilation so far."""
        return [made for step in dict.fromkeys(self._steps.values()) for made in step.compilations]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function, compiled."""
        if current_trace() is not None:
            return self.python_function(*args, **kwargs)  # It becomes a part of that program.
        frame = current_frame()
        if getattr(frame.recorder, "is_recording", False):
            raise TracingError(
                f"{self!r} is called at {user_line()} while a GradientTape records, which cannot "
                "see into it: open the tape in the function."
            )
        replica = get_replica_context() or get_strategy().replica_contexts[0]
        place = replica.strategy.serial, replica.local_replica_id, frame.replica is None
        key = *place, self._identities.of(self.python_function, (args, kwargs))
        step = self._steps.get(key)
        if step is None:

            def seeds() -> list[Array]:
                return [replica.generator().integers(2**32, size=2).astype(np.uint32)]

            enter = contextlib.nullcontext
            step = CompiledStep(self.python_function, Devices(), enter, seeds)
            step = self._steps.setdefault(key, step)
            while len(self._steps) > MOST_PROGRAMS:
                self._steps.popitem(last=False)
        count = len(step.compilations)
        results = step(args, kwargs)
        if len(step.compilations) > count:  # The trace may have changed what is around it.
            key = *place, self._identities.of(self.python_function, (args, kwargs))
            self._steps.setdefault(key, step)
        return results[0]

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
