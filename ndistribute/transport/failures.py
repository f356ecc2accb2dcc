"""Errors as records, with which one process tells another why it failed.

Each kind of message lists the classes that its receiver may raise; other classes become text. A
record is only data, so an error of a peer cannot create an object of an unknown class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ndistribute.transport.codec import Record

_MOST_CHARACTERS = 1 << 16
# The classes that a receiver raises, by name; the empty name is for all other classes.
Kinds = Mapping[str, type[Exception]]


class Failure(Record, frozen=True):
    """The reason why a process failed, or did not execute a request."""

    kind: str  # The name of a class, or a word that the sender and the receiver know.
    message: str
    rank: int | None = None  # These are attributes of the error, see `DistributeError`.
    op: str | None = None
    sequence: int | None = None
    task: str | None = None


def failure_of(error: BaseException, kinds: Kinds) -> Failure:
    """Return an error as a record, with the first of its classes that `kinds` has, if any.

    >>> failure_of(FileNotFoundError("no file"), {"OSError": OSError})
    Failure(kind='OSError', message='no file', rank=None, op=None, sequence=None, task=None)
    >>> failure_of(KeyError("x"), {}).message
    "KeyError: 'x'"
    """
    try:
        text = str(error)
    except Exception as problem:  # A user's class may raise an error, but this function must not.
        text = f"(no text: str() raised {type(problem).__name__})"
    names = [kind.__name__ for kind in type(error).__mro__]
    known = next((name for name in names if name in kinds), "")
    if not known:
        return Failure("", sendable(f"{type(error).__name__}: {text}"))
    values = {name: getattr(error, name, None) for name in _ATTRIBUTES}
    attributes = {name: _ATTRIBUTES[name](v) for name, v in values.items() if v is not None}
    return Failure(known, sendable(text), **attributes)


def error_of(failure: Failure, kinds: Kinds, prefix: str = "") -> Exception:
    """Return the error to raise for a failure of another process."""
    error = kinds.get(failure.kind, kinds[""])(prefix + failure.message)
    for name in _ATTRIBUTES:
        if (value := getattr(failure, name)) is not None:
            setattr(error, name, value)
    return error


def sendable(value: object) -> str:
    """Return a text that can be sent: shortened, with `?` for invalid characters.

    >>> sendable("a file's name: " + chr(0xDCFF))
    "a file's name: ?"
    """
    return str(value)[:_MOST_CHARACTERS].encode(errors="replace").decode()


_Convert = Callable[[Any], Any]
_ATTRIBUTES: dict[str, _Convert] = {"rank": int, "op": sendable, "sequence": int, "task": sendable}
