"""What a client's connection tells of the client."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from proxy.lines import Line


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's end of a connection, and ours."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        ours = listener.accept()[0]
        with ours:
            yield client, ours


def line_of(sock: socket.socket) -> Line:
    line = Line()
    line.transport = Mock(get_write_buffer_size=lambda: 0)
    line._fd = sock.fileno()
    return line


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("error_is_taken", [False, True], ids=["before the loop", "after the loop took the error"])
def test_a_reset_is_seen_as_one(ends: tuple[socket.socket, socket.socket], error_is_taken: bool) -> None:
    """Inside TLS the loop tells of it several turns after it has taken the error from the socket."""
    client, ours = ends
    line, told = line_of(ours), Mock()
    line.on_reset = told
    reset(client)
    if error_is_taken:
        with contextlib.suppress(ConnectionResetError):
            ours.recv(1)
    assert line.look()
    assert line.reset
    assert line.look()
    told.assert_called_once_with()


def test_a_reset_behind_an_end_is_seen_as_one(ends: tuple[socket.socket, socket.socket]) -> None:
    client, ours = ends
    line = line_of(ours)
    client.shutdown(socket.SHUT_WR)
    assert line.look()
    assert not line.reset
    reset(client)
    assert line.look()
    assert line.reset


def test_a_reset_behind_the_end_of_tls_may_be_the_answer_to_ours(ends: tuple[socket.socket, socket.socket]) -> None:
    """Who has read everything and closes is sent the end of TLS, which his kernel answers with a reset."""
    client, ours = ends
    line = line_of(ours)
    line._under = Mock(get_write_buffer_size=lambda: 0)
    client.close()
    assert line.look()
    ours.send(b"the end of TLS")
    assert line.look()
    assert not line.reset


@pytest.mark.parametrize("half", [False, True], ids=["ours is open", "ours is ended"])
def test_an_end_is_no_reset(ends: tuple[socket.socket, socket.socket], half: bool) -> None:
    client, ours = ends
    line = line_of(ours)
    if half:
        ours.shutdown(socket.SHUT_WR)
        line._said_all = True
    client.close()
    assert line.look()
    assert not line.reset
