import http.client
import socket
import threading
import time

import pytest

from sandbox.client import Sandbox
from tests.sandbox.conftest import Client

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.mark.parametrize(("drop", "effects"), [("before", 0), ("after", 1)])
@pytest.mark.parametrize("reset", [False, True])
def test_drops_before_and_after_the_effect(sandbox: Sandbox, ask: Client, drop: str, effects: int, reset: bool) -> None:
    sandbox.fault(match={"method": "POST", "path": "/any/*"}, drop=drop, reset=reset)
    error = ConnectionResetError if reset else http.client.RemoteDisconnected
    with pytest.raises(error):
        ask("POST", "/any/x")
    assert sandbox.count("any") == effects
    (request,) = sandbox.requests()
    assert (request.end, request.status, request.sent) == ("dropped", None, 0)
    assert ask("POST", "/any/x").status == 200  # only the first was hurt


def test_cuts_a_body_in_the_middle(sandbox: Sandbox, ask: Client) -> None:
    sandbox.fault(match={"path": "/any/*"}, drop="mid", cut_at=100_000)
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask("POST", "/any/x?size=300000")
    assert len(caught.value.partial) == 100_000
    assert sandbox.requests()[0].end == "cut"


@pytest.mark.parametrize(("framing", "clean"), [("chunked", False), ("chunked", True), ("close", False)])
def test_cuts_a_stream_between_events(sandbox: Sandbox, ask: Client, framing: str, clean: bool) -> None:
    sandbox.fault(match={"service": "llm"}, drop="mid", cut_at=3, framing=framing, clean=clean)
    if framing == "chunked" and not clean:
        with pytest.raises(http.client.IncompleteRead):
            ask("POST", "/v1/chat/completions", body=CHAT)
    else:  # looks complete: only the missing end marker tells
        assert ask("POST", "/v1/chat/completions", body=CHAT).body.count(b"data: ") == 3
    whole = ask("POST", "/v1/chat/completions", body=CHAT)
    assert whole.body.endswith(b"data: [DONE]\n\n")


def test_answers_a_status_with_or_without_the_effect(sandbox: Sandbox, ask: Client) -> None:
    sandbox.faults(
        {"match": {"path": "/any/a"}, "status": 503, "headers": {"Retry-After": "1"}},
        {"match": {"path": "/any/b"}, "status": 500, "after_effect": True, "body": "oops"},
    )
    first, second = ask("POST", "/any/a"), ask("POST", "/any/b")
    assert (first.status, first.headers["Retry-After"]) == (503, "1")
    assert (second.status, second.body) == (500, b"oops")
    assert [effect.n for effect in sandbox.effects()] == [2]


def test_nth_and_times(sandbox: Sandbox, ask: Client) -> None:
    sandbox.faults(
        {"match": {"path": "/any/a"}, "status": 500, "nth": 2}, {"match": {"path": "/any/b"}, "status": 500, "times": 2}
    )
    assert [ask("GET", "/any/a").status for _ in range(3)] == [200, 500, 200]
    assert [ask("GET", "/any/b").status for _ in range(3)] == [500, 500, 200]
    sandbox.fault(match={"body": "poison"}, status=400, times=0)
    sandbox.fault(match={"header": ["Idempotency-Key", "bad"]}, status=409)
    assert [ask("POST", "/any/c", body=body).status for body in (b"", b"a poison", b"poison")] == [200, 400, 400]
    assert [ask("POST", "/any/c", key=key).status for key in ("good", "bad-1", "bad-1")] == [200, 409, 200]
    sandbox.clear()
    assert ask("POST", "/any/c", body=b"poison").status == 200


def test_delays_by_chance_stay_within_their_bounds(sandbox: Sandbox, ask: Client) -> None:
    sandbox.fault(match={"path": "/any/*"}, delay=[0.05, 0.1], times=0)
    start = time.monotonic()
    ask("GET", "/any/x")
    assert time.monotonic() - start >= 0.05


def test_answer_held_after_the_effect(sandbox: Sandbox, ask: Client) -> None:
    sandbox.fault(match={"service": "payments"}, hold="gate")
    form = {"charge": "ch_1"}
    with socket.create_connection(("127.0.0.1", ask.port)) as client:
        client.sendall(
            b"POST /payments/v1/refunds HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 11\r\n\r\ncharge=ch_1"
        )
        sandbox.wait_held("gate")
        assert sandbox.count("payments") == 1
        assert sandbox.requests()[0].end is None
    sandbox.wait_for(lambda: sandbox.requests()[0].end == "gone", what="the client's end noticed")
    again = ask("POST", "/payments/v1/refunds", form=form, key="k")
    assert again.headers["Idempotent-Replayed"] == "true"
    sandbox.release("gate")


def test_effect_held_is_made_though_the_client_has_gone(sandbox: Sandbox, ask: Client) -> None:
    sandbox.fault(match={"path": "/any/x"}, hold_before="gate")
    with socket.create_connection(("127.0.0.1", ask.port)) as client:
        client.sendall(b"POST /any/x HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        sandbox.wait_held("gate")
    sandbox.wait_for(lambda: sandbox.requests()[0].gone, what="the client's end noticed")
    assert sandbox.counts() == {}
    sandbox.release("gate")
    sandbox.wait_for(lambda: sandbox.requests()[0].end == "gone", what="the request's end")
    assert sandbox.counts() == {"any": 1}


def test_events_held_by_index(sandbox: Sandbox, ask: Client) -> None:
    sandbox.fault(match={"service": "llm"}, hold_events={"2": "two", "4": "four"})
    client = ask.connect()
    client.request("POST", "/v1/chat/completions", b'{"model":"m","messages":[],"stream":true}')
    answer = client.getresponse()
    lines = [answer.readline() for _ in range(4)]  # two events have come although the third has not left
    assert [line[:5] for line in lines] == [b"data:", b"\n", b"data:", b"\n"]
    assert sandbox.waiting("two") == 1
    sandbox.release("two")
    sandbox.wait_held("four")
    sandbox.release("four")
    assert answer.read().endswith(b"[DONE]\n\n")
    client.close()


def test_a_gate_is_shut_again_by_a_new_fault(sandbox: Sandbox, ask: Client) -> None:
    for _ in range(2):
        sandbox.fault(match={"path": "/any/x"}, hold="gate")
        thread = threading.Thread(target=ask, args=("GET", "/any/x"))
        thread.start()
        sandbox.wait_held("gate")
        sandbox.release("gate")
        thread.join()
    with pytest.raises(ValueError, match="no gate"):
        sandbox.release("another")


@pytest.mark.parametrize(
    "fault", [{"nonsense": 1}, {"match": {"host": "x"}}, {"drop": "never"}, {"framing": "odd"}, [1]]
)
def test_unknown_faults_are_refused(sandbox: Sandbox, fault: object) -> None:
    with pytest.raises(ValueError, match="/faults"):
        sandbox._ask("POST", "/faults", fault)
