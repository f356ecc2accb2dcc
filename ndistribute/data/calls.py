"""Calls of functions of users for the elements of a dataset, whose mistakes are explained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.data.elements import Element, as_element
from ndistribute.data.pipeline import Epoch, Node
from ndistribute.mistakes import explain_read_only

# Where an error has the node for an element of which a function raised it.
CHILD = "_ndistribute_child"


def explained(
    what: str,
    fn: Callable[..., Any],
    epoch: Epoch | None = None,
    child: Node | None = None,
    produces: bool = False,
) -> Callable[..., Any]:
    """Return the function that calls `fn` with an element, or with the items of a tuple.

    It explains mistakes of `fn` where Python or NumPy cannot, and notes in the epoch, and in the
    error, that it failed for an element of `child`. If it `produces` elements, what `fn` returns
    becomes one; a list is several arrays, as a tuple is.
    """

    def call(element: Element) -> Any:
        nonlocal fn
        try:
            value = fn(*element) if type(element) is tuple else fn(element)
            if not produces or isinstance(value, np.generic):
                return value
            return as_element(tuple(value) if type(value) is list else value)
        except BaseException as error:
            if not isinstance(error, Exception):
                fn = _interrupted  # The next call would skip this element.
                raise
            explain_read_only(error)
            wrong: Exception = error
            if isinstance(error, StopIteration):
                wrong = RuntimeError(f"{what} raised StopIteration, which ends an iteration.")
                wrong.__cause__ = error
            if epoch is not None and child is not None:
                epoch.failed[child] = what
                vars(wrong)[CHILD] = child
            raise wrong from wrong.__cause__

    return call


def _interrupted(*_: Any) -> Any:
    raise RuntimeError(
        "the iteration was interrupted in an element, which would be left out: iterate anew, or "
        "load the state of this iterator into a new one."
    )


def check_state(what: str, initial: Element, state: Element) -> None:
    """Raise a TypeError if a function returned a state of another structure."""
    if not tree.same_structure(initial, state):
        raise TypeError(
            f"{what} returned the state {state!r}, whose structure differs from that of "
            f"initial_state, {initial!r}."
        )
