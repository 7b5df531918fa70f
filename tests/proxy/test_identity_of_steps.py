"""The same step or the next one: polling, sampling and retries told apart, live and after a kill (DESIGN §3.3)."""

import http.client
import socket
import struct
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stack import ROUTES, Attempt, Reply, Stack

CHAT = {"model": "gpt-sandbox", "temperature": 1, "messages": [{"role": "user", "content": "hello"}]}
ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 5}
MAIL = {"to": "ada@example.org", "subject": "s", "text": "t"}


def kill_agent(stack: Stack, attempt: Attempt) -> None:
    stack.end(attempt, "died")


def kill_sidecar(stack: Stack, attempt: Attempt) -> None:
    stack.restart()
    stack.end(attempt, "handed_over")


Kill = Callable[[Stack, Attempt], None]
killed = pytest.mark.parametrize("kill", [kill_agent, kill_sidecar], ids=["agent", "sidecar"])


def hang_up(connection: http.client.HTTPConnection) -> None:
    """As a client does whose time is over."""
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def reset(connection: http.client.HTTPConnection) -> None:
    """As a client does that dies before it read what it has received."""
    assert connection.sock is not None
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sock.close()


def bodies(replies: list[Reply]) -> Counter[bytes]:
    return Counter(reply.body for reply in replies)


def wait_answered(stack: Stack, run: str, count: int = 1) -> None:
    """Until so many answers of *run* are recorded."""
    statement = "SELECT FROM twiceshy.answer WHERE run_id = $1"
    stack.sandbox.wait_for(lambda: len(stack.fetch(statement, run)) >= count, what=f"{count} answers of {run}")


# ---- polling and sampling


@killed
def test_polling_gets_its_changing_answers_in_order(shared: Stack, run: str, kill: Kill) -> None:
    url = shared.url(f"/orders/A-{len(run)}7/status")
    first = shared.claim(run)
    polled = [first.ask("GET", url) for _ in range(4)]
    assert [reply.json()["asked"] for reply in polled] == [1, 2, 3, 4]
    assert len({reply.step for reply in polled}) == 4
    kill(shared, first)

    second = shared.claim(run)
    again = [second.ask("GET", url) for _ in range(4)]
    assert [reply.body for reply in again] == [reply.body for reply in polled]
    assert all(reply.replayed for reply in again)
    assert second.ask("GET", url).json()["asked"] == 5
    assert len(shared.received("orders")) == 5


@killed
def test_parallel_sampling_is_three_calls_and_their_three_answers(shared: Stack, run: str, kill: Kill) -> None:
    url = shared.url("/v1/chat/completions")
    shared.sandbox.fault(match={"path": "/v1/*"}, times=0, hold="all")
    first = shared.claim(run)
    asked = [first.in_background("POST", url, CHAT) for _ in range(3)]
    shared.sandbox.wait_held("all", 3)
    shared.sandbox.release("all")
    sampled = [each.result() for each in asked]
    assert len(bodies(sampled)) == 3
    kill(shared, first)

    second = shared.claim(run)
    again = [each.result() for each in [second.in_background("POST", url, CHAT) for _ in range(3)]]
    assert bodies(again) == bodies(sampled)
    assert len(shared.received("llm")) == 3


def test_parallel_samples_in_flight_are_joined(shared: Stack, run: str) -> None:
    url = shared.url("/v1/chat/completions")
    shared.sandbox.fault(match={"path": "/v1/*"}, times=0, hold="all")
    first = shared.claim(run)
    for _ in range(3):
        first.send("POST", url, CHAT)
    shared.sandbox.wait_held("all", 3)
    shared.end(first, "died")

    second = shared.claim(run)
    asked = [second.in_background("POST", url, CHAT) for _ in range(3)]
    shared.sandbox.wait_for(lambda: [part for _, part in second.steps()] == ["joined"] * 3)
    shared.sandbox.release("all")
    assert len(bodies([each.result() for each in asked])) == 3
    assert len(shared.received("llm")) == 3


def test_equal_calls_of_two_accounts_are_told_apart_after_a_restart(shared: Stack, run: str) -> None:
    url = shared.url("/v1/chat/completions")
    ann, bob = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}
    first = shared.claim(run)
    of_ann, of_bob = first.ask("POST", url, CHAT, ann), first.ask("POST", url, CHAT, bob)
    assert of_ann.body != of_bob.body
    shared.end(first, "died")

    second = shared.claim(run)
    assert second.ask("POST", url, CHAT, bob).body == of_bob.body
    assert second.ask("POST", url, CHAT, ann).body == of_ann.body
    assert len(shared.received("llm")) == 2


# ---- the retry of a client that went away

paths = pytest.mark.parametrize(
    ("path", "body"),
    [("/orders", ORDER), ("/email/send", MAIL), ("/v1/chat/completions", CHAT), ("/any/post", ORDER)],
    ids=["keyed", "at_most_once", "llm", "unknown"],
)


@paths
def test_a_client_that_times_out_and_asks_again_gets_its_one_answer(
    shared: Stack, run: str, path: str, body: dict[str, object]
) -> None:
    shared.sandbox.fault(match={"path": path}, hold="slow")
    first = shared.claim(run)
    hasty = first.send("POST", shared.url(path), body)
    shared.sandbox.wait_held("slow")
    hang_up(hasty)
    again = first.in_background("POST", shared.url(path), body)
    shared.sandbox.wait_for(first.steps)
    shared.sandbox.release("slow")
    live = again.result()
    assert live.status in (200, 201, 202)
    assert len(first.steps()) == 1
    assert len(shared.received(method="POST")) == 1

    # Its next equal request, once it has its answer, is another one.
    assert first.ask("POST", shared.url(path), body).body != live.body
    shared.end(first, "died")
    second = shared.claim(run)
    replayed = second.ask("POST", shared.url(path), body)
    assert (replayed.body, replayed.replayed) == (live.body, True)
    assert len(shared.received(method="POST")) == 2


@paths
def test_an_answer_that_came_for_nobody_is_given_to_the_retry(
    shared: Stack, run: str, path: str, body: dict[str, object]
) -> None:
    shared.sandbox.fault(match={"path": path}, hold="slow")
    first = shared.claim(run)
    hasty = first.send("POST", shared.url(path), body)
    shared.sandbox.wait_held("slow")
    hang_up(hasty)
    shared.sandbox.release("slow")
    wait_answered(shared, run)
    assert first.ask("POST", shared.url(path), body).replayed
    assert len(shared.received(method="POST")) == 1


def test_a_read_that_nobody_waits_for_any_more_is_made_again(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/any/read"}, hold="slow")
    first = shared.claim(run)
    hasty = first.send("GET", shared.url("/any/read"))
    shared.sandbox.wait_held("slow")
    hang_up(hasty)
    answer = first.ask("GET", shared.url("/any/read"))
    assert (answer.status, answer.replayed) == (200, False)
    made = shared.received("any")[1]
    shared.sandbox.wait_for(lambda: shared.received("any")[0].gone)
    assert answer.json()["n"] == made.n
    shared.end(first, "died")
    assert shared.claim(run).ask("GET", shared.url("/any/read")).json()["n"] == made.n


def test_an_answer_that_was_not_read_to_its_end_was_not_delivered(shared: Stack, run: str) -> None:
    url = shared.url("/any/large?size=8000000")
    first = shared.claim(run)
    unread = first.send("POST", url, ORDER)
    assert unread.getresponse().status == 200
    wait_answered(shared, run)
    hang_up(unread)
    again = first.ask("POST", url, ORDER)
    assert (len(again.body), again.replayed) == (8_000_000, True)
    assert len(shared.received("any")) == 1


def test_a_reset_undoes_the_delivery_of_an_answer(shared: Stack, run: str) -> None:
    first = shared.claim(run)
    unread = first.send("POST", shared.url("/any/reset"), ORDER)
    wait_answered(shared, run)
    assert unread.sock.recv(1, socket.MSG_PEEK)
    reset(unread)
    assert first.ask("POST", shared.url("/any/reset"), ORDER).replayed
    assert len(shared.received("any")) == 1


def test_a_client_that_still_waits_makes_the_next_one_another_step(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/any/twice"}, times=0, hold="both")
    first = shared.claim(run)
    asked = [first.in_background("POST", shared.url("/any/twice"), ORDER) for _ in range(2)]
    shared.sandbox.wait_held("both", 2)
    shared.sandbox.release("both")
    assert len(bodies([each.result() for each in asked])) == 2
    assert len(shared.effects("any")) == 2


# ---- what retries say of themselves


@paths
def test_a_retry_that_says_so_is_the_same_step_even_beside_the_first(
    shared: Stack, run: str, path: str, body: dict[str, object]
) -> None:
    shared.sandbox.fault(match={"path": path}, hold="slow")
    first = shared.claim(run)
    counted = [{"x-stainless-retry-count": str(n)} for n in range(3)]
    asked = [first.in_background("POST", shared.url(path), body, counted[0])]
    shared.sandbox.wait_held("slow")
    asked += [first.in_background("POST", shared.url(path), body, count) for count in counted[1:]]
    shared.sandbox.release("slow")
    assert len(bodies([each.result() for each in asked])) == 1
    assert len(shared.received(method="POST")) == 1
    shared.end(first, "died")

    second = shared.claim(run)
    assert second.ask("POST", shared.url(path), body, counted[0]).body == asked[0].result().body
    assert len(shared.received(method="POST")) == 1


def test_an_equal_random_key_is_the_same_call_and_another_one_is_the_next(shared: Stack, run: str) -> None:
    url = shared.url("/payments/v1/refunds")
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    one, two = ({"Idempotency-Key": str(uuid.uuid4()), **form} for _ in range(2))
    shared.sandbox.fault(match={"path": "/payments/*"}, hold="slow")
    first = shared.claim(run)
    asked = [first.in_background("POST", url, "charge=ch_1", one)]
    shared.sandbox.wait_held("slow")
    asked.append(first.in_background("POST", url, "charge=ch_1", one))
    shared.sandbox.release("slow")
    refund = asked[0].result()
    assert asked[1].result().body == refund.body
    other = first.ask("POST", url, "charge=ch_1", two)
    assert other.json()["id"] != refund.json()["id"]
    assert first.ask("POST", url, "charge=ch_1", one).body == refund.body
    sent = [each.header("idempotency-key") for each in shared.received("payments")]
    assert sent == [one["Idempotency-Key"], two["Idempotency-Key"]]
    shared.end(first, "died")

    # The SDK of the next process makes new ones up.
    second = shared.claim(run)
    fresh = [{"Idempotency-Key": str(uuid.uuid4()), **form} for _ in range(3)]
    again = [second.ask("POST", url, "charge=ch_1", key).body for key in fresh[:2]]
    assert again == [refund.body, other.body]
    third = second.ask("POST", url, "charge=ch_1", fresh[2])
    assert third.json()["id"] not in (refund.json()["id"], other.json()["id"])
    assert len(shared.effects("payments")) == 3


def test_the_first_random_key_is_put_over_that_of_the_retry(shared: Stack, run: str) -> None:
    url = shared.url("/payments/v1/refunds")
    keys = [str(uuid.uuid4()) for _ in range(2)]
    headers = [{"Idempotency-Key": key, "Content-Type": "application/x-www-form-urlencoded"} for key in keys]
    shared.sandbox.fault(match={"path": "/payments/*"}, status=503)
    first = shared.claim(run)
    assert first.ask("POST", url, "charge=ch_2", headers[0]).status == 503
    assert first.ask("POST", url, "charge=ch_2", headers[1]).status == 200
    assert [each.header("idempotency-key") for each in shared.received("payments")] == [keys[0]] * 2


def test_a_key_that_the_program_chose_goes_out_and_tells_equal_requests_apart(shared: Stack, run: str) -> None:
    first = shared.claim(run)
    made = [first.ask("POST", shared.url("/orders"), ORDER, {"Idempotency-Key": f"{run}-{n}"}) for n in (1, 2)]
    assert made[0].json()["id"] != made[1].json()["id"]
    assert [each.header("idempotency-key") for each in shared.received("orders")] == [f"{run}-1", f"{run}-2"]
    shared.end(first, "died")
    second = shared.claim(run)
    again = [second.ask("POST", shared.url("/orders"), ORDER, {"Idempotency-Key": f"{run}-{n}"}) for n in (2, 1)]
    assert [reply.body for reply in again] == [made[1].body, made[0].body]
    assert len(shared.received("orders")) == 2


@pytest.fixture(scope="module")
def stripe_like(module_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rules under which the payments' SDK makes one random key per call and keeps it over its retries."""
    rules = tmp_path_factory.mktemp("rules") / "twiceshy.toml"
    keyed = 'retention = 86400 }\nin_flight = [409]\nkind = "money"'
    text = ROUTES.read_text()
    assert keyed in text
    rules.write_text(text.replace(keyed, keyed.replace("86400", '86400, sdk = "random_per_call"')))
    return rules


def test_another_random_key_is_another_call_where_the_sdk_keeps_its_own(
    module_stack: Stack, stripe_like: Path, run: str
) -> None:
    module_stack.mark()
    module_stack.sidecar.stop()
    module_stack.settings["config"] = stripe_like
    try:
        module_stack.restart(kill=False)
        url = module_stack.url("/payments/v1/refunds")
        keys = [str(uuid.uuid4()) for _ in range(2)]
        headers = [{"Idempotency-Key": key, "Content-Type": "application/x-www-form-urlencoded"} for key in keys]
        module_stack.sandbox.fault(match={"path": "/payments/*"}, times=0, hold="slow")
        first = module_stack.claim(run)
        hasty = first.send("POST", url, b"charge=ch_3", headers[0])
        module_stack.sandbox.wait_held("slow")
        hang_up(hasty)
        # The first one's client is gone. Without the keys, this would be its retry.
        asked = [first.in_background("POST", url, "charge=ch_3", header) for header in (headers[1], headers[0])]
        module_stack.sandbox.wait_held("slow", 2)
        module_stack.sandbox.release("slow")
        assert len(bodies([each.result() for each in asked])) == 2
        sent = [each.header("idempotency-key") for each in module_stack.received("payments")]
        assert sent == keys
    finally:
        del module_stack.settings["config"]
        module_stack.restart()


# ---- named steps


@killed
def test_a_named_step_is_one_step_however_often_it_is_asked_for(shared: Stack, run: str, kill: Kill) -> None:
    named = {"Twiceshy-Step": "order/tea"}
    first = shared.claim(run)
    made = [first.ask("POST", shared.url("/any/named"), ORDER, named) for _ in range(2)]
    assert [reply.step for reply in made] == ["order/tea"] * 2
    assert [reply.replayed for reply in made] == [False, True]
    assert first.ask("POST", shared.url("/any/named"), ORDER, {"Twiceshy-Step": "order/tea-2"}).body != made[0].body
    kill(shared, first)
    again = shared.claim(run).ask("POST", shared.url("/any/named"), ORDER, named)
    assert again.body == made[0].body == made[1].body
    assert [each.header("twiceshy-step") for each in shared.received("any")] == [None, None]


@paths
def test_a_named_step_asked_for_twice_at_once_is_made_once(
    shared: Stack, run: str, path: str, body: dict[str, object]
) -> None:
    shared.sandbox.fault(match={"path": path}, hold="slow")
    first = shared.claim(run)
    asked = [first.in_background("POST", shared.url(path), body, {"Twiceshy-Step": "one"}) for _ in range(3)]
    shared.sandbox.wait_held("slow")
    shared.sandbox.release("slow")
    assert len(bodies([each.result() for each in asked])) == 1
    assert len(shared.received(method="POST")) == 1


@killed
def test_a_named_step_with_another_request_is_diverged(shared: Stack, run: str, kill: Kill) -> None:
    named = {"Twiceshy-Step": "refund"}
    first = shared.claim(run)
    first.ask("POST", shared.url("/any/refund"), {"charge": "ch_1", "note": {"at": "12:01"}}, named)
    kill(shared, first)
    second = shared.claim(run)
    refused = second.ask("POST", shared.url("/any/refund"), {"charge": "ch_1", "note": {"at": "12:05"}}, named)
    assert (refused.status, refused.error, refused.step) == (412, "diverged", "refund")
    message = refused.json()["message"]
    assert "body.note.at" in message
    assert "12:01" in message
    assert "12:05" in message
    assert len(shared.received("any")) == 1
    # The stop is the run's: every other request gets the same.
    assert second.ask("GET", shared.url("/any/else")).json() == refused.json()
    assert len(shared.received("any")) == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_named_step_in_flight_with_another_request_is_diverged(shared: Stack, run: str, method: str) -> None:
    named = {"Twiceshy-Step": "one"}
    shared.sandbox.fault(match={"path": "/any/a"}, hold="slow")
    first = shared.claim(run)
    first.send(method, shared.url("/any/a"), None, named)
    shared.sandbox.wait_held("slow")
    refused = first.ask(method, shared.url("/any/b"), None, named)
    assert (refused.status, refused.error) == (412, "diverged")
    assert "/any/a" in refused.json()["message"]
    assert len(shared.received("any")) == 1
