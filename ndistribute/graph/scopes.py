"""`get_variable` and `variable_scope`: variables that parts of a program share by name."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ndistribute.graph.graph import get_default_graph
from ndistribute.graph.operations import random_uniform
from ndistribute.graph.variables import GraphVariable
from ndistribute.mistakes import accepting

AUTO_REUSE = "auto"
"""A value for `reuse`: a variable is created at its first use, and used again later."""

REGULARIZATION_LOSSES = "regularization_losses"
_STORE = "variable store"


@dataclass(eq=False)
class VariableScope:
    """A scope of `get_variable`: a prefix of names, and defaults of its arguments."""

    name: str = ""
    reuse: Any = None  # None and False: variables are new; True: they exist; AUTO_REUSE: either.
    initializer: Any = None
    inner: set[str] = field(default_factory=set)  # The names of the scopes that were made in it.

    def reuse_variables(self) -> None:
        """Make `get_variable` return only existing variables, until the end of the scope."""
        self.reuse = True


def get_variable_scope() -> VariableScope:
    """Return the scope of the default graph in the current thread."""
    scopes = get_default_graph().scopes
    scopes.variables = scopes.variables or VariableScope()
    return scopes.variables  # type: ignore[no-any-return]


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | VariableScope | None,
    default_name: str | None = None,
    values: Any = None,
    *,
    reuse: Any = None,
    initializer: Any = None,
) -> Iterator[VariableScope]:
    """Return a context manager that puts a prefix before the names of `get_variable`.

    Args:
        name_or_scope: the prefix in the current scope, or a scope to enter again.
        default_name: the prefix if `name_or_scope` is None; a number makes it unique.
        values: has no effect.
        reuse: True: variables must exist already; `AUTO_REUSE`: they may exist; None or False: as
            in the outer scope.
        initializer: the default initializer; None: as in the outer scope.

    >>> from ndistribute.graph.graph import Graph
    >>> with Graph().as_default(), variable_scope("layer", reuse=AUTO_REUSE):
    ...     get_variable("w", [2, 3]) is get_variable("w", [2, 3])
    True
    """
    graph, outer = get_default_graph(), get_variable_scope()
    if isinstance(name_or_scope, VariableScope):
        entered, label = name_or_scope, f"{name_or_scope.name}/" if name_or_scope.name else None
    else:
        inner = label = name_or_scope or _unused(default_name or "scope", outer.inner)
        outer.inner.add(inner)
        entered = VariableScope(f"{outer.name}/{inner}" if outer.name else inner, outer.reuse)
    scope = VariableScope(
        entered.name,
        reuse or entered.reuse,
        initializer or entered.initializer or outer.initializer,
        set(outer.inner) if entered.name == outer.name else set(),
    )
    with graph.scoped("variables", scope), graph.name_scope(label):
        yield scope


def _unused(name: str, used: set[str]) -> str:
    """Return a name, with a number if it is used."""
    numbered = (f"{name}_{k}" for k in itertools.count(1))
    return next(each for each in itertools.chain([name], numbered) if each not in used)


@accepting("caching_device", "use_resource", "validate_shape")
def get_variable(
    name: str,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    initializer: Any = None,
    trainable: bool = True,
    collections: list[str] | None = None,
    regularizer: Callable[[Any], Any] | None = None,
) -> GraphVariable:
    """Return the variable with a name; the current scope creates or reuses it.

    Args:
        name: its name in the scope.
        shape: its shape; None: that of the initializer's array.
        dtype: its dtype; None: that of the initializer's array, otherwise float32.
        initializer: an array, a tensor, or a function of a shape and a dtype. None: the initializer
            of the scope; without one, uniform numbers after Glorot and Bengio (2010), or zeros for
            integers.
        trainable: whether optimizers change it by default.
        collections: the names of the collections to add it to; None: the global variables.
        regularizer: a function whose result for a new variable is added to the collection
            ``"regularization_losses"``.

    Raises:
        ValueError: the variable exists although the scope does not reuse, it does not exist
            although the scope reuses, or it has another shape.
    """
    graph, scope = get_default_graph(), get_variable_scope()
    full = f"{scope.name}/{name}" if scope.name else name
    store = graph.get_collection_ref(_STORE)
    variable: GraphVariable | None = dict(store).get(full)
    if variable is not None:
        if not scope.reuse:
            raise ValueError(
                f"variable {full!r} exists already: enter the scope with reuse=True or AUTO_REUSE "
                "to use it again, or choose another name."
            )
        _check_shape(full, variable.shape, shape)
        return variable
    if scope.reuse is True:
        raise ValueError(f"variable {full!r} does not exist, and its scope has reuse=True.")
    make = initializer if initializer is not None else scope.initializer
    if make is None or callable(make):
        dtype = np.dtype(np.float32 if dtype is None else dtype)
        make = _initial(make, shape, dtype, full)
    with graph.name_scope(None):
        made = GraphVariable(make, trainable, full, dtype, collections)
    _check_shape(full, made.shape, shape)
    store.append((full, made))
    if regularizer is not None:
        graph.add_to_collection(REGULARIZATION_LOSSES, regularizer(made))
    return made


def _check_shape(name: str, shape: Any, wanted: Any) -> None:
    wanted = (wanted,) if isinstance(wanted, int) else wanted
    if wanted is not None and shape is not None and tuple(wanted) != tuple(shape):
        raise ValueError(f"variable {name!r} has shape {tuple(shape)}, not {tuple(wanted)}.")


def _initial(
    make: Callable[..., Any] | None, shape: Any, dtype: np.dtype[Any], name: str
) -> Callable[[], Any]:
    """Return a function that returns the initial value."""
    if shape is None:
        raise ValueError(f"get_variable of {name!r} needs a shape, or an array as initializer.")
    lengths = tuple(int(length) for length in ([shape] if isinstance(shape, int) else shape))
    if make is None:
        make = np.zeros if dtype.kind in "biu" else glorot_uniform
    make = make() if isinstance(make, type) else make
    return functools.partial(make, lengths, dtype)


def glorot_uniform(shape: tuple[int, ...], dtype: Any, seed: int | None = None) -> Any:
    """Return uniform numbers after Glorot and Bengio (2010)."""
    inputs, outputs = shape[-2:] if len(shape) > 1 else (*shape, *shape) or (1, 1)
    limit = math.sqrt(6.0 / max(1, (inputs + outputs) * math.prod(shape[:-2])))
    return random_uniform(shape, -limit, limit, dtype, seed)
