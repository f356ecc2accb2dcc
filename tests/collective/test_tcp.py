"""The wire over sockets: what is lost, cut off or stopped, and messages of any size."""

import shutil
import socket
import ssl

import numpy as np
import pytest

from ndistribute.collective.headers import encode_header
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.tcp import TcpTransport
from tests.jobs import backend_calls
from tests.jobs.backend_calls import joined_peers
from tests.processes import Ranks
from tests.transport.ends import authority, tls_environ


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def recover(ranks):
    sums = ranks.results(backend_calls.recovered_sum)
    assert sums == [sum(range(ranks.size))] * ranks.size


def sum_more_than_is_buffered(rank, size):
    """Send in both directions at once what no system buffers."""
    array = np.full(6_000_000, rank + 1.0)
    (total,) = backend_calls.all_reduced(backend_calls.group_backend(), [array], ReduceOp.SUM)
    assert total.min() == total.max() == sum(range(1, size + 1))


def test_messages_may_be_larger_than_what_the_system_buffers(two):
    two.results(sum_more_than_is_buffered)


def connections(rank, size, length):
    backend_calls.all_reduced(backend_calls.group_backend(), [np.ones(length)], ReduceOp.SUM)
    return sorted(joined_peers()._data._sockets)


def test_data_connections_are_made_to_those_who_need_each_other():
    with Ranks(6) as ranks:
        found = ranks.results(connections, 300_000)
        assert found == [sorted({(rank - 1) % 6, (rank + 1) % 6}) for rank in range(6)]
        # The partners of small sums are at most one for each bit of the size.
        for outcome in ranks.run(connections, 3):
            assert len(outcome.result()) <= 2 + 3


def test_a_long_message_wakes_for_many_bytes_and_never_for_more_than_itself():
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as far:
        near, _ = listener.accept()
        near.setblocking(False)

        class Peers:
            def data_socket(self, rank, check):
                return near

        with near:
            transport = TcpTransport(Peers())
            woken_by = []
            for length in (1 << 20, 100):
                transport.close()
                transport.irecv(1, np.empty(length, np.uint8))
                transport.irecv(1, np.empty(1 << 21, np.uint8))  # Sent after an answer, perhaps.
                assert not transport._spins()
                transport._sleep(0.0)
                woken_by.append(near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))
            assert woken_by[0] == 64 * 1024
            assert woken_by[1] == 100
            transport.close()
            small = transport.irecv(1, np.empty(100, np.uint8))
            assert transport._spins()
            far.sendall(bytes(100))
            while not small.done:
                transport._sleep(0.0)
                transport._advance()


def cut_off(rank, size, odd, how):
    """End the data connection of one rank while the others communicate."""
    array = np.ones(3_000_000, np.float32)
    if rank == odd:
        peers = joined_peers()
        data = peers.data_socket((odd + 1) % size, peers.check)
        if how == "truncated":
            # A header, and the beginning of what should follow.
            data.setblocking(True)
            call = backend_calls.call_of("all_reduce", "SUM", [array])
            generation = joined_peers().generation
            header = encode_header(
                call, backend_calls.group_backend().count + 1, generation=generation
            )
            data.sendall(header + b"\0" * 1001)
        elif how == "garbage":
            data.setblocking(True)
            data.sendall(b"\xff" * 4096)
        if how != "garbage":
            data.shutdown(socket.SHUT_RDWR)
        return
    backend_calls.all_reduced(backend_calls.group_backend(), [array], ReduceOp.SUM)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("closed", "WorkerLostError", "closed its data connection"),
        ("truncated", "WorkerLostError", "closed its data connection"),
        ("garbage", "CollectiveMismatchError", "sent no header of a collective"),
    ],
)
def test_a_stream_that_is_cut_off_or_broken_is_an_error(two, how, error, text):
    for odd in range(2):
        outcomes = two.run(cut_off, odd, how)
        other = outcomes[1 - odd]
        assert other.error == error, other
        assert text in other.text
        assert other.attributes["rank"] == odd
        recover(two)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program, which makes the certificates, is not here")
    environ = tls_environ(authority(tmp_path_factory.mktemp("authority")))
    with Ranks(2, environ=environ) as ranks:
        yield ranks


def is_encrypted(rank, size):
    peers = joined_peers()
    return isinstance(peers.data_socket(1 - rank, peers.check), ssl.SSLSocket)


def test_the_wire_is_the_same_with_tls(encrypted):
    assert encrypted.results(is_encrypted) == [True, True]
    digests = encrypted.results(backend_calls.every_op_and_size, "float32")
    assert len(set(digests)) == 1
    encrypted.results(sum_more_than_is_buffered)


def test_with_tls_a_mismatch_or_a_cut_is_an_error_too(encrypted):
    assert all(encrypted.results(backend_calls.among_some, (0, 1)))  # What a mismatch says.
    recover(encrypted)
    outcome = encrypted.run(cut_off, 1, "closed")[0]
    assert outcome.error == "WorkerLostError"
    recover(encrypted)
