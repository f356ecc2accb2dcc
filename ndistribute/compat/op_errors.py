"""Errors of TensorFlow that this package raises under its names alone, and the numbers of all."""

from __future__ import annotations

from ndistribute.errors import OperationError

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = range(6)
ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED = range(6, 11)
OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = range(11, 17)


class AlreadyExistsError(OperationError, FileExistsError):
    """A file that is there already."""

    error_code = ALREADY_EXISTS


class PermissionDeniedError(OperationError, PermissionError):
    """A file that may not be read or written."""

    error_code = PERMISSION_DENIED


class ResourceExhaustedError(OperationError, MemoryError):
    """A value for which there is no memory."""

    error_code = RESOURCE_EXHAUSTED


class UnimplementedError(OperationError, NotImplementedError):
    """An operation that does not exist for its values."""

    error_code = UNIMPLEMENTED


class InternalError(OperationError):
    """A mistake in what runs an operation."""

    error_code = INTERNAL


class UnknownError(OperationError):
    """Any other failure."""


class OperatorNotAllowedInGraphError(TypeError):
    """A tensor of a graph where its value would be needed."""
