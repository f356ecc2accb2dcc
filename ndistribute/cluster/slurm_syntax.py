"""Slurm's two abbreviations, for lists of hosts and for tasks on each node, as pure functions.

They stand in `SLURM_STEP_NODELIST` and `SLURM_STEP_TASKS_PER_NODE`; expanding them here needs no
`scontrol` on the node.
"""

from __future__ import annotations

import itertools
import math
import re

__all__ = ["expand_hosts", "expand_tasks"]

_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
# More than any machine has; a slip such as [1-99999999999] is caught before it fills the memory.
_MOST_HOSTS = 1 << 17


def expand_hosts(text: str) -> list[str]:
    """Return the hosts that a Slurm host list names, in order.

    Args:
        text: such as ``"n[001-003,7],gpu-[1-2]x[3,5],login"``.

    Raises:
        ValueError: the list is malformed; the message names the part.

    >>> expand_hosts("n[001-003,7],gpu-[1-2]x[3,5],login")
    ['n001', 'n002', 'n003', 'n7', 'gpu-1x3', 'gpu-1x5', 'gpu-2x3', 'gpu-2x5', 'login']
    """
    hosts: list[str] = []
    for entry in _entries(text):
        # re.split puts what stands in brackets at the odd places.
        pieces = _PART.split(entry)
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
            raise ValueError(f"The host list {text!r} has brackets that do not match in {entry!r}.")
        choices = [
            _numbers(piece, text) if place % 2 else [range(1)] for place, piece in enumerate(pieces)
        ]
        if len(hosts) + math.prod(sum(map(len, c)) for c in choices) > _MOST_HOSTS:
            raise ValueError(f"The host list {text!r} names more than {_MOST_HOSTS} hosts.")
        words = [_words(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        hosts += ["".join(word) for word in itertools.product(*words)]
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Return how many tasks each node has.

    Args:
        text: such as ``"2(x3),1"``.

    Raises:
        ValueError: the text is malformed.

    >>> expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"The tasks per node {text!r} are malformed at {part!r}.")
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_HOSTS:
            raise ValueError(f"The tasks per node {text!r} are for more than {_MOST_HOSTS} nodes.")
        counts += [int(match[1])] * times
    return counts


def _entries(text: str) -> list[str]:
    """Cut at the commas that stand outside brackets."""
    entries = re.split(r",(?![^\[]*\])", text.strip())
    if not all(entries):
        raise ValueError(f"The host list {text!r} is empty, or has an empty entry.")
    return entries


def _numbers(inside: str, text: str) -> list[range]:
    ranges = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"The host list {text!r} has a malformed range {part!r}.")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranges


def _words(inside: str) -> list[str]:
    """Write the numbers of a bracket, as wide as the first of their range is written."""
    words = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        words += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return words
