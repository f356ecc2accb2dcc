"""`tf.Module`, and `tf.function`, which checks a function's arguments if it has a signature.

Functions run as plain Python: they are not traced, unless XLA compiles them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.compat.signatures import adapted
from ndistribute.compat.tensors import convert_to_tensor
from ndistribute.errors import InvalidArgumentError
from ndistribute.graph.shapes import Shape
from ndistribute.jit.function import function as jit_function
from ndistribute.models.layers import Layer
from ndistribute.tree import map_leaves
from ndistribute.values import DistributedValues


class SignatureError(InvalidArgumentError, TypeError):
    """An argument that does not fit the signature of a function."""


def _function(func: Any = None, input_signature: Any = None, jit_compile: Any = None) -> Any:
    """Return a function unchanged, with checked arguments, or compiled by XLA."""
    if func is None:
        return lambda func: _function(func, input_signature, jit_compile)
    if jit_compile:
        return jit_function(func)
    result: Any = func if input_signature is None else _checked(func, input_signature)
    with contextlib.suppress(AttributeError):  # Bound methods have no attributes.
        result.python_function = func
        result.get_concrete_function = functools.partial(_concrete, func, input_signature)
    return result


function = adapted(
    _function,
    *"autograph experimental_autograph_options experimental_relax_shapes reduce_retracing".split(),
    experimental_compile="jit_compile",
)


def _concrete(func: Any, signature: Any, *specs: Any) -> Any:
    """Return a function that checks its arguments."""
    if next(iter(inspect.signature(func).parameters), None) == "self":
        raise NotImplementedError(
            f"get_concrete_function of the method {func.__name__!r}: call the method itself, or "
            "tf.function of a function that calls it."
        )
    return _checked(func, specs or signature or ())


def _checked(func: Callable[..., Any], specs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that gets tensors of the shapes and dtypes of its signature."""
    signature = inspect.signature(func)
    names = [name for name in signature.parameters if name != "self"][: len(specs)]

    def fitted(name: str, spec: Any, value: Any) -> Any:
        if not hasattr(spec, "dtype") or isinstance(value, DistributedValues):
            return value
        tensor = convert_to_tensor(value, None if hasattr(value, "dtype") else spec.dtype)
        kinds = [np.dtype(each.dtype) for each in (spec, tensor)]
        is_text = all(kind.kind in "OSU" for kind in kinds)
        try:
            if not is_text and kinds[0] != kinds[1]:
                raise ValueError(f"the dtype is {kinds[1]}, expected {kinds[0]}.")
            if spec.shape is not None:
                Shape(spec.shape).merged(Shape(tensor.shape))
        except ValueError as error:
            raise SignatureError(f"{func.__name__}: argument {name!r}: {error}") from None
        return tensor

    @functools.wraps(func)
    def call(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        for name, spec in zip(names, specs, strict=False):
            if name in bound.arguments:
                check, value = functools.partial(fitted, name), bound.arguments[name]
                is_nest = not hasattr(spec, "dtype")
                value = map_leaves(check, spec, value) if is_nest else check(spec, value)
                bound.arguments[name] = value
        return func(*bound.args, **bound.kwargs)

    return call


class Module(Layer):
    """A group of variables and modules, which checkpoints save; a subclass defines its calls."""

    _uncalled: ClassVar[dict[str, str]] = {}
    name_scope = property(lambda self: contextlib.nullcontext(self.name))

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)

    @property
    def submodules(self) -> tuple[Any, ...]:
        """The modules and layers in this one."""
        return tuple(self.walk())[1:]

    @classmethod
    def with_name_scope(cls, method: Any) -> Any:
        """Return the method unchanged: the names of variables do not change."""
        return method
