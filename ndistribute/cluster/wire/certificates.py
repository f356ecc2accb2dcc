"""Learns which name stands in the certificate that a server shows, and that the job signed it."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from ndistribute.cluster.wire.transport import UnreachableError
from ndistribute.errors import AuthenticationError
from ndistribute.transport.address import split_address
from ndistribute.transport.tls import TlsFiles, tls_context

__all__ = ["name_of_certificate"]


def name_of_certificate(address: str, tls: TlsFiles, timeout: float) -> str:
    """Return a name in the certificate of the server at an address.

    Args:
        address: ``host:port``.
        tls: this process's certificate, which the server sees.
        timeout: seconds to wait for it.

    Raises:
        AuthenticationError: the server uses no TLS, or one of the two certificates is not signed
            by the other's authority, or the server's has no name at all.
        UnreachableError: nobody answers there.
    """
    context = tls_context(tls, server=False)
    context.set_alpn_protocols(["h2"])  # Without it gRPC ends the connection.
    try:
        with (
            socket.create_connection(split_address(address), timeout=timeout) as plain,
            context.wrap_socket(plain) as sock,
        ):
            sock.recv(1)  # A server that refuses this process's certificate says so only now.
            certificate: dict[str, Any] = dict(sock.getpeercert() or {})
    except ssl.SSLError as error:
        raise AuthenticationError(
            f"The server at {address} and this process do not agree on TLS: {error}. Give all "
            "processes of the job certificates of one authority (NDISTRIBUTE_TLS_CERT, _KEY and "
            "_CA), or none of them."
        ) from error
    except OSError as error:
        raise UnreachableError(f"{error}.") from error
    alternatives = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    common = [
        value
        for part in certificate.get("subject", ())
        for key, value in part
        if key == "commonName"
    ]
    names: list[str] = [*alternatives, *common]
    if not names:
        raise AuthenticationError(
            f"The certificate of the server at {address} has no name. Make it with one, such as "
            "openssl's -subj /CN=worker."
        )
    return names[0].replace("*", "any", 1)
