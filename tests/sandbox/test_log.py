import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox.client import PROJECT, Sandbox
from tests.sandbox.conftest import Client


def exchange(port: int, data: bytes) -> bytes:
    """What comes back for these bytes, until the sandbox closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(data)
        pieces = []
        while piece := client.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)


def test_a_request_is_logged_as_it_came(sandbox: Sandbox) -> None:
    head = b"PoST /any/%7e/../x?a=%2F&a=&b HTTP/1.1\r\nHOST: h\r\nX-Dup: 1\r\nx-dup:  caf\xe9 \r\nConnection: close\r\n"
    exchange(
        sandbox.port, head + b"Transfer-Encoding: chunked\r\n\r\n3\r\n\x00\xff\n\r\n2;x=y\r\nab\r\n0\r\nT: 1\r\n\r\n"
    )
    (request,) = sandbox.requests()
    assert (request.method, request.target, request.body) == ("PoST", "/any/%7e/../x?a=%2F&a=&b", b"\x00\xff\nab")
    assert request.headers[:3] == (("HOST", "h"), ("X-Dup", "1"), ("x-dup", "caf\xe9"))
    assert request.sha256 == hashlib.sha256(b"\x00\xff\nab").hexdigest()
    assert (request.n, request.whole, request.end, request.status) == (1, True, "answered", 200)


@pytest.mark.parametrize("byte_by_byte", [False, True])
def test_requests_of_one_connection_are_told(sandbox: Sandbox, byte_by_byte: bool) -> None:
    data = b"POST /any/1 HTTP/1.1\r\nContent-Length: 2\r\n\r\nabGET /any/2 HTTP/1.1\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", sandbox.port), timeout=20) as client:
        for piece in [data] if not byte_by_byte else [data[at : at + 1] for at in range(len(data))]:
            client.sendall(piece)
        while client.recv(65536):
            pass
    assert [(request.target, request.connection, request.turn) for request in sandbox.requests()] == [
        ("/any/1", sandbox.requests()[0].connection, 1),
        ("/any/2", sandbox.requests()[0].connection, 2),
    ]


def test_a_request_that_broke_off_is_logged_as_not_whole(sandbox: Sandbox) -> None:
    with socket.create_connection(("127.0.0.1", sandbox.port)) as client:
        client.sendall(b"POST /any/x HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc")
    request = sandbox.wait_for(lambda: next(iter(sandbox.requests()), None))
    assert (request.whole, request.body) == (False, b"abc")
    assert sandbox.counts() == {}


def test_expect_continue_is_answered(sandbox: Sandbox) -> None:
    data = b"POST /any/x HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    assert exchange(sandbox.port, data).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"GET /any/x\r\n\r\n",
        b"GET /any/x HTTP/1.0\r\n\r\n",
        b"GET /any/x HTTP/1.1\r\nA: b\n C: d\r\n\r\n",
        b"GET /any/x HTTP/1.1\r\nA : b\r\n\r\n",
        b"POST /any/x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
        b"POST /any/x HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /any/x HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /any/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"POST /any/x HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(sandbox: Sandbox, data: bytes) -> None:
    assert exchange(sandbox.port, data).startswith(b"HTTP/1.1 400 ")
    assert sandbox.requests() == []


def test_effects_are_in_the_file_before_the_answer(sandbox: Sandbox, ask: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda at: ask("POST", f"/any/{at}"), range(40)))
    assert sandbox.process is not None
    sandbox.process.kill()
    assert sandbox.log is not None
    lines = [json.loads(line) for line in sandbox.log.read_bytes().splitlines()]
    made = {line["n"] for line in lines if line["kind"] == "effect"}
    assert made == {answer.json["n"] for answer in answers} == set(range(1, 41))


def test_a_new_server_goes_on_where_the_log_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    form = {"charge": "ch_1"}
    with Sandbox.start(log) as sandbox:
        ask = Client(sandbox.port)
        refund = ask("POST", "/payments/v1/refunds", form=form, key="k")
        ask("POST", "/orders", body={"a": 1}, key="k")
        ask("POST", "/email/send", body={"to": "a@b"})
    with log.open("ab") as file:
        file.write(b'{"kind":"effect","n":')  # torn
    with Sandbox.start(log) as sandbox:
        ask = Client(sandbox.port)
        assert sandbox.counts() == {"payments": 1, "orders": 1, "email": 1}
        assert ask("POST", "/payments/v1/refunds", form=form, key="k").body == refund.body
        assert ask("POST", "/orders", body={"a": 1}, key="k").status == 200
        assert ask("POST", "/email/send", body={"to": "a@b"}).json["id"] == "M-0002"
        assert [request.n for request in sandbox.requests()] == [1, 2, 3, 4, 5, 6]


def test_the_client_takes_no_proxy(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert Sandbox(sandbox.url).counts() == {}


def test_the_process_ends_with_its_standard_input(tmp_path: Path) -> None:
    sandbox = Sandbox.start(tmp_path / "log")
    assert sandbox.process is not None
    assert sandbox.process.stdin is not None
    sandbox.process.stdin.close()
    assert sandbox.process.wait(20) == 0
    sandbox.stop()


def test_the_process_ends_on_sigterm_and_says_when_a_port_is_taken(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandbox", "--log", str(tmp_path / "log")]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT)
    assert first.stdout is not None
    port = json.loads(first.stdout.readline())["port"]
    second = subprocess.run([*command, "--port", str(port)], cwd=PROJECT, capture_output=True, text=True)
    assert second.returncode == 1
    assert second.stderr.startswith("sandbox: ")
    assert len(second.stderr.splitlines()) == 1
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(20) == 0
    first.stdout.close()
