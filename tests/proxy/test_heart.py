"""An agent's requests through a real sidecar, killed and started again: what the upstream received decides."""

import http.client

import pytest

from tests.stack import Stack

CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}


def test_an_answer_is_passed_on_and_replayed_to_the_next_attempt(heart: Stack) -> None:
    first = heart.claim("r1")
    live = first.ask("POST", heart.url("/v1/chat/completions"), CHAT)
    assert (live.status, live.replayed) == (200, False)
    heart.end(first, "died")

    second = heart.claim("r1")
    again = second.ask("POST", heart.url("/v1/chat/completions"), CHAT)
    assert (again.status, again.body, again.replayed) == (200, live.body, True)
    assert again.step == live.step
    assert heart.sandbox.count("llm") == 1


def test_an_answer_survives_the_sidecar(heart: Stack) -> None:
    first = heart.claim("r1")
    live = first.ask("POST", heart.url("/email/send"), {"to": "a", "subject": "b", "text": "c"})
    heart.restart()
    second = heart.claim("r1")
    again = second.ask("POST", heart.url("/email/send"), {"to": "a", "subject": "b", "text": "c"})
    assert (again.replayed, again.body) == (True, live.body)
    assert heart.sandbox.count("email") == 1


@pytest.mark.parametrize("path", ["/orders", "/email/send", "/any/x"])
def test_a_post_in_flight_is_finished_and_handed_over(heart: Stack, path: str) -> None:
    body = {"lines": [{"sku": "a", "n": 1}], "total": 5, "to": "a", "subject": "b", "text": "c"}
    heart.sandbox.fault(match={"method": "POST", "path": path}, hold="held")
    first = heart.claim("r1")
    asked = first.in_background("POST", heart.url(path), body)
    heart.sandbox.wait_held("held")
    heart.end(first, "died")
    with pytest.raises((OSError, http.client.HTTPException)):
        asked.result()

    second = heart.claim("r1")
    joined = second.in_background("POST", heart.url(path), body)
    heart.sandbox.wait_for(second.steps)
    heart.sandbox.release("held")
    reply = joined.result()
    assert (reply.status // 100, reply.replayed) == (2, False)
    assert len(heart.sandbox.requests(method="POST")) == 1


def test_a_stream_in_flight_is_joined_from_its_beginning(heart: Stack) -> None:
    body = {**CHAT, "stream": True}
    whole = heart.claim("undisturbed").ask("POST", heart.url("/v1/chat/completions"), body).body
    heart.sandbox.fault(match={"path": "/v1/chat/completions"}, hold_events={"2": "middle"})
    first = heart.claim("r1")
    answer = first.send("POST", heart.url("/v1/chat/completions"), body).getresponse()
    begun = answer.read1(10)
    heart.sandbox.wait_held("middle")
    first.die()

    second = heart.claim("r1")
    joined = second.in_background("POST", heart.url("/v1/chat/completions"), body)
    heart.sandbox.release("middle")
    reply = joined.result()
    assert reply.body == whole
    assert reply.body.startswith(begun)
    assert len(heart.sandbox.requests("llm")) == 2  # the undisturbed run's and this one
