"""How long this process is patient: numbers of seconds that its environment may set."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["seconds_of"]


def seconds_of(environ: Mapping[str, str], name: str, usual: float) -> float:
    """Return the seconds that a variable sets; if it is not set, the usual ones.

    >>> seconds_of({"PATIENCE": "2.5"}, "PATIENCE", 30.0), seconds_of({}, "PATIENCE", 30.0)
    (2.5, 30.0)
    """
    text = environ.get(name) or str(usual)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is a number of seconds above 0, here {text!r}.")
    return seconds
