"""What real CuPy takes: each call of the imitation is compared with it, where it is installed.

Its wheel needs no GPU for that; `make cupy-check` installs it for CuPy 13 and 14, with NCCL.
"""

import functools
import inspect
import operator
import re
import warnings

try:  # Before the imitation takes its name.
    import cupy

    with warnings.catch_warnings(action="ignore"):  # that NCCL is not installed
        import cupy.cuda.nccl
except ImportError:
    cupy = None


def check_call(name, *args, **kwargs):
    """Raise what is wrong with a call of CuPy, of a method with its array first.

    Raises:
        AttributeError: CuPy has no such function.
        TypeError: it takes other arguments.
    """
    if cupy is not None:
        signature = _signature_of(name)
        if signature is not None:
            signature.bind(*args, **kwargs)


@functools.cache
def _signature_of(name):
    """Return what a function takes; None for a ufunc, all of which take the same."""
    if name.startswith("cuda.nccl") and not cupy.cuda.nccl.available:
        return None
    function = operator.attrgetter(name)(cupy)
    if isinstance(function, cupy.ufunc):
        return None
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return signature_in(function.__doc__)


def signature_in(doc):
    """Read what a compiled function takes from the first line of its docstring."""
    inside = doc.partition("\n")[0].partition("(")[2].rpartition(")")[0]
    inside = re.sub(r"\([^()]*\)", "", inside)  # a default that is a tuple
    parameters, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in filter(None, (part.strip() for part in inside.split(","))):
        typed, equals, _ = part.partition("=")
        argument = typed.split()[-1]
        name, stars = argument.lstrip("*"), argument.count("*")
        own = (kind, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)[stars]
        if name not in ("", "/"):
            default = None if equals else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name, own, default=default))
        if stars == 1:
            kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(parameters)
