"""With TLS, each end also shows a certificate of the job's own authority."""

from __future__ import annotations

import shutil
import socket
import subprocess

import pytest

from ndistribute.errors import AuthenticationError, CollectiveTimeoutError
from ndistribute.transport.gate import Gate, listen
from ndistribute.transport.handshake import TlsFiles, tls_files
from tests.transport.handshakes import (
    SECRET,
    WRONG_SECRET,
    at_once,
    connection,
    outcome,
    shake,
)

KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes".split()
NAMES = ("NDISTRIBUTE_TLS_CERT", "NDISTRIBUTE_TLS_KEY", "NDISTRIBUTE_TLS_CA")


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> list[TlsFiles]:
    """Certificates of two authorities that know nothing of each other."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program, which makes the certificates, is not here")
    return [_authority(tmp_path_factory.mktemp(name)) for name in ("ours", "theirs")]


def _authority(folder) -> TlsFiles:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=30)

    openssl("req", "-x509", *KEY, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    openssl("req", *KEY, "-keyout", "key.pem", "-out", "request", "-subj", "/CN=worker")
    openssl(*"x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem".split())
    return TlsFiles(*(str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem")))


def tls(server: TlsFiles | None, client: TlsFiles | None, client_secret: bytes = SECRET):
    return shake(SECRET, client_secret, server={"tls": server}, client={"tls": client})


def test_two_ends_of_one_authority_meet(authorities):
    ours = authorities[0]
    assert tls(ours, ours) == (b"I join", b"I serve")


def test_a_certificate_does_not_replace_the_secret(authorities):
    ours = authorities[0]
    for error in tls(ours, ours, WRONG_SECRET):
        assert isinstance(error, AuthenticationError)
        assert "another secret" in str(error)


def test_a_certificate_of_another_authority_is_refused_at_both_ends(authorities):
    ours, theirs = authorities
    for server, client in [
        (ours, theirs),
        (ours, TlsFiles(theirs.cert, theirs.key, ours.ca)),  # Only the client is a stranger.
        (TlsFiles(theirs.cert, theirs.key, ours.ca), ours),  # Only the server is.
    ]:
        for error in tls(server, client):
            assert isinstance(error, AuthenticationError), error
            assert "NDISTRIBUTE_TLS_CA" in str(error)


@pytest.mark.parametrize("tls_end", ["server", "client"])
def test_one_end_without_tls_is_told_at_both_ends(authorities, tls_end):
    ours = authorities[0]
    server, client = (ours, None) if tls_end == "server" else (None, ours)
    for error in tls(server, client):
        assert isinstance(error, AuthenticationError), error
        assert "TLS" in str(error)


def test_silence_in_tls_ends_at_the_deadline(authorities):
    with connection() as (server, client):
        error = outcome(server, SECRET, server=True, tls=authorities[0], seconds=0.2)
        assert isinstance(error, CollectiveTimeoutError)
        assert client.recv(100) == b""


def test_a_peer_that_leaves_in_tls_is_one_that_may_come_again(authorities):
    with connection() as (server, client):
        client.sendall(b"\x16\x03\x01")
        client.shutdown(socket.SHUT_WR)
        error = outcome(server, SECRET, server=True, tls=authorities[0])
    assert isinstance(error, ConnectionError)


def test_a_gate_with_tls_admits_and_refuses(authorities):
    ours, theirs = authorities
    admitted = []

    def on_peer(sock: socket.socket, hello: bytes) -> None:
        admitted.append(hello)
        sock.sendall(b"welcome")
        sock.close()

    def join(files: TlsFiles | None):
        sock = socket.create_connection(listener.getsockname(), timeout=5)
        return outcome(sock, SECRET, server=False, hello=b"me", tls=files)

    listener = listen("127.0.0.1:0")
    with Gate(listener, SECRET, on_peer, hello=b"gate", tls=ours):
        refused = at_once(lambda: join(theirs), lambda: join(None))
        assert {type(error) for error in refused} == {AuthenticationError}
        assert join(ours) == b"gate"
    assert admitted == [b"me"]


def test_files_that_are_no_certificates_are_named(authorities, tmp_path):
    ours = authorities[0]
    empty = tmp_path / "empty.pem"
    empty.touch()
    for broken in (
        TlsFiles("nowhere.pem", ours.key, ours.ca),
        TlsFiles(ours.cert, ours.key, str(empty)),
        TlsFiles(ours.cert, authorities[1].key, ours.ca),
    ):
        with (
            listen("127.0.0.1:0") as listener,
            pytest.raises(AuthenticationError, match="NDISTRIBUTE_TLS_CERT="),
        ):
            Gate(listener, SECRET, lambda sock, hello: None, tls=broken)


def test_a_key_with_a_passphrase_is_refused_rather_than_asked_for(authorities, tmp_path):
    ours = authorities[0]
    locked = str(tmp_path / "locked.pem")
    words = ["openssl", "ec", "-in", ours.key, "-out", locked, "-aes128", "-passout", "pass:open"]
    subprocess.run(words, check=True, capture_output=True, timeout=30)
    with listen("127.0.0.1:0") as listener, pytest.raises(AuthenticationError, match="passphrase"):
        Gate(listener, SECRET, lambda sock, hello: None, tls=TlsFiles(ours.cert, locked, ours.ca))


def test_the_environment_names_all_files_or_none():
    values = ("cert", "key", "ca")
    every = dict(zip(NAMES, values, strict=True))
    assert tls_files(every) == TlsFiles(*values)
    assert tls_files({}) is None
    assert tls_files(dict.fromkeys(NAMES, "")) is None
    for missing in NAMES:
        with pytest.raises(ValueError, match=f"{missing} is not set"):
            tls_files({name: value for name, value in every.items() if name != missing})
