"""What a network does between an agent and its sidecar: ends that come late, answers that never arrive, black holes."""

import contextlib
import http.client
import random
import threading
from collections.abc import Iterator

import pytest

from tests.cable import Cable
from tests.stack import Attempt, Stack

ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 5}
MAIL = {"to": "ada@example.org", "subject": "s", "text": "t"}
CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}
JSON = {"Content-Type": "application/json"}
#: What a kernel takes of an answer that nobody reads.
SMALL = 4096
LARGE = 3_000_000


@pytest.fixture
def cable(shared: Stack) -> Iterator[Cable]:
    with Cable(shared.sidecar.port, receive_buffer=SMALL) as made:
        yield made


def through(attempt: Attempt, cable: Cable) -> Attempt:
    return Attempt(attempt.run, attempt.token, cable.port)


@pytest.mark.parametrize("path", ["/email/send", "/orders"])
def test_a_retry_that_overtakes_the_end_before_it_joins(shared: Stack, cable: Cable, run: str, path: str) -> None:
    """The client gave up and asks again at once; its FIN is still on the way."""
    cable.end_delay = 0.03
    agent = through(shared.claim(run), cable)
    body = MAIL if path == "/email/send" else ORDER
    shared.sandbox.fault(match={"path": path}, hold="slow")
    given_up = agent.send("POST", shared.url(path), body)
    shared.sandbox.wait_held("slow")
    given_up.close()
    retry = agent.in_background("POST", shared.url(path), body)
    with contextlib.suppress(TimeoutError):  # several beats: it would have been sent by then
        shared.sandbox.wait_for(lambda: len(shared.received(method="POST")) > 1, timeout=0.3)
    shared.sandbox.release("slow")
    assert retry.result().status // 100 == 2
    assert len(shared.received(method="POST")) == 1


def test_an_answer_that_did_not_arrive_is_given_to_the_retry(shared: Stack, cable: Cable, run: str) -> None:
    """Its last bytes were never acknowledged: to the client it is as if it had not been answered."""
    agent = through(shared.claim(run), cable)
    path = f"/any/large?size={LARGE}"
    cable.deaf = True
    waiting = agent.send("POST", shared.url(path), ORDER)
    shared.sandbox.wait_for(lambda: len(shared.received("any")) == 1 and shared.received("any")[0].end == "answered")
    waiting.close()
    cable.reset()
    cable.deaf = False
    reply = agent.ask("POST", shared.url(path), ORDER)
    assert reply.status == 200
    assert len(shared.received("any")) == 1


def test_a_retry_that_overtakes_the_last_acknowledgement_joins(shared: Stack, cable: Cable, run: str) -> None:
    """The answer is on its way yet, its client has given up, and neither the one nor the other is known."""
    direct = shared.claim(run)
    path = f"/any/large?size={LARGE}"
    cable.deaf, cable.end_delay = True, 0.03
    waiting = through(direct, cable).send("POST", shared.url(path), ORDER)
    shared.sandbox.wait_for(lambda: len(shared.received("any")) == 1 and shared.received("any")[0].end == "answered")
    waiting.close()
    reply = direct.ask("POST", shared.url(path), ORDER)
    cable.deaf = False
    assert (reply.status, len(reply.body)) == (200, LARGE)
    assert len(shared.received("any")) == 1


def test_a_reset_in_the_middle_of_an_answer(shared: Stack, cable: Cable, run: str) -> None:
    agent = through(shared.claim(run), cable)
    path = f"/any/large?size={LARGE}"
    cable.cut_after = 100_000
    first = agent.ask("POST", shared.url(path), ORDER)
    assert first.cut
    cable.cut_after = None
    again = agent.ask("POST", shared.url(path), ORDER)
    assert (again.status, len(again.body)) == (200, LARGE)
    assert len(shared.received("any")) == 1


def test_a_slow_way_changes_nothing(shared: Stack, cable: Cable, run: str) -> None:
    cable.latency = 0.05
    agent = through(shared.claim(run), cable)
    replies = [agent.ask("POST", shared.url("/orders"), {**ORDER, "total": n}) for n in range(3)]
    assert [each.status for each in replies] == [201, 201, 201]
    assert len(shared.effects("orders")) == 3


@pytest.mark.check_all
def test_clients_that_leave_at_any_moment_leave_nothing_behind(shared: Stack, run: str) -> None:
    """1000 of them, each of its own run of 50: no connection to Postgres is leaked, none idles in a transaction."""
    runs = [shared.claim(f"{run}-{n}") for n in range(50)]
    dice = random.Random(1)
    work = [(dice.choice(runs), dice.choice(KINDS), dice.uniform(0, 0.03)) for _ in range(1000)]
    lock = threading.Lock()

    def leave() -> None:
        while True:
            with lock:
                if not work:
                    return
                attempt, (method, path, body), when = work.pop()
            connection = http.client.HTTPConnection("127.0.0.1", attempt.port, timeout=when + 0.001)
            try:
                connection.request(method, shared.url(path), body, attempt.headers(JSON))
                connection.getresponse().read(10)
            except OSError:
                pass
            finally:
                connection.close()

    threads = [threading.Thread(target=leave) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not work
    shared.sandbox.wait_for(lambda: idle(shared), what="every statement has ended")
    fresh = shared.claim(run + "-after")
    assert fresh.ask("POST", shared.url("/orders"), ORDER).status == 201
    [row] = shared.fetch(
        "SELECT count(*) AS n FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name NOT LIKE '%test%'"
    )
    assert row["n"] <= 6


KINDS = [
    ("POST", "/email/send", '{"to": "a", "text": "t"}'), ("POST", "/orders", '{"total": 1}'), ("GET", "/pantry", None),
    ("POST", "/v1/chat/completions", '{"model": "m", "stream": true, "messages": [{"role": "user", "content": "x"}]}'),
]  # fmt: skip


def idle(stack: Stack) -> bool:
    rows = stack.fetch(
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND (state LIKE 'idle in transaction%' OR (state = 'active' AND wait_event_type IS DISTINCT FROM 'Client'))"
    )
    return not rows
