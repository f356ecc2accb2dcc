"""The errors for code that a compiled step cannot run; they name the user's line."""

from __future__ import annotations

from typing import Any, NoReturn

from ndistribute.autodiff.diagnostics import name_of, user_line
from ndistribute.context import current_frame
from ndistribute.errors import TracingError

_OF_NUMPY = (
    "Write np.stack([x, y]) for np.array([x, y]), np.ones(n) * x for np.full(n, x), and pass an "
    "array that x indexes as an argument, or make it a variable. To keep the value, return it."
)


def refuse(function: Any, why: str) -> NoReturn:
    """Raise the error for a function of NumPy that cannot be compiled."""
    raise TracingError(
        f"{name_of(function)} at {user_line()} cannot be compiled, because {why.rstrip('.')}. Use "
        "other functions of NumPy instead, or run this step without compiling it."
    )


def refuse_value(what: str, instead: str) -> NoReturn:
    """Raise the error for code that needs the values of an array while a step is traced."""
    raise TracingError(
        f"{what} at {user_line()} needs the values of an array in a compiled step, which has none "
        f"before it runs. {instead or _OF_NUMPY} Or run this step without compiling it."
    )


def refuse_shape(what: str) -> NoReturn:
    """Raise the error for code in which values decide a shape."""
    raise TracingError(
        f"{what} at {user_line()}: the values of an array decide the shape of the result, which a "
        "compiled step must know before it runs. Write np.where(mask, x, 0) in place of x[mask], "
        "or run this step without compiling it."
    )


def refuse_leak() -> NoReturn:
    """Raise the error for a box that is used outside the step in which it was made."""
    raise TracingError(
        f"a value that a compiled step computed is used at {user_line()}, outside of that step: it "
        "has no value. Return it from the step, or assign it to a variable."
    )


def refuse_outside(target: Any) -> NoReturn:
    """Raise the error for a write to an array outside of the step that is traced."""
    raise TracingError(
        f"a compiled step writes to a {type(target).__name__} that was made outside of it, at "
        f"{user_line()}: such a write would happen once, while the step is traced. Make it a "
        "variable, nd.Variable(array), and assign to it, or return the value."
    )


def refuse_recording(what: str, instead: str) -> None:
    """Raise the error for an operation without a gradient, if a tape records."""
    if getattr(current_frame().recorder, "is_recording", False):
        raise TracingError(
            f"{what} at {user_line()} while a GradientTape records, which cannot see into it: "
            f"{instead}."
        )
