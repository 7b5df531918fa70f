"""WebSockets through each door: as aiohttp's client opens them, and as bytes."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sandbox.tls import Issuer
from tests.conftest import fresh_database
from tests.raw import Origin, Wire, connections, credentials, headers, refused
from tests.stack import Attempt, Stack, stack
from tests.tunnelled import Tls, TlsOrigin, connected, context_of, refused_by_upstream, trusting

ROUTES = """
[[route]]
host = "*"
path = "/forbidden/**"
effect = "deny"
name = "not there"
"""
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: WebSocket\r\nCONNECTION: Upgrade\r\nX-Odd:  a b \r\n\r\n"


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    """A CA that the sidecar trusts (extra_ca)."""
    return Issuer("an upstream's CA")


@pytest.fixture(scope="module")
def module_stack(
    server: str, template: str, tmp_path_factory: pytest.TempPathFactory, issuer: Issuer
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("websockets")
    (folder / "ca.pem").write_bytes(issuer.pem)
    (folder / "twiceshy.toml").write_text(ROUTES)
    for dsn in fresh_database(server, template):
        with stack(dsn, folder, config=folder / "twiceshy.toml", extra_ca=folder / "ca.pem", lease=3) as made:
            yield made


@pytest.fixture
def plain() -> Iterator[Origin]:
    with Origin() as made:
        yield made


@pytest.fixture
def secure(issuer: Issuer, tmp_path: Path) -> Iterator[TlsOrigin]:
    with TlsOrigin(context_of(issuer.issue(["127.0.0.1"]), tmp_path)) as made:
        yield made


def handshake(target: str, host: str, *lines: bytes) -> bytes:
    head = [f"GET {target} HTTP/1.1".encode(), b"Host: " + host.encode(), b"Connection: keep-alive, Upgrade"]
    head += [b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: " + KEY]
    return b"\r\n".join([*head, *lines, b"", b""])


def begun(attempt: Attempt, origin: Origin, door: str, path: str, *lines: bytes, stack: Stack) -> Wire:
    """A client that has asked for a WebSocket at *path* of *origin*, through *door*."""
    there = f"127.0.0.1:{origin.port}"
    scheme = "wss" if isinstance(origin, TlsOrigin) else "ws"
    if door == "tunnel":
        client = connected(attempt, there)
        if scheme == "wss":
            client = Tls(client, trusting(stack), "127.0.0.1")
        client.send(handshake(path, there, *lines))
        return client
    client = Wire.to(attempt)
    if door == "gateway":
        address = f"/@{attempt.run}:{attempt.token}/{scheme}/{there}{path}"
        client.send(handshake(address, f"localhost:{attempt.port}", *lines))
    else:
        client.send(handshake(f"{scheme}://{there}{path}", there, credentials(attempt), *lines))
    return client


def opened(attempt: Attempt, origin: Origin, door: str = "proxy", *, stack: Stack) -> tuple[Wire, Wire]:
    """A WebSocket: client and upstream."""
    client = begun(attempt, origin, door, "/echo", stack=stack)
    upstream = origin.accept()
    upstream.head()
    upstream.send(SWITCH)
    assert client.head() == SWITCH
    return client, upstream


# ---- by aiohttp


@contextlib.asynccontextmanager
async def echo(context: ssl.SSLContext | None, received: list[web.Request]) -> AsyncIterator[str]:
    """A server in the test's own loop; where it listens."""

    async def serve(request: web.Request) -> web.StreamResponse:
        received.append(request)
        answer = web.WebSocketResponse(protocols=("realtime",))
        await answer.prepare(request)
        async for message in answer:
            if message.type is aiohttp.WSMsgType.TEXT:
                await answer.send_str(message.data[::-1])
            elif message.type is aiohttp.WSMsgType.BINARY:
                await answer.send_bytes(message.data)
        return answer

    app = web.Application()
    app.router.add_get("/echo", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("secure", [False, True], ids=["ws", "wss"])
@pytest.mark.parametrize("door", ["proxy", "gateway"])
async def test_an_echo(shared: Stack, run: str, issuer: Issuer, tmp_path: Path, secure: bool, door: str) -> None:
    attempt = shared.claim(run)
    received: list[web.Request] = []
    context = context_of(issuer.issue(["127.0.0.1"]), tmp_path) if secure else None
    async with echo(context, received) as there, aiohttp.ClientSession() as session:
        options: dict[str, Any] = {"protocols": ["realtime"], "headers": {"Authorization": "Bearer sk"}}
        scheme = "wss" if secure else "ws"
        url = f"{scheme}://{there}/echo?x=%26"
        if door == "proxy":
            options |= {"proxy": f"http://{run}:{attempt.token}@127.0.0.1:{attempt.port}", "ssl": trusting(shared)}
        else:
            url = f"ws://127.0.0.1:{attempt.port}/@{run}:{attempt.token}/{scheme}/{there}/echo?x=%26"
        async with session.ws_connect(url, **options) as client:
            assert client.protocol == "realtime"
            await client.send_str("drawer")
            assert await client.receive_str(timeout=20) == "reward"
            large = bytes(range(256)) * 8000
            await client.send_bytes(large)
            assert await client.receive_bytes(timeout=20) == large
        told = await asyncio.to_thread(attempt.report)
    assert told["arrived"] == {there: {"WebSocket": 1}}
    [request] = received
    assert request.raw_path == "/echo?x=%26"
    assert (request.headers["Authorization"], request.headers["Host"]) == ("Bearer sk", there)
    for name, value in request.headers.items():
        assert not name.lower().startswith(("proxy-", "twiceshy-"))
        assert str(attempt.token) not in value and run not in value
    assert await asyncio.to_thread(shared.fetch, "SELECT FROM twiceshy.step WHERE run_id = $1", run) == []


# ---- as bytes


@pytest.mark.parametrize("door", ["proxy", "tunnel", "gateway"])
@pytest.mark.parametrize("kind", ["plain", "secure"])
def test_what_arrives_is_what_was_asked(
    shared: Stack, run: str, request: pytest.FixtureRequest, kind: str, door: str
) -> None:
    origin: Origin = request.getfixturevalue(kind)
    attempt = shared.claim(run)
    lines = (b"Twiceshy-Run: " + run.encode(), b"sec-websocket-PROTOCOL: a, b", b"X-A: 1", b"x-a: caf\xc3\xa9")
    client = begun(attempt, origin, door, "/a%2Fb/%61/../c?x=%2F&", *lines, stack=shared)
    upstream = origin.accept()
    head = upstream.head()
    via = dict(headers(head))[b"Via"]
    assert head == b"\r\n".join(
        [
            b"GET /a%2Fb/%61/../c?x=%2F& HTTP/1.1",
            b"Host: 127.0.0.1:%d" % origin.port,
            b"Sec-WebSocket-Version: 13",
            b"Sec-WebSocket-Key: " + KEY,
            *lines[1:],
            b"Via: " + via,
            b"Connection: Upgrade",
            b"Upgrade: websocket",
            b"",
            b"",
        ]
    )
    assert str(attempt.token).encode() not in head
    assert run.encode() not in head
    upstream.send(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SWITCH + b"\x81\x02hi")
    assert client.head() == SWITCH
    assert client.exactly(4) == b"\x81\x02hi"
    frames = bytes(range(256)) * 4096
    client.send(frames)
    assert upstream.exactly(len(frames)) == frames


def test_what_is_sent_ahead_waits_for_the_answer(shared: Stack, run: str, plain: Origin) -> None:
    """Before the upstream has agreed it might be taken for another request, which nobody journalled."""
    attempt = shared.claim(run)
    client = begun(attempt, plain, "proxy", "/echo", stack=shared)
    client.send(b"\x81\x01a")
    upstream = plain.accept()
    upstream.head()
    client.send(b"\x81\x01b")
    assert upstream.silent()
    upstream.send(SWITCH)
    assert upstream.exactly(6) == b"\x81\x01a\x81\x01b"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"HTTP/1.1 401 Who\r\nContent-Length: 5\r\nConnection: keep-alive\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n", b"5;x\r\nhello\r\n0\r\n\r\n"),
        (b"HTTP/1.1 503 No\r\n", b"hello"),
        (b"HTTP/1.1 204 None\r\n", b""),
    ],
)
def test_who_gets_no_websocket_gets_the_answer(
    shared: Stack, run: str, plain: Origin, head: bytes, body: bytes
) -> None:
    attempt = shared.claim(run)
    client = begun(attempt, plain, "proxy", "/echo", stack=shared)
    client.send(b"POST /refund HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")  # goes nowhere
    upstream = plain.accept()
    upstream.head()
    upstream.send(head + b"\r\n" + body)
    if b"503" in head:
        upstream.close()
    assert client.head() == head.replace(b"Connection: keep-alive\r\n", b"") + b"Connection: close\r\n\r\n"
    assert client.rest() == body
    if b"503" not in head:
        with contextlib.suppress(ConnectionResetError):
            assert upstream.rest() == b""
    assert attempt.report()["arrived"] == {f"127.0.0.1:{plain.port}": {"passthrough": 1}}


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 403 No\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\na\r\nhalf",
        b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\nhalf\r\n",
    ],
)
def test_a_cut_answer_is_seen_as_cut(shared: Stack, run: str, plain: Origin, answer: bytes) -> None:
    client = begun(shared.claim(run), plain, "proxy", "/echo", stack=shared)
    plain.accept().head()
    plain.taken[0].send(answer)
    plain.taken[0].close()
    assert client.is_reset()


# ---- what is refused


def test_who_may_not_ask_is_refused(shared: Stack, run: str, plain: Origin, secure: TlsOrigin) -> None:
    attempt = shared.claim(run)
    stranger = Attempt(run, "not-the-token", attempt.port)
    for door in ("proxy", "tunnel"):
        refused(begun(stranger, plain, door, "/echo", stack=shared), 423, "fenced")
        assert "not there" in refused(begun(attempt, plain, door, "/forbidden/x", stack=shared), 403, "denied")
    bare = Wire.to(attempt)
    bare.send(handshake(plain.url("/echo"), f"127.0.0.1:{plain.port}"))
    refused(bare, 428, "no-run")
    for target in ("ws://169.254.169.254/x", f"ws://127.0.0.1:{attempt.port}/x"):
        denied = Wire.to(attempt)
        denied.send(handshake(target, target.split("/")[2], credentials(attempt)))
        refused(denied, 403, "denied")
    assert plain.nobody()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ((b"GET ", b"POST "), "GET"),
        ((b"HTTP/1.1", b"HTTP/1.0"), "GET"),
        ((b"keep-alive, Upgrade", b"keep-alive"), "Connection"),
        ((b"Sec-WebSocket-Version: 13", b"Content-Length: 5"), "no body"),
    ],
)
def test_what_is_no_handshake(shared: Stack, run: str, plain: Origin, change: tuple[bytes, bytes], word: str) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    asked = handshake(plain.url("/echo"), f"127.0.0.1:{plain.port}", credentials(attempt))
    client.send(asked.replace(*change))
    assert word in refused(client, 400)
    assert plain.nobody()


def test_the_sidecars_own_pages_have_no_websocket(shared: Stack, run: str) -> None:
    attempt = shared.claim(run)
    client = Wire.to(attempt)
    client.send(handshake("http://twiceshy.internal/run", "twiceshy.internal", credentials(attempt)))
    assert client.head().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("how", ["nobody", "not verified", "no answer", "garbage", "http/2"])
def test_an_upstream_that_fails(shared: Stack, run: str, tmp_path: Path, plain: Origin, how: str) -> None:
    attempt = shared.claim(run)
    if how == "nobody":
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            client = Wire.to(attempt)
            there = f"127.0.0.1:{taken.getsockname()[1]}"
            client.send(handshake(f"ws://{there}/x", there, credentials(attempt)))
            assert "Nothing was sent" in refused_by_upstream(client)
        return
    if how == "not verified":
        with TlsOrigin(context_of(Issuer("nobody's CA").issue(["127.0.0.1"]), tmp_path)) as origin:
            client = begun(attempt, origin, "gateway", "/x", stack=shared)
            origin.offended()
            assert "Nothing was sent" in refused_by_upstream(client)
        return
    client = begun(attempt, plain, "proxy", "/x", stack=shared)
    upstream = plain.accept()
    upstream.head()
    upstream.send(
        {"no answer": b"HTTP/1.", "garbage": b"hello, here I am\r\n\r\n", "http/2": b"\0\0\0\4\0\0\0\0\0"}[how]
    )
    upstream.close()
    words = refused_by_upstream(client)
    assert "The request was sent" in words
    assert ('effect = "tunnel"' in words) == (how == "http/2")


def test_an_upstream_that_says_nothing(dsn: str, tmp_path: Path, run: str, plain: Origin) -> None:
    with stack(dsn, tmp_path, first_byte_timeout=0.3) as made:
        attempt = made.claim(run)
        client = begun(attempt, plain, "proxy", "/x", stack=made)
        plain.accept().head()
        head = client.head()
        assert head.startswith(b"HTTP/1.1 504")
        assert b"first_byte_timeout" in client.rest()


# ---- whose it is, and its end


@pytest.mark.parametrize("kind", ["plain", "secure"])
def test_a_zombies_websocket_is_cut(shared: Stack, run: str, request: pytest.FixtureRequest, kind: str) -> None:
    origin: Origin = request.getfixturevalue(kind)
    first = shared.claim(run)
    client, upstream = opened(first, origin, "tunnel", stack=shared)
    waiting = begun(first, origin, "tunnel", "/slow", stack=shared)
    asked = origin.accept()
    asked.head()
    second = shared.claim(run)
    assert second.ask("GET", "http://twiceshy.internal/run").status == 200
    for each in (client, upstream, waiting, asked):
        with pytest.raises((ConnectionResetError, ssl.SSLError, EOFError)):
            each.exactly(1)


@pytest.mark.parametrize("kind", ["plain", "secure"])
@pytest.mark.parametrize("who", ["client", "upstream"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_nothing_is_left_of_a_websocket(
    shared: Stack, run: str, request: pytest.FixtureRequest, kind: str, who: str, how: str
) -> None:
    origin: Origin = request.getfixturevalue(kind)
    pair = opened(shared.claim(run), origin, "tunnel", stack=shared)
    one, other = pair if who == "client" else reversed(pair)
    one.send(b"bye")
    assert other.exactly(3) == b"bye"
    getattr(one, how)()
    with contextlib.suppress(ConnectionResetError, ssl.SSLError):
        other.rest()
    other.close()
    shared.sandbox.wait_for(lambda: connections(shared, origin) == 0, what="all is closed")
    assert "Traceback" not in shared.sidecar.log.read_text()


def test_a_client_that_leaves_before_the_answer(shared: Stack, run: str, plain: Origin) -> None:
    client = begun(shared.claim(run), plain, "proxy", "/slow", stack=shared)
    upstream = plain.accept()
    upstream.head()
    client.close()
    assert upstream.is_reset()
    shared.sandbox.wait_for(lambda: connections(shared, plain) == 0, what="all is closed")


def test_half_an_end_is_passed_on(shared: Stack, run: str, plain: Origin) -> None:
    client, upstream = opened(shared.claim(run), plain, stack=shared)
    client.send(b"last words")
    client.sock.shutdown(socket.SHUT_WR)
    assert upstream.rest() == b"last words"
    upstream.send(b"so long")
    upstream.close()
    assert client.rest() == b"so long"


def test_requests_go_on_beside_it(shared: Stack, run: str, plain: Origin) -> None:
    attempt = shared.claim(run)
    client, upstream = opened(attempt, plain, stack=shared)
    assert attempt.ask("POST", shared.url("/any/x"), b"x").status == 200
    upstream.send(b"\x81\x02ok")
    assert client.exactly(4) == b"\x81\x02ok"
    assert attempt.report()["arrived"][f"127.0.0.1:{plain.port}"] == {"WebSocket": 1}
