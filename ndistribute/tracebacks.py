"""Short reports of the errors that end a process of a job: the user's lines, not the package's.

`ndistribute run` asks for them by an environment variable. This file changes how an error that
nobody caught is printed, and nothing else; a hook that the user has set stays.
"""

from __future__ import annotations

import os
import sys
import traceback

from ndistribute.errors import CollectiveMismatchError, CollectiveTimeoutError, WorkerLostError

VARIABLE = "NDISTRIBUTE_TRACEBACK"
SHORT = "short"

_PACKAGE = os.path.dirname(__file__) + os.sep
# Several processes raise these together, so each one reports in a line.
OF_SEVERAL = CollectiveMismatchError, CollectiveTimeoutError, WorkerLostError


def install() -> None:
    """Print short reports if the environment asks for them."""
    if os.environ.get(VARIABLE) == SHORT and sys.excepthook is sys.__excepthook__:
        sys.excepthook = lambda _, error, __: sys.stderr.write(short_report(error))


def short_report(error: BaseException) -> str:
    """Return the traceback of an error without the package's frames.

    An error that several processes raise together becomes one line, with the user's last line.

    >>> print(short_report(WorkerLostError("worker 1 failed")))
    ndistribute.errors.WorkerLostError: worker 1 failed
    """
    report = traceback.TracebackException.from_exception(error, compact=True)
    _drop_frames(report)
    if not isinstance(error, OF_SEVERAL) or report.__cause__ or report.__context__:
        return "".join(report.format())
    said = " ".join(next(report.format_exception_only()).split())
    last = report.stack[-1] if report.stack else None
    return said + (f" ({last.filename}:{last.lineno}: {last.line})\n" if last else "\n")


def _drop_frames(report: traceback.TracebackException) -> None:
    report.stack[:] = [frame for frame in report.stack if _is_users(frame)] or report.stack
    for other in [report.__cause__, report.__context__, *(report.exceptions or ())]:
        if other is not None:
            _drop_frames(other)


def _is_users(frame: traceback.FrameSummary) -> bool:
    runs_module = frame.filename == "<frozen runpy>" or f"{os.sep}mpi4py{os.sep}" in frame.filename
    return not runs_module and not frame.filename.startswith(_PACKAGE)
