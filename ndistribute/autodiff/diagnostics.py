"""Errors that name the user's line: lost gradients and missing rules.

A tape detects a mistake inside NumPy or deeper. So the message names the innermost frame that
belongs neither to this package nor to an installed one. Frames are searched only when a message is
needed.
"""

from __future__ import annotations

import dis
import itertools
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import numpy as np

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD = os.path.dirname(os.__file__)
# Packages may be outside site-packages: `pip install --target` installs them anywhere.
_INSTALLED = os.path.dirname(os.path.dirname(np.__file__))
_NUMERIC = [os.path.join(_INSTALLED, name) for name in ("numpy", "scipy", "pandas")]
_LIBRARIES = (*(path + os.sep for path in (_PACKAGE, _STANDARD, *_NUMERIC)), "<frozen ")

# SciPy functions that convert arguments before NumPy's protocols see them; ours are the same.
_REPLACED = {"logsumexp", "softmax", "log_softmax"}


def user_line() -> str:
    """Return the current file and line of the user's code, as ``file:line``."""
    frame = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def called(function: Any, arguments: str = "") -> str:
    """Return a function's name, its arguments, and the user's line that calls it."""
    return f"{name_of(function)}{arguments} at {user_line()}"


def missing(function: Any, why: str = "") -> Callable[[Any], NoReturn]:
    """Return a rule that raises a `TypeError` that names the function, and why it has none."""
    arguments = f" with these arguments ({why})" if why else ""
    error = (
        f"{name_of(function)}{arguments}, called at {user_line()}, has no derivative rule. Write "
        "it in terms of functions that have one, define one with nd.custom_gradient, or compute it "
        "from nd.stop_gradient(x)."
    )

    def vjp(g: Any) -> NoReturn:
        raise TypeError(error)

    return vjp


def refusing(function: Any, why: str) -> Callable[[Any], NoReturn]:
    """Return a rule for a gradient without a gradient: it raises a `TypeError` that says why."""
    name = "an operation" if function is None else name_of(function)
    error = f"second derivatives of {name} are not available: {why.rstrip('.')}."

    def vjp(g: Any) -> NoReturn:
        raise TypeError(error)

    return vjp


def refuse_conversion(conversion: str) -> None:
    """Raise a `TypeError` for a conversion of a tracked array to a plain value.

    The ``%`` operator of a string may convert.
    """
    caller, user = next(_frames()), _user_frame()
    # "%.3f" % loss only displays the value, but calls __float__ too.
    operation, operator = caller.f_code.co_code[caller.f_lasti : caller.f_lasti + 2]
    if operation == dis.opmap["BINARY_OP"] and operator in _REMAINDERS:
        return
    inside = itertools.takewhile(lambda frame: frame is not user, _frames())
    called = _REPLACED.intersection(frame.f_code.co_name for frame in inside)
    instead = "".join(f"nd.{name} does the same and has a gradient. " for name in called)
    raise TypeError(
        f"{_expression(user) or conversion} at {user_line()} converts a tracked array to a plain "
        f"value ({conversion}) while a GradientTape records, so the gradient would be lost. "
        f"{instead}Use NumPy functions of the tracked array itself, join tracked values with "
        "np.stack([a, b]), convert arrays of other libraries with np.asarray, wrap functions of "
        "other libraries in nd.custom_gradient, or, if no gradient is needed, pass "
        "nd.stop_gradient(x)."
    )


def refuse_elsewhere(function: Any) -> NoReturn:
    """Raise a `TypeError` for a call outside the frame of the tape that tracks its argument."""
    raise TypeError(
        f"{function if isinstance(function, str) else name_of(function)} at {user_line()} computes "
        "with a tracked array in another thread, or in a step of strategy.run, while the "
        "GradientTape that tracks it records elsewhere, and the gradient would be lost. Open the "
        "tape in the function that computes, or pass nd.stop_gradient(x)."
    )


def refuse_read(variable: Any) -> NoReturn:
    """Raise a `TypeError` for a variable that a step reads, but a tape outside of it watches."""
    raise TypeError(
        f"{getattr(variable, 'name', 'a variable')} is read at {user_line()} in a step of "
        "strategy.run, while a GradientTape that was opened outside of the step watches it, and "
        "the gradient would be lost. Open the tape in the step, or use nd.stop_gradient(variable)."
    )


def refuse_polyval() -> None:
    """Raise a `TypeError` in a `polyval` with coefficients that NumPy reshapes for arrays only."""
    frame = next(_frames())
    names = frame.f_locals
    if frame.f_code.co_name == "polyval" and names.get("tensor") and np.ndim(names["c"]) > 1:
        raise TypeError(
            f"np.polynomial.polynomial.polyval of a tracked array, called at {user_line()} with "
            "coefficients of several dimensions, would not broadcast as it does for an array: call "
            "it for each column of the coefficients, and join the results with np.stack."
        )


def name_of(function: Any) -> str:
    """Return a function's name as users write it.

    >>> name_of(np.exp), name_of(np.linalg.inv), name_of(np.add.reduceat)
    ('np.exp', 'np.linalg.inv', 'np.add.reduceat')
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, np.ufunc):
        return f"{name_of(owner)}.{function.__name__}"
    name = getattr(function, "__name__", repr(function))
    if isinstance(function, np.ufunc):
        if getattr(np, name, None) is function:
            return f"np.{name}"
        special = getattr(sys.modules.get("scipy.special"), name, None) is function
        return f"scipy.special.{name}" if special else f"the ufunc {name}"
    module = getattr(function, "__module__", None) or "numpy"
    if module.partition(".")[0] == "numpy":
        parts = [part for part in module.split(".")[1:] if not part.startswith("_")]
        return ".".join(["np", *parts, name])
    return f"{module}.{name}"


def _frames() -> Iterator[FrameType]:
    """Yield the frames of this thread outside this package, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES[0]):
            yield frame
        frame = frame.f_back


def is_user_file(file: str) -> bool:
    """Return True if a file belongs neither to this package nor to an installed one."""
    return not file.startswith(_LIBRARIES) and "-packages" + os.sep not in file


def _user_frame() -> FrameType:
    """Return the innermost frame of the user's code; without one, of any code."""
    first = None
    for frame in _frames():
        if is_user_file(frame.f_code.co_filename):
            return frame
        first = first or frame
    return first or sys._getframe()


def _expression(frame: FrameType) -> str:
    """Return the source of the expression that a frame executes; "" if unknown or multi-line."""
    code = frame.f_code
    places = itertools.islice(code.co_positions(), frame.f_lasti // 2, None)
    first, last, start, stop = next(places, (None,) * 4)
    if first is None or first != last:
        return ""
    line = linecache.getline(code.co_filename, first, frame.f_globals)
    return line.encode()[start:stop].decode()


_REMAINDERS = (6, 19)  # NB_REMAINDER and NB_INPLACE_REMAINDER of opcode.h.
