"""Which hosts a job runs on and how many processes each gets, from a command line or a file.

Pure functions but for one: whether a name is this machine's.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Host", "assign", "is_this_machine", "parse_hostfile", "parse_hosts"]

# Not a dash at the start: ssh would take it for an option.
_HOST = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.@-]*|\[[0-9A-Fa-f:.]+\])(?::(?P<slots>\d+))?")
_LINE = re.compile(r"(?P<host>\S+)(?:\s+(?:slots\s*=\s*)?(?P<slots>\d+))?(?:\s+max_slots=\d+)?")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A machine and how many processes it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of a list such as ``a:2,b:2``; one process where no number is given.

    Raises:
        ValueError: an entry is malformed, or a host is named twice.

    >>> parse_hosts("a:2,b")
    [Host(name='a', slots=2), Host(name='b', slots=1)]
    """
    return _distinct([_host(entry.strip(), None) for entry in text.split(",")])


def parse_hostfile(text: str) -> list[Host]:
    r"""Return the hosts of a file with one in each line: ``a:2``, ``a 2`` or ``a slots=2``.

    Raises:
        ValueError: a line is malformed, or there is none.

    >>> parse_hostfile("# rack 1\na slots=2\nb:2\n")
    [Host(name='a', slots=2), Host(name='b', slots=2)]
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None:
            raise ValueError(f"line {number} of the hostfile, {line!r}, is not HOST slots=N.")
        hosts.append(_host(match["host"], match["slots"]))
    if not hosts:
        raise ValueError("the hostfile names no host.")
    return _distinct(hosts)


def assign(hosts: Sequence[Host], processes: int | None) -> list[Host]:
    """Return how many of a number of processes each host gets, filling one after the other.

    Args:
        hosts: at least one.
        processes: how many; None for as many as the hosts take.

    Raises:
        ValueError: the hosts do not take as many, or it is not at least one.

    >>> assign([Host("a", 2), Host("b", 2), Host("c", 2)], 3)
    [Host(name='a', slots=2), Host(name='b', slots=1)]
    """
    room = sum(host.slots for host in hosts)
    left = room if processes is None else processes
    if left < 1:
        raise ValueError(f"-n must be at least 1, got {left}.")
    if left > room:
        raise ValueError(f"-n {left} is more than the {room} processes that the hosts take.")
    used = []
    for host in hosts:
        if left > 0:
            used.append(Host(host.name, min(host.slots, left)))
            left -= host.slots
    return used


def is_this_machine(name: str) -> bool:
    """Say whether a host's name is one of this machine's own."""
    mine = socket.gethostname()
    return name.strip("[]").lower() in {*_LOOPBACK, mine.lower(), mine.partition(".")[0].lower()}


def _host(entry: str, slots: str | None) -> Host:
    match = _HOST.fullmatch(entry)
    count = int((match and match["slots"]) or slots or 1) if match else 0
    if match is None or count < 1 or (slots and match["slots"]):
        raise ValueError(f"{entry!r} is not HOST or HOST:PROCESSES.")
    return Host(match["name"], count)


def _distinct(hosts: list[Host]) -> list[Host]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the host {name!r} is named twice: write {name}:2 for two processes.")
    return hosts
