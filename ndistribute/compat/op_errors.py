"""TensorFlow's errors that this package raises under TensorFlow's names only, and all numbers."""

from __future__ import annotations

from typing import Any

from ndistribute.errors import OperationError

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = range(6)
ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED = range(6, 11)
OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = range(11, 17)


def _kind(name: str, number: int, *bases: type) -> Any:
    """Return a class of errors, which also derives from built-in classes that fit."""
    return type(name, (OperationError, *bases), {"error_code": number, "__module__": __name__})


AlreadyExistsError = _kind("AlreadyExistsError", ALREADY_EXISTS, FileExistsError)
PermissionDeniedError = _kind("PermissionDeniedError", PERMISSION_DENIED, PermissionError)
ResourceExhaustedError = _kind("ResourceExhaustedError", RESOURCE_EXHAUSTED, MemoryError)
UnimplementedError = _kind("UnimplementedError", UNIMPLEMENTED, NotImplementedError)
InternalError = _kind("InternalError", INTERNAL)


class UnknownError(OperationError):
    """Any failure that fits no other class."""


class OperatorNotAllowedInGraphError(TypeError):
    """A tensor of a graph was used where its value is needed."""
