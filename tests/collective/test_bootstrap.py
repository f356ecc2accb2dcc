"""Who a process is in its group, and at which address the others reach it."""

from __future__ import annotations

import socket
import time

import pytest

from ndistribute.collective import bootstrap
from ndistribute.collective.bootstrap import (
    DataConnections,
    ProcessInfo,
    info_from_addresses,
    info_from_rank_0,
    outward_address,
)
from ndistribute.transport.address import address_of
from ndistribute.transport.secret import Credentials


def test_a_host_whose_own_name_is_loopback_is_reached_at_another_address(monkeypatch):
    """Debian gives a host's name 127.0.1.1: workers on other hosts called themselves."""
    own = socket.gethostname()
    ways = {f"{own}:9": "127.0.1.1", "twin:9": "127.0.0.1", "other:9": "10.1.2.3"}
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(bootstrap, "_own_address_towards", ways.__getitem__)
    assert outward_address(["twin", own, "other"]) == "10.1.2.3"


def test_a_host_that_nobody_reaches_is_told_so(monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    with pytest.raises(OSError, match="add it to /etc/hosts"):
        outward_address(["elsewhere"])


def test_a_rank_0_of_an_unknown_name_is_named(monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "the secret of this test")
    with pytest.raises(OSError, match="the host name 'no-such-host"):
        info_from_rank_0("no-such-host.invalid:1", 1, 2)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_a_heartbeat_that_would_never_pause_is_refused(monkeypatch, text):
    monkeypatch.setenv("NDISTRIBUTE_HEARTBEAT_SECONDS", text)
    with pytest.raises(ValueError, match="NDISTRIBUTE_HEARTBEAT_SECONDS must be a number"):
        info_from_addresses(["127.0.0.1:0", "127.0.0.1:1"], 0)


def test_a_process_that_connects_again_for_data_ends_its_first_connection() -> None:
    """It was closed under a thread that may poll it, by then perhaps another file."""
    credentials = Credentials(b"the secret of this test", "a job", None)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [address_of(*listener.getsockname()) for listener in listeners]
    group = [
        DataConnections(
            ProcessInfo(rank, 2, addresses[0], addresses[rank], listener, credentials, group=1)
        )
        for rank, listener in enumerate(listeners)
    ]
    try:
        for data in group:
            data.open(addresses, "this start")
        group[1].get(0, lambda: None)
        first = group[0].get(1, lambda: None)
        group[1].let_go()
        again = group[1].get(0, lambda: None)
        deadline = time.monotonic() + 50.0
        while (second := group[0].get(1, lambda: None)) is first:
            assert time.monotonic() < deadline
        assert first.fileno() >= 0
        assert first.recv(1) == b""
        again.setblocking(True)
        second.sendall(b"+")
        assert again.recv(1) == b"+"
    finally:
        for data in group:
            data.close()
