import threading
from typing import Any

import pytest

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
    made = ask("POST", "/payments/v1/refunds", form={**REFUND, "metadata[order]": "A-1"}).json
    assert made["metadata"] == {"order": "A-1"}
    assert ask("GET", "/payments/v1/refunds").json["data"] == [made]
    assert ask("GET", f"/payments/v1/refunds/{made['id']}").json == made
    assert ask("GET", "/payments/v1/refunds/re_9").status == 404


def test_payments_are_at_the_root_too(sandbox: Sandbox, ask: Client) -> None:
    made = ask("POST", "/v1/refunds", form=REFUND, key="k").json
    assert ask("POST", "/payments/v1/refunds", form={**REFUND, "charge": "ch_2"}).json["id"] == "re_0002"
    assert ask("GET", f"/v1/refunds/{made['id']}").json == made
    assert sandbox.counts() == {"payments": 2}


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


def test_a_search_finds_what_it_is_asked_for_and_has_no_effect(sandbox: Sandbox, ask: Client) -> None:
    first, again, other = (ask("GET", f"/search?q={words}") for words in ("green+tea", "green%20tea", "tea"))
    assert first.body == again.body != other.body
    assert (first.json["q"], len(first.json["results"])) == ("green tea", 3)
    assert ask("GET", "/search").status == ask("POST", "/search?q=tea").status == 404
    assert sandbox.counts() == {}


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
