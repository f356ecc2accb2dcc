# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

ABORTED: Any
ALREADY_EXISTS: Any
from ndistribute.errors import AbortedError as _AbortedError
AbortedError = _AbortedError
from ndistribute.compat.op_errors import AlreadyExistsError as _AlreadyExistsError
AlreadyExistsError = _AlreadyExistsError
CANCELLED: Any
from ndistribute.errors import CancelledError as _CancelledError
CancelledError = _CancelledError
DATA_LOSS: Any
DEADLINE_EXCEEDED: Any
from ndistribute.errors import CheckpointCorruptError as _DataLossError
DataLossError = _DataLossError
from ndistribute.errors import DeadlineExceededError as _DeadlineExceededError
DeadlineExceededError = _DeadlineExceededError
FAILED_PRECONDITION: Any
from ndistribute.errors import FailedPreconditionError as _FailedPreconditionError
FailedPreconditionError = _FailedPreconditionError
INTERNAL: Any
INVALID_ARGUMENT: Any
from ndistribute.compat.op_errors import InternalError as _InternalError
InternalError = _InternalError
from ndistribute.errors import InvalidArgumentError as _InvalidArgumentError
InvalidArgumentError = _InvalidArgumentError
NOT_FOUND: Any
from ndistribute.errors import NotFoundError as _NotFoundError
NotFoundError = _NotFoundError
OK: Any
OUT_OF_RANGE: Any
from ndistribute.errors import DistributeError as _OpError
OpError = _OpError
from ndistribute.compat.op_errors import OperatorNotAllowedInGraphError as _OperatorNotAllowedInGraphError
OperatorNotAllowedInGraphError = _OperatorNotAllowedInGraphError
OutOfRangeError: Any
PERMISSION_DENIED: Any
from ndistribute.compat.op_errors import PermissionDeniedError as _PermissionDeniedError
PermissionDeniedError = _PermissionDeniedError
RESOURCE_EXHAUSTED: Any
from ndistribute.compat.op_errors import ResourceExhaustedError as _ResourceExhaustedError
ResourceExhaustedError = _ResourceExhaustedError
UNAUTHENTICATED: Any
UNAVAILABLE: Any
UNIMPLEMENTED: Any
UNKNOWN: Any
from ndistribute.errors import AuthenticationError as _UnauthenticatedError
UnauthenticatedError = _UnauthenticatedError
from ndistribute.errors import WorkerLostError as _UnavailableError
UnavailableError = _UnavailableError
from ndistribute.compat.op_errors import UnimplementedError as _UnimplementedError
UnimplementedError = _UnimplementedError
from ndistribute.compat.op_errors import UnknownError as _UnknownError
UnknownError = _UnknownError
