"""Derivatives of the functions that take or return several arrays at once.

Their tracked arguments stand inside a list, or behind a string, so a rule here sees the whole call
and the paths of the tracked arrays in it. None means that the call is beyond the rule.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.fit import fit, zeros
from ndistribute.device import Array

__all__ = ["JOINT_RULES", "RULES_BY_PATH"]

Vjp = Callable[[Array], Array]
Path = tuple[Any, ...]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def _concatenate(out: Array, path: Path, args: Args, kwargs: Kwargs) -> Vjp:
    arrays, position, axis = args[0], path[1], _axis(args, kwargs, 1)
    part = arrays[position]
    shape, dtype = part.shape, part.dtype
    if axis is None:
        start = sum(np.size(array) for array in arrays[:position])
        return lambda g: fit(g[start : start + part.size].reshape(shape), shape, dtype)
    start = sum(np.shape(array)[axis] for array in arrays[:position])
    where = (slice(None),) * (axis % part.ndim) + (slice(start, start + shape[axis]),)
    return lambda g: fit(g[where], shape, dtype)


def _stack(out: Array, path: Path, args: Args, kwargs: Kwargs) -> Vjp:
    part = args[0][path[1]]
    shape, dtype = part.shape, part.dtype
    where = (slice(None),) * (_axis(args, kwargs, 1) % out.ndim) + (path[1],)
    return lambda g: fit(g[where], shape, dtype)


def _einsum(out: Array, path: Path, args: Args, kwargs: Kwargs) -> Vjp | None:
    """Return the rule of one operand of an einsum, itself an einsum."""
    if not isinstance(args[0], str):
        return None
    inputs, arrow, output = _without_ellipsis(args[0].replace(" ", ""), args[1:]).partition("->")
    terms = inputs.split(",")
    if not arrow:
        output = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    own = terms[path[0] - 1]
    others = [
        (t, x) for k, (t, x) in enumerate(zip(terms, args[1:], strict=True), 1) if k != path[0]
    ]
    distinct = "".join(dict.fromkeys(own))
    known = "".join(c for c in distinct if c in output or any(c in term for term, _ in others))
    backward = ",".join([output, *(term for term, _ in others)]) + "->" + known
    operand, rest = args[path[0]], [x for _, x in others]
    shape, dtype = operand.shape, operand.dtype

    def vjp(g: Array) -> Array:
        change = np.einsum(backward, g, *rest, optimize=True)
        if known != own:
            # Indices that were summed away alone spread the gradient, and repeated ones put it on
            # the diagonal, which einsum gives as a view.
            whole = zeros(change, shape)
            diagonal = np.einsum(f"{own}->{distinct}", whole)
            where = tuple(slice(None) if c in known else None for c in distinct)
            diagonal[...] = change[where]
            change = whole
        return fit(change, shape, dtype)

    return vjp


def _without_ellipsis(formula: str, operands: Sequence[Any]) -> str:
    """Return the formula of an einsum with letters in the place of each ellipsis."""
    if "..." not in formula:
        return formula
    free = "".join(sorted(set(string.ascii_letters) - set(formula)))
    inputs, arrow, output = formula.partition("->")
    terms = inputs.split(",")
    counts = [
        np.ndim(x) - len(term) + 3 if "..." in term else 0
        for term, x in zip(terms, operands, strict=True)
    ]
    # Axes are matched from the last one on, as in broadcasting.
    most = max(counts)
    letters = free[:most]
    terms = [t.replace("...", letters[most - n :]) for t, n in zip(terms, counts, strict=True)]
    if not arrow:
        output = "..." + "".join(
            sorted(c for c in set(inputs) - {",", "."} if inputs.count(c) == 1)
        )
    return ",".join(terms) + "->" + output.replace("...", letters)


def _split(parts: Sequence[Array], args: Args, kwargs: Kwargs) -> Any:
    """Return the rule that joins the gradients of the pieces; None counts as zeros."""
    axis = _axis(args, kwargs, 2)

    def vjp(gradients: Sequence[Array | None]) -> list[Array]:
        pairs = zip(parts, gradients, strict=True)
        return [np.concatenate([np.zeros_like(p) if g is None else g for p, g in pairs], axis)]

    return vjp


def _axis(args: Args, kwargs: Kwargs, position: int) -> Any:
    return args[position] if len(args) > position else kwargs.get("axis", 0)


RULES_BY_PATH: dict[Any, Callable[[Array, Path, Args, Kwargs], Vjp | None]] = {
    np.concatenate: _concatenate,
    np.stack: _stack,
    np.einsum: _einsum,
}

JOINT_RULES: dict[Any, Callable[[Sequence[Array], Args, Kwargs], Any]] = {
    np.split: _split,
    np.array_split: _split,
}
