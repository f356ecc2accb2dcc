"""Who a process is in its group, and at which address the others reach it."""

from __future__ import annotations

import socket

import pytest

from ndistribute.collective import bootstrap
from ndistribute.collective.bootstrap import info_from_addresses, outward_address


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


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_a_heartbeat_that_would_never_pause_is_refused(monkeypatch, text):
    monkeypatch.setenv("NDISTRIBUTE_HEARTBEAT_SECONDS", text)
    with pytest.raises(ValueError, match="NDISTRIBUTE_HEARTBEAT_SECONDS must be a number"):
        info_from_addresses(["127.0.0.1:0", "127.0.0.1:1"], 0)
