"""What counts as an answer: lists of them, the last one tried again, doubtful ones, late ones (DESIGN §3.8)."""

from collections.abc import Iterator
from typing import Literal

import pytest

from runtime.errors import NotNow
from tests.stack import Attempt, SidecarProcess, Stack

CHAT = {"model": "gpt-sandbox", "messages": [{"role": "user", "content": "hello"}]}
ORDER = {"lines": [{"sku": "tea", "n": 1}], "total": 5}
MAIL = {"to": "ada@example.org", "subject": "s", "text": "t"}

provisional = pytest.mark.parametrize(
    ("path", "body"), [("/orders", ORDER), ("/v1/chat/completions", CHAT)], ids=["keyed", "llm"]
)
restarts = pytest.mark.parametrize("sidecar_too", [False, True], ids=["agent", "sidecar"])


def die(stack: Stack, attempt: Attempt, *, sidecar_too: bool, outcome: str = "died") -> None:
    if sidecar_too:
        stack.restart()
    stack.end(attempt, outcome)


# ---- answers that are not final


@provisional
@restarts
def test_a_503_that_the_agent_acted_on_is_a_503_on_replay(
    shared: Stack, run: str, path: str, body: dict[str, object], sidecar_too: bool
) -> None:
    shared.sandbox.fault(match={"path": path}, status=503)
    first = shared.claim(run)
    busy = first.ask("POST", shared.url(path), body)
    assert busy.status == 503
    first.ask("POST", shared.url("/any/instead"), ORDER)
    die(shared, first, sidecar_too=sidecar_too)

    second = shared.claim(run)
    again = second.ask("POST", shared.url(path), body)
    assert (again.status, again.body, again.replayed) == (503, busy.body, True)
    assert second.ask("POST", shared.url("/any/instead"), ORDER).replayed
    # The replay was no effort of this attempt: what it asks beyond that goes on under the same key.
    made = second.ask("POST", shared.url(path), body)
    assert made.status in (200, 201)
    shared.end(second, "died")
    third = shared.claim(run)
    assert [third.ask("POST", shared.url(path), body).status for _ in range(2)] == [503, made.status]
    asked = [each for each in shared.received() if each.path == path]
    assert len(asked) == 2
    assert len({each.header("idempotency-key") for each in asked}) == 1


@provisional
@restarts
def test_a_trailing_503_is_tried_again_under_the_same_key(
    shared: Stack, run: str, path: str, body: dict[str, object], sidecar_too: bool
) -> None:
    shared.sandbox.fault(match={"path": path}, status=503, times=2)
    first = shared.claim(run)
    assert first.ask("POST", shared.url(path), body).status == 503
    first.ask("GET", shared.url("/pantry"))  # a read is no acting
    die(shared, first, sidecar_too=sidecar_too)

    second = shared.claim(run)
    assert second.ask("POST", shared.url(path), body).status == 503
    die(shared, second, sidecar_too=sidecar_too)
    third = shared.claim(run)
    made = third.ask("POST", shared.url(path), body)
    assert (made.status in (200, 201), made.replayed) == (True, False)
    shared.end(third, "died")
    # What was tried again took the place of what it was tried again for.
    replayed = shared.claim(run).ask("POST", shared.url(path), body)
    assert (replayed.body, replayed.replayed) == (made.body, True)
    asked = [each for each in shared.received() if each.path == path]
    assert len(asked) == 3
    assert len({(each.header("idempotency-key"), each.body) for each in asked}) == 1


def test_an_sdks_retries_make_a_list_that_is_replayed_in_its_order(shared: Stack, run: str) -> None:
    path = {"path": "/orders"}
    shared.sandbox.faults({"match": path, "nth": 1, "status": 500}, {"match": path, "nth": 2, "status": 429})
    first = shared.claim(run)
    heard = [first.ask("POST", shared.url("/orders"), ORDER) for _ in range(4)]
    assert [reply.status for reply in heard] == [500, 429, 201, 201]
    assert len({reply.step for reply in heard}) == 2
    shared.end(first, "died")
    second = shared.claim(run)
    again = [second.ask("POST", shared.url("/orders"), ORDER) for _ in range(4)]
    assert [(reply.status, reply.body) for reply in again] == [(reply.status, reply.body) for reply in heard]
    assert len(shared.received("orders")) == 4


def test_a_503_that_came_for_nobody_is_given_to_the_retry(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/orders"}, status=503, after_effect=True, hold="slow")
    first = shared.claim(run)
    hasty = first.send("POST", shared.url("/orders"), ORDER)
    shared.sandbox.wait_held("slow")
    hasty.close()
    shared.sandbox.release("slow")
    wait_recorded(shared, run)
    assert first.ask("POST", shared.url("/orders"), ORDER).status == 503
    assert len(shared.received("orders")) == 1
    assert first.ask("POST", shared.url("/orders"), ORDER).status == 200
    assert len(shared.effects("orders")) == 1


def test_a_retry_in_flight_is_joined_after_what_came_before_it(shared: Stack, run: str) -> None:
    shared.sandbox.faults(
        {"match": {"path": "/orders"}, "nth": 1, "status": 503},
        {"match": {"path": "/orders"}, "nth": 2, "hold": "slow"},
    )
    first = shared.claim(run)
    assert first.ask("POST", shared.url("/orders"), ORDER).status == 503
    first.send("POST", shared.url("/orders"), ORDER)
    shared.sandbox.wait_held("slow")
    shared.end(first, "died")
    second = shared.claim(run)
    assert second.ask("POST", shared.url("/orders"), ORDER).status == 503
    joining = second.in_background("POST", shared.url("/orders"), ORDER)
    shared.sandbox.release("slow")
    assert joining.result().status == 201
    assert len(shared.received("orders")) == 2


def test_a_503_that_was_acted_on_is_tried_again_once_its_replay_led_nowhere(shared: Stack, run: str) -> None:
    shared.sandbox.fault(match={"path": "/orders"}, status=503)
    first = shared.claim(run)
    first.ask("POST", shared.url("/orders"), ORDER)
    first.ask("POST", shared.url("/any/instead"), ORDER)
    shared.end(first, "died")
    # An attempt that ends before it asked for anything says nothing about the 503.
    shared.end(shared.claim(run), "failed")
    second = shared.claim(run)
    assert second.ask("POST", shared.url("/orders"), ORDER).status == 503
    shared.end(second, "failed")
    assert shared.claim(run).ask("POST", shared.url("/orders"), ORDER).status == 201
    assert len(shared.received("orders")) == 2


@pytest.mark.parametrize("status", [401, 403, 407, 429])
def test_an_effect_that_was_not_processed_may_go_again(shared: Stack, run: str, status: int) -> None:
    shared.sandbox.fault(match={"path": "/email/send"}, status=status)
    first = shared.claim(run)
    assert first.ask("POST", shared.url("/email/send"), MAIL).status == status
    assert first.ask("POST", shared.url("/email/send"), MAIL).status == 202
    shared.end(first, "failed")
    second = shared.claim(run)
    assert [second.ask("POST", shared.url("/email/send"), MAIL).status for _ in range(2)] == [status, 202]
    assert len(shared.received("email")) == 2


@pytest.mark.parametrize("status", [404, 409, 422])
def test_a_refusal_by_the_upstream_is_final(shared: Stack, run: str, status: int) -> None:
    shared.sandbox.fault(match={"path": "/orders"}, status=status)
    first = shared.claim(run)
    assert first.ask("POST", shared.url("/orders"), ORDER).status == status
    shared.end(first, "failed")
    assert shared.claim(run).ask("POST", shared.url("/orders"), ORDER).status == status
    assert len(shared.received("orders")) == 1


# ---- a 5xx of what must not be done twice


def doubt(stack: Stack, run: str) -> Attempt:
    """An attempt whose e-mail was answered with 500, asked twice."""
    stack.sandbox.fault(match={"path": "/email/send"}, status=500, after_effect=True)
    attempt = stack.claim(run)
    heard = [attempt.ask("POST", stack.url("/email/send"), MAIL) for _ in range(2)]
    assert [(reply.status, reply.replayed) for reply in heard] == [(500, False), (500, True)]
    assert heard[0].body == heard[1].body
    return attempt


def test_a_5xx_that_leaves_an_effect_in_doubt_is_its_answer_while_the_attempt_goes_on(shared: Stack, run: str) -> None:
    first = doubt(shared, run)
    assert shared.end(first, "interrupted") == "queued"
    second = shared.claim(run)
    again = second.ask("POST", shared.url("/email/send"), MAIL)
    assert (again.status, again.replayed) == (500, True)
    assert shared.end(second, "done", 0) == "done"
    assert len(shared.effects("email")) == 1


@pytest.mark.parametrize("outcome", ["failed", "died"])
@pytest.mark.parametrize("how", ["assume_done", "send_again"])
def test_an_attempt_that_fails_after_such_an_answer_leaves_a_question(
    shared: Stack, run: str, how: Literal["assume_done", "send_again"], outcome: str
) -> None:
    first = doubt(shared, run)
    step = first.steps()[0][0]
    assert shared.end(first, outcome) == "ambiguous"
    with pytest.raises(NotNow, match="ambiguous"):
        shared.claim(run)
    assert shared.resolve(run, step, how) == "queued"
    second = shared.claim(run)
    settled = second.ask("POST", shared.url("/email/send"), MAIL)
    # The 500 again would make it fail again, for ever.
    assert (settled.status, settled.replayed) == ((200, True) if how == "assume_done" else (202, False))
    assert shared.end(second, "failed") == "queued"
    assert shared.claim(run).ask("POST", shared.url("/email/send"), MAIL).body == settled.body
    assert len(shared.received("email")) == (1 if how == "assume_done" else 2)


# ---- answers that come when nobody expects them any more


def test_an_answer_is_recorded_though_the_run_was_stopped_meanwhile(shared: Stack, run: str) -> None:
    shared.sandbox.faults(
        {"match": {"path": "/email/send"}, "hold": "slow"}, {"match": {"path": "/any/lost"}, "drop": "after"}
    )
    first = shared.claim(run)
    asked = first.in_background("POST", shared.url("/email/send"), MAIL)
    shared.sandbox.wait_held("slow")
    stopped = first.ask("POST", shared.url("/any/lost"), ORDER)
    assert stopped.status == 424
    shared.sandbox.release("slow")
    assert asked.result().status == 202
    first.die()
    assert shared.resolve(run, stopped.step, "assume_done") == "queued"
    replayed = shared.claim(run).ask("POST", shared.url("/email/send"), MAIL)
    assert (replayed.body, replayed.replayed) == (asked.result().body, True)
    assert len(shared.received("email")) == 1


@pytest.fixture
def successor(shared: Stack) -> Iterator[SidecarProcess]:
    """A second sidecar, which has declared the first one dead; that goes on none the less."""
    second = SidecarProcess(shared.dsn, shared.folder, **shared.settings)
    yield second
    shared.sandbox.clear()
    second.stop()
    shared.restart()


def given_up(shared: Stack, successor: SidecarProcess, run: str) -> str:
    """An e-mail waits in the first sidecar, and the run was stopped by the second for it; the step."""
    shared.sandbox.fault(match={"path": "/email/send"}, nth=1, hold="late")
    first = shared.claim(run)
    first.send("POST", shared.url("/email/send"), MAIL)
    shared.sandbox.wait_held("late")
    first.die()
    second = claim_at(shared, successor, run)
    stopped = second.ask("POST", shared.url("/email/send"), MAIL)
    assert (stopped.status, stopped.error) == (424, "ambiguous")
    return stopped.step


def claim_at(shared: Stack, sidecar: SidecarProcess, run: str) -> Attempt:
    attempt = shared.claim(run)
    attempt.port = sidecar.port
    return attempt


def wait_recorded(shared: Stack, run: str, words: str = "SELECT FROM twiceshy.answer WHERE run_id = $1") -> None:
    shared.sandbox.wait_for(lambda: shared.fetch(words, run), what=words)


def test_a_late_answer_settles_the_step_that_was_given_up(shared: Stack, successor: SidecarProcess, run: str) -> None:
    given_up(shared, successor, run)
    shared.sandbox.release("late")
    wait_recorded(shared, run, "SELECT FROM twiceshy.run WHERE id = $1 AND status = 'queued'")
    replayed = claim_at(shared, successor, run).ask("POST", shared.url("/email/send"), MAIL)
    assert (replayed.status, replayed.replayed) == (202, True)
    assert len(shared.received("email")) == 1


def test_a_late_answer_still_counts_after_send_again_while_nothing_was_sent(
    shared: Stack, successor: SidecarProcess, run: str
) -> None:
    step = given_up(shared, successor, run)
    assert shared.resolve(run, step, "send_again") == "queued"
    third = claim_at(shared, successor, run)
    assert third.ask("GET", shared.url("/pantry")).status == 200  # it has read the journal
    shared.sandbox.release("late")
    wait_recorded(shared, run)
    answer = third.ask("POST", shared.url("/email/send"), MAIL)
    assert (answer.status, answer.replayed) == (202, True)
    assert len(shared.received("email")) == 1


def test_a_late_answer_is_evidence_only_once_the_step_was_sent_again(
    shared: Stack, successor: SidecarProcess, run: str
) -> None:
    step = given_up(shared, successor, run)
    assert shared.resolve(run, step, "send_again") == "queued"
    third = claim_at(shared, successor, run)
    sent = third.ask("POST", shared.url("/email/send"), MAIL)
    assert (sent.status, sent.replayed) == (202, False)
    shared.sandbox.release("late")
    wait_recorded(shared, run, "SELECT FROM twiceshy.step WHERE run_id = $1 AND evidence LIKE '%lost the step%'")
    shared.end(third, "died")
    assert claim_at(shared, successor, run).ask("POST", shared.url("/email/send"), MAIL).body == sent.body
    assert len(shared.received("email")) == 2


def test_a_late_answer_under_a_key_is_that_of_the_one_effect(
    shared: Stack, successor: SidecarProcess, run: str
) -> None:
    shared.sandbox.fault(match={"path": "/orders"}, nth=1, hold="late")
    first = shared.claim(run)
    first.send("POST", shared.url("/orders"), ORDER)
    shared.sandbox.wait_held("late")
    first.die()
    second = claim_at(shared, successor, run)
    made = second.ask("POST", shared.url("/orders"), ORDER)
    assert made.status in (200, 201)
    shared.sandbox.release("late")
    wait_recorded(shared, run, "SELECT FROM twiceshy.step WHERE run_id = $1 AND evidence LIKE '%lost the step%'")
    assert len(shared.effects("orders")) == 1
    assert len({each.header("idempotency-key") for each in shared.received("orders")}) == 1
