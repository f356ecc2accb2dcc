"""What tells a function of a compiled step from others, and a constant in its arguments."""

from __future__ import annotations

from typing import Any


def identity_of(function: Any) -> Any:
    """Return a key that is equal for functions of one code with the same things around it."""
    if hasattr(function, "__func__"):  # A method, which has the code of its function, too.
        return identity_of(function.__func__), _Same(function.__self__)
    code = getattr(function, "__code__", None)
    if code is None:
        return _Same(function)
    cells = [_content(cell) for cell in function.__closure__ or ()]
    around = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    around += [function.__globals__.get(name) for name in code.co_names]
    return code, _Same(function.__globals__), tuple(map(constant_key, around))


def _content(cell: Any) -> Any:
    """Return what a cell of a closure contains; None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def constant_key(leaf: Any) -> Any:
    """Return what tells a constant of a program from others: its value, or itself."""
    if isinstance(leaf, str | bytes | int | float | complex | bool | None):
        return type(leaf), leaf
    return _Same(leaf)


class _Same:
    """A key for an object that equals itself only."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
