"""`cond` and `while_loop`: branches and loops that depend on values, in compiled or plain steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ndistribute.autodiff.diagnostics import user_line
from ndistribute.context import current_trace
from ndistribute.devices import jax_module
from ndistribute.errors import TracingError
from ndistribute.jit.box import Box, boxed, value_of
from ndistribute.jit.refusals import refuse_recording

_OUTSIDE = "or compute it outside of the tape"


def cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any
) -> Any:
    """Return what one of two functions returns, depending on a condition.

    In a compiled step both functions are compiled, and the step runs one of them. They may read
    variables and arrays from outside, but must not write to them. Their results must have the same
    shapes and dtypes.

    Args:
        pred: a boolean, or an array of one.
        true_fn: called with the operands if the condition holds.
        false_fn: called with them otherwise.
        operands: the arrays that are passed to the function.

    Raises:
        TracingError: in a compiled step, if the branches differ, or a tape records.

    >>> import ndistribute as nd
    >>> nd.cond(2 > 1, lambda x: x + 1, lambda x: x - 1, 10)
    11
    """
    trace = current_trace()
    if trace is None or not isinstance(pred, Box):
        return true_fn(*operands) if pred else false_fn(*operands)
    refuse_recording("nd.cond in a compiled step", f"use np.where, {_OUTSIDE}")
    branches = map(trace.nested, (true_fn, false_fn))
    try:
        result, held = jax_module().lax.cond(pred.value, *branches, *map(value_of, operands))
    except TypeError as error:
        raise TracingError(f"nd.cond at {user_line()}: the branches differ. {error}") from error
    _check_inside(trace, held)
    return boxed(result)


def while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], loop_vars: Any
) -> tuple[Any, ...]:
    """Return the loop's variables after calling a body as long as a condition holds.

    Args:
        cond_fn: a function of the variables that returns a boolean.
        body_fn: a function of the variables that returns their new values, of the same shapes and
            dtypes.
        loop_vars: a sequence of arrays and numbers.

    Raises:
        TracingError: in a compiled step, if the body changes a shape or dtype, or a tape records.

    >>> import ndistribute as nd
    >>> nd.while_loop(lambda k, x: k < 3, lambda k, x: (k + 1, x * 2), (0, 1.0))
    (3, 8.0)
    """
    state, trace = tuple(loop_vars), current_trace()
    if trace is None:
        while cond_fn(*state):
            state = tuple(body_fn(*state))
        return state
    instead = f"use a Python loop over a fixed number of steps, {_OUTSIDE}"
    refuse_recording("nd.while_loop in a compiled step", instead)
    lax, test = jax_module().lax, trace.nested(cond_fn, repeats=True)
    body = trace.nested(lambda *values: tuple(body_fn(*values)), repeats=True)

    def step(carried: Any) -> Any:
        values, held = carried
        new, now = body(*values)
        return new, held & now & test(*new)[1]  # The condition has checks too.

    start = tuple(map(value_of, state))
    try:
        values, held = lax.while_loop(lambda c: test(*c[0])[0], step, (start, test(*start)[1]))
    except TypeError as error:
        raise TracingError(f"nd.while_loop at {user_line()}: {error}") from error
    _check_inside(trace, held)
    return tuple(boxed(values))


def _check_inside(trace: Any, held: Any) -> None:
    where = user_line()
    trace.check(held, lambda: IndexError(f"an index or a label at {where} is out of range."))
