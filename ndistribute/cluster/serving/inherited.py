"""The port that a launcher keeps free for a task until the task itself listens there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from ndistribute.transport.address import split_address

__all__ = ["LISTEN_FD", "release_inherited"]

LISTEN_FD = "NDISTRIBUTE_LISTEN_FD"


def release_inherited(address: str, environ: Mapping[str, str]) -> None:
    """Close the socket by which a launcher kept this task's port free until now.

    gRPC opens sockets of its own only, and two cannot listen at one port.
    """
    number = environ.get(LISTEN_FD, "")
    if not number.isdigit():
        return
    try:
        held = socket.socket(fileno=os.dup(int(number)))
    except OSError:
        return  # It was used and closed before.
    with held:
        ours = held.getsockname()[1:2] == (split_address(address)[1],)
    if ours:
        os.close(int(number))
