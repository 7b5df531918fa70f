"""What went wrong with an upstream is told in words for people: none of a library's."""

import re
import socket
import threading
from collections.abc import Callable

import pytest

from tests.stack import Stack

pytestmark = pytest.mark.check_all

#: Words of libraries, and of programs that were never meant to be read.
NOT_OURS = re.compile(r"\[None\]|\[Errno|ssl:|Cannot connect to host|Connect call|object at|Client\w*Error|Exception")


def _serves(answer: bytes) -> tuple[str, Callable[[], None]]:
    """An upstream that reads a request and answers so, once."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        taken, _ = listening.accept()
        with listening, taken:
            taken.recv(65536)
            taken.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/x", lambda: thread.join(10)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1/x", "127.0.0.1:1: Connection refused"),
        ("http://[::1]:1/x", "[::1]:1: "),
        ("http://localhost:1/x", "localhost:1: "),
        ("http://nowhere.invalid/x", "nowhere.invalid: this name cannot be looked up: "),
        (f"http://{'a' * 64}.invalid/x", "this name cannot be looked up: "),
    ],
)
def test_who_cannot_be_reached(shared: Stack, url: str, words: str) -> None:
    refused = shared.claim("unreached").ask("POST", url, b"1")
    assert refused.error == "upstream"
    message = refused.json()["message"]
    assert words in message
    assert not NOT_OURS.search(message), message


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "it closed the connection"),
        (b"hello\r\n\r\n", "what it sends is no HTTP: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n", "what it sends is no HTTP: "),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "it closed the connection"),
    ],
)
def test_who_does_not_answer(shared: Stack, answer: bytes, words: str) -> None:
    url, served = _serves(answer)
    refused = shared.claim("unanswered").ask("PUT", url, b"1", {"Twiceshy-Step": url.replace("//", "")[5:]})
    served()
    assert refused.status >= 400
    message = refused.json()["message"]
    assert words in message or "Connection refused" in message  # it is asked again, where that is safe
    assert not NOT_OURS.search(message), message
