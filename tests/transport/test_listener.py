"""A listener lets peers in, whatever strangers do meanwhile, and leaves nothing when it closes."""

import contextlib
import errno
import logging
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from ndistribute.errors import AuthenticationError, CollectiveTimeoutError
from ndistribute.transport import listener
from ndistribute.transport.address import name_of_peer
from ndistribute.transport.handshake import Accepted, Hello
from ndistribute.transport.listener import LISTEN_FD, MAXIMUM_HANDSHAKES, Listener, listen
from ndistribute.transport.secret import Credentials, TlsFiles, tls_files
from tests.transport.ends import (
    CREDENTIALS,
    GREETING,
    SECONDS,
    STRANGER,
    authority,
    forked,
    open_sockets,
    shake,
    sockets,
    soon,
)

TLS_NAMES = ("NDISTRIBUTE_TLS_CERT", "NDISTRIBUTE_TLS_KEY", "NDISTRIBUTE_TLS_CA")


class Served:
    """A listener, and the peers that it has accepted."""

    def __init__(self, credentials: Credentials = CREDENTIALS, **options) -> None:
        self.peers: queue.Queue[tuple[socket.socket, Accepted]] = queue.Queue()
        sock = listen("127.0.0.1:0")
        self.address = sock.getsockname()
        own = Hello(name="server")
        options.setdefault("on_peer", lambda *peer: self.peers.put(peer))
        self.listener = Listener([sock], credentials, own, **options)

    def knock(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=SECONDS)

    def join(self, name: str = "me", credentials: Credentials = CREDENTIALS) -> str | Exception:
        """Return who answered, or what went wrong."""
        try:
            sock, accepted = shake(self.knock(), credentials, Hello(name=name))
        except Exception as error:
            return error
        sock.close()
        return accepted.hello.name

    def peer(self) -> str:
        sock, accepted = self.peers.get(timeout=SECONDS)
        sock.close()
        return accepted.hello.name


@contextlib.contextmanager
def opened(*args, **options) -> Iterator[Served]:
    made = Served(*args, **options)
    with contextlib.closing(made.listener):
        yield made
    while not made.peers.empty():
        made.peer()


@pytest.fixture
def server() -> Iterator[Served]:
    with opened() as made:
        yield made


@contextlib.contextmanager
def strangers(server: Served, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(server.knock()) for _ in range(count)]
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
        yield socks


def hung_up(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_peer_gets_in_and_nothing_of_what_follows_is_eaten(server):
    sock, accepted = shake(server.knock())
    with sock:
        assert accepted.hello.name == "server"
        peer, theirs = server.peers.get(timeout=SECONDS)
        with peer:
            assert theirs.hello.name == "me"
            assert theirs.receiving_key == accepted.sending_key
            peer.sendall(b"welcome")
            assert sock.recv(7, socket.MSG_WAITALL) == b"welcome"


@pytest.mark.parametrize("sent", [b"", GREETING])
def test_a_crowd_that_waits_costs_no_thread_and_delays_nobody(server, sent):
    threads = threading.active_count()
    with strangers(server, MAXIMUM_HANDSHAKES + 100, sent):
        assert server.join() == "server"
        assert threading.active_count() == threads
        assert len(server.listener._pending) <= MAXIMUM_HANDSHAKES


def test_the_newest_is_not_the_one_that_makes_way(server):
    """A peer whose first bytes are under way must not be taken for a stranger that says nothing."""
    with strangers(server, MAXIMUM_HANDSHAKES, GREETING):
        for _ in range(20):
            late = server.knock()
            with strangers(server, 8, GREETING):
                assert shake(late)[1].hello.name == "server"
            late.close()


@pytest.mark.parametrize("sent", [b"", GREETING])
def test_who_does_not_finish_in_time_is_dropped_though_it_drips(sent, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.3)
    with opened() as server, server.knock() as sock:
        sock.sendall(sent[:-1])
        sock.settimeout(0.02)
        deadline, open_ = soon(), True
        while open_:
            assert time.monotonic() < deadline
            try:
                sock.send(b"N" * (not sent))
                open_ = bool(sock.recv(4096))
            except TimeoutError:
                pass
            except ConnectionError:
                break


def test_a_wrong_secret_keeps_one_out_and_refusals_are_logged_with_why_and_then_counted(caplog):
    with opened() as server:
        for _ in range(20):
            assert isinstance(server.join(credentials=STRANGER), AuthenticationError)
        assert server.join() == "server"
        assert server.peer() == "me"
        assert server.peers.empty()
    records = [record for record in caplog.records if record.name == "ndistribute"]
    assert all(record.levelno == logging.WARNING for record in records)
    assert 2 <= len(records) <= 5
    assert "127.0.0.1:" in records[0].getMessage()
    assert "another secret" in records[0].getMessage()
    assert "more since the last" in records[-1].getMessage()


def test_a_callback_that_raises_costs_one_connection_and_one_may_close_the_listener(caplog):
    def picky(sock: socket.socket, accepted: Accepted) -> None:
        if accepted.hello.name == "stranger":
            raise LookupError("never heard of you")
        sock.close()
        server.listener.close()

    with opened(on_peer=picky) as server:
        for name in ("stranger", "friend"):
            with shake(server.knock(), hello=Hello(name=name))[0] as sock:
                assert hung_up(sock)
    assert "never heard of you" in caplog.text
    assert "friend" not in caplog.text


def test_closing_drops_who_waits_and_frees_the_port(server):
    with strangers(server, 5) as silent, strangers(server, 5, GREETING) as begun:
        assert server.join() == "server"  # So all who came before were accepted.
        server.listener.close()
        assert all(hung_up(sock) for sock in silent + begun)
        with pytest.raises(ConnectionError):
            server.knock()
    with listen(f"127.0.0.1:{server.address[1]}"):
        pass
    server.listener.close()


def test_the_connecting_side_gives_up_at_its_deadline():
    server, client = sockets()
    server.sendall(GREETING[:6])
    with server, pytest.raises(CollectiveTimeoutError):
        shake(client, seconds=0.2)
    server, client = sockets()
    server.close()
    with pytest.raises(ConnectionError):
        shake(client)


def test_addresses_that_can_not_be_had_are_named_with_what_to_do(server):
    port = server.address[1]
    with pytest.raises(OSError, match="choose another port, or port 0") as caught:
        listen(f"127.0.0.1:{port}")
    assert caught.value.errno == errno.EADDRINUSE
    assert f"127.0.0.1 port {port}" in str(caught.value)
    with pytest.raises(OSError, match=r"192\.0\.2\.1 port 0.*does not have this address"):
        listen("192.0.2.1:0")
    with pytest.raises(OSError, match=r"no\.such\.host\.invalid"):
        listen("no.such.host.invalid:0")
    with listen("127.0.0.2:0") as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", sock.getsockname()[1]), timeout=SECONDS)


def test_a_version_6_address_serves_as_well():
    try:
        sock = listen("[::1]:0")
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    six = Listener([sock], CREDENTIALS, Hello(name="six"), lambda peer, _: peer.close())
    with contextlib.closing(six):
        client = socket.create_connection(sock.getsockname()[:2], timeout=SECONDS)
        client, accepted = shake(client)
        client.close()
        assert accepted.hello.name == "six"


def test_a_socket_that_a_launcher_keeps_is_taken_and_another_refused(server):
    with socket.create_server(("127.0.0.1", 0)) as kept:
        port, environ = kept.getsockname()[1], {LISTEN_FD: str(kept.fileno())}
        with listen(f"127.0.0.1:{port}", environ) as sock:
            assert sock.getsockname()[1] == port
        with pytest.raises(OSError, match=f"listens on port {port}"):
            listen("127.0.0.1:1", environ)
    with pytest.raises(OSError, match="not an open socket"):
        listen("127.0.0.1:1", {LISTEN_FD: "9999"})


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> list[TlsFiles]:
    """Certificates of two authorities that know nothing of each other."""
    return [authority(tmp_path_factory.mktemp(name)) for name in ("ours", "theirs")]


def with_tls(files: TlsFiles | None, credentials: Credentials = CREDENTIALS) -> Credentials:
    return Credentials(credentials.secret, credentials.job, files)


def test_with_tls_both_ends_need_a_certificate_and_the_secret(authorities):
    ours, theirs = authorities
    mixed = TlsFiles(theirs.cert, theirs.key, ours.ca)  # A stranger that trusts this job's CA.
    with opened(with_tls(ours)) as server:
        assert server.join(credentials=with_tls(ours)) == "server"
        assert server.peer() == "me"
        error = server.join(credentials=with_tls(ours, STRANGER))
        assert isinstance(error, AuthenticationError)
        assert "another secret" in str(error)
        for files in (theirs, mixed, None):
            error = server.join(credentials=with_tls(files))
            assert isinstance(error, AuthenticationError), error
            assert "TLS" in str(error)
        assert server.peers.empty()
    for credentials in (with_tls(mixed), CREDENTIALS):
        with opened(credentials) as server:
            error = server.join(credentials=with_tls(ours))
            assert isinstance(error, AuthenticationError)
            assert "TLS" in str(error)
            assert server.peers.empty()


def test_who_stops_or_leaves_in_tls_delays_nobody(authorities, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.5)
    with (
        opened(with_tls(authorities[0])) as server,
        server.knock() as stopped,
        server.knock() as leaving,
    ):
        stopped.sendall(b"\x16\x03\x01")
        leaving.sendall(b"\x16\x03\x01")
        leaving.shutdown(socket.SHUT_WR)
        assert server.join(credentials=with_tls(authorities[0])) == "server"
        assert hung_up(leaving)
        assert hung_up(stopped)


def test_files_that_are_no_certificates_are_named_and_no_passphrase_is_asked_for(
    authorities, tmp_path
):
    ours, theirs = authorities
    empty, locked = tmp_path / "empty.pem", tmp_path / "locked.pem"
    empty.touch()
    words = ["openssl", "ec", "-in", ours.key, "-out", locked, "-aes128", "-passout", "pass:open"]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    for broken in (
        TlsFiles("nowhere.pem", ours.key, ours.ca),
        TlsFiles(ours.cert, ours.key, str(empty)),
        TlsFiles(ours.cert, theirs.key, ours.ca),
        TlsFiles(ours.cert, str(locked), ours.ca),
    ):
        with (
            listen("127.0.0.1:0") as sock,
            pytest.raises(AuthenticationError, match="NDISTRIBUTE_TLS_CERT="),
        ):
            Listener([sock], with_tls(broken), Hello(), lambda peer, accepted: None)


def test_the_environment_names_all_files_of_tls_or_none():
    every = dict(zip(TLS_NAMES, ("cert", "key", "ca"), strict=True))
    assert tls_files(every) == TlsFiles("cert", "key", "ca")
    assert tls_files(dict.fromkeys(TLS_NAMES, "")) is None
    for missing in TLS_NAMES:
        with pytest.raises(ValueError, match=f"not set: {missing}"):
            tls_files({name: value for name, value in every.items() if name != missing})


def test_a_fork_keeps_no_copy_of_the_listener():
    before = open_sockets()
    with opened() as server, strangers(server, 3, GREETING):
        assert server.join() == "server"
        server.peer()
        # The test's own three strangers remain; nothing of the listener does.
        assert forked(open_sockets) == before + 3
        assert server.join() == "server"  # The parent's goes on.


def test_a_name_is_listened_for_at_all_addresses_and_loopback_at_itself(monkeypatch):
    """A host's own name may mean 127.0.1.1 there, as on Debian, and another address elsewhere."""
    found = socket.getaddrinfo
    means = {"debian.example": "127.0.1.1", "away.example": "203.0.113.9"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: found(means.get(host, host), *a, **k)
    )
    with listen("debian.example:0") as everywhere:
        port = everywhere.getsockname()[1]
        for host in ("127.0.0.1", "127.0.1.1", "127.0.0.2"):
            with socket.create_connection((host, port)):
                peer, _ = everywhere.accept()
                with peer:
                    assert name_of_peer(peer).startswith("127.0.")
    for host in ("localhost", "127.0.0.1", "127.0.1.1"):
        with listen(f"{host}:0") as here:
            assert here.getsockname()[0] in ("127.0.0.1", "127.0.1.1", "::1")
    with pytest.raises(OSError, match="check which process of the job this is"):
        listen("away.example:0")
