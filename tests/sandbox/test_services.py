import json
import threading
from typing import Any

import pytest

from sandbox import model
from sandbox.client import Sandbox
from tests.sandbox.conftest import Client, Got

REFUND = {"charge": "ch_1", "amount": "1250"}


def in_background(call: Any) -> tuple[threading.Thread, list[Got]]:
    got: list[Got] = []
    thread = threading.Thread(target=lambda: got.append(call()))
    thread.start()
    return thread, got


def test_refund_without_key_is_made_each_time(sandbox: Sandbox, ask: Client) -> None:
    first = ask("POST", "/payments/v1/refunds", form=REFUND)
    second = ask("POST", "/payments/v1/refunds", form=REFUND)
    assert (first.json["id"], second.json["id"]) == ("re_0001", "re_0002")
    assert first.json["amount"] == 1250
    assert sandbox.counts() == {"payments": 2}


def test_refund_with_a_key_is_made_once(sandbox: Sandbox, ask: Client) -> None:
    first = ask("POST", "/payments/v1/refunds", form=REFUND, key="k")
    again = ask("POST", "/payments/v1/refunds", form=REFUND, key="k")
    other = ask("POST", "/payments/v1/refunds", form={**REFUND, "amount": "1"}, key="k")
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.body == first.body
    assert (other.status, other.json["error"]["type"]) == (400, "idempotency_error")
    assert sandbox.counts() == {"payments": 1}
    assert [effect.key for effect in sandbox.effects("payments")] == ["k"]


def test_refund_that_fails_validation_leaves_nothing(sandbox: Sandbox, ask: Client) -> None:
    assert ask("POST", "/payments/v1/refunds", form={"amount": "1"}, key="k").status == 400
    assert ask("POST", "/payments/v1/refunds", form=REFUND, key="k").status == 200
    assert sandbox.counts() == {"payments": 1}


def test_second_refund_while_the_first_is_in_progress_is_told_so(sandbox: Sandbox, ask: Client) -> None:
    sandbox.fault(match={"service": "payments"}, hold_before="gate")
    thread, got = in_background(lambda: ask("POST", "/payments/v1/refunds", form=REFUND, key="k"))
    sandbox.wait_held("gate")
    early = ask("POST", "/payments/v1/refunds", form=REFUND, key="k")
    assert (early.status, early.json["error"]["code"]) == (409, "idempotency_key_in_use")
    sandbox.release("gate")
    thread.join()
    late = ask("POST", "/payments/v1/refunds", form=REFUND, key="k")
    assert late.body == got[0].body
    assert sandbox.counts() == {"payments": 1}


def test_refunds_can_be_looked_up(ask: Client) -> None:
    made = ask("POST", "/payments/v1/refunds", form=REFUND).json
    assert ask("GET", "/payments/v1/refunds").json["data"] == [made]
    assert ask("GET", f"/payments/v1/refunds/{made['id']}").json == made
    assert ask("GET", "/payments/v1/refunds/re_9").status == 404


@pytest.mark.parametrize(("path", "service"), [("/orders", "orders"), ("/crm/notes", "crm")])
def test_tables_have_a_unique_key(sandbox: Sandbox, ask: Client, path: str, service: str) -> None:
    first = ask("POST", path, body={"text": "a"}, key="k")
    again = ask("POST", path, body={"text": "a"}, key="k")
    other = ask("POST", path, body={"text": "a"})
    assert (first.status, again.status, other.status) == (201, 200, 201)
    assert first.json == again.json != other.json
    assert sandbox.counts() == {service: 2}


def test_mail_ignores_keys(sandbox: Sandbox, ask: Client) -> None:
    for _ in range(2):
        assert ask("POST", "/email/send", body={"to": "a@b"}, key="k").status == 202
    assert sandbox.counts() == {"email": 2}
    assert len(ask("GET", "/email/sent").json["data"]) == 2


def test_order_status_changes_each_time(ask: Client) -> None:
    seen = [ask("GET", "/orders/A-7/status").json["status"] for _ in range(5)]
    assert seen == ["received", "picking", "packed", "shipped", "shipped"]
    assert ask("GET", "/orders/A-7").body == ask("GET", "/orders/A-7").body


def test_any_counts_every_method(sandbox: Sandbox, ask: Client) -> None:
    methods = ["GET", "PUT", "DELETE", "POST", "PATCH", "OPTIONS", "PROPFIND"]
    assert [ask(method, "/any/x?a=%2F").json["target"] for method in methods] == ["/any/x?a=%2F"] * len(methods)
    assert [effect.effect for effect in sandbox.effects()] == [method.lower() for method in methods]


def test_any_gives_large_bodies_that_differ_everywhere(ask: Client) -> None:
    body = ask("GET", "/any/x?size=300000").body
    assert len(body) == 300_000
    assert len({body[at : at + 22] for at in range(0, 300_000 - 22, 65_536)}) == 5


# ---- the model


def chat(stream: bool, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": stream, **more}


def test_openai_answers_are_a_function_of_the_body(sandbox: Sandbox, ask: Client) -> None:
    first, second = (ask("POST", "/v1/chat/completions", body=chat(False)) for _ in range(2))
    other = ask("POST", "/v1/chat/completions", body=chat(False, user="x"))
    assert first.body == second.body
    assert first.json["choices"] == other.json["choices"]
    assert first.json["usage"]["total_tokens"] == 26  # "user: hello" and two dozen words
    assert sandbox.counts() == {"llm": 3}


def test_a_temperature_makes_each_answer_another(ask: Client) -> None:
    bodies = {ask("POST", "/v1/chat/completions", body=chat(False, temperature=1)).body for _ in range(3)}
    assert len(bodies) == 3


def test_openai_stream_says_the_same(ask: Client) -> None:
    plain = ask("POST", "/v1/chat/completions", body=chat(False)).json["choices"][0]["message"]["content"]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        got = ask("POST", "/v1/chat/completions", body=chat(True, **options))
        assert got.headers["Content-Type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in got.body.decode().split("\n\n")[:-1]]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        words = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
        assert "".join(words) == plain
        assert len([word for word in words if word]) > 5
        assert ("usage" in chunks[-1]) == bool(options)


def test_anthropic_stream_says_the_same(ask: Client) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    plain = ask("POST", "/v1/messages", body=body).json
    got = ask("POST", "/v1/messages", body={**body, "stream": True})
    events = [event.split("\n") for event in got.body.decode().split("\n\n")[:-1]]
    kinds = [kind.removeprefix("event: ") for kind, _ in events]
    datas = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert kinds == [data["type"] for data in datas]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    words = [data["delta"]["text"] for data in datas if data["type"] == "content_block_delta"]
    assert "".join(words) == plain["content"][0]["text"]
    assert datas[-2]["usage"]["output_tokens"] == plain["usage"]["output_tokens"]
    assert datas[0]["message"]["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


def test_the_model_refuses_what_it_does_not_understand(sandbox: Sandbox, ask: Client) -> None:
    for body in (b"{", b"[]", b'{"model": "m"}', b'{"model": "m", "messages": [1]}'):
        assert ask("POST", "/v1/chat/completions", body=body).status == 400
    assert ask("POST", "/v1/messages", body=b"{").json["type"] == "error"
    assert sandbox.counts() == {}


def test_chunks_make_the_text_again() -> None:
    text = "one two  three four"
    assert "".join(model.chunks(text, 1)) == "".join(model.chunks(text, 3)) == text
