# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.errors import AbortedError as _AbortedError
AbortedError = _AbortedError
from ndistribute.errors import CancelledError as _CancelledError
CancelledError = _CancelledError
from ndistribute.errors import DeadlineExceededError as _DeadlineExceededError
DeadlineExceededError = _DeadlineExceededError
from ndistribute.errors import FailedPreconditionError as _FailedPreconditionError
FailedPreconditionError = _FailedPreconditionError
from ndistribute.errors import InvalidArgumentError as _InvalidArgumentError
InvalidArgumentError = _InvalidArgumentError
from ndistribute.errors import NotFoundError as _NotFoundError
NotFoundError = _NotFoundError
from ndistribute.errors import OperationError as _OpError
OpError = _OpError
OutOfRangeError: Any
from ndistribute.errors import WorkerLostError as _UnavailableError
UnavailableError = _UnavailableError
