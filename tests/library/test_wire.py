"""Requests as bytes, answers made of bytes."""

import base64

import pytest

from twiceshy import wire
from twiceshy.errors import NotUnderTwiceshy
from twiceshy.wire import Ask, Cut, Proxy

PROXY = Proxy("127.0.0.1", 7777, "Basic abc")


def test_the_proxy_and_its_run_come_from_the_environment() -> None:
    found = wire.proxy({"HTTP_PROXY": "http://run-1:t0ken@127.0.0.1:7777"})
    assert (found.host, found.port) == ("127.0.0.1", 7777)
    assert base64.b64decode(found.authorization.removeprefix("Basic ")) == b"run-1:t0ken"
    assert wire.proxy({"http_proxy": "http://r:t@h:1", "HTTP_PROXY": "http://x:y@z:2"}).host == "h"


@pytest.mark.parametrize(
    "environment", [{}, {"HTTP_PROXY": "http://proxy.example:3128"}, {"HTTP_PROXY": "http://run@h:1"}]
)
def test_without_a_run_the_error_says_how_to_start_the_program(environment: dict[str, str]) -> None:
    with pytest.raises(NotUnderTwiceshy, match="`twiceshy run -- python "):
        wire.proxy(environment)


def test_a_request_goes_to_the_proxy_whole() -> None:
    route = wire.route(Ask("POST", "http://twiceshy.internal/sleep", b'{"seconds": 1}', {"X-A": "b"}), PROXY)
    assert (route.host, route.port, route.connect, route.tls) == ("127.0.0.1", 7777, None, None)
    head, body = route.data.split(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST http://twiceshy.internal/sleep HTTP/1.1"
    assert {b"Proxy-Authorization: Basic abc", b"Connection: close", b"Content-Length: 14", b"X-A: b"} < set(
        head.split(b"\r\n")
    )
    assert body == b'{"seconds": 1}'


def test_https_goes_through_a_tunnel_and_its_credentials_stay_outside() -> None:
    route = wire.route(Ask("POST", "https://api.example.com/v1/x?y=z", b"{}"), PROXY, again=2)
    assert route.connect is not None
    assert route.connect.startswith(b"CONNECT api.example.com:443 HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic abc" in route.connect
    assert route.tls == "api.example.com"
    assert route.data.startswith(b"POST /v1/x?y=z HTTP/1.1\r\nHost: api.example.com\r\n")
    assert b"Proxy-Authorization" not in route.data
    assert b"X-Stainless-Retry-Count: 2" in route.data


def test_without_a_proxy_it_goes_straight() -> None:
    route = wire.route(Ask("GET", "http://[::1]:7778/v1/runs"), None)
    assert (route.host, route.port, route.tls) == ("::1", 7778, None)
    assert route.data.startswith(b"GET /v1/runs HTTP/1.1\r\nHost: [::1]:7778\r\n")


@pytest.mark.parametrize("url", ["ftp://h/", "nothing", "http:///x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        wire.route(Ask("GET", url), PROXY)


def test_no_header_carries_another_one() -> None:
    with pytest.raises(ValueError, match="line break"):
        wire.route(Ask("GET", "http://h/", None, {"Twiceshy-Step": "a\r\nb: c"}), PROXY)


def test_answers() -> None:
    reply = wire.reply(b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\nTwiceshy-Step: k\r\n\r\n{"a": 1}')
    assert (reply.status, reply.json(), reply.headers["twiceshy-step"]) == (200, {"a": 1}, "k")
    chunked = wire.reply(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    assert chunked.json() == {}
    assert wire.reply(b"HTTP/1.1 204 No Content\r\n\r\n").body == b""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_an_answer_that_was_cut_is_none(data: bytes) -> None:
    with pytest.raises(Cut):
        wire.reply(data)


def test_what_a_problem_says() -> None:
    for body in (b'{"detail": "so"}', b'{"message": "so"}', b'{"error": {"message": "so"}}', b"so"):
        assert wire.Reply(400, {}, body).message == "so"
    assert wire.Reply(400, {}, b"[1]").message == "[1]"


def test_tunnels() -> None:
    assert not wire.connected(b"HTTP/1.1 200 OK\r\n")
    assert wire.connected(b"HTTP/1.1 200 OK\r\n\r\n")
    with pytest.raises(Cut, match="407"):
        wire.connected(b"HTTP/1.1 407 No\r\n\r\n")
